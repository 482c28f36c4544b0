"""The published schedules of a placement as orders, each made once: the planner starts from all that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zbkern.pipeline import schedules
from zbkern.pipeline.planner.problem import Ordering, grouped, ordering_of
from zbkern.pipeline.schedules.schedule import Schedule


class Published:
    """Makes the orders of published schedules when they are first asked for, and keeps them."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, int, int, int], Ordering] = {}

    def orders(self, placement: Sequence[int], sequences: int, slices: int = 1) -> Iterator[Ordering]:
        """Of every schedule with this placement (the rank of every chunk), those that are made quickest first.

        sequences, slices: microbatches of whole sequences, and how many slices each has.
        """
        ranks = max(placement) + 1
        chunks = len(placement) // ranks
        for make in _generators(tuple(placement), ranks):
            key = (make.__name__, ranks, sequences, chunks, slices)
            if key not in self._made:
                schedule = _made(make, ranks, sequences, chunks, slices)
                self._made[key] = grouped(ordering_of(schedule))
            yield self._made[key]


def published(placement: Sequence[int], sequences: int, slices: Sequence[int] = (1,)) -> Iterator[Schedule]:
    """Every published schedule with this placement, the rank of every chunk, of sequences in these slices."""
    ranks = max(placement) + 1
    for make in _generators(tuple(placement), ranks):
        yield _made(make, ranks, sequences, len(placement) // ranks, slices)


def _made(
    make: Callable[..., Schedule], ranks: int, sequences: int, chunks: int, slices: int | Sequence[int]
) -> Schedule:
    return make(ranks, sequences, *([chunks] if make in _INTERLEAVED else []), slices=slices)


_ONE_CHUNK = (schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2)
_V = (schedules.zb_v, schedules.dualpipe_v, schedules.one_f_one_b_v, schedules.v_min, schedules.v_half)
_INTERLEAVED = (schedules.interleaved, schedules.interleaved_zero_bubble)


def _generators(placement: tuple[int, ...], ranks: int) -> tuple[Callable[..., Schedule], ...]:
    down = tuple(range(ranks))
    if placement == down:
        return _ONE_CHUNK
    if placement == down + down[::-1]:
        return _V
    if placement == down * (len(placement) // ranks):
        return _INTERLEAVED
    return ()
