"""Local search: simulated annealing over the order of every rank, W included, or over one building block of all.

A move shifts one pass of one rank to an earlier or later position of its row, as far as dependencies and memory there
allow. Half of the moves take their pass from the critical path; a fifth shift a group of passes at once: the same pass
of the microbatch in the neighbouring chunks, or of the next microbatches on the rank, since a better order mostly needs
the same change in many rows. One move in twenty takes a pass from however far behind into a gap: where the first rank
has most to do, the forwards that would fill its warm-up are far behind in its row (DeepSeek-V3, p=16, m=64, two chunks
in a V, eight seeds: 2073.9 ms on average instead of 2094.7; the lower bound is 2068.3). What is minimised is the
largest span of a rank (from its first start to its last end) plus `spread` times the mean span: most moves do not
change the largest, and the mean alone would rather fill a gap on every rank than end the last pass a little earlier.

Most moves change the times of about a hundred passes: these alone are computed again. The longest way from every pass
to an end is known, and kept up to date where a move is kept, so that moves that make the largest span longer are mostly
rejected after a few passes. Moves that leave no room for messages that wait are rejected, too.

Orders that bear delays are found by annealing the same orders at several speeds of the ranks at once: a move is made in
all of them, and kept where each would keep it.

It runs in C++ (csrc/planner_anneal.cpp), some millions of moves a second on small problems.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from operator import add
from typing import NamedTuple

from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.planner import native
from zbkern.planning.planner.native import Effort, uncollected
from zbkern.planning.planner.problem import Ordering, Problem, Rows, actions_of
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import Action, Event
from zbkern.schedules.schedule import Schedule


def anneal(problem: Problem, start: Ordering, effort: Effort, samples: Sequence[Problem] = ()) -> Ordering:
    """The best orders found from `start`. Raises ValueError when these cannot run.

    samples: the same problem with other times; the cost is then half that of the problem and half their mean.
    """
    return Ordering(*native.core.anneal([problem, *samples], start.rows, start.fused, effort, problem.may_fuse))


def at_speeds(problem: Problem, count: int, seed: int) -> list[Problem]:
    """The same with the passes of each rank up to 20% faster or slower: so many samples, in which each rank has each of
    so many speeds once."""
    generator = random.Random(seed)
    speeds = [sorted(range(count), key=lambda _: generator.random()) for _ in range(problem.ranks)]
    factors = [[8 * count + 4 * speed + 2 for speed in of_ranks] for of_ranks in zip(*speeds, strict=True)]
    return [_scaled(problem, each, 10 * count) for each in factors]


def _scaled(problem: Problem, factors: Sequence[int], unit: int) -> Problem:
    """The times of each rank's passes times its factor / unit."""
    found = []
    for rank, each in zip(problem.placement, problem.by_chunk, strict=True):
        times = {name: getattr(each, name) for name in ("forward", "backward", "weight", "fused", "merge_saving")}
        scaled = {name: tuple(time * factors[rank] // unit for time in of_pass) for name, of_pass in times.items()}
        found.append(each._replace(**scaled))
    return replace(problem, by_chunk=tuple(found))


def search_blocks(problem: Problem, fuse: bool, effort: Effort) -> Ordering | None:
    """The best orders found that repeat one building block: when each pass of one microbatch runs, which every
    microbatch repeats one period later. None when there are none; it stops only once something fits.

    V-Half and V-Min (arXiv 2405.15362) are such schedules, made by hand for passes of equal length. Here the block is
    searched for, with the real costs: a rank runs its passes in the order of the time that the block gives them, each
    as soon as it can, and simulated annealing moves passes of the block, which moves those of all microbatches at once.
    Where memory is short, changing one microbatch after the other does not lead from one steady state to a better one;
    this does. Warm-up and cool-down of what it finds are poor; it is where `anneal` starts from. It runs in C++
    (csrc/planner_blocks.cpp). fuse: all backwards are fused.
    """
    orders = Ordering(*native.core.search_blocks(problem, fuse, effort))
    return orders if orders.rows else None


class Measured(NamedTuple):
    """Orders in turn with their cost; the most that every rank holds, messages included; and what of it are messages
    that the problem has no room for."""

    orders: Ordering
    peaks: Sequence[int]
    messages: Sequence[int]


def measured(problem: Problem, orders: Ordering) -> Measured | None:
    """None when they cannot run, as when microbatches do not pass in order."""
    cost, passes, messages = native.core.measure(problem, orders.rows, orders.fused)
    if cost < 0:
        return None
    return Measured(replace(orders, cost=cost, beside=()), [*map(add, passes, messages)], messages)


@uncollected()
def timeline_of(orders: Ordering, problem: Problem, name: str) -> Timeline:
    """What `simulate` finds of these orders, by the compiled core: whole microbatches alone."""
    rows: Rows = native.core.grouped(orders.rows, orders.fused)
    actions = actions_of(rows, orders.fused, problem.order_of_backward)
    schedule = Schedule(actions, problem.placement, problem.microbatches, name)._proven()
    costs = problem.flat.given
    events = events_of(actions, native.core.timed(problem, rows, orders.fused))
    _, passes, _ = native.core.measure(problem, rows, orders.fused)
    static = flat_costs(costs, schedule).static
    held = tuple(peak / problem.memory_scale + always for peak, always in zip(passes, static, strict=True))
    return Timeline(schedule, events, held, unit=costs.time_unit or "", memory_unit=costs.memory_unit or "")


def events_of(
    actions: Sequence[Sequence[Action]], times: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> tuple[tuple[Event, ...], ...]:
    """times: when the actions of each rank begin, and when they end."""
    return tuple(
        tuple(map(tuple.__new__, repeat(Event), zip(repeat(rank), row, starts, ends)))
        for rank, (row, (starts, ends)) in enumerate(zip(actions, times, strict=True))
    )
