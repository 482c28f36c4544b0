"""The compiled search core: what it returns is a schedule, fits the memory, and costs what the simulator says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner_problems import random_problem
from zbkern.pipeline import Costs, schedules, simulate
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.planner import annealing, bounds, incumbents, list_scheduler, native, pattern_search, portfolio
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.problem import (
    Ordering,
    Problem,
    grouped,
    ordering_of,
    schedule_of,
    serial_ordering,
    within,
)

pytestmark = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")


def problem(seed: int, slices: tuple[int, ...]) -> Problem:
    return random_problem(random.Random(seed), slices, roomy=True)


def with_cost(given: Problem, orders: Ordering) -> Ordering | None:
    found = annealing.measured(given, orders)
    return found and found[0]


SLICES = [(1,), (1, 1), (5, 4, 3, 2)]


def few_of(count: int) -> list[Any]:
    """Seeds, of which the quick run has every other one from the first and the last on."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (min(seed, count - 1 - seed) % 2)) for seed in range(count)]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("seed", few_of(12))
def test_rules_of_every_rank(seed: int, slices: tuple[int, ...]) -> None:
    given = problem(seed, slices)
    made = [
        (rule, orders)
        for rule in list_scheduler.rules_to_try(given)
        if (orders := list_scheduler.list_schedule(given, rule))
    ]
    for _, orders in random.Random(seed).sample(made, min(20, len(made))):
        check(given, with_cost(given, orders))
    rule, start = made[0]
    tries = Effort(seed, (0,), 200)
    found, changed = list_scheduler.refine(given, rule, tries)
    assert (found, changed) == list_scheduler.refine(given, rule, tries)
    assert list_scheduler.list_schedule(given, changed) == found
    assert found.cost <= start.cost
    assert (
        annealing.anneal(given, found, Effort()).cost <= found.cost
    )  # less where W are merged, which rules do not know
    check(given, with_cost(given, found))


def test_neighbouring_chunks_of_a_rank_that_follow_each_other_may_be_better() -> None:
    owners = (0, 1, 1, 0, 0, 1, 1, 0)
    given = Problem.build(FlatCosts.of(Costs(9, 9, 5, 4, 1.0, 1.0), owners), 3, [8.0] * 2, False)
    tried = list(list_scheduler.rules_to_try(given))
    best = {}
    for follow in (False, True):
        some = [rule for rule in tried if rule.follow == follow]
        best[follow] = list_scheduler.best_rules(given, some, 1)[0][0] / given.time_scale
    assert round(best[True]) < round(best[False])
    turn = Problem.build(FlatCosts.of(Costs(), (0, 1, 1, 0)), 3, [8.0] * 2, False)
    assert not any(rule.follow for rule in list_scheduler.rules_to_try(turn))


def exact_costs(given: Problem) -> Costs:
    """The costs of whole sequences in the problem's integers, which a simulation counts with exactly."""
    names = ("forward", "backward", "weight", "communication", "activation", "held", "merge_saving")
    costs = {name: [getattr(each, name)[0] for each in given.by_chunk] for name in names}
    costs["communication"].pop()
    split = [each.backward[0] + each.weight[0] - each.fused[0] for each in given.by_chunk]
    return Costs(**costs, split_overhead=split)


def check(given: Problem, found: Ordering) -> None:
    """Its cost is that of an independent run, at least the lower bound, and it is a valid schedule within the limit."""
    schedule = schedule_of(grouped(found), given, "found")
    if len(given.slices) > 1:
        timeline = simulate(schedule, given.flat.given)
        reached = (timeline.makespan if given.makespan else timeline.cost) * given.time_scale
        assert reached <= found.cost * (1 + 1e-9)
        assert given.saves or reached == pytest.approx(found.cost, rel=1e-9)
        assert within(annealing.measured(given, found)[1], given.limit)
        assert found.cost >= bounds.cost_bound(given)
        return
    timeline = simulate(schedule, exact_costs(given))  # validates
    assert within(timeline.peak_memory, given.limit)
    reached = timeline.makespan if given.makespan else timeline.cost
    assert reached <= found.cost if given.saves else reached == found.cost  # W that are grouped may save more
    assert found.cost >= bounds.cost_bound(given)


