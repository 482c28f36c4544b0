"""No schedule is below the bound, and some reach it: random problems, and small ones whose optimum is known."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.planner_problems import random_problem
from zbkern.pipeline import Costs, plan
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.planner import annealing, list_scheduler, native
from zbkern.planning.planner.bounds import cost_bound
from zbkern.planning.planner.incumbents import Incumbent
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.problem import Ordering, Problem, problem_of, serial_ordering
from zbkern.planning.planner.request import placement_of

compiled = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")


def good_order(given: Problem, draw: random.Random) -> Ordering:
    """What a short search finds."""
    found = [
        list_scheduler.list_schedule(given, rule) for rule in draw.sample(list(list_scheduler.rules_to_try(given)), 12)
    ]
    best = Incumbent(given)
    for each in found:
        best.offer(each)
    for fuse in (False, True):
        best.offer(serial_ordering(given, fuse))
    mean = sum(sum(each.forward) + sum(each.backward) for each in given.by_chunk) // (2 * given.chunks)
    temperatures = [mean, mean // 3, mean // 10, mean // 50]
    return annealing.anneal(given, best.orders, Effort(0, temperatures, 60_000, spread=0))


@compiled
@pytest.mark.parametrize(
    ("count", "sliced"),
    [(60, True), (150, False), *(pytest.param(500, s, marks=pytest.mark.slow) for s in (True, False))],
)
def test_no_order_is_below_the_bound(count: int, sliced: bool) -> None:
    reached = 0
    for seed in range(count):
        draw = random.Random(seed)
        lengths = [draw.choice([1, 1, 2, 5]) for _ in range(draw.choice([2, 3, 4]))] if sliced else [1]
        given = random_problem(draw, lengths)
        bound, cost = cost_bound(given), good_order(given, draw).cost
        assert cost >= bound, seed
        reached += cost <= bound * (1 + 1e-9)
    assert reached > (0.15 if sliced else 0.3) * count  # it says something


# Costs that an exact solver proved to be the least (`python -m bench.planner_exact small`), fused backwards among them:
# ranks, microbatches, chunks of 10 for F and B and a message of 1, memory relative to 1F1B's, cost.
SHORT_W = [
    (2, 2, 4, 0.75, 250), (2, 2, 4, 1, 214), (2, 2, 4, 1.5, 214), (2, 3, 4, 1.5, 302), (2, 4, 2, 0.75, 270),
    (2, 4, 2, 1, 214), (2, 4, 2, 1.5, 202), (3, 2, 4, 0.75, 281), (3, 2, 4, 1, 281), (3, 2, 4, 1.5, 281),
    (3, 4, 2, 0.75, 277), (3, 4, 2, 1, 230), (3, 4, 2, 1.5, 214), (3, 4, 4, 1.5, 416), (3, 6, 2, 0.75, 377),
    (4, 4, 2, 0.75, 296), (4, 4, 2, 1, 247), (4, 4, 2, 1.5, 241), (4, 6, 2, 1.5, 321),
]  # fmt: skip
LONGER_W = [
    (2, 2, 4, 0.75, 248), (2, 2, 4, 1, 222), (2, 2, 4, 1.5, 222), (2, 3, 4, 1, 316), (2, 3, 4, 1.5, 314),
    (2, 4, 2, 0.75, 254), (2, 4, 2, 1.5, 208), (3, 2, 4, 0.75, 282), (3, 2, 4, 1, 282), (3, 2, 4, 1.5, 282),
    (3, 4, 2, 1, 230), (3, 4, 2, 1.5, 222), (3, 4, 4, 1, 434), (3, 6, 2, 0.75, 380), (3, 6, 2, 1.5, 314),
    (4, 4, 2, 0.75, 296), (4, 4, 2, 1, 244), (4, 4, 2, 1.5, 244), (4, 6, 2, 1.5, 328),
]  # fmt: skip
LATE_MESSAGES = [(2, 3, 4, 0.75, 358), (2, 3, 4, 1, 304)]  # 9 for F and B, 4 for a message
OPTIMA = [
    (costs, *case)
    for costs, cases in (
        (Costs(10, 10, 5, 1, 1, 1.15), SHORT_W),
        (Costs(10, 10, 6, 1, 1, 0.5), LONGER_W),
        (Costs(9, 9, 5, 4, 1, 1.15), LATE_MESSAGES),
    )
    for case in cases
]


def test_the_bound_is_at_most_the_optimum_and_often_the_optimum() -> None:
    reached = 0
    for costs, ranks, microbatches, chunks, memory, optimum in OPTIMA:
        bound = bound_of(costs, ranks, microbatches, chunks, memory)
        assert bound <= optimum + 1e-6, (costs, ranks, microbatches, chunks, memory)
        assert bound >= 0.85 * optimum, (costs, ranks, microbatches, chunks, memory)
        reached += bound >= optimum - 1e-6
    assert reached >= len(OPTIMA) // 2


@compiled
@pytest.mark.slow
def test_plans_are_the_optimum() -> None:
    for costs, ranks, microbatches, chunks, memory, optimum in OPTIMA[::4]:
        found = plan(costs, ranks, microbatches, chunks, memory_limit=memory * ranks * chunks)
        assert found.timeline.cost == pytest.approx(optimum, abs=1e-6)


LLAMA = Costs(20, 20, 10, 1, 1, 1.15)  # of a chunk


def bound_of(costs: Costs, ranks: int, microbatches: int, chunks: int, memory: float) -> float:
    """memory: relative to 1F1B's."""
    limit = memory * ranks * chunks
    _, owners = placement_of("plan", ("linear", "v", "zigzag")[min(chunks, 3) - 1], ranks, chunks)
    given = problem_of(FlatCosts.of(costs, owners), microbatches, limit, "cost")
    return cost_bound(given) / given.time_scale


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "memory", "least"),
    [
        # In a V the first rank waits for the last, which has memory for three microbatches; 600 is the work.
        (3, 6, 2, 1.0, 648),
        (3, 6, 2, 0.75, 742),
        (8, 16, 2, 1.0, 1778),
        # At the last B in a chunk no other microbatch waits for its own there.
        (3, 6, 2, 1.5, 624),
        # More chunks: what is left is little.
        (4, 16, 4, 0.75, 3400),
        # One chunk in half the memory: a round trip of all that fits at once, again and again; 400 is the work.
        (4, 8, 1, 0.5, 708),
    ],
)
def test_memory_makes_ranks_wait(ranks: int, microbatches: int, chunks: int, memory: float, least: float) -> None:
    assert bound_of(LLAMA, ranks, microbatches, chunks, memory) >= least - 1e-6


@compiled
def test_two_chunks_with_little_memory_are_proven_optimal() -> None:
    found = plan(LLAMA, 3, 6, 2, memory_limit=0.75 * 6, effort=1)
    assert found.optimal
    assert found.timeline.cost == pytest.approx(742)


def test_large_problems_take_little_time() -> None:
    """Also where no two chunks are alike, so that nothing is worked out once for all ranks."""
    draw = random.Random(0)
    some = [[draw.uniform(0.8, 1.2) for _ in range(64)] for _ in range(5)]
    begin = time.process_time()
    bound_of(Costs(some[0], some[1], some[2], 0.05, some[3], some[4]), 16, 128, 4, 1.5)
    assert time.process_time() - begin < 1
