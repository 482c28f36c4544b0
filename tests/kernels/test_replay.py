"""Launches that are made again are those that a call would make: the driver is given the same, byte by byte."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from tests.emulator import gpu as emulated
from tests.emulator import library
from tests.emulator.library import given_to_driver
from tests.support import every_launch
from tests.support.launch_checks import Random
from zbkern.kernels.triton import common as triton_common
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import replay as triton_replay
from zbkern.kernels.triton import wgrad as triton_wgrad
from zbkern.kernels.triton.replay import Replay, replay

REPLAYED = ("linear_fwd", "linear_dgrad", "linear_dgrad_sum", "linear_wgrad", "linear_wgrads", "gated_linear_fwd",
            "gated_linear_dgrad", "activation_fwd", "activation_bwd", "gated_fwd", "gated_bwd", "norm_fwd",
            "norm_dgrad", "norm_wgrad", "rotary_fwd", "rotary_dgrad")  # fmt: skip
OTHERS = (("linear_wgrad", torch.float16), ("linear_wgrad", torch.float32))


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with emulated.gpu(90, runs=False):
        yield
    replay.forget()


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for every launch that Triton's Python made."""
    found, launch = [], triton_common.Kernel._launch
    monkeypatch.setattr(triton_common.Kernel, "_launch", lambda *arguments: (found.append(1), launch(*arguments))[1])
    return found


def through_triton(call: Callable[[], object]) -> bytes:
    with replay.paused():
        return given_to_driver(call)


def w_of(x: Tensor, dy: Tensor, *outputs: Tensor | None, **options: Any) -> Callable[[], None]:
    """A W, into outputs of its own if none are given."""
    dweight, dbias = outputs or (torch.empty(dy.shape[1], x.shape[1]), None)
    return lambda: triton_kernels.linear_wgrads([([(x, dy)], (dweight, dbias))], **{"accumulate": False, **options})


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in REPLAYED), *OTHERS])
def test_a_hit_is_equal_to_a_miss(name: str, dtype: torch.dtype, worked_out: list[int]) -> None:
    """Also of operands elsewhere in memory, on another stream."""
    here, there = (every_launch.cases(triton_kernels, Random(dtype, "cpu"), 32, 48, 16)[name].run for _ in range(2))
    expected = through_triton(here)
    driver = emulated.driver(90)
    driver.get_current_stream = lambda device: 7
    expected_there = through_triton(there)
    assert expected != expected_there
    driver.get_current_stream = lambda device: 0
    assert given_to_driver(here) == expected
    count = len(worked_out)
    assert given_to_driver(here) == expected
    driver.get_current_stream = lambda device: 7
    try:
        assert given_to_driver(there) == expected_there
    finally:
        driver.get_current_stream = lambda device: 0
    assert len(worked_out) == count


def test_sums_by_group(worked_out: list[int]) -> None:
    """Of five segments, in two launches: the last lies in memory in another way."""
    rows = [torch.randn(8, 48).half() for _ in range(4)] + [torch.randn(48, 8).half().t()]
    ends, sums = [torch.tensor([i, 8], dtype=torch.int32) for i in range(5)], torch.zeros(2, 48)

    def call() -> None:
        triton_wgrad.sum_rows(list(zip(rows, ends, strict=True)), sums, True)

    expected = through_triton(call)
    assert given_to_driver(call) == expected
    count = len(worked_out)
    assert given_to_driver(call) == expected
    assert len(worked_out) == count == 4


def test_one_address_and_other_strides_shapes_dtypes(worked_out: list[int]) -> None:
    memory, dy = torch.randn(32 * 32).half(), torch.randn(32, 16).half()
    for shape, stride in (((32, 16), (16, 1)), ((32, 16), (32, 1)), ((32, 16), (1, 32)), ((32, 32), (32, 1))):
        call = w_of(memory.as_strided(shape, stride), dy)
        assert given_to_driver(call) == given_to_driver(call)
    assert len(worked_out) == 4
    w_of(memory[: 32 * 16].view(32, 16), dy)()
    assert len(worked_out) == 4
    w_of(memory[: 32 * 16].view(torch.bfloat16).view(32, 16), dy.bfloat16())()
    assert len(worked_out) == 5


