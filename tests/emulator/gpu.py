"""A GPU that is not here: Triton compiles for it, and its launches run in the emulator of PTX."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from tests.emulator import library


def set_options(
    seed: int = 0, races: bool = True, uninitialised: bool = True, proxies: bool = True, capability: int = 90,
    verbose: bool = False,
) -> None:  # fmt: skip
    """seed: of the order of warps, and of how late asynchronous work is done: at random (seed % 3 == 0), as late as may
    be (1), at once (2)."""
    library.load().emu_options(seed, races, uninitialised, proxies, capability, verbose)


@functools.cache
def driver(capability: int) -> Any:
    """Triton's driver on it."""
    from triton.backends.nvidia import driver as nvidia

    library.load()
    made = object.__new__(nvidia.CudaDriver)
    made.utils, made.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
    made.get_current_device, made.get_current_stream = (lambda: 0), (lambda device: 0)
    made.get_device_capability = lambda device=0: divmod(capability, 10)
    return made


def forget(*functions: Any) -> None:
    """What was compiled in this process, of zbkern's kernels and of these jitted functions: neither Triton nor zbkern
    asks again for which target."""
    from build_tools.kernels.jobs import kernel_modules
    from zbkern.kernels.triton.common import Kernel
    from zbkern.kernels.triton.replay import replay

    replay.forget()
    for module in kernel_modules():
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, Kernel):
                value._compiled.clear()
                value.function.device_caches.clear()
    for function in functions:
        function.device_caches.clear()


_target: list[int] = []


@contextlib.contextmanager
def gpu(capability: int, seed: int = 0, processors: int = 4, **options: Any) -> Iterator[None]:
    """Inside, tensors of the CPU lie on a GPU of that capability. processors: its SMs; few, so that persistent kernels
    take several tiles each. options: of set_options()."""
    import torch
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    from build_tools.kernels import launches
    from zbkern.kernels import dispatch
    from zbkern.kernels.triton import kernels

    real = dispatch.resolve

    def resolve(op: str, impl: str, device: Any = None, dtype: Any = None) -> ModuleType:
        return kernels if impl == "triton" else real(op, impl, device, dtype)

    set_options(seed, capability=capability, **options)
    if _target != [capability]:
        forget()
        _target[:] = [capability]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", _text))
        stack.enter_context(mock.patch.object(CUDABackend, "hash", _hash))
        stack.enter_context(mock.patch.dict(launches.SMS, {capability: processors}))
        stack.enter_context(launches.tiles_of(capability))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", _of_a_cpu))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", _never))
        stack.enter_context(mock.patch.object(dispatch, "resolve", resolve))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver(capability)))
        yield


def _text(backend: Any, ptx: str, *_: object) -> bytes:
    return ptx.encode() + b"\0"


def _hash(backend: Any) -> str:  # Triton's cache keeps these apart from what is compiled for a GPU
    return f"emulated {backend.target}"


def _of_a_cpu() -> int:  # no mock, whose calls take longer than what bench.host_launch measures
    return -1


def _never() -> bool:
    return False
