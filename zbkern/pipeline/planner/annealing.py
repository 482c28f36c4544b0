"""Local search: simulated annealing over the order of every rank, W included.

A move shifts one pass of one rank to an earlier or later position of its row, as far as dependencies and memory there
allow. Half of the moves take their pass from the critical path; a fifth shift a group of passes at once: the same pass
of the microbatch in the neighbouring chunks, or of the next microbatches on the rank, since a better order mostly needs
the same change in many rows. What is minimised is the largest span of a rank (from its first start to its last end)
plus `spread` times the mean span: most moves do not change the largest, and the mean alone would rather fill a gap on
every rank than end the last pass a little earlier.

It runs in C++ (csrc/planner_anneal.cpp), some millions of moves a second on small problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.problem import BACKWARD, FORWARD, WEIGHT, Ordering, Problem
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
) -> Ordering:
    """The best orders found from `start`.

    temperatures: one after the other, in units of time. passes: how many it runs again, the same at each temperature; a
    move counts as 50 besides. spread: the weight of the mean span beside the largest. target: a cost at which to stop,
    such as a lower bound; seconds: stop after this long. Raises ValueError when `start` cannot run.
    """
    assert native.core is not None
    scaled = [problem.ranks * temperature for temperature in temperatures]
    found = native.core.anneal(
        problem, start.rows, start.fused, seed, scaled, passes, spread, target, problem.may_fuse, seconds
    )
    return Ordering(*found)


def measured(problem: Problem, orders: Ordering) -> tuple[Ordering, Sequence[float]] | None:
    """The orders with their cost computed, and the most that every rank holds; None when they cannot run, as when
    microbatches do not pass in order.
    """
    if native.core is None:
        return _measured_here(problem, orders)
    cost, peaks = native.core.measure(problem, orders.rows, orders.fused)
    return (replace(orders, cost=cost), peaks) if cost >= 0 else None


def _measured_here(problem: Problem, orders: Ordering) -> tuple[Ordering, Sequence[float]] | None:
    """The same without the compiled core, for orders of published schedules."""
    chunks, microbatches, slices = problem.chunks, problem.microbatches, len(problem.slices)
    clock, memory, peaks = ([0] * problem.ranks for _ in range(3))
    begun: dict[int, int] = {}
    ends: dict[int, int] = {}
    previous = [-1] * problem.ranks
    needs = partial(_input, problem)
    for rank, number in advance(orders.rows, needs, lambda number: number):
        kind, rest = divmod(number, chunks * microbatches)
        chunk, place = divmod(rest, microbatches)
        at, need = chunk * slices + place % slices, needs(number)
        length, change = _length_and_change(problem, kind, at, bool(orders.fused[rest]))
        if kind == WEIGHT and length and previous[rank] // microbatches == number // microbatches:
            length -= 0 if orders.fused[previous[rank] % (chunks * microbatches)] else problem.merge_saving[at]
        now = clock[rank]
        if need is not None:
            edge = (
                (chunk - 1) * slices + place % slices if kind == FORWARD else (chunk + 1) * slices - 1 - place % slices
            )
            now = max(now, ends[need] + problem.communication[edge])
        begun.setdefault(rank, 0 if problem.makespan else now)
        clock[rank] = ends[number] = now + length
        memory[rank] += change
        peaks[rank], previous[rank] = max(peaks[rank], memory[rank]), number
    if len(ends) < problem.passes:
        return None
    return replace(orders, cost=max(end - begun[rank] for rank, end in enumerate(clock))), tuple(peaks)


def _input(problem: Problem, number: int) -> int | None:
    """The pass of another chunk that a pass waits for."""
    kind, chunk = divmod(number // problem.microbatches, problem.chunks)
    step = {FORWARD: -1, BACKWARD: 1, WEIGHT: problem.chunks}[kind]
    return number + step * problem.microbatches if 0 <= chunk + step < problem.chunks else None


def _length_and_change(problem: Problem, kind: int, at: int, fused: bool) -> tuple[int, int]:
    """How long a pass takes, and how much memory; at: its place among the costs."""
    if kind == FORWARD:
        return problem.forward[at], problem.activation[at]
    if kind == BACKWARD:
        held = 0 if fused else problem.held[at]
        return (problem.fused if fused else problem.backward)[at], held - problem.freed[at]
    return (0, 0) if fused else (problem.weight[at], -problem.held[at])


def with_cost(problem: Problem, orders: Ordering) -> Ordering | None:
    found = measured(problem, orders)
    return found and found[0]
