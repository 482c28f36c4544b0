"""A GPU that is not there: Triton compiles for it and launches on it, through a CUDA driver of our own (fake_cuda.c).

The driver checks each launch as a real one would and does nothing; kernels get tensors of the CPU. As a program it runs
a module over it, in which no result is compared: `python -m bench.fake_driver 90 bench.gpu --device cpu --tiny`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_name("fake_cuda.c")


def library_folder() -> Path:
    """Where libcuda.so.1 is, compiled when it is not there. Raises RuntimeError without a C compiler then."""
    import triton

    from build_tools.kernels import aot

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = aot.kept_in() / f"fake-driver-{digest}"
    library = folder / "libcuda.so.1"
    if not library.exists():
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("a driver to rehearse with is compiled from C, and there is no compiler: install gcc")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            made = Path(beside, library.name)
            name = f"-Wl,-soname,{library.name}"  # as which Triton's modules ask for it
            command = [compiler, "-O1", "-shared", "-fPIC", name, f"-I{headers}", str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True)
            made.replace(library)
    return folder


@functools.cache
def load() -> ctypes.CDLL:
    """The library, which this process takes for the driver from now on."""
    folder = library_folder()
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def driver(capability: int) -> Any:
    """Triton's driver on it."""
    from triton.backends.nvidia import driver as nvidia

    load().fake_capability(capability)
    made = object.__new__(nvidia.CudaDriver)
    made.utils, made.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
    made.get_current_device, made.get_current_stream = (lambda: 0), (lambda device: 0)
    made.get_device_capability = lambda device=0: divmod(capability, 10)
    return made


@contextlib.contextmanager
def gpu(capability: int) -> Iterator[None]:
    """Inside, tensors of the CPU lie on a GPU of that capability; what kernels write stays as it is."""
    import torch
    import triton

    from build_tools.kernels import launches
    from zbkern.kernels import dispatch
    from zbkern.kernels.triton import kernels

    real = dispatch.resolve

    def resolve(op: str, impl: str, device: Any = None, dtype: Any = None) -> ModuleType:
        return kernels if impl == "triton" else real(op, impl, device, dtype)

    with contextlib.ExitStack() as stack:
        stack.enter_context(launches.tiles_of(capability))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", _of_a_cpu))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", _never))
        stack.enter_context(mock.patch.object(dispatch, "resolve", resolve))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver(capability)))
        yield


def _of_a_cpu() -> int:  # no mock, whose calls take longer than what bench.host_launch measures
    return -1


def _never() -> bool:
    return False


if __name__ == "__main__":
    from zbkern import testing

    capability, sys.argv = int(sys.argv[1]), sys.argv[2:]
    with gpu(capability), mock.patch.object(testing, "assert_close"):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
