"""Torch optimizers that do more than others: they write into gradients, or have quantised states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.support.optimizer_cases import OPTIMIZERS, Case, clip_in_float64, ours, plain_loop

CLIPPED = {(1, 0): 3.0, (1, 2): 5.0}  # steps that the first rank does too early


@pytest.mark.parametrize("forced", [CLIPPED, {(1, 1): 3.0, (1, 2): math.nan}, {(0, 1): math.nan, (1, 3): 4.0}])
@pytest.mark.parametrize("undo", ["snapshot", None])
def test_gradients_that_a_step_has_written_into_are_there_for_the_next_try(forced: Any, undo: str | None) -> None:
    case = Case(2, 4, forced, OPTIMIZERS["writing"])
    history, _, optimizers = ours(case, adaptive=False, undo=undo)
    early = [place for place in forced if place[0] == 1]
    assert [optimizer.undone for optimizer in optimizers] == [0 if undo is None else len(early), 0]
    for found, expected in zip(history, plain_loop(case, clip_in_float64)[0], strict=True):
        assert_close(found, expected, rtol=0, atol=0)


# ---- of packages


def schedule_free(parameters: Any) -> torch.optim.Optimizer:
    made = pytest.importorskip("schedulefree", reason="pip install schedulefree")
    optimizer = made.AdamWScheduleFree(parameters, lr=0.01)
    optimizer.train()
    return optimizer


def in_8_bits(parameters: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim", reason="pip install torchao").AdamW8bit(parameters, lr=0.01)


def in_4_bits(parameters: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim", reason="pip install torchao").AdamW4bit(parameters, lr=0.01)


@pytest.mark.slow  # imports them
@pytest.mark.parametrize("make", [schedule_free, in_8_bits, in_4_bits])
def test_steps_of_packages_are_taken_back(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao's would take a minute
    make([nn.Parameter(torch.ones(2))])  # or skip
    case = Case(2, 3, CLIPPED, make, shapes=((64, 64), (7,), (64, 64)))  # large enough to be quantised
    history, _, optimizers = ours(case, adaptive=False)
    waited, *_ = ours(case, undo=None)
    assert [optimizer.undone for optimizer in optimizers] == [2, 0]
    for found, other, expected in zip(history, waited, plain_loop(case, clip_in_float64)[0], strict=True):
        assert_close(found, other, rtol=0, atol=0)
        assert_close(other, expected, rtol=1e-3, atol=1e-4)
