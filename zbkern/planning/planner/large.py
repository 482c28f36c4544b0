"""Problems of many passes: schedules of few microbatches made longer, and timelines without the simulator in Python.

Every schedule comes to a steady state, in which it repeats itself each microbatch, or each group of them. So one for
few microbatches becomes one for many by repeating that period: what takes long is then done for few.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat

from zbkern.planning.planner import native
from zbkern.planning.planner.problem import Ordering, Problem, Rows, actions_of
from zbkern.planning.simulation.memory import static_of_ranks
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import Event
from zbkern.schedules.schedule import Schedule

_STEADY = 3  # periods that come again, so that it is none by chance
MANY = 100_000
"""Passes: the simulator takes a second for as many."""


def few_of(placement: Sequence[int], microbatches: int) -> int:
    """Of how many microbatches a schedule is made that is then made longer; all of them where they are few."""
    ranks, chunks = max(placement) + 1, len(placement)
    group = 1 if chunks == ranks or placement[ranks] else ranks  # of a loop: microbatches go in groups of p
    few = 2 * ranks + (8 if group == 1 else 2 * ranks)  # ZB-V, DualPipe-V and ZB-H2 take 2p to come to it
    return (
        few + (microbatches - few) % group if 3 * chunks * microbatches > MANY and few < microbatches else microbatches
    )


def longer(orders: Ordering, chunks: int, few: int, many: int) -> Ordering | None:
    """Orders for `many` microbatches out of those for `few`; None where some rank does not repeat itself."""
    if few == many:
        return orders
    half = chunks * few
    fused = {half + at for at, both in enumerate(orders.fused) if both}  # which are a kind of their own here
    short = [[number + 2 * half if number in fused else number for number in row] for row in orders.rows]
    for period in [step for step in range(1, few // 3 + 1) if (many - few) % step == 0]:
        rows = [_repeated(row, period, few, many) for row in short]
        if not all(rows):
            continue
        found, half = Ordering(0, rows, [0] * (chunks * many)), chunks * many
        for row in rows if fused else ():
            for at, number in enumerate(row):
                if number >= 3 * half:
                    found.fused[number - 3 * half], row[at] = 1, number - 2 * half
        return found
    return None


def _repeated(row: Sequence[int], period: int, few: int, many: int) -> list[int]:
    """The row with its period repeated; empty where there is none."""
    length = period * (len(row) // few)
    middle = max(0, len(row) - (_STEADY + 1) * length) // 2  # transients are over there, if they are anywhere
    at = _steady(row, middle, length, period, few) or _steady(row, 0, length, period, few)
    if at is None:
        return []
    end, more = at + 1, many - few  # the passes before `end` come first; the last `length` of them are the period

    def moved(passes: Sequence[int], by: int) -> Iterator[int]:
        return (number // few * many + number % few + by for number in passes)

    found = [*moved(row[:end], 0)]
    for step in range(period, more + 1, period):
        found += moved(row[end - length : end], step)
    return [*found, *moved(row[end:], more)]


def _steady(row: Sequence[int], begin: int, length: int, period: int, few: int) -> int | None:
    """The end of the first passes from `begin` on that come again, so many later, for microbatches a period later."""
    run = 0
    for at in range(begin, len(row) - length):
        same = row[at + length] == row[at] + period and row[at] // few == row[at + length] // few
        run = run + 1 if same else 0
        if run == _STEADY * length:
            return at
    return None


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which would look at a million new tuples again and again: half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def timeline_of(orders: Ordering, problem: Problem, name: str) -> Timeline:
    """What `simulate` finds of these orders, by the compiled core: whole microbatches alone."""
    assert native.core is not None
    rows: Rows = native.core.grouped(orders.rows, orders.fused)
    actions = actions_of(rows, problem, orders.fused)
    schedule = Schedule(actions, problem.placement, problem.microbatches, name).proven()
    costs, times = problem.costs, native.core.timed(problem, rows, orders.fused)
    events = tuple(
        tuple(map(Event, repeat(rank), row, starts, ends))
        for rank, (row, (starts, ends)) in enumerate(zip(actions, times, strict=True))
    )
    static = static_of_ranks(costs.per_chunk(problem.chunks), problem.placement)
    _, peaks = native.core.measure(problem, rows, orders.fused)
    held = tuple(peak / problem.memory_scale + always for peak, always in zip(peaks, static, strict=True))
    return Timeline(schedule, events, held, unit=costs.time_unit or "", memory_unit=costs.memory_unit or "")
