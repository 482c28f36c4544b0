"""One GPU as several: disjoint groups of multiprocessors, each with a stream whose kernels run on that group alone.

CUDA's green contexts, made from one split: torch.cuda.GreenContext cannot do that, because each of its contexts is cut
out of the whole device and so shares multiprocessors with the others. Needs the cuda-bindings package (torch's CUDA
builds bring it) and a driver of CUDA 12.4 or later.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def partitions(count: int, multiprocessors: int, device: torch.device) -> Iterator[list[torch.cuda.Stream]]:
    """A stream for each of `count` disjoint groups of at least so many multiprocessors, else RuntimeError."""
    from cuda.bindings import driver

    torch.zeros(1, device=device)  # torch's context is there before the others are made
    (handle,) = _checked(driver.cuDeviceGet(device.index or 0))
    (whole,) = _checked(driver.cuDeviceGetDevResource(handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, found, _ = _checked(driver.cuDevSmResourceSplitByCount(count, whole, 0, multiprocessors))
    if found < count:
        raise RuntimeError(f"this GPU has no {count} x {multiprocessors} multiprocessors: {whole.sm.smCount} in all")
    contexts, streams = [], []
    try:
        for group in groups[:count]:
            (description,) = _checked(driver.cuDevResourceGenerateDesc([group], 1))
            kind = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM.value
            contexts += _checked(driver.cuGreenCtxCreate(description, handle, kind))
            blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
            streams += _checked(driver.cuGreenCtxStreamCreate(contexts[-1], blocking, 0))
        yield [torch.cuda.ExternalStream(int(stream), device) for stream in streams]
    finally:
        torch.cuda.synchronize(device)
        for stream in streams:
            driver.cuStreamDestroy(stream)
        for context in contexts:
            driver.cuGreenCtxDestroy(context)


def _checked(answer: Sequence[Any]) -> list[Any]:
    """What a driver's function returns after its error code."""
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(f"the CUDA driver answers {code!r}")
    return values


@contextlib.contextmanager
def told(multiprocessors: int) -> Iterator[None]:
    """Inside, kernels see this number of multiprocessors; zbkern's ask for it once per process, at first use."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    same = {name: getattr(properties, name) for name in ("name", "major", "minor", "total_memory")}
    fewer = SimpleNamespace(multi_processor_count=multiprocessors, **same)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=fewer):
        yield


def tell_cublas(multiprocessors: int) -> None:
    """cuBLAS chooses its kernels for so many, in this thread; torch has no call for that."""
    library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '0').partition('.')[0]}")
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    if library.cublasSetSmCountTarget(handle, multiprocessors):
        raise RuntimeError(f"cuBLAS does not take {multiprocessors} multiprocessors for its target")
