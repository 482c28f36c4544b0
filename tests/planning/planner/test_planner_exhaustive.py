"""Tiny problems, where every order can be tried: no bound is above the best, no plan that says optimal is worse."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.support.every_order import Slices, orders, span
from zbkern.pipeline import Action, Costs, PlanOptions, plan
from zbkern.planning.planner import native

EPSILON = 1e-6
# Stages, sequences, lengths of slices, chunks, whether only microbatches in order are tried; cases, and how many of
# them are not slow.
SHAPES = [
    *((2, 2, [1], 1, False, 16, 3), (3, 2, [1], 1, True, 12, 3), (2, 3, [1], 1, True, 12, 3)),
    *((3, 3, [1], 1, True, 3, 1), (2, 1, [1], 2, True, 6, 3)),
    *((2, 1, [2, 1], 1, True, 8, 2), (3, 1, [3, 2, 1], 1, True, 8, 1)),
    *((2, 2, [1, 1], 1, True, 4, 1), (2, 1, [3, 2], 2, True, 3, 1)),
]


def costs_of(draw: random.Random, sliced: bool) -> Costs:
    forward, backward, weight = (draw.randint(1 + sliced, 5) for _ in range(3))
    travel = draw.choice([0, 1])
    if not sliced:
        return Costs(forward, backward, weight, travel, 1.0, draw.choice([0.3, 0.5, 1.0]))
    carried = draw.choice([0.0, 0.1])
    held = 0.0 if carried else draw.choice([0.3, 0.5])  # so that no fused backward saves memory
    return Costs(
        *(forward, backward, weight, travel, 1.0, held),
        attention_forward=draw.choice([0.0, 0.5]) * forward,
        attention_backward=draw.choice([0.0, 0.7]) * backward,
        overhead=draw.choice([0.0, 0.1]),
        carried=carried,
        carried_gradients=2 * carried,
    )


def apart(action: Action) -> list[Action]:
    return [action._replace(kind=kind) for kind in "BW"] if action.kind == "BW" else [action]


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
@pytest.mark.parametrize(
    ("stages", "sequences", "lengths", "chunks", "ordered", "case"),
    [
        pytest.param(*shape, case, marks=pytest.mark.slow if case >= quick else ())
        for *shape, count, quick in SHAPES
        for case in range(count)
    ],
)
def test_plan_is_the_best_of_all(
    stages: int, sequences: int, lengths: list[int], chunks: int, ordered: bool, case: int
) -> None:
    count = len(lengths)
    draw = random.Random(f"{stages} {sequences} {lengths} {case}")
    costs = costs_of(draw, sliced=count > 1)
    limit = chunks * draw.choice([1.0 + 0.1 * (count > 1), 1.5, 2.0, 3.0])
    makespan = case % 3 == 2
    options = PlanOptions("makespan" if makespan else "cost")
    owners = [rank for turn in range(chunks) for rank in (range(stages) if turn % 2 == 0 else range(stages)[::-1])]
    found = plan(costs, stages, sequences, chunks, memory_limit=limit, effort=2, slices=lengths, options=options)
    assert found.schedule.slices == tuple(lengths)
    reached = found.timeline.makespan if makespan else found.timeline.cost
    given = Slices(costs, lengths)
    rows = tuple([tuple(each)[:3] for action in row for each in apart(action)] for row in found.schedule.actions)
    assert all(given.peak(row) <= limit + EPSILON for row in rows)
    assert span(rows, owners, given, makespan) <= reached + EPSILON
    backwards = [first + each for first in range(0, sequences * count, count) for each in reversed(range(count))]
    fitting = [
        [row for row in orders(own_chunks, backwards, count, ordered) if given.peak(row) <= limit + EPSILON]
        for own_chunks in ([chunk for chunk, each in enumerate(owners) if each == rank] for rank in range(stages))
    ]
    least = min(span(choice, owners, given, makespan) for choice in product(*fitting))
    assert reached == pytest.approx(least)
    work = stages * (1 - found.lower_bound)
    assert sum(found.timeline.busy) / work <= least + EPSILON
    if found.optimal:
        assert sum(found.timeline.busy) / work == pytest.approx(least)


def test_more_orders_are_tried_than_pass_in_order() -> None:
    """So that the claim that microbatches may as well pass in order is put to the test."""
    assert sum(1 for _ in orders([0], [0, 1])) == 5
    assert sum(1 for _ in orders([0], [0, 1], ordered=False)) == 20