def test_where_it_begins_modulo_16_bytes(worked_out: list[int]) -> None:
    """An operand that descriptors do not take is copied, always."""
    memory, dy = torch.randn(33 * 16).half(), torch.randn(32, 16).half()
    for start, count in ((0, 1), (8, 1), (1, 2), (1, 3), (0, 3)):
        w_of(memory[start : start + 512].view(32, 16), dy)()
        assert len(worked_out) == count


def test_pointers_that_begin_elsewhere_modulo_16_bytes(worked_out: list[int]) -> None:
    """Both ways are known at the same time."""
    x, dy, memory = torch.randn(32, 16).half(), torch.randn(32, 16).half(), torch.empty(17 * 16)
    calls = [w_of(x, dy, memory[start : start + 256].view(16, 16), None) for start in (0, 1)]
    expected = [through_triton(call) for call in calls]
    assert [given_to_driver(call) for call in calls] == expected
    count = len(worked_out)
    assert [given_to_driver(call) for call in calls] == expected
    assert len(worked_out) == count


def test_operands_that_are_one_tensor(worked_out: list[int]) -> None:
    """Where two operands began at one address, arguments do not say which of them they were."""
    x, dy, dweight = torch.randn(32, 16).half(), torch.randn(32, 16).half(), torch.empty(16, 16)
    pairs = (x, x), (x, dy), (dy, x), (dy, dy)
    expected = [through_triton(w_of(*pair, dweight, None)) for pair in pairs]
    assert [given_to_driver(w_of(*pair, dweight, None)) for pair in pairs] == expected
    assert len(worked_out) == len(pairs) + 2


