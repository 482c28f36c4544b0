"""Pattern search: the order of ZB-V with its counts as parameters, for two chunks per rank in a V.

A rank runs f and F, the forwards of its first and second chunk, and b and B, their backwards, in this order (arXiv
2401.10241, section 6, there with counts for passes of equal length and 1F1B's memory, and with no third phase):

    f as often as ahead[rank], then F f as often as paired[rank], F B as often as turned[rank], f F B as often as
    filled[rank], and f b F B until nothing is left,

and a W, the oldest first, where the next of these has to wait, or where the memory that the W holds is needed. A
backward for which there is no room even so, as a W holds more than the activation that the B frees, is fused with its
W. How long that wait must be is the patience of the rank in each of three phases: before the first b, while there are
f, and after. These are seven numbers per rank, so that annealing finds in a second how a step should start and end with
real costs, many passes at a time, where moving pass by pass does not (p=16, m=48, 1.25 times 1F1B's memory: 2.4% idle;
rules and moved passes reached 5.2%). A pattern that has reached its steady state holds for any larger number of
microbatches.

It runs in C++ (csrc/planner_patterns.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator

from zbkern.planning.planner import native
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.problem import Ordering, Problem

Pattern = list[list[int]]  # [7][ranks]: ahead, paired, turned, filled, and patience in quarters of a W by phase


def is_v(problem: Problem) -> bool:
    """Whether the placement is a V, the only one that patterns are defined for."""
    down = tuple(range(problem.ranks))
    return problem.placement == down + down[::-1]


def zb_v_patterns(problem: Problem) -> Iterator[Pattern]:
    """Those to start from: first ZB-V's own counts, then more for more memory, and fewer for less."""
    ranks = range(problem.ranks)
    counts = [2 * (problem.ranks - rank) - 1 for rank in ranks], [*ranks], [problem.ranks - rank for rank in ranks]
    for percent in (100, *range(104, 164, 4), *range(96, 40, -4)):
        ahead, paired, turned = ([(count * percent + 50) // 100 for count in each] for each in counts)
        ahead = [max(1, count) for count in ahead]
        for patience in (4, 2, 1):
            yield [ahead, paired, turned, *([each] * problem.ranks for each in (0, patience, patience, patience))]


def search_patterns(problem: Problem, start: Pattern, effort: Effort = Effort()) -> tuple[Ordering, Pattern] | None:  # noqa: B008
    """The best orders found and their pattern, from `start` on; None when that one cannot run or does not fit.

    What merged W save is not taken into account.
    """
    found, pattern = native.core.search_patterns(problem, start, effort)
    orders = Ordering(*found)
    return (orders, pattern) if orders.rows else None
