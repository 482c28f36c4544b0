"""What every planner is asked for is checked by one Request, in the words of whoever asks, before any plan is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zbkern.pipeline import Costs, LayerCosts, ModelCosts, PlannedBatches, PlanOptions, ScheduleError, plan, plan_batch
from zbkern.planning.planner import native

PLANNERS: dict[str, Callable[..., Any]] = {
    "plan": lambda costs, stages, **how: plan(costs, stages, 4, effort=0, **how),
    "plan_batch": lambda costs, stages, **how: plan_batch([8, 8], costs, stages, **how),
    "PlannedBatches": lambda costs, stages, **how: PlannedBatches([[1, 2]], costs, stages, sequences=1, **how),
}
COSTS = Costs(tokens=8)
needs_core = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")


@needs_core
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"costs": 3}, TypeError, "costs must be a zbkern.pipeline.Costs"),
        ({"stages": 0}, ValueError, "stages must be at least 1; got 0"),
        ({"stages": "2"}, TypeError, "stages must be an int; got str '2'"),
        ({"stages": 10**9}, ScheduleError, "3 x stages x microbatches x chunks x slices must be at most"),
        ({"chunks": 0}, ValueError, "chunks must be at least 1; got 0"),
        ({"chunks": 3, "placement": "v"}, ValueError, 'placement "v" needs chunks=2'),
        ({"placement": "w"}, ValueError, "placement must be one of"),
        ({"placement": [0, 0]}, ValueError, "placement must name every rank below 2 1 times"),
        ({"memory_limit": "much"}, TypeError, "memory_limit must be one number or one per rank; got str"),
        ({"memory_limit": [1.0]}, ValueError, r"memory_limit must be one number or one per rank \(2\); got 1"),
        ({"memory_limit": -1.0}, ValueError, "memory_limit must be at least 0; got -1"),
    ],
)
def test_every_planner_refuses_the_same_in_its_own_name(
    planner: str, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{planner}: {message}"):
        PLANNERS[planner](**{"costs": COSTS, "stages": 2, **wrong})


@needs_core
def test_a_placement_says_how_many_chunks_there_are() -> None:
    model = ModelCosts([LayerCosts(str(n), 1, 1, 1, 1) for n in range(8)])
    for placement, owners in (("v", (0, 1, 1, 0)), ("linear", (0, 1)), ((0, 1, 0, 1, 0, 1), (0, 1, 0, 1, 0, 1))):
        for found in (
            plan(COSTS, 2, 2, placement=placement, effort=0),
            plan(model, 2, 2, placement=placement, effort=0),
            plan_batch([8, 8], COSTS, 2, placement=placement),
        ):
            assert found.schedule.placement == owners


@needs_core
def test_a_partition_and_a_placement_must_have_as_many_chunks() -> None:
    model = ModelCosts([LayerCosts(str(n), 1, 1, 1, 1) for n in range(8)])
    three = PlanOptions(partition=(0, 2, 3, 5, 6, 7))
    assert plan(model, 2, 2, effort=0, options=three).schedule.chunks == 3
    for how in ({"placement": "v"}, {"chunks": 2}):
        with pytest.raises(ValueError, match="plan: partition must have chunks x stages entries, 4; got 6"):
            plan(model, 2, 2, options=three, **how)
