"""The published schedules of a placement as orders, each made once: the planner starts from all that fit.

Every schedule comes to a steady state, in which it repeats itself each microbatch, or each group of them. So one for
few microbatches becomes one for many by repeating that period: what takes long is then done for few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

from zbkern import schedules
from zbkern.planning.planner.native import uncollected
from zbkern.planning.planner.problem import Ordering, Rows, grouped, ordering_of
from zbkern.schedules.schedule import Schedule

MANY = 100_000
"""Passes: the simulator takes a second for as many."""


def published_orders(placement: tuple[int, ...], microbatches: int, slices: int = 1) -> Iterator[tuple[str, Ordering]]:
    """The name and the orders of every schedule with this placement, the rank of every chunk.

    slices: of every microbatch. Where microbatches are many, schedules are made for fewer and repeat their period;
    GPipe has none, and is left out there.
    """
    made = (_made(placement, microbatches, slices, index) for index in range(len(generators_of(placement))))
    return ((name, orders) for name, orders in made if orders is not None)


@lru_cache(maxsize=32)
@uncollected()
def _made(placement: tuple[int, ...], microbatches: int, slices: int, index: int) -> tuple[str, Ordering | None]:
    few, period = few_of(placement, microbatches)

    def made(count: int) -> tuple[str, Ordering]:
        schedule = generators_of(placement)[index](max(placement) + 1, count, slices=slices)
        return schedule.name, grouped(ordering_of(schedule))

    if slices > 1 or few == microbatches:
        return made(microbatches)
    (name, short), (_, next_) = made(few), made(few + period)
    return name, longer(short, next_, len(placement), few, period, microbatches)


_ONE_CHUNK = (schedules.zb_h2, schedules.zb_h1, schedules.one_f_one_b, schedules.gpipe)
_V = (schedules.zb_v, schedules.dualpipe_v, schedules.one_f_one_b_v, schedules.v_min, schedules.v_half)
_INTERLEAVED = (schedules.interleaved_zero_bubble, schedules.interleaved)


def generators_of(placement: tuple[int, ...]) -> Sequence[Callable[..., Schedule]]:
    """Of every published schedule with this placement, the rank of every chunk."""
    down = tuple(range(max(placement) + 1))
    chunks = len(placement) // len(down)
    if placement == down:
        return _ONE_CHUNK
    if placement == down + down[::-1]:
        return _V
    return [partial(make, chunks=chunks) for make in _INTERLEAVED] if placement == down * chunks else ()


def few_of(placement: Sequence[int], microbatches: int) -> tuple[int, int]:
    """For how many microbatches a schedule is made that is then made longer, all where they are few; and its period."""
    ranks, chunks = max(placement) + 1, len(placement)
    period = 1 if chunks == ranks or placement[ranks] else ranks  # of a loop: microbatches go in groups of p
    few = 2 * ranks + (8 if period == 1 else 2 * ranks)  # ZB-V, DualPipe-V and ZB-H2 take 2p to come to it
    few += (microbatches - few) % period
    return few if 3 * chunks * microbatches > MANY and few < microbatches else microbatches, period


def longer(short: Ordering, next_: Ordering, chunks: int, few: int, period: int, many: int) -> Ordering | None:
    """Orders for `many` microbatches out of those for `few`, and for a period more; None where that does not repeat.

    Each row of `next_` is that of `short` with a period put in, behind all that both begin with. It is put in again.
    """
    rows: Rows = []
    for row, other in zip(_numbered(short, few, many), _numbered(next_, few + period, many), strict=True):
        begin = next((at for at, number in enumerate(row) if number != other[at]), len(row))
        end = begin + len(other) - len(row)
        if [number + period for number in row[2 * begin - end :]] != other[begin:]:
            return None
        found = other[:end]
        for more in range(period, many - few, period):
            found += [number + more for number in other[begin:end]]
        rows.append(found + [number + many - few - period for number in other[end:]])
    orders, half = Ordering(0, rows, [0] * (chunks * many)), chunks * many
    for row in rows:
        for at, number in enumerate(row):
            if number >= 3 * half:
                orders.fused[number - 3 * half], row[at] = 1, number - 2 * half
    return orders


def _numbered(orders: Ordering, units: int, many: int) -> Rows:
    """The rows with the numbers that passes have among `many` microbatches; a fused B is of a kind of its own, 3."""
    half = len(orders.fused)
    fused = {half + at for at, both in enumerate(orders.fused) if both}
    kinds = [[number + 2 * half if number in fused else number for number in row] for row in orders.rows]
    return [[number // units * many + number % units for number in row] for row in kinds]
