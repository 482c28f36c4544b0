"""Building blocks: when each pass of one microbatch runs, which every microbatch repeats one period later.

V-Half and V-Min (arXiv 2405.15362) are such schedules, made by hand for passes of equal length. Here the block is
searched for, with the real costs: a rank runs its passes in the order of the time that the block gives them, each as
soon as it can, and simulated annealing moves passes of the block, which moves those of all microbatches at once. Where
memory is short, changing one microbatch after the other does not lead from one steady state to a better one; this does.
Warm-up and cool-down of what it finds are poor; it is where annealing.py starts from.

It runs in C++ (csrc/planner_blocks.cpp).
"""

from __future__ import annotations

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.native import Effort
from zbkern.pipeline.planner.problem import Ordering, Problem


def search_blocks(problem: Problem, fuse: bool, effort: Effort) -> Ordering | None:
    """The best orders found that repeat one block; None when there are none. fuse: all backwards are fused.

    It stops only once something fits.
    """
    assert native.core is not None
    orders = Ordering(*native.core.search_blocks(problem, fuse, effort))
    return orders if orders.rows else None
