"""Launches that are made again are those that a call would make."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import every_launch
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import replay as triton_replay
from zbkern.kernels.triton import wgrad as triton_wgrad
from zbkern.kernels.triton.replay import Replay, replay

Random = every_launch.Random
REPLAYED = ("linear_fwd", "linear_dgrad", "linear_dgrad_sum", "linear_wgrad", "linear_wgrads", "gated_linear_fwd",
            "gated_linear_dgrad")  # fmt: skip


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for every W that was worked out, not replayed."""
    found, wgrads = [], triton_wgrad._wgrads
    monkeypatch.setattr(triton_wgrad, "_wgrads", lambda *arguments: (found.append(1), wgrads(*arguments)))
    return found


def wgrad(x: Tensor, dy: Tensor, dweight: Tensor | None = None, dbias: Tensor | None = None) -> Tensor:
    """dweight after a W, which is also compared with torch's."""
    if dweight is None:
        dweight = torch.full((dy.shape[1], x.shape[1]), float("nan"))
    triton_kernels.linear_wgrad([(x, dy)], (dweight, dbias), False)
    torch.testing.assert_close(dweight, dy.float().t() @ x.float(), rtol=1e-5, atol=1e-5)
    return dweight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", REPLAYED)
def test_a_hit_is_equal_to_a_miss(name: str, dtype: torch.dtype) -> None:
    """The same bits, also from operands elsewhere in memory."""
    here, there = ({}, {})
    for found in (here, there):
        torch.manual_seed(0)
        found[name] = every_launch.cases(triton_kernels, Random(dtype, "cpu", scale=0.3), 32, 48, 16)[name]
    with replay.paused():
        expected = here[name].results()
    for case in (here[name], here[name], there[name]):
        for one, two in zip(case.results(), expected, strict=True):
            assert torch.equal(one, two)
    assert replay._templates


def test_an_address_that_another_tensor_has_now(worked_out: list[int]) -> None:
    memory = torch.randn(2, 32 * 16).half()
    dweight = torch.empty(16, 16)
    first = wgrad(memory[0].view(32, 16), memory[1].view(32, 16), dweight).clone()
    memory.copy_(torch.randn(2, 32 * 16))
    second = wgrad(memory[0].view(32, 16), memory[1].view(32, 16), dweight)
    assert len(worked_out) == 1
    assert not torch.equal(first, second)


def test_one_address_and_other_strides_shapes_dtypes(worked_out: list[int]) -> None:
    memory, dy = torch.randn(32 * 32).half(), torch.randn(32, 16).half()
    for shape, stride in (((32, 16), (16, 1)), ((32, 16), (32, 1)), ((32, 16), (1, 32)), ((32, 32), (32, 1))):
        wgrad(memory.as_strided(shape, stride), dy)
    assert len(worked_out) == 4
    wgrad(memory[: 32 * 16].view(32, 16), dy)
    assert len(worked_out) == 4
    wgrad(memory[: 32 * 16].view(torch.bfloat16).view(32, 16).nan_to_num_(0, 0, 0).clamp_(-9, 9), dy.bfloat16())
    assert len(worked_out) == 5


def test_where_it_begins_modulo_16_bytes(worked_out: list[int]) -> None:
    """An operand that descriptors do not take is copied, always."""
    memory, dy = torch.randn(33 * 16).half(), torch.randn(32, 16).half()
    for start, count in ((0, 1), (8, 1), (1, 2), (1, 3), (0, 3)):
        wgrad(memory[start : start + 512].view(32, 16), dy)
        assert len(worked_out) == count


def test_operands_that_are_one_tensor(worked_out: list[int]) -> None:
    """Where two operands begin at one address, arguments do not say which of them they were."""
    x, dy = torch.randn(32, 16).half(), torch.randn(32, 16).half()
    wgrad(x, x)
    wgrad(x, dy)
    wgrad(dy, x)
    wgrad(dy, dy)
    assert len(worked_out) == 2


def test_options_are_told_apart(worked_out: list[int]) -> None:
    x, dy, dweight, dbias = torch.randn(32, 16), torch.randn(32, 16), torch.zeros(16, 16), torch.zeros(16)
    wgrad(x, dy, dweight)
    triton_kernels.linear_wgrad([(x, dy)], (dweight, None), True)
    torch.testing.assert_close(dweight, 2 * dy.t() @ x, rtol=1e-5, atol=1e-5)
    wgrad(x, dy, dweight, dbias)
    torch.testing.assert_close(dbias, dy.sum(0))
    triton_kernels.linear_wgrad([(x, dy)], (dweight, None), True, max_tiles=1)
    assert len(worked_out) == 4
    with mock.patch.object(triton_wgrad, "precision", return_value="tf32"):
        wgrad(x, dy, dweight)
    assert len(worked_out) == 5


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("segments", [[(torch.ones(0, 16),) * 2], []], ids=["of no rows", "none"])
def test_no_rows(segments: list, accumulate: bool) -> None:
    """Nothing to launch is not a launch to repeat: what is written then is written every time."""
    some, dweights = torch.ones(8, 16), torch.empty(2, 16, 16)
    for _ in range(3):
        dweights.fill_(1.0)
        layers = [([(some, some)], (dweights[0], None)), (segments, (dweights[1], None))]
        triton_kernels.linear_wgrads(layers, accumulate)
        assert torch.equal(dweights[0], torch.full((16, 16), 8.0 + accumulate))
        assert torch.equal(dweights[1], torch.full((16, 16), float(accumulate)))


def test_no_tensor_is_kept() -> None:
    x, dy = torch.randn(32, 16), torch.randn(32, 16)
    dweight = wgrad(x, dy)
    wgrad(x, dy, dweight)
    references = [weakref.ref(tensor) for tensor in (x, dy, dweight)]
    assert replay._templates
    del x, dy, dweight
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Replay(layouts=3)
    monkeypatch.setattr(triton_wgrad, "replay", small)
    for rows in (*range(1, 8), 1, 7):
        wgrad(torch.randn(rows, 16), torch.randn(rows, 16))
        assert 1 <= len(small._templates) <= 3


def test_more_turns_than_are_kept_cost_no_more_than_those_that_are_too_many(
    monkeypatch: pytest.MonkeyPatch, worked_out: list[int]
) -> None:
    """Microbatches come round and round: forgetting all, or the oldest, would forget each just before its turn."""
    monkeypatch.setattr(triton_wgrad, "replay", Replay(layouts=8))
    operands = [(torch.randn(rows, 16), torch.randn(rows, 16)) for rows in range(1, 11)]
    for _ in range(20):
        for x, dy in operands:
            wgrad(x, dy)
    assert 20 < len(worked_out) < 100  # of 200


def test_an_error_is_not_kept() -> None:
    mine, x = Replay(), torch.ones(4)
    fails: Callable[[], None] = mock.Mock(side_effect=ValueError("as it does"))
    for _ in range(2):
        with pytest.raises(ValueError, match="as it does"):
            mine.run(fails, [x], "fails")
    assert not mine._templates
    assert not triton_replay.recording()