def temperatures(given: Problem) -> list[int]:
    mean = sum(sum(each.forward) + sum(each.backward) for each in given.by_chunk) // (2 * given.chunks)
    return [mean, mean // 3, mean // 20]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("seed", few_of(12))
def test_annealing(seed: int, slices: tuple[int, ...]) -> None:
    given = problem(seed, slices)
    start = next(
        orders
        for orders in (list_scheduler.list_schedule(given, rule) for rule in list_scheduler.rules_to_try(given))
        if orders
    )
    start = with_cost(given, start)
    found = annealing.anneal(given, start, Effort(seed, temperatures(given), 100_000, spread=3))
    assert found.cost <= start.cost
    check(given, found)


@pytest.mark.parametrize("seed", few_of(12))
def test_annealing_at_several_speeds(seed: int) -> None:
    """The cost is that of the same orders at all of them."""
    given = problem(seed, SLICES[0])
    start = with_cost(given, serial_ordering(given, fuse=given.may_fuse))
    samples = annealing.at_speeds(given, 5, seed)
    found = annealing.anneal(given, start, Effort(seed, temperatures(given), 200_000, spread=1), samples)
    check(given, with_cost(given, found))
    costs = [with_cost(each, found).cost for each in samples]
    assert found.cost == pytest.approx((with_cost(given, found).cost + sum(costs) / 5) / 2, rel=1e-9)
    assert found.cost <= (start.cost + sum(with_cost(each, start).cost for each in samples) / 5) / 2


def test_annealing_improves_a_poor_start() -> None:
    given = Problem.build(FlatCosts.of(Costs(2, 2, 1, 0.1), range(4)), 8, [6.0] * 4, False)
    start = with_cost(given, serial_ordering(given, fuse=False))
    found = annealing.anneal(given, start, Effort(0, temperatures(given), 2_000_000, spread=3))
    assert found.cost < 0.6 * start.cost
    check(given, found)


def unequal(units: int, limit: float, message: float = 0.0) -> Problem:
    """The embedding is with the first chunk, the loss with the last."""
    chunks = [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]
    times = {"forward": (4.3, 4.7, 8.1), "backward": (5.6, 5.9, 3.3), "weight": (3.5, 3.5, 7.5)}
    memory = {"activation": (0.6, 1.2, 0.7), "held": (0.55, 1.1, 0.6)}
    costs = {name: [each[chunk] for chunk in chunks] for name, each in (times | memory).items()}
    flat = FlatCosts.of(Costs(**costs, communication=0.4, message=message), [*range(8), *reversed(range(8))])
    return Problem.build(flat, units, [limit] * 8, False)


@pytest.mark.parametrize("seed", range(3))
def test_annealing_keeps_to_the_room_for_messages(seed: int) -> None:
    """Orders whose messages have no room mostly lead to others that have none, either."""
    given = unequal(32, 14.0, message=0.3)
    best = incumbents.Incumbent(given)
    while best.orders is None or best.refused:
        portfolio.best_tried_rules(best, 200_000, ())
    beside = best.beside(best.orders)
    assert beside is not None
    cooling = portfolio.temperatures(given, *portfolio.SETTINGS.finish)
    found = annealing.anneal(beside, best.orders, Effort(seed, cooling, 4_000_000, spread=0))
    assert best.beside(found) is not None
    assert found.cost < 1.112 * bounds.cost_bound(given) < 0.97 * best.orders.cost


@pytest.mark.parametrize("kinds", ["forward", "backward", "both"])
def test_passes_that_take_no_time_do_not_wait_for_each_other(kinds: str) -> None:
    times = {"forward": 0.0 if kinds != "backward" else 1.0, "backward": 0.0 if kinds != "forward" else 1.0}
    given = Problem.build(FlatCosts.of(Costs(**times, weight=1.0), [0, 1, 2, 3, 3, 2, 1, 0]), 8, [6.0] * 4, False)
    found = serial_ordering(given, fuse=False)
    for seed in range(6):
        found = annealing.anneal(given, found, Effort(seed, temperatures(given), 300_000, spread=0))
        assert annealing.measured(given, found) is not None


@pytest.mark.parametrize("seed", range(4))
def test_annealing_fills_the_warm_up_of_a_rank_that_has_most_to_do(seed: int) -> None:
    """Its first backwards come late, and the forwards that it could run until then are far behind in its row."""
    given = unequal(24, 24.0)
    rules = list(list_scheduler.rules_to_try(given))
    start = list_scheduler.list_schedule(given, rules[list_scheduler.best_rules(given, rules, 1)[0][1]])
    effort = Effort(seed, portfolio.temperatures(given, 0.6), 4_000_000, spread=3)
    found = annealing.anneal(given, start, effort)
    assert start.cost > 1.015 * bounds.cost_bound(given)
    assert found.cost < 1.005 * bounds.cost_bound(given)
    check(given, found)


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("seed", few_of(12))
def test_building_blocks(seed: int, slices: tuple[int, ...]) -> None:
    given = problem(seed, slices)
    if len(slices) > 1:  # blocks hold parts of two sequences at once
        given = replace(given, limit=tuple(4 * each for each in given.limit))
    found = annealing.search_blocks(given, seed % 4 == 3, Effort(seed, temperatures(given), 60))
    if given.saves:  # which blocks do not weigh
        by_blocks, found = found.cost, with_cost(given, found)
        assert found.cost <= by_blocks
    check(given, found)


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("seed", few_of(8))
def test_patterns(seed: int, slices: tuple[int, ...]) -> None:
    draw = random.Random(seed)
    stages, microbatches = 1 + seed % 4, draw.randint(1, 9)
    times = ([draw.uniform(0.5, 3) for _ in range(2 * stages)] for _ in range(3))
    costs = Costs(*times, draw.random(), 1.0, 1.3 if seed == 5 else 0.4)
    down = tuple(range(stages))
    limit = [2 * stages * draw.uniform(1.2, 3)] * stages
    if len(slices) > 1:
        costs = replace(costs, attention_forward=[0.5 * each for each in costs.forward], carried=0.1)
    given = Problem.build(FlatCosts.of(costs, down + down[::-1], slices), microbatches, limit, seed % 4 == 3)
    found = [pattern_search.search_patterns(given, start) for start in list(pattern_search.zb_v_patterns(given))[::3]]
    orders, start = next(result for result in found if result is not None)
    better, _ = pattern_search.search_patterns(given, start, Effort(seed, temperatures(given), 100, seed % 3))
    assert better.cost <= orders.cost
    for each, _ in (result for result in [*found, (better, start)] if result is not None):
        check(given, each)


def test_a_pattern_found_gives_its_orders_again() -> None:
    given = Problem.build(FlatCosts.of(Costs(92, 90, 46, 6), (0, 1, 2, 3, 3, 2, 1, 0)), 8, [10.0] * 4, False)
    start = next(pattern_search.zb_v_patterns(given))
    found, pattern = pattern_search.search_patterns(given, start, Effort(0, temperatures(given), 500))
    assert found.cost < pattern_search.search_patterns(given, start)[0].cost
    assert pattern_search.search_patterns(given, pattern)[0] == found


def test_a_pattern_fuses_a_backward_whose_weight_gradient_has_no_room() -> None:
    """ZB-V needs 1F1B's memory to the last byte, and there is none for a B that leaves more than it found."""
    costs = Costs(18.5, 18.1, 9.3, 0.6, 1.0, 1.15, split_overhead=1.0)
    given = Problem.build(FlatCosts.of(costs, (*range(8), *reversed(range(8)))), 32, [16.0] * 8, False)
    found, _ = pattern_search.search_patterns(given, next(pattern_search.zb_v_patterns(given)))
    check(given, found)
    assert 0 < sum(found.fused) < len(found.fused)
    assert 1 - given.work(0) / found.cost < 0.1


def test_orders_that_cannot_run_are_refused() -> None:
    given = Problem.build(FlatCosts.of(Costs(), (0, 1)), 2, [2.0, 2.0], False)
    orders = ordering_of(schedules.one_f_one_b(2, 2))
    stuck = Ordering(0, [list(reversed(row)) for row in orders.rows], orders.fused)
    with pytest.raises(ValueError, match="cannot run"):
        annealing.anneal(given, stuck, Effort())
    assert with_cost(given, stuck) is None
