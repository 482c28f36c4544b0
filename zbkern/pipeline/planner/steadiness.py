"""How far orders are delayed where a rank is slower than planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from zbkern.pipeline.planner.annealing import measured
from zbkern.pipeline.planner.problem import Ordering, Problem

_RANKS = 8  # at most, of all that are slow in turn


def delayed(problem: Problem, orders: Ordering) -> float:
    """The mean cost where one rank after the other is 20% slower, in the unit of the costs.

    It needs no random numbers: orders that it delays little are also those that noise of all passes delays little.
    """
    ranks = range(0, problem.ranks, -(-problem.ranks // _RANKS))
    found = [measured(_slower(problem, rank), orders) for rank in ranks]
    return fmean(each[0].cost for each in found if each is not None) / problem.time_scale


def with_late_messages(problem: Problem) -> Problem:
    """The same, but messages between ranks take longer by a tenth of the mean F."""
    ranks, more = problem.placement, sum(problem.forward) // (10 * len(problem.forward))
    apart = [here != there for here, there in pairwise(ranks) for _ in problem.slices]
    late = tuple(lag + more * far for lag, far in zip(problem.communication, apart, strict=True))
    return replace(problem, communication=late)


def _slower(problem: Problem, slow: int) -> Problem:
    at_slow = [problem.placement[at // len(problem.slices)] == slow for at in range(len(problem.forward))]
    times: dict[str, Any] = {
        name: tuple(time * 6 // 5 if here else time for time, here in zip(getattr(problem, name), at_slow, strict=True))
        for name in ("forward", "backward", "weight", "fused", "merge_saving")
    }
    return replace(problem, **times)
