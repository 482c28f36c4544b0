"""Triton's launcher, and what is left of a launch without its Python: the same call into C."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia

from zbkern.kernels.triton import direct as triton_direct
from zbkern.kernels.triton.matmul_tile import described

META = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [16, 16], "fp4_padded": False}
SIGNATURE = {"a": "tensordesc<fp16[16, 16]>", "b": "*fp32", "c": "i32", "d": "constexpr", "e": "tensordesc<fp16[8, 8]>"}
IN_C = "{}".format  # any function in C that takes whatever it is given


class Driver:
    """Encodes a descriptor as what it would be made of."""

    def __init__(self) -> None:
        self.utils = types.SimpleNamespace(fill_tma_descriptor=lambda *values: ("encoded", *map(str, values)))
        self.streams = {0: 7}
        self.get_current_stream = self.streams.__getitem__


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(nvidia.triton.runtime, "driver", types.SimpleNamespace(active=found))
    monkeypatch.setattr(triton_direct, "driver", types.SimpleNamespace(active=found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


def compiled(final: Any, descriptors: bool = True, **changes: Any) -> Any:
    """As Triton has it after compiling; final: its function in C."""
    run = object.__new__(nvidia.CudaLauncher)
    meta = [META, META] if descriptors else None
    signature = SIGNATURE if descriptors else {"b": "*fp32", "c": "i32"}
    run.launch = nvidia.wrap_handle_tensordesc(final, signature, meta)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    for name, value in changes.items():
        setattr(run, name, value)
    metadata = types.SimpleNamespace(tensordesc_meta=meta)
    return types.SimpleNamespace(run=run, function=99, packed_metadata=(4, 1, 1024), metadata=metadata)


class Compiled(types.SimpleNamespace):
    __hash__ = object.__hash__


def arguments(address: bool) -> tuple[Tensor, list[Any]]:
    """A tensor, and what a kernel is given of it and of others."""
    matrix, vector = torch.zeros(64, 32).half(), torch.zeros(4)
    one, two = described(matrix, [64, 32], [32, 1], [16, 16]), described(matrix, [32, 32], [64, 1], [8, 8])
    return matrix, [one, vector.data_ptr() if address else vector, 5, True, two]


@pytest.mark.parametrize("descriptors", [True, False])
def test_it_is_what_triton_calls(driver: Driver, descriptors: bool) -> None:
    said: list[tuple] = []
    _, values = arguments(True)
    values = values if descriptors else values[1:3]
    triton_kernel = compiled(lambda *passed: said.append(passed), descriptors)
    triton_kernel.run(3, 2, 1, 7, 99, triton_kernel.packed_metadata, None, None, None, *values)
    ours = triton_direct.direct(Compiled(**vars(compiled(IN_C, descriptors))), (3, 2, 1), values, ())
    assert ours is not None
    assert ours.function is IN_C
    ours.function = lambda *passed: said.append(passed)
    ours(7)
    assert said[1] == said[0]


def test_it_goes_to_the_current_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple] = []
    launches = [triton_direct.Direct(lambda *passed: said.append(passed), (1, 1, 1), ("rest",))] * 2
    triton_direct.launch_all(launches, 0)
    driver.streams[0] = 8
    triton_direct.launch_all(launches[:1], 0)
    assert said == [(1, 1, 1, stream, "rest") for stream in (7, 7, 8)]
    entered = []

    def other(device: int) -> Any:
        entered.append(device)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
        return pytest.MonkeyPatch.context()

    driver.streams[1] = 9
    monkeypatch.setattr(torch.cuda, "device", other)
    triton_direct.launch_all(launches[:1], 1)
    assert entered == [1]
    assert said[-1] == (1, 1, 1, 9, "rest")


def test_no_tensor_is_kept(driver: Driver) -> None:
    matrix, values = arguments(True)
    ours = triton_direct.direct(Compiled(**vars(compiled(IN_C))), (1, 1, 1), values, ())
    reference = weakref.ref(matrix)
    del matrix, values
    gc.collect()
    assert ours is not None
    assert reference() is None


def test_what_goes_through_triton(driver: Driver) -> None:
    _, values = arguments(True)
    others = [
        compiled(IN_C, global_scratch_size=64),
        compiled(IN_C, launch=lambda *passed: None),  # another version's
        compiled(lambda *passed: None),
        compiled(IN_C),
    ]
    others[-1].metadata.tensordesc_meta = [META, None]  # of this one the tensor itself is passed on
    for other in others:
        assert triton_direct.direct(Compiled(**vars(other)), (1, 1, 1), values, ()) is None


def test_a_profiler_hears_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not triton_direct.hooked()
    hook = knobs.runtime.launch_enter_hook
    assert hook is not None
    hook.add(print)
    try:
        assert triton_direct.hooked()
    finally:
        hook.remove(print)
