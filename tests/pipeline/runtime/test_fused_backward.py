"""Passes of which no W waits, as those of 1F1B: what is small is left to torch's autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbkern
from zbkern import wgrad
from zbkern.pipeline import Pipeline, Schedule, StepOptions, schedules
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.schedules.actions import Action

COUNT = 6


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = lambda x: self.second(torch.tanh(self.first(x)))  # noqa: E731
        return x + checkpoint(inner, x, use_reentrant=False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Checkpointed(), nn.Linear(4, 4))


def recomputed() -> Schedule:
    """1F1B of one rank, whose backwards come after an R."""
    row = [Action(kind, 0, number) for number in range(COUNT) for kind in ("F", "R", "BW")]
    return Schedule.build([row], [0], COUNT)


def step(schedule: Schedule, module: nn.Module, rows: int = 1, **options: Any) -> list[torch.Tensor | None]:
    x, y = torch.randn(2, COUNT * rows, 4, generator=torch.Generator().manual_seed(1))
    pipe = Pipeline([module], schedule, nn.functional.mse_loss, LocalTransport.ring(1)[0], **options)
    for _ in range(2):
        pipe.step(x, y)
    pipe.close()
    return [parameter.grad for parameter in module.parameters()]


def expected(module: nn.Module) -> list[torch.Tensor]:
    x, y = torch.randn(2, COUNT, 4, generator=torch.Generator().manual_seed(1))
    nn.functional.mse_loss(module(x), y).backward()
    return [2 * parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a WGradTask was made")


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b(1, COUNT), recomputed()], ids=["1F1B", "with R"])
def test_a_small_layer_of_which_no_w_waits_makes_no_task(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    part = model()
    whole = copy.deepcopy(part)
    monkeypatch.setattr(wgrad.WGradTask, "__init__", refuse)
    found = step(schedule, zbkern.convert(part))
    torch.testing.assert_close(found, expected(whole))
    with pytest.raises(Exception, match="a WGradTask was made"):
        step(schedules.zb_h1(1, COUNT), part)


def test_what_autograd_does_not_know_of_is_done_by_a_task() -> None:
    part = model()
    whole = copy.deepcopy(part)
    for parameter in part.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    assert step(schedules.one_f_one_b(1, COUNT), zbkern.convert(part)) == [None] * 8
    torch.testing.assert_close([parameter.main_grad for parameter in part.parameters()], expected(whole))


def test_a_large_layer_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgrad.WGradTask, "__init__", refuse)
    with pytest.raises(Exception, match="a WGradTask was made"):
        step(schedules.one_f_one_b(1, COUNT), zbkern.convert(nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 4))))


def test_same_bits_are_those_of_a_kernel_for_each_w() -> None:
    """Autograd adds a product to the gradient; the kernel sums both at once, and rounds once less."""
    parts = [zbkern.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) for _ in range(2)]
    parts[1].load_state_dict(parts[0].state_dict())
    both = schedules.one_f_one_b(1, COUNT), schedules.zb_h1(1, COUNT)
    one, other = (step(s, part, 20, options=StepOptions(same_bits=True)) for s, part in zip(both, parts, strict=True))
    for ours, theirs in zip(one, other, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
