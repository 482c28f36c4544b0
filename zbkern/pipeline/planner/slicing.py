"""Into which slices a plan may cut sequences: as said, or numbers and lengths to choose from."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.pipeline.schedules.slices import slice_lengths
from zbkern.pipeline.simulation.costs import ChunkCosts
from zbkern.pipeline.simulation.slice_costs import equal_lengths, equal_times

Slices = int | Sequence[int] | str  # lengths, a number, or "auto"
WHOLE = (1,)
_NUMBERS = (2, 4, 8, 16, 32)
_MOST_PASSES = 400_000  # of one chunk per rank: making and measuring published schedules then takes seconds
_LEAST_UNITS = 2  # of a slice's length, in the mean


def check_slices(slices: Slices) -> None:
    """Raises TypeError or ValueError for anything but "auto", a number or lengths."""
    if isinstance(slices, str) and slices != "auto":
        raise ValueError(f'plan: slices must be "auto", a number of slices, or the length of each; got {slices!r}')
    if not isinstance(slices, str):
        slice_lengths("plan", slices)


def slices_to_try(
    slices: Slices, whole: ChunkCosts, tokens: int | None, unit: int, stages: int, sequences: int
) -> list[tuple[int, ...]]:
    """Lengths of slices: those that are given; of so many both equal lengths and equal times; or of several numbers,
    whole sequences first.

    whole: costs of a whole model, or of all of its chunks. tokens: of a sequence, where they are known; lengths are
    then multiples of `unit`.
    """
    if slices == 1:
        return [WHOLE]
    if not isinstance(slices, (int, str)):
        return [slice_lengths("plan", slices)]
    if isinstance(slices, int):
        numbers: tuple[int, ...] = (slices,)
    else:
        room = _MOST_PASSES // (3 * stages * sequences)
        most = room if tokens is None else min(room, tokens // (_LEAST_UNITS * unit))
        numbers = tuple(number for number in _NUMBERS if number <= most)
    found: list[tuple[int, ...]] = [] if isinstance(slices, int) else [WHOLE]
    for number in numbers:
        found += [equal_times(whole, number, tokens, unit), equal_lengths(number, tokens, unit)]
    return list(dict.fromkeys(found))
