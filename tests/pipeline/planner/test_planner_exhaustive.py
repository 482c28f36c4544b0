"""Tiny problems, where every schedule can be tried: no bound is above the best, and no plan that says optimal is worse.

The schedules are run by a simulation of a few lines, which knows nothing of the library's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from zbkern.pipeline import Costs, PlanOptions, plan, simulate
from zbkern.pipeline.planner import native

Pass = tuple[str, int, int]  # kind, chunk, microbatch
EPSILON = 1e-6


def orders(chunks: list[int], microbatches: int, ordered: bool) -> Iterator[list[Pass]]:
    """Every order of one rank's passes. ordered: the microbatches of a chunk pass in order."""
    every = [(kind, chunk, microbatch) for kind in "FBW" for chunk in chunks for microbatch in range(microbatches)]

    def before(kind: str, chunk: int, microbatch: int) -> list[Pass]:
        found = [] if kind == "F" else [("F" if kind == "B" else "B", chunk, microbatch)]
        if kind in "FB":  # in model order, and back
            found += [
                (kind, other, microbatch) for other in chunks if (other < chunk if kind == "F" else other > chunk)
            ]
        if ordered and microbatch:
            found.append((kind, chunk, microbatch - 1))
        return found

    def extend(row: list[Pass]) -> Iterator[list[Pass]]:
        if len(row) == len(every):
            yield row
        for each in every:
            if each not in row and all(need in row for need in before(*each)):
                yield from extend([*row, each])

    yield from extend([])


def peak(row: list[Pass], costs: Costs) -> float:
    change = {"F": costs.activation, "B": costs.held - costs.activation, "W": -costs.held}
    held = [sum(change[kind] for kind, _, _ in row[: count + 1]) for count in range(len(row))]
    return max(held)


def span(rows: tuple[list[Pass], ...], owners: list[int], costs: Costs, makespan: bool) -> float:
    """The cost of the rows, or their makespan; infinite when they lock up."""
    lengths = {"F": costs.forward, "B": costs.backward, "W": costs.weight}
    ends: dict[Pass, float] = {}
    clock, first, place = [0.0] * len(rows), [0.0] * len(rows), [0] * len(rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                kind, chunk, microbatch = row[place[rank]]
                source = chunk + {"F": -1, "B": 1, "W": len(owners)}[kind]
                begin = clock[rank]
                if 0 <= source < len(owners):
                    if (kind, source, microbatch) not in ends:
                        break
                    lag = costs.communication if owners[source] != rank else 0.0
                    begin = max(begin, ends[kind, source, microbatch] + lag)
                if place[rank] == 0:
                    first[rank] = 0.0 if makespan else begin
                clock[rank] = ends[kind, chunk, microbatch] = begin + lengths[kind]
                place[rank] += 1
                progress = True
    if any(done < len(row) for done, row in zip(place, rows, strict=True)):
        return float("inf")
    return max(end - begin for end, begin in zip(clock, first, strict=True))


def best(owners: list[int], microbatches: int, costs: Costs, limit: float, makespan: bool, ordered: bool) -> float:
    ranks = max(owners) + 1
    rows = []
    for rank in range(ranks):
        own_chunks = [chunk for chunk, each in enumerate(owners) if each == rank]
        rows.append([row for row in orders(own_chunks, microbatches, ordered) if peak(row, costs) <= limit + EPSILON])
    return min(span(choice, owners, costs, makespan) for choice in product(*rows))


# Stages, microbatches, chunks, whether only microbatches in order are tried, cases.
SHAPES = [(2, 2, 1, False, 16), (3, 2, 1, True, 12), (2, 3, 1, True, 12), (3, 3, 1, True, 3), (2, 1, 2, True, 6)]
QUICK = 6  # cases of a shape that are not slow


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "ordered", "case"),
    [
        pytest.param(*shape[:4], case, marks=pytest.mark.slow if case >= QUICK else ())
        for shape in SHAPES
        for case in range(shape[4])
    ],
)
def test_plan_is_the_best_of_all(stages: int, microbatches: int, chunks: int, ordered: bool, case: int) -> None:
    draw = random.Random(f"{stages} {microbatches} {case}")
    costs = Costs(*(draw.randint(1, 5) for _ in range(3)), draw.choice([0, 1]), 1.0, draw.choice([0.3, 0.5, 1.0]))
    limit = chunks * draw.choice([1.0, 1.5, 2.0, 3.0])
    makespan = case % 3 == 2
    objective = "makespan" if makespan else "cost"
    owners = [rank for turn in range(chunks) for rank in (range(stages) if turn % 2 == 0 else range(stages)[::-1])]
    found = plan(costs, stages, microbatches, chunks, memory_limit=limit, effort=2, options=PlanOptions(objective))
    reached = found.timeline.makespan if makespan else found.timeline.cost
    rows = tuple([tuple(action)[:3] for action in row] for row in found.schedule.actions)
    assert span(rows, owners, costs, makespan) == pytest.approx(reached)
    least = best(owners, microbatches, costs, limit, makespan, ordered)
    assert reached == pytest.approx(least)
    work = stages * (1 - found.lower_bound)
    assert sum(found.timeline.busy) / work <= least + EPSILON
    if found.optimal:
        assert sum(found.timeline.busy) / work == pytest.approx(least)


def test_more_orders_are_tried_than_pass_in_order() -> None:
    """So that the claim that microbatches may as well pass in order is put to the test."""
    assert sum(1 for _ in orders([0], 2, ordered=True)) == 5
    assert sum(1 for _ in orders([0], 2, ordered=False)) == 20


def test_the_simulator_agrees_about_a_schedule_with_idle_time() -> None:
    costs = Costs(2, 3, 1, 1.0)
    row = [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("W", 0, 0), ("B", 0, 1), ("W", 0, 1)]
    rows = (row, [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), ("W", 1, 0), ("W", 1, 1)])
    from zbkern.pipeline import Action, Schedule

    schedule = Schedule.build([[Action(*each) for each in row] for row in rows], (0, 1), 2, "some")
    timeline = simulate(schedule, costs)
    assert timeline.cost == span(rows, [0, 1], costs, False)
    assert timeline.makespan == span(rows, [0, 1], costs, True)
