"""What all Triton kernels share: launching a variant cheaply, arithmetic, activations.

A kernel is a jitted function inside a `Kernel`. Its arguments come first, its compile-time constants last; one set of
constants, with the warps and stages, is a variant. build_tools/kernels compiles the same variants without a GPU.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Kernel:
    """A jitted function and its compiled variants.

    Triton looks up the variant by binding every argument anew: 8 us for 18 pointers. A table whose key is what
    Triton specialises on finds it in a third of that.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple, Any] = {}

    def __call__(
        self, grid: int | tuple[int, ...], arguments: Sequence[Any], constants: Sequence[Any], warps: int, stages: int
    ) -> None:
        """Launches on the current stream of the device of the first tensor among the arguments.

        arguments, constants: in the order of the function's parameters. grid: programs, along up to three axes.
        """
        grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        device = _device(arguments)
        elsewhere = device != torch.cuda.current_device()
        with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
            compiled = self._launch(device, grid, arguments, constants, warps, stages)
        if _recorder.launches is not None:
            _recorder.launches.append(Launch(self, grid, arguments, constants, warps, stages, compiled))

    def _launch(
        self,
        device: int,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Sequence[Any],
        warps: int,
        stages: int,
    ) -> Any:
        key = (device, warps, stages, *constants, *map(_specialization, arguments))
        compiled = self._compiled.get(key)
        if compiled is None:  # compiles, and launches
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.function.__name__.strip('_')}: its first call with these shapes and dtypes is inside a "
                    "CUDA graph capture, where nothing can be compiled or loaded; run it once before capture"
                )
            with compiling():
                compiled = self.function[grid](*arguments, *constants, **compile_options(warps, stages))
            self._compiled[key] = compiled
        else:
            compiled[grid](*arguments, *constants)
        return compiled


def compile_options(warps: int, stages: int) -> dict[str, Any]:
    """Options of Triton's compiler. Products and sums become one instruction, as everything was tested and measured.
    Triton 3.9 announces that 3.10 will not do so where it is not asked."""
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


class _Compiling(threading.local):
    here = False


_compiling = _Compiling()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Kernels that this thread compiles inside get a barrier after each access to tensor memory, which 10.x has.

    Triton 3.6 leaves it out (triton-lang/triton#10263 adds it): one warp starts a product that overwrites what other
    warps still read. The emulator of PTX found that in W.
    """
    _patch_compiler()
    _compiling.here = True
    try:
        yield
    finally:
        _compiling.here = False


@functools.cache
def _patch_compiler() -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    real = CUDABackend.make_ptx

    def make_ptx(*arguments: Any) -> str:
        accesses = r"tcgen05\.wait::(ld|st)\.sync\.aligned;" if _compiling.here else r"(?!)"
        return re.sub(accesses, r"\g<0>\n\tbar.sync 0;", real(*arguments))

    CUDABackend.make_ptx = make_ptx


class Launch(NamedTuple):
    """The arguments of a Kernel's call. compiled: Triton's kernel for them."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    constants: Sequence[Any]
    warps: int
    stages: int
    compiled: Any


class _Recorder(threading.local):
    launches: list[Launch] | None = None


_recorder = _Recorder()


def recording() -> bool:
    """Whether this thread is inside `recorded`."""
    return _recorder.launches is not None


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches of this thread, inside."""
    _recorder.launches = []
    try:
        yield _recorder.launches
    finally:
        _recorder.launches = None


def _specialization(argument: Any) -> Any:
    """The properties that a variant is compiled for: dtype and alignment of a pointer, 1 and multiples of 16."""
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return type(argument)


def rows_dense(tensor: Tensor, copy: bool = True) -> Tensor:
    """The tensor itself where neighbours of its last dimension are neighbours in memory, else a copy (or, without
    `copy`, memory for one)."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous() if copy else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _device(arguments: Sequence[Any]) -> int:
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument.get_device()
        if isinstance(argument, TensorDescriptor):
            return argument.base.get_device()
    raise TypeError("Kernel: none of the arguments is a tensor, so there is no device to launch on")


@triton.jit
def widen(value):
    """To float32: every kernel computes in it."""
    return value.to(tl.float32)


@triton.jit
def offset(index, stride):
    """index * stride in 64 bits, for matrices of more than 2^31 elements; in 32, and fewer registers, where it is 1.

    Not by an annotation of the stride: one of 1 would then not be compiled in, and elements be loaded one by one.
    """
    if isinstance(stride, int):  # a constant, which only 1 becomes
        return index * stride
    else:
        return index.to(tl.int64) * stride


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """accumulator + a b. `compiling` adds barriers: what Triton cached without them has another key, thanks to these
    words."""
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def _exp2(x):
    """2^x, 0 instead of numbers below 2^-126: what tl.exp2 does about those takes four more instructions."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _reciprocal(x):
    """1 / x for x of 1 and above, of which a division would first ask whether it is too large or too small."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def sigmoid(x):
    return _reciprocal(1.0 + _exp2(x * -1.4426950408889634))


@triton.jit
def _normal(z, power):
    """The share of a normal distribution below z, given exp(-z^2 / 2); wrong by 3e-7 at most.

    Abramowitz and Stegun 7.1.26, whose exponential the gradient needs anyway: a third of the instructions of a
    library's erf, which an epilogue has once for each of the 128 elements of a thread.
    """
    t = _reciprocal(1.0 + 0.23164188 * tl.abs(z))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * power
    return tl.where(z < 0.0, tail, 1.0 - tail)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """activation(z) in float32. Names: spec.ACTIVATIONS; "" is the identity."""
    if ACTIVATION == "gelu":
        return z * _normal(z, _exp2(-0.7213475204444817 * (z * z)))
    elif ACTIVATION == "gelu_tanh":
        return z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        return z * sigmoid(z)
    else:
        return z


@triton.jit
def activation_gradient(dy, z, ACTIVATION: tl.constexpr):
    """dy activation'(z) in float32."""
    if ACTIVATION == "gelu":
        power = _exp2(-0.7213475204444817 * (z * z))
        return dy * (_normal(z, power) + z * (0.3989422804014327 * power))
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return dy * (s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z))
    elif ACTIVATION == "relu":
        return tl.where(z <= 0.0, 0.0, dy)  # a choice, not a product: an infinite dy must not leave nan behind
    elif ACTIVATION == "silu":
        s = sigmoid(z)
        return dy * (s * (1.0 + z * (1.0 - s)))
    else:
        return dy


@triton.jit
def capped(scores, bend):
    """tanh(bend scores), or without a bend the scores."""
    if bend is None:
        return scores
    else:
        return 2.0 * tl.sigmoid(scores * (2.0 * bend)) - 1.0
