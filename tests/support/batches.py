"""Batches of unequal sequences for tests: random costs, lengths and places, and whether a plan has all of a batch."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from zbkern.pipeline import Costs
from zbkern.planning.planner.batch import BatchPlan
from zbkern.schedules.schedule import Schedule

TOKENS = 4096


def costs_of(chunks: int, generator: random.Random, same: bool = False) -> Costs:
    """Of a sequence of TOKENS tokens: linear parts of 3 to 5, and as much attention at twice as many tokens."""

    def each(low: float, high: float) -> tuple[float, ...]:
        first = generator.uniform(low, high)
        return tuple(first if same else generator.uniform(low, high) for _ in range(chunks))

    linear, attention, overhead = each(3, 5), each(1, 2), each(0.01, 0.1)
    costs = Costs(
        forward=tuple(map(sum, zip(linear, attention, overhead, strict=True))),
        backward=tuple(a + 2.5 * b + c for a, b, c in zip(linear, attention, overhead, strict=True)),
        weight=tuple(map(sum, zip(linear, overhead, strict=True))),
        split_overhead=tuple(0.02 * a + c for a, c in zip(linear, overhead, strict=True)),
        communication=generator.choice([0.0, 0.3]),
        activation=each(1, 2),
        held=each(0.8, 2.2),
        carried=each(0.01, 0.1),
        attention_forward=attention,
        attention_backward=tuple(2.5 * each for each in attention),
        overhead=overhead,
        static=each(0, 3),
        merge_saving=generator.choice([0.0, 0.05, 1.0]),
        tokens=TOKENS,
    )
    return replace(costs, carried_gradients=tuple(2 * each for each in costs.carried))  # of 16-bit keys, in fp32


def lengths_of(generator: random.Random, count: int) -> list[int]:
    return [max(1, min(4 * TOKENS, int(generator.lognormvariate(math.log(900), 1.3)))) for _ in range(count)]


def placements(generator: random.Random) -> dict[str, Any]:
    stages = generator.choice([1, 2, 4, 5])
    return {"stages": stages, **generator.choice([{}, {"chunks": 1}, {"chunks": 2, "placement": "loop"}])}


def check_complete(plan: BatchPlan, lengths: list[int]) -> None:
    Schedule.build(
        plan.schedule.actions,
        plan.schedule.placement,
        len(plan.schedule.own_slices),
        own_slices=plan.schedule.own_slices,
    )  # validates
    assert sorted(number for row in plan.rows for number in row) == list(range(len(lengths)))
    for row, cut in zip(plan.rows, plan.schedule.own_slices, strict=True):
        assert sum(cut) == sum(lengths[number] for number in row)
        assert len(cut) == 1 or len(row) == 1, "a pack is not cut"
        assert all(length % 128 == 0 for length in cut[:-1])
        assert min(cut) > 0
