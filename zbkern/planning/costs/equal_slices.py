"""Slices of a sequence that are equally long, or take equally long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, sqrt

from zbkern.planning.costs.chunks import ChunkCosts

SLICE_UNIT = 128  # tokens: kernels work on multiples of as many rows
_PARTS = 1024  # of a sequence, at least, whose slices are multiples of one where its tokens are not known


def equal_lengths(slices: int, tokens: int | None = None, unit: int = SLICE_UNIT) -> tuple[int, ...]:
    """The lengths of so many slices that are as equal as multiples of `unit` tokens allow.

    tokens: of a sequence; None where they are not known: then as equal as can be.
    """
    ends = [number / slices for number in range(slices + 1)]
    return (1,) * slices if tokens is None else _rounded(ends, tokens, unit)


def equal_times(costs: ChunkCosts, slices: int, tokens: int | None = None, unit: int = SLICE_UNIT) -> tuple[int, ...]:
    """The same for slices that all take about as long: F, B and W together, in all chunks.

    Where the tokens are not known, a slice is a multiple of 1/1024 of the sequence.
    """
    attention = sum(costs.attention_forward) + sum(costs.attention_backward)
    fixed = 3 * sum(costs.overhead)
    linear = max(0.0, sum(costs.forward) + sum(costs.backward) + sum(costs.weight) - fixed - attention)
    ends = [number / slices for number in range(slices + 1)]
    if attention > 0:  # where attention x^2 + linear x reaches this share of both
        root = [sqrt(linear * linear + 4 * attention * (attention + linear) * end) for end in ends]
        ends = [(each - linear) / (2 * attention) for each in root]
    return _rounded(ends, tokens, unit)


def _rounded(ends: Sequence[float], tokens: int | None, unit: int) -> tuple[int, ...]:
    """Lengths between these ends in tokens, or in parts of a sequence; in single ones where there are too few units."""
    slices = len(ends) - 1
    whole = max(_PARTS, slices) if tokens is None else tokens
    step = 1 if tokens is None or tokens % unit or tokens < unit * slices else unit
    count = whole // step
    places = [round(end * count) for end in ends]
    for place in range(1, slices):  # every slice has a unit at least
        places[place] = min(max(places[place], places[place - 1] + 1), count - slices + place)
    lengths = [b - a for a, b in pairwise(places)]
    common = gcd(*lengths) if tokens is None else 1
    return tuple(length // common * step for length in lengths)
