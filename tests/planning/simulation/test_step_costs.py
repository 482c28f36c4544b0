"""Costs read off timelines: of simulated ones they are known."""

from __future__ import annotations

import math

import pytest

from zbkern.pipeline import Costs, Timeline, schedules, simulate
from zbkern.planning.simulation import step_costs

COSTS = Costs(forward=(2, 3, 2, 4), backward=(2, 2.5, 2, 3), weight=(1, 1.5, 1, 2), communication=0.25)


@pytest.mark.parametrize("fill", ["planned", "eager"])
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_costs_of_a_simulated_timeline_are_those_it_was_simulated_with(name: str, fill: str) -> None:
    schedule = getattr(schedules, name)(4, 8)
    found = step_costs.costs([simulate(schedule, COSTS, fill=fill)])
    for field in ("forward", "backward", "weight"):
        assert getattr(found, field) == pytest.approx(getattr(COSTS, field))
    assert found.communication == pytest.approx(0.25)


def test_the_spread_of_times_is_that_of_the_pass_that_varies_most() -> None:
    def steps(*forwards: float) -> list[Timeline]:
        return [simulate(schedules.zb_h1(2, 4), Costs(forward=(time, 2))) for time in forwards]

    assert step_costs.spread(steps(2, 2, 2)) == 0
    assert step_costs.spread(steps(2, 2, 2, 3)) == pytest.approx(0.125)  # 2 to 2.25, of a median of 2
    assert step_costs.spread(steps(0, 0, 0.04)) < 0.04  # of the mean of all passes
    assert step_costs.spread([simulate(schedules.zb_h1(1, 1))]) == math.inf


def test_fused_passes_are_measured_as_two_halves() -> None:
    found = step_costs.costs([simulate(schedules.one_f_one_b(4, 8), COSTS)])
    assert found.forward == pytest.approx(COSTS.forward)
    assert [b + w for b, w in zip(found.backward, found.weight, strict=True)] == pytest.approx([3, 4, 3, 5])
