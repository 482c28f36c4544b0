"""Of orders that cost about the same, a plan takes those that slow ranks delay least."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from zbkern.pipeline import Costs, PlanOptions, Schedule, plan, schedules, simulate
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.planner import native
from zbkern.planning.planner.annealing import at_speeds, measured
from zbkern.planning.planner.portfolio import SETTINGS
from zbkern.planning.planner.problem import Ordering, Problem, ordering_of, problem_of
from zbkern.planning.planner.request import placement_of
from zbkern.planning.planner.search import Search, choose, search_all

COSTS = Costs(2, 2.2, 1, communication=0.3)


def delayed(samples: list[Problem], orders: Ordering) -> float:
    """The mean cost in these samples, in the unit of the costs."""
    found = [measured(sample, orders) for sample in samples]
    return fmean(each[0].cost for each in found) / samples[0].time_scale


def with_speeds(schedule: Schedule, speeds: list[float], costs: Costs = COSTS) -> Costs:
    """Costs of its chunks where the passes of each rank take so many times as long."""
    of_chunks = [speeds[rank] for rank in schedule.placement]
    passes = {name: [getattr(costs, name) * each for each in of_chunks] for name in ("forward", "backward", "weight")}
    return replace(costs, **passes)


def noisy_cost(schedule: Schedule, costs: Costs = COSTS) -> float:
    """The mean of 32 steps with 10% noise of every pass, and ranks up to 20% slower or faster."""
    found = []
    for seed in range(32):
        speeds = [random.Random(100 * seed + rank).uniform(0.8, 1.2) for rank in range(schedule.ranks)]
        found.append(simulate(schedule, with_speeds(schedule, speeds, costs), jitter=0.1, seed=seed).cost)
    return fmean(found)


@pytest.mark.parametrize("make", [schedules.zb_h2, schedules.zb_v])
def test_each_rank_has_each_speed_once(make) -> None:
    schedule = make(4, 8)
    problem = problem_of(FlatCosts.of(COSTS, schedule.placement), 8, None, "cost")
    samples = at_speeds(problem, 5, 3)
    backward, *others = ([each.backward[0] for each in given.by_chunk[:4]] for given in (problem, *samples))
    speeds = [[time / planned for time, planned in zip(each, backward, strict=True)] for each in others]
    for of_rank in zip(*speeds, strict=True):
        assert sorted(of_rank) == pytest.approx([0.84, 0.92, 1.0, 1.08, 1.16])
    expected = fmean(simulate(schedule, with_speeds(schedule, each)).cost for each in speeds)
    assert delayed(samples, ordering_of(schedule)) == pytest.approx(expected)
    assert at_speeds(problem, 5, 3) == samples != at_speeds(problem, 5, 4)


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
def test_of_plans_that_are_about_as_good_the_steadiest_is_chosen() -> None:
    """Noise costs the best plan of 6 ranks more than one that costs about as much without."""
    best, steady, again = (
        plan(COSTS, 6, 12, 2, memory_limit=12, effort=2, options=PlanOptions(steady=choice))
        for choice in (False, True, True)
    )
    assert steady.timeline.cost <= 1.003 * best.timeline.cost
    assert noisy_cost(steady.schedule) < 0.99 * noisy_cost(best.schedule)
    assert steady.schedule == again.schedule
    assert steady.timeline.cost <= min(simulate(make(6, 12), COSTS).cost for make in (schedules.zb_v, schedules.v_half))


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
def test_what_is_proven_optimal_stays_so_and_bears_delays() -> None:
    costs = Costs(9.25, 9.05, 4.65, 0.6, 0.5, 0.575)
    best, steady = (
        plan(costs, 4, 8, 2, memory_limit=6, options=PlanOptions(steady=choice)) for choice in (False, True)
    )
    assert best.optimal
    assert steady.optimal
    assert steady.timeline.cost == pytest.approx(best.timeline.cost)
    assert noisy_cost(steady.schedule, costs) < 0.995 * noisy_cost(best.schedule, costs)


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
def test_a_round_ends_cold() -> None:
    problem = problem_of(FlatCosts.of(COSTS, placement_of("plan", "v", 6, 2)[1]), 18, [7.0] * 6, "cost")
    hot, cold = (Search(problem, 0) for _ in range(2))
    hot.construct(SETTINGS.rule_passes)
    hot.round(0, SETTINGS.first_round)
    search_all([cold], 1)
    assert cold.reached < hot.reached


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
def test_orders_that_bear_delays_are_searched_for() -> None:
    problem = problem_of(FlatCosts.of(COSTS, placement_of("plan", "v", 6, 2)[1]), 12, [9.0] * 6, "cost")
    chosen = []
    for finished, steady in ((False, False), (True, False), (True, True)):
        search = Search(problem, 1)
        search.round(0, 1_000_000)
        if finished:
            search.finish(2, SETTINGS.finish_share)
        assert choose([search], steady, 2, 1) is search
        chosen.append(search.best.orders)
    samples = at_speeds(problem, 64, 5)
    assert chosen[2].cost <= 1.003 * chosen[1].cost < 0.998 * chosen[0].cost
    assert delayed(samples, chosen[2]) < 0.996 * delayed(samples, chosen[1])
