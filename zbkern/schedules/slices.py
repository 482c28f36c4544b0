"""Sequences in slices: what a schedule moves, a unit, is then a slice of a microbatch's sequences.

A decoder is causal: slices go forward from the first to the last, each reading what the ones before it left, and
backward from the last to the first. Units are numbered along the microbatches: with n slices of each, unit i is slice
i % n of microbatch i // n.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zbkern.schedules.actions import Action, ScheduleError

_MOST = 1_000_000  # more than tokens of any sequence are worth


class Unit(NamedTuple):
    """What a schedule moves: a slice, by its number, of the slices of a microbatch; where there is one, all of it."""

    microbatch: int
    slice: int
    slices: int

    def __str__(self) -> str:
        of_slice = f"slice {self.slice} of " if self.slices > 1 else ""
        return f"{of_slice}microbatch {self.microbatch}"

    @property
    def is_last(self) -> bool:
        return self.slice == self.slices - 1


def units_of(microbatches: int, slices: Sequence[int], own_slices: Sequence[Sequence[int]]) -> tuple[Unit, ...]:
    """The units of microbatches that all have these slices, or of which each has its own."""
    counts = [len(each) for each in own_slices] or [len(slices)] * microbatches
    return tuple(Unit(number, index, count) for number, count in enumerate(counts) for index in range(count))


def slice_lengths(call: str, slices: int | Sequence[int]) -> tuple[int, ...]:
    """The lengths of a sequence's slices, in any unit: of so many equal ones, or as given.

    call: what takes them, for errors. Raises TypeError or ScheduleError for anything but numbers from 1 on.
    """
    if isinstance(slices, int) and slices > _MOST:
        raise ScheduleError(f"{call}: slices must be at most {_MOST}; got {slices}")
    lengths = (1,) * slices if isinstance(slices, int) else tuple(slices) if isinstance(slices, Sequence) else (slices,)
    if isinstance(slices, bool) or not all(isinstance(length, int) for length in lengths):
        raise TypeError(f"{call}: slices must be a number of slices, or the length of each; got {slices!r}")
    if not lengths or min(lengths) < 1:
        raise ScheduleError(f"{call}: slices must be at least 1, and so must the length of each; got {slices!r}")
    return lengths


def order_of_backward(units: int, slices: int) -> list[int]:
    """The units in the order in which every chunk runs their B: the last slice of each sequence first."""
    return [first + slice for first in range(0, units, slices) for slice in reversed(range(slices))]


def late_backwards(row: Iterable[Action], units: int, slices: int) -> list[Action]:
    """A rank's row for `units` slices, from one for slices - 1 more units whose order was free.

    The k-th B of a chunk takes the place of the one slices - 1 later, before which all forwards of its sequence have
    run, and its W follows it so. With 1F1B this is Seq1F1B (arXiv 2406.03488).
    """
    more = slices - 1
    order = order_of_backward(units, slices)
    placed = []
    for action in row:
        if action.kind == "F":
            if action.unit < units:
                placed.append(action)
        elif action.unit >= more:
            placed.append(action._replace(unit=order[action.unit - more]))
    return placed
