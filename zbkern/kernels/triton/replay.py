"""Calls whose operands lie in memory as those of an earlier call did: its launches again, at other addresses.

What a W's Python works out (layouts, the tile, the grid, what is a descriptor), and Triton's Python for each launch,
follows from the shapes, strides and dtypes of its operands and from where they begin modulo 16 bytes. It is worked out
once; from then on csrc/launcher_bindings.cpp looks a call up, puts the addresses into the parameters and launches. No
tensor is kept. Where that extension is not built, where a profiler listens to Triton's launches, and with
ZBKERN_REPLAY=0 in the environment, every call is worked out anew.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from zbkern.kernels.triton.common import Launch, recorded, recording
from zbkern.kernels.triton.matmul_tile import precision

try:
    from zbkern import _launcher
except ImportError:
    _launcher = None
if os.environ.get("ZBKERN_REPLAY") == "0":
    _launcher = None

_PACKED = {"i1": "<?", "u1": "<?", "i32": "<i", "i64": "<q", "fp32": "<f"}
"""How Triton's types of numbers are passed."""

_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType."""

_SCRATCH = [struct.pack("<q", 0)] * 2
"""The last two parameters of every kernel: addresses of memory that it asks for, none here."""


class Replay:
    """The launches of calls, in so many ways in which operands lie at most; then any of them makes room. (Microbatches
    come round and round: were it the oldest, each would go just before its turn.)"""

    def __init__(self, layouts: int = 1024) -> None:
        self._table = _table_of(layouts)
        self._paused = 0

    def __len__(self) -> int:
        return 0 if self._table is None else len(self._table)

    def run(self, call: Callable[[], None], operands: list[Any], options: Hashable) -> None:
        """call(), or the launches that it would make.

        operands: every tensor that the call reads or writes, on one device, or None; the first is a tensor. options:
        whatever else its launches depend on, its name too. The call must do nothing but launch kernels, unless an
        operand is empty or it allocates (a copy of an operand, say): launches on other memory than the operands' are
        not repeated.
        """
        if self._paused or self._table is None or recording() or _hooked():  # recording: or a part of a call that is
            return call()
        done = self._table.run(options, operands, False)
        if done is False:  # the thread is at another device
            with _at(operands[0].get_device()):
                done = self._table.run(options, operands, True)
        if done:
            return None
        with recorded() as made:
            call()
        if made and all(operand is None or operand.numel() for operand in operands):
            self._keep(options, made, operands)
        return None

    def _keep(self, options: Hashable, made: Sequence[Launch], operands: list[Tensor | None]) -> None:
        try:
            launches = [_parameterised(launch, operands) for launch in made]
            if None not in launches:
                self._table.add(options, operands, launches)
        except Exception as error:  # of a Triton that does this in another way
            _warn(f"launches go through Triton's Python, slowly: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, calls are made: for programs that change what they launch, or what launching is. Forgets all."""
        self._paused += 1
        self.forget()
        try:
            yield
        finally:
            self._paused -= 1

    def forget(self) -> None:
        if self._table is not None:
            self._table.clear()


def _at(device: int) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if device == torch.cuda.current_device() else torch.cuda.device(device)


def _table_of(layouts: int) -> Any:
    """_launcher.Table, None where there is no launcher, or a torch that does not show it tensors."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # from torch 2.10 on, with which Triton 3.6 comes
    if _launcher is None or exchange is None:
        return None
    return _launcher.Table(layouts, exchange, Tensor, torch.nn.Parameter, _stream_of_cpu)


def _stream_of_cpu() -> int:
    """Of a driver that stands in for a GPU's."""
    return driver.active.get_current_stream(-1)


def _parameterised(launch: Launch, operands: Sequence[Tensor | None]) -> tuple | None:
    """What _launcher.Launches takes of a launch; None where it takes other memory than the operands', or where each
    launch needs some of its own."""
    compiled = launch.compiled
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        return None
    places = {(tensor.data_ptr(), tensor.dtype): i for i, tensor in enumerate(operands) if tensor is not None}
    swizzles = iter(getattr(metadata, "tensordesc_meta", None) or ())
    parameters: list[Any] = []
    for argument, kind in zip(launch.arguments, compiled.src.signature.values(), strict=False):
        if kind == "constexpr":
            continue
        described = isinstance(argument, TensorDescriptor)
        base = argument.base if described else argument
        operand = places.get((base.data_ptr(), base.dtype)) if isinstance(base, Tensor) else None
        if isinstance(base, Tensor) and operand is None:
            return None
        if described:
            parameters += _descriptor(argument, operand, next(swizzles))
        elif operand is not None:
            parameters.append(operand)
        else:
            parameters.append(struct.pack(_PACKED[kind], argument))
    threads = metadata.num_warps * metadata.target.warp_size
    return compiled.function, launch.grid, threads, metadata.shared, parameters + _SCRATCH


def _descriptor(argument: TensorDescriptor, operand: int | None, compiled: Any) -> Iterator[Any]:
    """The parameters that one becomes: what copies take, and once more its shape and strides."""
    size, shape, strides = argument.base.element_size(), argument.shape, argument.strides
    box = compiled["block_size"]
    steps = [size * stride for stride in strides[-2::-1]]
    yield operand, _MAP_TYPES[argument.base.dtype], compiled["swizzle"], shape[::-1], steps, box[::-1]
    yield from (struct.pack("<i", length) for length in shape)
    yield from (struct.pack("<q", stride) for stride in strides)


def _hooked() -> bool:
    """Whether a profiler wants to hear of every launch."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


@functools.cache
def _warn(text: str) -> None:
    logging.getLogger("zbkern").warning(text)


replay = Replay()
"""Of all kernels."""


def replayed(call: Callable[..., None]) -> Callable[..., None]:
    """`call` with its launches replayed. Of its arguments, those that are tensors are its operands, the first among
    them; its launches depend on nothing but these, the others, and how float32 is multiplied."""

    @functools.wraps(call)
    def run(*arguments: Any, **options: Any) -> None:
        values = (*arguments, *options.values())
        operands = [value for value in values if isinstance(value, Tensor)]
        others = [Tensor if isinstance(value, Tensor) else value for value in values]
        key = (call, *options, *others, precision(operands[0].dtype))
        replay.run(lambda: call(*arguments, **options), operands, key)

    return run
