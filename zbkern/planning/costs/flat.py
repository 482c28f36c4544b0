"""Where a slice lies in its sequence, and what its passes take and hold there; slices of equal lengths or times.

A slice from a to b, shares of its sequence, takes b - a of a cost of the whole sequence; of attention, whose queries
each read all keys before them, b^2 - a^2; and all of the overhead, and of a message's latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import gcd, sqrt

from zbkern.planning.costs.chunks import ChunkCosts
from zbkern.schedules.schedule import Schedule

SLICE_UNIT = 128  # tokens: kernels work on multiples of as many rows
_PARTS = 1024  # of a sequence, at least, whose slices are multiples of one where its tokens are not known


def slice_costs(costs: ChunkCosts, slices: Sequence[int]) -> tuple[ChunkCosts, ...]:
    """The costs of each slice of these lengths, from first to last, for the costs of a whole sequence.

    The activation is without what is carried, which belongs to the whole sequence (`carried_change`).
    """
    if len(slices) == 1:
        return (costs,)
    ends = [end / sum(slices) for end in accumulate(slices, initial=0)]
    return tuple(_of_slice(costs, b - a, b * b - a * a) for a, b in pairwise(ends))


def unit_costs(costs: ChunkCosts, schedule: Schedule, tokens: int | None) -> tuple[ChunkCosts, ...]:
    """Of every slice of a sequence, or, where sequences have slices of their own, of every microbatch.

    tokens: of the sequence that the costs are of. Raises ValueError where it is needed and None.
    """
    if not schedule.own_slices:
        return slice_costs(costs, schedule.slices)
    if tokens is None:
        raise ValueError(
            "Costs: tokens must be given for a schedule whose sequences have slices of their own; got None"
        )
    found = []
    for lengths in schedule.own_slices:
        ends = [end / tokens for end in accumulate(lengths, initial=0)]
        kept = {
            name: tuple(each * ends[-1] for each in getattr(costs, name)) for name in ("carried", "carried_gradients")
        }
        found += [_of_slice(costs, b - a, b * b - a * a)._replace(**kept) for a, b in pairwise(ends)]
    return tuple(found)


def _of_slice(costs: ChunkCosts, length: float, context: float) -> ChunkCosts:
    """length, context: of the whole sequence, what it has of a cost that grows with its length, and of attention's."""

    def time(whole: float, rising: float, fixed: float) -> float:
        fixed = min(fixed, whole)
        rising = min(rising, whole - fixed)
        return fixed + rising * context + (whole - rising - fixed) * length

    def scaled(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * length for value in values)

    none = (0.0,) * len(costs.forward)
    forward = tuple(map(time, costs.forward, costs.attention_forward, costs.overhead))
    backward = tuple(map(time, costs.backward, costs.attention_backward, costs.overhead))
    weight = tuple(map(time, costs.weight, none, costs.overhead))
    activation = scaled([max(0.0, all_ - kept) for all_, kept in zip(costs.activation, costs.carried, strict=True)])
    parts = zip(costs.recompute, forward, costs.forward, strict=True)
    # what B and W apart take longer than a BW: up to the overhead that is one of the two
    apart = [b + w - both for b, w, both in zip(costs.backward, costs.weight, costs.fused, strict=True)]
    both = zip(backward, weight, map(time, apart, none, costs.overhead), strict=True)
    return costs._replace(
        forward=forward,
        backward=backward,
        weight=weight,
        fused=tuple(max(0.0, b + w - split) for b, w, split in both),
        communication=tuple(map(time, costs.communication, (0.0,) * len(costs.latency), costs.latency)),
        activation=activation,
        held=scaled(costs.held),
        merge_saving=tuple(map(min, costs.merge_saving, weight)),
        recompute=tuple(again * (of_slice / whole if whole else length) for again, of_slice, whole in parts),
        checkpoint=None if costs.checkpoint is None else scaled(costs.checkpoint),
        streamed=tuple(map(min, costs.streamed, activation)),
    )


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
