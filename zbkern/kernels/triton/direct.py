"""A compiled kernel's launch, as Triton's launcher passes it to the driver in the end: encoded descriptors, addresses.

Triton's Python part of a launch goes through all arguments (66 of a W, and its constants) and encodes the descriptors
anew each time: 90 percent of a launch. Made once, the rest is a call into C.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver


class Direct:
    """A launch of `function` in C, with all that it is passed but the stream. It keeps no tensor alive."""

    __slots__ = ("_arguments", "function")

    def __init__(self, function: Callable[..., object], grid: Sequence[int], rest: Sequence[Any]) -> None:
        self.function = function
        self._arguments = (*grid, 0, *rest)

    def __call__(self, stream: int) -> None:
        arguments = self._arguments
        if arguments[3] != stream:  # the tuple is kept: to make one of a hundred values takes as long as to pass it on
            arguments = self._arguments = (*arguments[:3], stream, *arguments[4:])
        self.function(*arguments)


def direct(compiled: Any, grid: Sequence[int], arguments: Sequence[Any], constants: Sequence[Any]) -> Direct | None:
    """The launch of a compiled kernel on addresses and descriptors, without launching it; None where each launch needs
    memory of its own, or where this version of Triton has another launcher than those of 3.4 to 3.9."""
    launch = _in_c(compiled)
    if launch is None:
        return None
    calls: list[tuple] = []
    launcher = copy.copy(compiled.run)
    launcher.launch = _instead(launcher.launch, lambda *passed: calls.append(passed))
    launcher(*grid, 0, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constants)
    passed = calls[0]
    return Direct(launch, grid, passed[4:]) if passed[:5] == (*grid, 0, compiled.function) else None


@functools.lru_cache(maxsize=1024)
def _in_c(compiled: Any) -> Callable[..., object] | None:
    """The C function of its launcher. Where there are descriptors, it is a variable of the function that encodes them.
    Those that are not encoded (the kernel reads by pointers after all) would keep their tensors."""
    launcher = compiled.run
    launch = launcher.launch
    if any(getattr(launcher, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled")):
        return None
    if isinstance(launch, types.FunctionType) and "launcher" in launch.__code__.co_freevars:
        encoded = getattr(compiled.metadata, "tensordesc_meta", None)
        if not encoded or None in encoded:
            return None
        launch = (launch.__closure__ or ())[launch.__code__.co_freevars.index("launcher")].cell_contents
    return launch if isinstance(launch, types.BuiltinFunctionType) else None


def _instead(launch: Any, other: Callable[..., object]) -> Callable[..., object]:
    """`launch`, which ends with another function than the one in C."""
    if isinstance(launch, types.BuiltinFunctionType):
        return other
    names = zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True)
    cells = tuple(types.CellType(other) if name == "launcher" else cell for name, cell in names)
    return types.FunctionType(launch.__code__, launch.__globals__, closure=cells)


def hooked() -> bool:
    """Whether a profiler wants to hear of every launch."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def launch_all(launches: Sequence[Direct], device: int) -> None:
    """On the current stream of the device."""
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch_all(launches, device)
    stream = driver.active.get_current_stream(device)
    for launch in launches:
        launch(stream)
    return None
