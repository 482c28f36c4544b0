"""The published schedules of a placement as orders, each made once: the planner starts from all that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from zbkern import schedules
from zbkern.planning.planner import native
from zbkern.planning.planner.large import few_of, longer, uncollected
from zbkern.planning.planner.problem import Ordering, grouped, ordering_of
from zbkern.schedules.schedule import Schedule


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
