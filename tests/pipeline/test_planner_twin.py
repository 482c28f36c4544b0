"""The compiled search core does what its Python twin does, to the last bit."""

from __future__ import annotations

import random

import pytest

from zbkern.pipeline import Costs, schedules
from zbkern.pipeline.planner import blocks, lists, patterns, search
from zbkern.pipeline.planner.problem import Orders, Problem, fits, orders_of, schedule_of

pytestmark = pytest.mark.skipif(lists.compiled is None, reason="the compiled search core is not built")


def problem(seed: int, overheads: bool = False, makespan: bool = False) -> Problem:
    draw = random.Random(seed)
    stages, chunks = draw.choice([(2, 1), (4, 1), (2, 2), (3, 2), (2, 4)])
    down = list(range(stages))
    homes = [rank for turn in range(chunks) for rank in (down[::-1] if turn % 2 else down)]
    if seed % 3 == 2:
        draw.shuffle(homes)
    n = len(homes)

    def some(high: float) -> list[float]:
        return [draw.uniform(0.5, high) for _ in range(n)]

    backward, weight = some(3), some(2)
    split = [min(pair) * 0.6 for pair in zip(backward, weight, strict=True)] if overheads else 0
    saving = [each * 0.3 for each in weight] if overheads else 0
    costs = Costs(some(3), backward, weight, some(1)[1:], some(2), 0.9 if seed % 5 == 1 else 0.4, split, saving)
    flat = costs.per_chunk(n)
    need = max(sum(flat.activation[c] for c in range(n) if homes[c] == rank) for rank in range(stages))
    return Problem.build(flat, homes, draw.randint(1, 7), [need * draw.uniform(1, 3)] * stages, makespan)


@pytest.mark.parametrize("seed", range(12))
def test_list_scheduler(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(seed, overheads=seed % 4 == 3, makespan=seed % 5 == 4)
    some = random.Random(seed).sample(list(lists.rules(given)), 40)
    fast = [lists.list_schedule(given, rule) for rule in some]
    monkeypatch.setattr(lists, "compiled", None)
    slow = [lists.list_schedule(given, rule) for rule in some]
    assert fast == slow
    assert any(orders is not None for orders in fast)


@pytest.mark.parametrize("seed", range(12))
def test_rules_of_every_rank(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(seed, overheads=seed % 4 == 3, makespan=seed % 5 == 4)
    start = next(rule for rule in lists.rules(given) if lists.list_schedule(given, rule))
    fast, rule = lists.refine(given, start, 200, seed)
    monkeypatch.setattr(lists, "compiled", None)
    assert (fast, rule) == lists.refine(given, start, 200, seed)
    assert fast.cost <= lists.list_schedule(given, start).cost
    assert fits(given, fast)
    assert search.anneal(given, fast)[0].cost <= fast.cost  # less where W are merged, which rules do not know


@pytest.mark.parametrize("seed", range(12))
def test_annealing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(seed, overheads=seed % 4 == 3, makespan=seed % 5 == 4)
    start = next(orders for orders in (lists.list_schedule(given, rule) for rule in lists.rules(given)) if orders)
    mean = (sum(given.forward) + sum(given.backward)) // (2 * given.chunks)
    options = {"seed": seed, "temperatures": [mean, mean // 3, mean // 20], "moves": 300}
    fast, finished = search.anneal(given, start, **options)
    monkeypatch.setattr(search, "compiled", None)
    slow, _ = search.anneal(given, start, **options)
    assert finished
    assert fast == slow
    schedule_of(fast, given, "found")  # validates


@pytest.mark.parametrize("seed", range(12))
def test_building_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(seed, overheads=seed % 4 == 3, makespan=seed % 5 == 4)
    mean = (sum(given.forward) + sum(given.backward)) // (2 * given.chunks)
    options = {"seed": seed, "temperatures": [mean, mean // 3, mean // 20], "moves": 60, "fuse": seed % 4 == 3}
    fast = blocks.search_blocks(given, **options)
    monkeypatch.setattr(blocks, "compiled", None)
    assert fast == blocks.search_blocks(given, **options)
    assert fits(given, fast)
    if not given.saves:
        assert search.anneal(given, fast)[0].cost == fast.cost
    schedule_of(fast, given, "found")  # validates


@pytest.mark.parametrize("seed", range(8))
def test_patterns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    stages, microbatches = 1 + seed % 4, draw.randint(1, 9)
    times = ([draw.uniform(0.5, 3) for _ in range(2 * stages)] for _ in range(3))
    costs = Costs(*times, draw.random(), 1.0, 1.3 if seed == 5 else 0.4)
    down = tuple(range(stages))
    limit = [2 * stages * draw.uniform(1.2, 3)] * stages
    given = Problem.build(costs.per_chunk(2 * stages), down + down[::-1], microbatches, limit, seed % 4 == 3)
    mean = (sum(given.forward) + sum(given.backward)) // (2 * given.chunks)
    starts = list(patterns.zb_v_patterns(given))[::3]

    def results() -> list[tuple[Orders, patterns.Pattern] | None]:
        found = [patterns.search_patterns(given, start) for start in starts]
        start = next(result for result in found if result is not None)[1]
        more = {"seed": seed, "temperatures": [mean, mean // 3, mean // 20], "moves": 100, "spread": seed % 3}
        return [*found, patterns.search_patterns(given, start, **more)]

    fast = results()
    monkeypatch.setattr(patterns, "compiled", None)
    assert fast == results()
    for orders, _ in (result for result in fast if result is not None):
        assert fits(given, orders)
        assert search.anneal(given, orders)[0].cost == orders.cost
        schedule_of(orders, given, "found")  # validates


def test_both_refuse_orders_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Problem.build(Costs().per_chunk(2), (0, 1), 2, [2.0, 2.0], False)
    orders = orders_of(schedules.one_f_one_b(2, 2))
    stuck = Orders(0, [list(reversed(row)) for row in orders.rows], orders.fused)
    for compiled in (search.compiled, None):
        monkeypatch.setattr(search, "compiled", compiled)
        with pytest.raises(ValueError, match="cannot run"):
            search.anneal(given, stuck)


def test_the_core_works_out_the_simulators_cost() -> None:
    from zbkern.pipeline import simulate

    costs = Costs(2, 1.5, 1, 0.25)
    for make in (schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2):
        schedule = make(4, 8)
        given = Problem.build(costs.per_chunk(4), range(4), 8, [9.0] * 4, False)
        cost = search.anneal(given, orders_of(schedule))[0].cost / given.time_scale
        assert cost == pytest.approx(simulate(schedule, costs).cost, rel=1e-9)
