"""Of orders that cost about the same, a plan takes those that a slow rank delays least."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from zbkern.pipeline import Costs, PlanOptions, Schedule, plan, schedules, simulate
from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.arguments import placement_of, problem_of
from zbkern.pipeline.planner.incumbents import Budget
from zbkern.pipeline.planner.problem import ordering_of
from zbkern.pipeline.planner.published import Published
from zbkern.pipeline.planner.search import Search, choose
from zbkern.pipeline.planner.steadiness import delayed, with_late_messages

COSTS = Costs(2, 2.2, 1, communication=0.3)


def with_speeds(schedule: Schedule, speeds: list[float]) -> Costs:
    """Costs of its chunks where the passes of each rank take so many times as long."""
    of_chunks = [speeds[rank] for rank in schedule.placement]
    passes = {name: [getattr(COSTS, name) * each for each in of_chunks] for name in ("forward", "backward", "weight")}
    return replace(COSTS, **passes)


def noisy_cost(schedule: Schedule) -> float:
    """The mean of 32 steps with 10% noise of every pass, and ranks up to 20% slower or faster."""
    found = []
    for seed in range(32):
        speeds = [random.Random(100 * seed + rank).uniform(0.8, 1.2) for rank in range(schedule.stages)]
        found.append(simulate(schedule, with_speeds(schedule, speeds), jitter=0.1, seed=seed).cost)
    return fmean(found)


@pytest.mark.parametrize("make", [schedules.zb_h2, schedules.zb_v])
def test_each_rank_is_slow_in_turn(make) -> None:
    schedule = make(4, 8)
    problem = problem_of(COSTS, schedule.placement, 8, None, "cost")
    slow = [[1.2 if rank == other else 1.0 for other in range(4)] for rank in range(4)]
    expected = fmean(simulate(schedule, with_speeds(schedule, speeds)).cost for speeds in slow)
    assert delayed(problem, ordering_of(schedule)) == pytest.approx(expected)


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
def test_of_plans_that_are_about_as_good_the_steadiest_is_chosen() -> None:
    """Noise costs the best plan of 6 ranks 2% more than one that costs 0.28% more without noise."""
    best, steady, again = (
        plan(COSTS, 6, 12, 2, memory_limit=12, effort=2, options=PlanOptions(steady=choice))
        for choice in (False, True, True)
    )
    assert best.timeline.cost < steady.timeline.cost <= 1.003 * best.timeline.cost
    assert noisy_cost(steady.schedule) < 0.99 * noisy_cost(best.schedule)
    assert steady.schedule == again.schedule
    assert steady.timeline.cost <= min(simulate(make(6, 12), COSTS).cost for make in (schedules.zb_v, schedules.v_half))


def test_only_messages_between_ranks_are_late() -> None:
    problem = problem_of(COSTS, (0, 1, 1, 0), 8, None, "cost")
    late, tenth = with_late_messages(problem), round(0.2 * problem.time_scale)
    more = [after - before for before, after in zip(problem.communication, late.communication, strict=True)]
    assert more == pytest.approx([tenth, 0, tenth])
    assert replace(late, communication=problem.communication) == problem


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
def test_orders_that_bear_delays_are_searched_for() -> None:
    problem = problem_of(COSTS, placement_of("v", 6, 2)[1], 12, [9.0] * 6, "cost")
    chosen = []
    for rounds in (0, 2):
        search = Search(problem, Budget(1), 0, Published())
        search.round(0, 1_000_000)
        assert choose([search], True, rounds) is search
        chosen.append(search.best.orders)
    assert chosen[1].cost < 0.998 * chosen[0].cost
    assert delayed(problem, chosen[1]) < 0.996 * delayed(problem, chosen[0])


def test_whether_to_choose_the_steadiest_is_yes_or_no() -> None:
    with pytest.raises(TypeError, match="PlanOptions: steady must be True or False; got 1"):
        PlanOptions(steady=1)
