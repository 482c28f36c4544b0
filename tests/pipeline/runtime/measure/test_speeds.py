"""Ranks of which one is slow: measured, planned for, and run as fast as planned. Their time is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.counted import counted_time as counted_time
from tests.support.counted import results_on_counted_ranks, sleep
from zbkern.pipeline import ModelCosts, Pipeline, ProfileOptions, Timeline, plan, profile_layers
from zbkern.pipeline.runtime.measure.measured_costs import speeds_of
from zbkern.planning.planner import native
from zbkern.planning.planner.plan import Plan
from zbkern.planning.simulation.drift import Drift

SPEEDS = (1.0, 0.5, 1.0, 1.0)
LAYERS, MICROBATCHES = 20, 8
SECONDS = 6.0  # of a forward, and of a backward
NOISE = 0.04  # they take up to so much longer
DATA = torch.randn(2 * MICROBATCHES, 8)


class Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        sleep(seconds, NOISE)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep(ctx.seconds, NOISE)
        return dy, None


class Layer(nn.Module):
    """Takes its time divided by the speed of the rank that it is on."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.seconds, self.linear = [SECONDS / speed], zbkern.nn.Linear(8, 8, bias=False)  # a list: no setting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slept.apply(self.linear(x), self.seconds[0])


def test_a_rank_is_compared_with_others_in_layers_that_are_alike() -> None:
    owners, alike = (0, 0, 0, 1, 1, 2, 2, 2), ("in", *["block"] * 6, "out")
    assert speeds_of((9, 1, 1, 2, 2, 1, 1, 7), alike, owners) == (1, 0.5, 1)
    assert speeds_of((9, 1, 1.04, 1, 1, 0.97, 1, 7), alike, owners) == (1, 1, 1)  # noise
    assert speeds_of((9, 4, 4, 2, 2, 2, 2, 7), alike, owners) == (0.5, 1, 1)
    assert speeds_of((1, 3), ("in", "out"), (0, 1)) == (1, 1)  # nothing to compare
    assert speeds_of((1, 3), ("block", "block"), (0, 1)) == (1, 0.333)  # of two, the faster is the usual one


def messages(sender: int, receiver: int, tag: Any, message: Any) -> float:
    return 0.05


def measured_layers() -> ModelCosts:
    def rank(transport: Any) -> ModelCosts:
        mine = range(transport.rank * LAYERS // 4, (transport.rank + 1) * LAYERS // 4)
        layers = {f"layer {n}": Layer(SPEEDS[transport.rank]) for n in mine}
        return profile_layers(layers, nn.functional.mse_loss, DATA, DATA, 4, transport, options=ProfileOptions(2))

    return results_on_counted_ranks(4, rank, messages)[0]


def step_of(found: Plan) -> tuple[Timeline, Drift]:
    ends = [*map(int, found.partition or ()), LAYERS]

    def rank(transport: Any) -> tuple[Timeline, Drift]:
        mine = [chunk for chunk, owner in enumerate(found.schedule.placement) if owner == transport.rank]
        chunks = [
            nn.Sequential(*(Layer(SPEEDS[transport.rank]) for _ in range(ends[chunk], ends[chunk + 1])))
            for chunk in mine
        ]
        with Pipeline(chunks, found.schedule, nn.functional.mse_loss, group=transport) as pipe:
            pipe.step(DATA, DATA)
            return pipe.last.gather_timeline(), pipe.last.drift(found.costs)

    return results_on_counted_ranks(4, rank, messages)[0]


@pytest.mark.slow
@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
@pytest.mark.usefixtures("counted_time")
def test_a_plan_for_a_slow_rank_is_as_fast_as_simulated_and_faster_than_that_of_equal_ranks() -> None:
    layers = measured_layers()
    assert layers.speeds == pytest.approx(SPEEDS, abs=0.01)
    equal = plan(layers, 4, MICROBATCHES, speeds=[1.0] * 4, effort=1)
    before, drift = step_of(equal)
    assert drift.speeds == pytest.approx(SPEEDS, abs=0.01)
    assert drift.gain_of_new_cut > 0.2
    assert "speeds=" in drift.to_text()
    for speeds in (None, drift.speeds):  # in the costs, and measured since
        by_speed = plan(layers, 4, MICROBATCHES, speeds=speeds, effort=1)
        after, drift_after = step_of(by_speed)
        assert after.cost * 1e3 == pytest.approx(by_speed.timeline.cost, rel=0.02)
        assert after.cost <= 0.9 * before.cost
        assert drift_after.gain_of_new_cut < 0.08
