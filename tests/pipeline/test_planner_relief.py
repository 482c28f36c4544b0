"""Recomputing and offloading: taken where memory is the limit, and only there."""

from __future__ import annotations

import pytest

from zbkern.pipeline import Costs, ScheduleError, plan, simulate
from zbkern.pipeline.planner import Relief, plan_relieved

RECOMPUTE = Relief("recompute", kept=0.1, recompute=True)
OFFLOAD = Relief("offload", kept=0.0, forward=0.05, backward=0.05, room=2)
COSTS = Costs(1.0, 1.1, 0.9, 0.1, 1.0, 0.2)


def test_none_where_memory_is_plenty() -> None:
    found = plan_relieved(COSTS, [RECOMPUTE, OFFLOAD], 4, 12, memory_limit=8, effort=1)
    assert found.reliefs == (None,) * 4
    assert found.plan.timeline.cost <= plan(COSTS, 4, 12, memory_limit=8, effort=1).timeline.cost


def test_recomputes_where_waiting_for_memory_costs_more() -> None:
    limit = 1.9
    found = plan_relieved(COSTS, [RECOMPUTE], 4, 12, memory_limit=limit, effort=1)
    without = plan(COSTS, 4, 12, memory_limit=limit, effort=1)
    assert found.reliefs[0] == RECOMPUTE
    assert found.plan.timeline.cost < 0.95 * without.timeline.cost
    timeline = simulate(found.plan.schedule, found.costs)
    room = [0.9 if relief else 0.0 for relief in found.reliefs]  # for one microbatch's activations
    assert all(peak + more <= limit + 1e-9 for peak, more in zip(timeline.peak_memory, room, strict=True))
    backward = found.costs.per_chunk(4).backward
    assert backward == tuple(2.1 if relief else 1.1 for relief in found.reliefs)


def test_takes_the_cheaper_relief() -> None:
    found = plan_relieved(COSTS, [RECOMPUTE, OFFLOAD], 4, 12, memory_limit=3, effort=1)
    assert {relief.name for relief in found.reliefs if relief} == {"offload"}


def test_fits_where_nothing_else_does() -> None:
    """Two chunks per rank in a V hold both activations of one microbatch at once, relieved ones do not."""
    costs = Costs(activation=1.0, held=0.2)
    with pytest.raises(ScheduleError):
        plan(costs, 2, 4, 2, memory_limit=1.5, effort=0)
    found = plan_relieved(costs, [Relief("recompute", 0.1, recompute=True)], 2, 4, 2, memory_limit=1.5, effort=0)
    assert max(found.plan.timeline.peak_memory) <= 1.5


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="kept"):
        Relief("recompute", kept=1.5)
    with pytest.raises(ValueError, match="one per rank"):
        plan_relieved(COSTS, [RECOMPUTE], 4, 8, memory_limit=[1.0, 2.0])
    with pytest.raises(ScheduleError):
        plan_relieved(COSTS, [RECOMPUTE], 4, 8, memory_limit=0.5)
