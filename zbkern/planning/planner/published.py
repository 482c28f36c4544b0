"""The published schedules of a placement as orders, each made once: the planner starts from all that fit.

Every schedule comes to a steady state, in which it repeats itself each microbatch, or each group of them. So one for
few microbatches becomes one for many by repeating that period: what takes long is then done for few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from zbkern import schedules
from zbkern.planning.planner import native
from zbkern.planning.planner.native import uncollected
from zbkern.planning.planner.problem import Ordering, grouped, ordering_of
from zbkern.schedules.schedule import Schedule

_STEADY = 3  # periods that come again, so that it is none by chance
MANY = 100_000
"""Passes: the simulator takes a second for as many."""


class Published:
    """Makes the orders of published schedules when they are first asked for, and keeps them."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], int, int], list[Ordering | None]] = {}

    def orders(self, placement: tuple[int, ...], microbatches: int, slices: int = 1) -> Iterator[Ordering]:
        """Of every schedule with this placement (the rank of every chunk), those that are made quickest first.

        slices: of every microbatch. Where microbatches are many, schedules are made for fewer and repeat their period;
        GPipe has none, and is left out there.
        """
        made = self._made.setdefault((placement, microbatches, slices), [])
        few = microbatches if slices > 1 or native.core is None else few_of(placement, microbatches)
        for index, make in enumerate(generators_of(placement)):
            if index == len(made):
                with uncollected():
                    short = grouped(ordering_of(make(max(placement) + 1, few, slices=slices)))
                    made.append(longer(short, len(placement), few, microbatches))
            if (orders := made[index]) is not None:
                yield orders


_ONE_CHUNK = (schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2)
_V = (schedules.zb_v, schedules.dualpipe_v, schedules.one_f_one_b_v, schedules.v_min, schedules.v_half)
_INTERLEAVED = (schedules.interleaved, schedules.interleaved_zero_bubble)


def generators_of(placement: tuple[int, ...]) -> Sequence[Callable[..., Schedule]]:
    """Of every published schedule with this placement, the rank of every chunk."""
    down = tuple(range(max(placement) + 1))
    chunks = len(placement) // len(down)
    if placement == down:
        return _ONE_CHUNK
    if placement == down + down[::-1]:
        return _V
    return [partial(make, chunks=chunks) for make in _INTERLEAVED] if placement == down * chunks else ()


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
