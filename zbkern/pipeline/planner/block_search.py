"""Building blocks: when each pass of one microbatch runs, which every microbatch repeats one period later.

V-Half and V-Min (arXiv 2405.15362) are such schedules, made by hand for passes of equal length. Here the block is
searched for, with the real costs: a rank runs its passes in the order of the time that the block gives them, each as
soon as it can, and simulated annealing moves passes of the block, which moves those of all microbatches at once. Where
memory is short, changing one microbatch after the other does not lead from one steady state to a better one; this does.
Warm-up and cool-down of what it finds are poor; it is where annealing.py starts from.

It runs in C++ (csrc/planner_blocks.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.problem import Ordering, Problem


def search_blocks(
    problem: Problem,
    *,
    seed: int,
    temperatures: Sequence[int],
    moves: int,
    target: int = 0,
    fuse: bool = False,
    seconds: float = float("inf"),
) -> Ordering | None:
    """The best orders found that repeat one block; None when there are none.

    temperatures: one after the other, in units of time, `moves` tried at each. target: a cost at which to stop.
    fuse: all backwards are fused. seconds: stop after this long, once something fits. What merged W save is not taken
    into account.
    """
    assert native.core is not None
    orders = Ordering(*native.core.search_blocks(problem, seed, temperatures, moves, target, fuse, seconds))
    return orders if orders.rows else None
