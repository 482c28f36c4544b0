"""What calls compile beyond the variants that kernels list: other layouts, alignments, dtypes and tiles.

`python -m build_tools.kernels --launched` compiles it: kernels are called with tensors on the CPU, as for a GPU of the
capability, and their arguments are recorded instead of run. Too much for every test run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, Variant

SMS = {80: 108, 90: 132, 100: 148}

LAYOUTS = (
    ("plain", "plain", "plain"),
    ("plain", "plain", "odd"),
    ("plain", "plain", "shifted"),
    ("transposed", "plain", "plain"),
    ("plain", "transposed", "plain"),
    ("transposed", "transposed", "odd"),
)
"""Of two operands and of the output: contiguous rows, or columns; rows whose pitch is no multiple of 16 bytes; rows
that start at an unaligned address. Operands that are odd or shifted are copied first."""

SHAPES = ((4096, 4096), (2048, 1024), (1024, 1024), (512, 512), (4096, 64), (64, 4096), (4095, 4097), (513, 519))
"""[rows, columns] of outputs that together take every tile."""


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "plain") -> Tensor:
    """Its memory is allocated and never used."""
    if layout == "transposed":
        return torch.empty(columns, rows, dtype=dtype).t()
    if layout == "odd":
        return torch.empty(rows, columns + 1, dtype=dtype)[:, :columns]
    if layout == "shifted":
        return torch.empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
    return torch.empty(rows, columns, dtype=dtype)


def linear(shape: tuple[int, int], dtype: torch.dtype, layouts: tuple[str, str, str]) -> Iterator[tuple[str, Callable]]:
    """(name, call) of every kernel of linear layers: x, weight and y, or what is in their place, have the layouts."""
    from zbkern.kernels.triton import kernels as backend

    (p, q), r = shape, 4096
    one, two, three = layouts

    def m(rows: int, columns: int, layout: str, other: torch.dtype = dtype) -> Tensor:
        return matrix(rows, columns, other, layout)

    bias = torch.empty(q, dtype=dtype)
    x, weight, y, z = m(p, r, one), m(q, r, two), m(p, q, three), m(p, q, three)
    yield "fwd", lambda: backend.linear_fwd(x, weight, bias, y)
    yield "fwd silu z", lambda: backend.linear_fwd(x, weight, bias, y, "silu", z)
    yield "fwd gelu", lambda: backend.linear_fwd(x, weight, bias, y, "gelu")
    down = m(r, q, two)
    yield "dgrad", lambda: backend.linear_dgrad(x, down, y)
    yield "dgrad add", lambda: backend.linear_dgrad(x, down, y, accumulate=True)
    for activation in ("gelu", "gelu_tanh", "silu"):
        yield f"dgrad {activation}", functools.partial(backend.linear_dgrad, x, down, y, activation=activation, z=z)
    yield "dgrad sum", lambda: backend.linear_dgrad_sum([(x, down)] * 3, y)
    rows, gradient = m(r, q, one), m(r, p, two)
    for out in dict.fromkeys((torch.float32, dtype)):
        dweight, dbias = m(p, q, three, out), torch.empty(p, dtype=out)
        for accumulate, segments in itertools.product((False, True), (1, 4, 8)):
            name = f"wgrad to {str(out)[6:]} of {segments}" + " add" * accumulate
            some = [(rows, gradient)] * segments
            yield name, functools.partial(backend.linear_wgrad, some, (dweight, dbias), accumulate)
    layers = [([(rows, gradient)], (dweight, dbias))] * 7
    yield "wgrads of 7", lambda: backend.linear_wgrads(layers, True)
    up, gate, h = (m(p, q, three) for _ in range(3))
    yield "gated fwd", lambda: backend.gated_linear_fwd(x, weight, weight, bias, bias, "silu", gate, up, h)
    for activation in ("gelu", "gelu_tanh", "silu"):
        outputs = (m(p, q, three) for _ in range(3))
        yield (
            f"gated dgrad {activation}",
            functools.partial(backend.gated_linear_dgrad, x, down, gate, up, activation, *outputs),
        )


def attention(size: int, dtype: torch.dtype, causal: bool, window: int | None, lengths: Sequence[int]) -> Callable:
    """Both directions of attention, with two query heads for a key head."""
    from zbkern.kernels.spec import AttentionOptions
    from zbkern.kernels.triton import kernels as backend

    ends = tuple(itertools.accumulate(lengths, initial=0))
    options = AttentionOptions(size**-0.5, causal, window, ends, ends)
    q, dy, y, dq = (torch.empty(ends[-1], 4, size, dtype=dtype) for _ in range(4))
    k, v, dk, dv = (torch.empty(ends[-1], 2, size, dtype=dtype) for _ in range(4))
    lse = torch.empty(4, ends[-1])

    def run() -> None:
        backend.attention_fwd(q, k, v, options, y, lse)
        backend.attention_dgrad(dy, q, k, v, y, lse, options, dq, dk, dv)

    return run


def runs() -> Iterator[tuple[str, Callable]]:
    """(name, call) of everything."""
    for dtype, layouts, shape in itertools.product((torch.bfloat16, torch.float32), LAYOUTS, SHAPES):
        for name, run in linear(shape, dtype, layouts):
            yield f"{str(dtype)[6:]} {name} {' '.join(dict.fromkeys(layouts))}", run
    for dtype, size in itertools.product(
        (torch.bfloat16, torch.float32), (16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
    ):
        for causal, window in ((False, None), (True, None), (True, 100)):
            for lengths in ((1024, 1024), (1000, 24)):
                name = f"{str(dtype)[6:]} attention {size}" + " causal" * causal + " window" * (window is not None)
                yield name + " packed" * (len(set(lengths)) > 1), attention(size, dtype, causal, window, lengths)


@contextlib.contextmanager
def machine(capability: int) -> Iterator[None]:
    """Inside, kernels choose tiles as on a GPU of that capability, whatever GPU is here, and each call is made."""
    from zbkern.kernels.triton.replay import replay

    with replay.paused(), tiles_of(capability):
        yield


@contextlib.contextmanager
def tiles_of(capability: int) -> Iterator[None]:
    """Inside, kernels choose tiles as on a GPU of that capability, whatever GPU is here."""
    from zbkern.kernels.triton import attention_forward as triton_attention_forward
    from zbkern.kernels.triton import matmul_tile as triton_matmul_tile
    from zbkern.kernels.triton import norm_backward as triton_norm_backward
    from zbkern.kernels.triton.replay import replay

    with contextlib.ExitStack() as stack:
        for module, attribute, value in (
            (triton_matmul_tile, "_machine", (capability, SMS[capability])),
            (triton_attention_forward, "capability_of", capability),
            (triton_norm_backward, "_processors", SMS[capability]),
        ):
            stack.enter_context(mock.patch.object(module, attribute, lambda device, value=value: value))
        for remembered in (triton_matmul_tile.plan.cache_clear, replay.forget):
            remembered()
            stack.callback(remembered)
        yield


@functools.cache
def variants(capability: int) -> list[Variant]:
    """What the runs would compile on such a GPU, each once. Where their tensors begin and end is anything, so nothing
    is said about the size of accesses."""
    from triton.backends.compiler import GPUTarget

    found: dict[str, Variant] = {}
    label = ""

    def record(
        self: Kernel, grid: Any, arguments: Any, constants: Any, warps: int, stages: int, key: Any = None
    ) -> None:
        types = tuple(_types(self, arguments, constants, GPUTarget("cuda", capability, 32)))
        bulk = any(isinstance(kind, str) and kind.startswith("tensordesc") for kind in types[:8])
        name = self.function.__name__.strip("_")
        text = f"{self.function.__name__} {id(self)} {types} {constants} {warps} {stages}"
        if text not in found:
            matrices = name in ("product", "sums", "gated_fwd", "gated_dgrad", "forward", "dq", "dkdv")
            matrices = matrices and self.function.__module__ != "zbkern.kernels.triton.activation"
            half = "bf16" in str(types)
            sizes = "x".join(
                map(str, [c for c in constants if isinstance(c, int) and not isinstance(c, bool) and c >= 16])
            )
            found[text] = Variant(
                f"{label}: {name} {sizes}", self, types, constants, warps, stages, matrices and half, bulk, False
            )

    with machine(capability), mock.patch.object(Kernel, "__call__", record):
        for label, run in runs():  # noqa: B007
            run()
    return list(found.values())


def _types(
    kernel: Kernel, arguments: Sequence[Any], constants: Sequence[Any], target: Any
) -> Iterator[str | int | None]:
    """As triton.runtime.jit.JITFunction.run finds them out (3.6), in the words of `Variant`."""
    binder = _binder(kernel, target)
    _, specialization, _ = binder(*arguments, *constants)
    for argument, (kind, attribute) in zip(arguments, specialization, strict=False):
        if kind == "constexpr":
            yield argument
        elif kind.startswith("*"):
            yield kind if attribute and "D" in attribute else f"{kind}:1"
        else:
            yield f"{kind}:16" if attribute and "D" in attribute else kind


@functools.cache
def _binder(kernel: Kernel, target: Any) -> Callable:
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    function = kernel.function
    return create_function_from_signature(function.signature, function.params, make_backend(target))