def test_options_are_told_apart(worked_out: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy, dweight, dbias = torch.randn(32, 16), torch.randn(32, 16), torch.zeros(16, 16), torch.zeros(16)
    calls = [
        w_of(x, dy, dweight, None),
        w_of(x, dy, dweight, None, accumulate=True),
        w_of(x, dy, dweight, dbias),
        w_of(x, dy, dweight, None, accumulate=True, max_tiles=1),
    ]
    expected = [through_triton(call) for call in calls]
    worked_out.clear()
    for _ in range(2):
        assert [given_to_driver(call) for call in calls] == expected
    assert len(worked_out) == 5  # a bias is a launch of its own
    monkeypatch.setattr(triton_wgrad, "precision", lambda dtype: "tf32")
    calls[0]()
    assert len(worked_out) == 6


def test_a_profiler_hears_of_every_launch(worked_out: list[int]) -> None:
    call, heard = w_of(torch.randn(32, 16), torch.randn(32, 16)), []
    call()
    hook = knobs.runtime.launch_enter_hook
    assert hook is not None
    hook.add(heard.append)
    try:
        call()
    finally:
        hook.remove(heard.append)
    assert len(heard) == 1
    assert len(worked_out) == 2


def encoded() -> int:
    """Descriptors that the driver has been asked for."""
    return int(library.load().emu_encoded())


def test_descriptors_are_encoded_once_for_each_address(worked_out: list[int]) -> None:
    """Of the three of a W: those of a microbatch's operands come round, the weight's stays."""
    dweight, batches = torch.zeros(64, 64), [(torch.randn(64, 64), torch.randn(64, 64)) for _ in range(4)]
    calls = [w_of(x.half(), dy.half(), dweight, None, accumulate=True) for x, dy in batches]
    expected = [through_triton(call) for call in calls]
    calls[0]()
    for call in calls:
        call()
    begin = encoded()
    assert [given_to_driver(call) for call in calls] == expected
    assert encoded() == begin
    assert len(worked_out) == len(calls) + 1


def test_descriptors_of_more_addresses_than_are_kept(worked_out: list[int]) -> None:
    """All calls are right, whatever was kept at the place of an address."""
    memory, dy, dweight = torch.randn(400, 32, 16).half(), torch.randn(32, 16).half(), torch.empty(16, 16)
    calls = [w_of(x, dy, dweight, None) for x in memory]
    expected = [through_triton(call) for call in calls[:3]]
    for _ in range(2):
        given = [given_to_driver(call) for call in calls]
        assert given[:3] == expected
        assert len({*given}) == len(calls)
    assert len(worked_out) == 4


def test_on_another_device(worked_out: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    current, entered = [0], []
    call, emulator = w_of(torch.randn(32, 16), torch.randn(32, 16)), library.load()
    expected = through_triton(call)
    call()
    count, theirs = len(worked_out), ctypes.c_void_p()
    emulator.cuCtxGetCurrent(ctypes.byref(theirs))

    @contextlib.contextmanager
    def other(device: int) -> Iterator[None]:
        entered.append(device)
        current[0] = device
        emulator.cuCtxSetCurrent(theirs)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", other)
    emulator.cuCtxSetCurrent(ctypes.c_void_p(2))
    assert given_to_driver(call) == expected
    assert entered == [-1]  # a CPU's
    assert len(worked_out) == count


def test_no_tensor_is_kept() -> None:
    x, dy, dweight = torch.randn(32, 16), torch.randn(32, 16), torch.empty(16, 16)
    call = w_of(x, dy, dweight, None)
    call(), call()
    references = [weakref.ref(tensor) for tensor in (x, dy, dweight)]
    assert len(replay)
    del x, dy, dweight, call
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_more_turns_than_are_kept_cost_no_more_than_those_that_are_too_many(
    monkeypatch: pytest.MonkeyPatch, worked_out: list[int]
) -> None:
    """Microbatches come round and round: forgetting all, or the oldest, would forget each just before its turn."""
    small = Replay(layouts=8)
    monkeypatch.setattr(triton_wgrad, "replay", small)
    calls = [w_of(torch.randn(rows, 16), torch.randn(rows, 16)) for rows in range(16, 176, 16)]
    for _ in range(20):
        for call in calls:
            call()
            assert 1 <= len(small) <= 8
    assert 20 < len(worked_out) < 100  # of 200


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("segments", [[(torch.ones(0, 16),) * 2], []], ids=["of no rows", "none"])
def test_no_rows(segments: list, accumulate: bool) -> None:
    """Nothing to launch is not a launch to repeat: what is written then is written every time."""
    some, dweights = torch.ones(16, 16), torch.empty(2, 16, 16)
    for _ in range(3):
        dweights.fill_(1.0)
        layers = [([(some, some)], (dweights[0], None)), (segments, (dweights[1], None))]
        triton_kernels.linear_wgrads(layers, accumulate)
        assert torch.equal(dweights[1], torch.full((16, 16), float(accumulate)))


def in_a_new_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()


def test_a_thread_that_has_used_no_gpu_launches(worked_out: list[int]) -> None:
    call = w_of(torch.randn(32, 16), torch.randn(32, 16))
    in_a_new_thread(call)
    in_a_new_thread(call)
    assert len(worked_out) == 1


def test_threads_make_room_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Replay(layouts=2)
    monkeypatch.setattr(triton_wgrad, "replay", full)
    calls = [w_of(torch.randn(rows, 16), torch.randn(rows, 16)) for rows in range(16, 144, 16)]
    expected = [through_triton(call) for call in calls]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda call: call(), calls * 20))
    assert 1 <= len(full) <= 2
    assert [given_to_driver(call) for call in calls] == expected


def test_an_error_is_not_kept() -> None:
    mine, x = Replay(), torch.ones(4)

    def fails() -> None:
        raise ValueError("as it does")

    for _ in range(2):
        with pytest.raises(ValueError, match="as it does"):
            mine.run(fails, [x], "fails")
    assert not len(mine)
    assert not triton_common.recording()


@pytest.mark.parametrize(
    ("broken", "by", "said"),
    [
        ("_SCRATCH", [], "takes more than"),
        ("_PACKED", {}, "KeyError"),
        ("_PACKED", dict.fromkeys(triton_replay._PACKED, "<2i"), "error: pack"),
        ("_MAP_TYPES", {}, "KeyError"),
        ("iter", lambda values: builtins.iter([]), "StopIteration"),
    ],
)
def test_of_an_unknown_triton_every_launch_goes_through_its_python(
    broken: str,
    by: Any,
    said: str,
    worked_out: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(triton_replay, broken, by, raising=False)
    call = w_of(torch.randn(32, 16), torch.randn(32, 16))
    with caplog.at_level(logging.WARNING, "zbkern"):
        call(), call()
    assert len(worked_out) == 2
    assert said in caplog.text
