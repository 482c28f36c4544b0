"""A GPU that is not here: Triton compiles for it, and its launches run in the emulator of PTX, or are checked only.

As a program it runs a module whose launches are checked and do nothing, and no result is compared:
`python -m tests.emulator.gpu 90 bench.gpu --device cpu --tiny`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import runpy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from tests.emulator import library


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
    from triton.compiler import compiler

    from build_tools.kernels.jobs import kernel_modules
    from zbkern.kernels.triton.common import Kernel
    from zbkern.kernels.triton.replay import replay

    replay.forget()
    compiler.max_shared_mem.cache_clear()
    for module in kernel_modules():
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, Kernel):
                value._compiled.clear()
                value.function.device_caches.clear()
    for function in functions:
        function.device_caches.clear()


_target: list[tuple[int, bool]] = []


@contextlib.contextmanager
def gpu(capability: int, seed: int = 0, runs: bool = True, processors: int | None = None) -> Iterator[None]:
    """Inside, tensors of the CPU lie on a GPU of that capability.

    seed: of the order of warps, and of how late asynchronous work is done: at random (seed % 3 == 0), as late as may be
    (1), at once (2). runs: else kernels are compiled as for that GPU, and launches are checked as a driver would, and
    do nothing. processors: its SMs; four where kernels run, so that persistent ones take several tiles each.
    """
    import torch
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    from build_tools.kernels import jobs, launches
    from zbkern.kernels import dispatch
    from zbkern.kernels.triton import kernels

    real = dispatch.resolve

    def resolve(op: str, impl: str, device: Any = None, dtype: Any = None) -> ModuleType:
        return kernels if impl == "triton" else real(op, impl, device, dtype)

    jobs.name_kernels()
    library.load().emu_options(seed, capability, runs)
    if _target != [(capability, runs)]:
        forget()
        _target[:] = [(capability, runs)]
    with contextlib.ExitStack() as stack:
        if runs:
            stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", _text))
            stack.enter_context(mock.patch.object(CUDABackend, "hash", _hash))
        processors = processors or (4 if runs else launches.SMS[capability])
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


def _of_a_cpu() -> int:  # no mock, whose calls take longer than a repeated launch
    return -1


def _never() -> bool:
    return False


if __name__ == "__main__":
    from zbkern import testing

    capability, sys.argv = int(sys.argv[1]), sys.argv[2:]
    with gpu(capability, runs=False), mock.patch.object(testing, "assert_close"):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
