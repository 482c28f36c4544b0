"""A GPU that is not there: Triton compiles for it and launches on it, through a CUDA driver of our own (fake_cuda.c).

The driver checks each launch as a real one would and does nothing. Kernels get tensors of the CPU, and where asked
for the reference's results, so that what runs on them can be rehearsed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_name("fake_cuda.c")

FAULTS = {"hang": 1, "sticky": 2}
"""What a launch may do: never end; fail with an error that every later call would repeat."""


def library_folder() -> Path:
    """Where libcuda.so.1 is, compiled when it is not there. Raises RuntimeError without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("a driver to rehearse with is compiled from C, and there is no compiler: install gcc")
    import triton

    from build_tools.kernels import aot

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = aot.kept_in() / f"fake-driver-{digest}"
    library = folder / "libcuda.so.1"
    if not library.exists():
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


def answering() -> ModuleType:
    """Triton's kernels, and after each what the reference makes of the same operands."""
    from zbkern.kernels import reference, spec
    from zbkern.kernels.triton import kernels

    joined = ModuleType("triton, rehearsed")

    def both(launch: Any, answer: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            launch(*arguments, **options)
            for name in ("num_sms", "max_tiles"):
                options.pop(name, None)
            _in_double(answer, arguments, options)

        return run

    for name in spec.KERNELS:
        if hasattr(kernels, name):
            answer = getattr(reference, name)
            answer = _into_many(answer) if name.endswith("norm_dgrad") else answer
            setattr(joined, name, both(getattr(kernels, name), answer))
    joined.norm_partials = kernels.norm_partials  # type: ignore[attr-defined]
    return joined


def _in_double(answer: Any, arguments: Any, options: Any) -> None:
    """Runs it on tensors of float64, and rounds what it has written: all that an exact kernel would."""
    import torch
    from torch.utils import _pytree as pytree

    leaves, form = pytree.tree_flatten((arguments, options))
    floating = [isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves]
    wide = [leaf.double() if is_wide else leaf for leaf, is_wide in zip(leaves, floating, strict=True)]
    before = [leaf.clone() if is_wide else leaf for leaf, is_wide in zip(wide, floating, strict=True)]
    wide_arguments, wide_options = pytree.tree_unflatten(wide, form)
    answer(*wide_arguments, **wide_options)
    for leaf, was, now, is_wide in zip(leaves, before, wide, floating, strict=True):
        if is_wide and not torch.equal(was, now):
            leaf.copy_(now)


def _into_many(answer: Any) -> Any:
    """The reference of a norm's dgrad, which writes one partial sum, where there is room for many."""

    def run(*arguments: Any, **options: Any) -> None:
        bound = inspect.signature(answer).bind(*arguments, **options)
        partials = bound.arguments["partials"]
        if partials is not None:
            bound.arguments["partials"] = partials.new_empty(partials.shape[0], 1, partials.shape[2])
        answer(*bound.args, **bound.kwargs)
        if partials is not None:
            partials.zero_()[:, :1] = bound.arguments["partials"]

    return run


@contextlib.contextmanager
def gpu(capability: int, answers: bool = True) -> Iterator[None]:
    """Inside, tensors of the CPU lie on a GPU of that capability. answers: what kernels write is the reference's."""
    import torch
    import triton

    from build_tools.kernels import launches
    from zbkern.kernels import dispatch
    from zbkern.kernels.triton import kernels

    backend, real = answering() if answers else kernels, dispatch.resolve

    def resolve(op: str, impl: str, device: Any = None, dtype: Any = None) -> ModuleType:
        return backend if impl == "triton" else real(op, impl, device, dtype)

    with contextlib.ExitStack() as stack:
        stack.enter_context(launches.tiles_of(capability))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=-1))  # a CPU's
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False))
        stack.enter_context(mock.patch.object(dispatch, "resolve", resolve))
        if not answers:  # in a peer that is torch's product and our kernel, the product takes minutes of a CPU
            stack.enter_context(mock.patch.object(torch, "mm"))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver(capability)))
        yield
