"""Random problems of the planner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from zbkern.pipeline import Costs
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.planner.problem import Problem

SHAPES = [(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3), (2, 4)]  # ranks, chunks


def random_problem(draw: random.Random, lengths: Sequence[int] = (1,), roomy: bool = False) -> Problem:
    """Any placement, equal or other chunks, split overheads, merged W, limits of every rank, both objectives.

    lengths: of the slices of a sequence; with several there is attention, and keys and values that stay. roomy: more
    than what a rank cannot do without.
    """
    ranks, per_rank = draw.choice(SHAPES)
    down = list(range(ranks))
    turns = draw.choice(("loop", "zigzag", "shuffled"))
    owners = [rank for turn in range(per_rank) for rank in (down[::-1] if turn % 2 and turns == "zigzag" else down)]
    if turns == "shuffled":
        draw.shuffle(owners)
    n, alike = len(owners), draw.random() < 0.5

    def some(high: float) -> list[float]:
        return [draw.choice([0.5, 1, 2, high])] * n if alike else [draw.uniform(0, high) for _ in range(n)]

    backward, weight, activation = some(3), some(2), some(2)
    overhead = [0.5 * min(pair) * (draw.random() < 0.3) for pair in zip(backward, weight, strict=True)]
    saving = [0.3 * each * (draw.random() < 0.2) for each in weight]
    held = [each * draw.choice([0, 0.5, 1.15]) for each in activation]
    costs = Costs(some(3), backward, weight, some(1)[1:] if n > 1 else 0.0, activation, held, overhead, saving)
    flat = costs.per_chunk(n)
    most = map(max, flat.activation, flat.held)
    need = [0.0] * ranks
    for rank, memory in zip(owners, most, strict=True):
        need[rank] += memory
    least = [1 + 0.5 * roomy, draw.uniform(1 + 0.5 * roomy, 3), draw.uniform(1 + roomy, 12)]
    limit = [each * draw.choice(least) for each in need]
    makespan = draw.random() < 0.25
    if len(lengths) == 1:
        return Problem.build(FlatCosts.of(costs, owners), draw.choice([1, 2, 3, 4, 5, 7, 12]), limit, makespan)
    costs = replace(
        costs,
        attention_forward=[each * draw.choice([0, 0.7, 1]) for each in flat.forward],
        attention_backward=[each * draw.choice([0, 0.7, 1]) for each in flat.backward],
        carried=[each * draw.choice([0, 0.1, 0.5]) for each in activation],
        overhead=draw.choice([0.0, 0.1]),
    )
    costs = replace(costs, carried_gradients=[2 * each for each in costs.carried])  # type: ignore[union-attr]
    limit = [2 * each for each in limit]
    return Problem.build(FlatCosts.of(costs, owners, lengths), draw.choice([1, 2, 3, 5]), limit, makespan)
