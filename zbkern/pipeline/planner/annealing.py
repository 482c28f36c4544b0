"""Local search: simulated annealing over the order of every rank, W included.

A move shifts one pass of one rank to an earlier or later position of its row, as far as dependencies and memory there
allow. Half of the moves take their pass from the critical path; a fifth shift a group of passes at once: the same pass
of the microbatch in the neighbouring chunks, or of the next microbatches on the rank, since a better order mostly needs
the same change in many rows. What is minimised is the largest span of a rank (from its first start to its last end)
plus `spread` times the mean span: most moves do not change the largest, and the mean alone would rather fill a gap on
every rank than end the last pass a little earlier.

It runs in C++ (csrc/planner_anneal.cpp), some millions of moves a second on small problems. `Timing` is the same
evaluation of given orders in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.problem import BACKWARD, FORWARD, Ordering, Problem, peaks_of
from zbkern.pipeline.schedules.dependencies import advance


def anneal(
    problem: Problem,
    start: Ordering,
    *,
    seed: int = 0,
    temperatures: Sequence[int] = (),
    passes: int = 0,
    spread: int = 3,
    target: int = 0,
    seconds: float = float("inf"),
) -> tuple[Ordering, bool]:
    """The best orders found from `start`, and whether the search was completed within `seconds`.

    temperatures: one after the other, in units of time. passes: how many it runs again, the same at each temperature; a
    move counts as 50 besides. spread: the weight of the mean span beside the largest. target: a cost at which to stop,
    such as a lower bound. Without passes it computes the cost of `start`. Raises ValueError when `start` cannot run.
    """
    assert native.core is not None
    scaled = [problem.ranks * temperature for temperature in temperatures]
    found, finished = native.core.anneal(
        problem, start.rows, start.fused, seed, scaled, passes, spread, target, problem.may_fuse, seconds
    )
    return Ordering(*found), finished


class Timing:
    """When every pass of given orders runs: starts[rank][position] and ends[pass]. Raises ValueError for a deadlock."""

    def __init__(self, problem: Problem, orders: Ordering) -> None:
        self._problem, self._orders = problem, orders
        self.starts: list[list[int]] = [[] for _ in orders.rows]
        self.ends: list[Any] = [None] * problem.passes
        clock = [0] * problem.ranks
        for rank, number in advance(orders.rows, lambda number: self._input(number)[0], lambda number: number):
            needs, lag = self._input(number)
            if needs is not None:
                clock[rank] = max(clock[rank], self.ends[needs] + lag)
            position = len(self.starts[rank])
            self.starts[rank].append(clock[rank])
            clock[rank] += self._length(orders.rows[rank], position)
            self.ends[number] = clock[rank]
        if None in self.ends:
            raise ValueError("planner: these orders cannot run: ranks wait for each other")
        self.cost = max(
            end - (0 if problem.makespan else starts[0]) for end, starts in zip(clock, self.starts, strict=True)
        )

    def _input(self, number: int) -> tuple[int | None, int]:
        """The pass of another chunk whose output it waits for, and how long the message takes."""
        problem = self._problem
        kind, chunk = divmod(number // problem.microbatches, problem.chunks)
        if kind == FORWARD and chunk > 0:
            return number - problem.microbatches, problem.communication[chunk - 1]
        if kind == BACKWARD and chunk < problem.chunks - 1:
            return number + problem.microbatches, problem.communication[chunk]
        return None, 0

    def _length(self, row: Sequence[int], position: int) -> int:
        problem = self._problem
        kind, rest = divmod(row[position], problem.chunks * problem.microbatches)
        chunk = rest // problem.microbatches
        if kind == FORWARD:
            return problem.forward[chunk]
        if kind == BACKWARD:
            return problem.fused[chunk] if self._orders.fused[rest] else problem.backward[chunk]
        if self._orders.fused[rest]:
            return 0
        follows = position > 0 and row[position - 1] // problem.microbatches == row[position] // problem.microbatches
        merges = follows and not self._orders.fused[row[position - 1] % (problem.chunks * problem.microbatches)]
        return problem.weight[chunk] - (problem.merge_saving[chunk] if merges else 0)


def measured(problem: Problem, orders: Ordering) -> tuple[Ordering, list[int]] | None:
    """The orders with their cost computed, and the most that every rank holds; None when they cannot run, as when
    microbatches do not pass in order.
    """
    if native.core is not None:
        cost, peaks = native.core.measure(problem, orders.rows, orders.fused)
        return (replace(orders, cost=cost), peaks) if cost >= 0 else None
    try:
        return replace(orders, cost=Timing(problem, orders).cost), peaks_of(problem, orders)
    except ValueError:
        return None


def with_cost(problem: Problem, orders: Ordering) -> Ordering | None:
    found = measured(problem, orders)
    return found and found[0]


def extended(problem: Problem, orders: Ordering) -> Ordering | None:
    """The best orders for all microbatches that repeat the steady state of `orders`, which are for fewer.

    What a rank repeats is a stretch of its row that runs every kind of pass of each of its chunks once, nearest to the
    same time on all ranks, of which several are tried; where all ranks are busy throughout it, repeating it adds no
    bubble. Nothing is fused.
    """
    assert native.core is not None
    found = Ordering(*native.core.extended(problem, orders.rows, orders.fused))
    return found if found.rows else None
