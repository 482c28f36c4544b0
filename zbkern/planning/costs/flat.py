"""The flat form of costs: those of every unit that a schedule moves, in every chunk, worked out once.

The simulation, memory, bounds, recomputation and both planners read it. A slice from a to b, shares of its sequence,
takes b - a of a cost of the whole sequence; of attention, whose queries each read all keys before them, b^2 - a^2; and
all of the overhead, and of a message's latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from zbkern.planning.costs.chunks import COMPUTED, ChunkCosts, Costs, checked_speeds
from zbkern.schedules.ahead import memory_ahead
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.slices import Unit, units_of


def flat_costs(costs: Costs, schedule: Schedule) -> FlatCosts:
    """The costs of a schedule's units. Raises ValueError for costs of another number of chunks, or without tokens where
    sequences have slices of their own."""
    flat = FlatCosts.of(costs, schedule.placement, schedule.slices, schedule.own_slices)
    if not any(flat.whole.message):
        return flat
    return replace(flat, ahead=tuple(memory_ahead(schedule, lambda edge, unit: flat.of_unit(unit).message[edge])))


@dataclass(frozen=True, eq=False)
class FlatCosts:
    """What every unit takes and holds in every chunk.

    given: the costs that it is made from. placement: the rank of every chunk. slices: those of all sequences. whole:
    the costs of a whole sequence. places: where slices lie in their sequence; those of one sequence, or of every unit
    where sequences have slices of their own. by_place: their costs. ahead: on each rank, the memory of the messages
    that others may have sent before it takes them; where there is no schedule yet, of the largest message that it gets,
    which every schedule needs at least.
    """

    given: Costs
    placement: tuple[int, ...]
    slices: tuple[int, ...]
    whole: ChunkCosts
    places: tuple[Unit, ...]
    by_place: tuple[ChunkCosts, ...]
    ahead: tuple[float, ...]

    @classmethod
    def of(
        cls,
        costs: Costs,
        placement: Sequence[int],
        slices: Sequence[int] = (1,),
        own_slices: Sequence[Sequence[int]] = (),
    ) -> FlatCosts:
        """Where there is no schedule yet."""
        whole = _on_ranks(costs.per_chunk(len(placement)), costs, placement)
        if own_slices:
            by_place = _of_own_slices(whole, own_slices, costs.tokens)
        elif len(slices) == 1:
            by_place = (whole,)
        else:
            ends = [end / sum(slices) for end in accumulate(slices, initial=0)]
            by_place = tuple(_of_slice(whole, b - a, b * b - a * a) for a, b in pairwise(ends))
        places = units_of(1, slices, own_slices)
        ahead = _largest_messages(placement, by_place)
        return cls(costs, tuple(placement), tuple(slices), whole, places, by_place, ahead)

    def of_unit(self, unit: int) -> ChunkCosts:
        """A slice's activation is without what is carried, which belongs to the whole sequence (`carried_change`)."""
        return self.by_place[unit % len(self.by_place)]

    @cached_property
    def static(self) -> list[float]:
        """What each rank holds all the time: the model states of all of its chunks, and room for messages."""
        total = [*self.ahead]
        for chunk, rank in enumerate(self.placement):
            total[rank] += self.whole.static[chunk]
        return total

    @cached_property
    def has_network(self) -> bool:
        """Whether passes have collectives that others can hide."""
        return any(self.whole.network_forward) or any(self.whole.network_backward)

    def carried_change(self, kind: str, chunk: int, unit: int) -> float:
        """What a pass of this unit takes, or frees, of its sequence's keys and values and of their gradients."""
        place = self.places[unit % len(self.places)]
        if place.slices == 1 or kind not in ("F", "B", "BW"):
            return 0.0
        costs = self.of_unit(unit)
        carried, gradients = costs.carried[chunk], costs.carried_gradients[chunk]
        if kind == "F":
            return carried if place.slice == 0 else 0.0
        return (gradients if place.is_last else 0.0) - (carried + gradients if place.slice == 0 else 0.0)


class Growth(NamedTuple):
    """A cost of a whole sequence in every chunk: what is fixed, what grows with the length of a slice, and what with
    its length times the mean context."""

    fixed: tuple[float, ...]
    linear: tuple[float, ...]
    quadratic: tuple[float, ...]

    @classmethod
    def of(cls, wholes: Sequence[float], rising: Sequence[float], fixed: Sequence[float]) -> Growth:
        """rising, fixed: of the whole, what grows with length times context, and what does not grow."""
        parts = []
        for whole, most, always in zip(wholes, rising, fixed, strict=True):
            fixed_part = min(always, whole)
            quadratic = min(most, whole - fixed_part)
            parts.append((fixed_part, whole - quadratic - fixed_part, quadratic))
        return cls(*zip(*parts, strict=True)) if parts else cls((), (), ())

    def at(self, length: float, context: float) -> tuple[float, ...]:
        """The cost of a slice: its length, and its length times twice the mean context, as shares of the sequence's."""
        return tuple(
            fixed + quadratic * context + linear * length for fixed, linear, quadratic in zip(*self, strict=True)
        )


class Growths(NamedTuple):
    """How the times of passes and of messages grow. apart: what B and W take longer than a fused BW. network_forward,
    network_backward: no more than the pass itself."""

    forward: Growth
    backward: Growth
    weight: Growth
    apart: Growth
    communication: Growth
    network_forward: Growth
    network_backward: Growth

    @property
    def fused(self) -> Growth:
        parts = zip(self.backward, self.weight, self.apart, strict=True)  # fixed, linear and quadratic
        return Growth(*(tuple(max(0.0, b + w - d) for b, w, d in zip(*each, strict=True)) for each in parts))

    @classmethod
    def of(cls, whole: ChunkCosts) -> Growths:
        none = (0.0,) * len(whole.forward)
        apart = [b + w - both for b, w, both in zip(whole.backward, whole.weight, whole.fused, strict=True)]
        return cls(
            forward=Growth.of(whole.forward, whole.attention_forward, whole.overhead),
            backward=Growth.of(whole.backward, whole.attention_backward, whole.overhead),
            weight=Growth.of(whole.weight, none, whole.overhead),
            apart=Growth.of(apart, none, whole.overhead),  # up to the overhead that is one of the two
            communication=Growth.of(whole.communication, none[1:], whole.latency),
            network_forward=Growth.of(whole.network_forward, none, none),
            network_backward=Growth.of(whole.network_backward, none, none),
        )


def kept_by_slices(whole: ChunkCosts) -> list[float]:
    """Of the activation of a whole sequence, what its slices hold apart from what is carried."""
    return [max(0.0, activation - carried) for activation, carried in zip(whole.activation, whole.carried, strict=True)]


def _largest_messages(placement: Sequence[int], by_place: Sequence[ChunkCosts]) -> tuple[float, ...]:
    """By rank, of those that it exchanges with others."""
    largest = [0.0] * (max(placement) + 1)
    for edge, ranks in enumerate(pairwise(placement)):
        if ranks[0] != ranks[1]:
            for rank in ranks:
                largest[rank] = max(largest[rank], *(each.message[edge] for each in by_place))
    return tuple(largest)


def _on_ranks(whole: ChunkCosts, costs: Costs, placement: Sequence[int]) -> ChunkCosts:
    """Times of passes as the rank of every chunk takes them; collectives are in flight as long as on any rank."""
    if costs.speeds is None:
        return whole
    speeds = checked_speeds("Costs", costs.speeds, max(placement) + 1)
    in_flight = {
        "forward": whole.network_forward,
        "recompute": whole.network_forward,
        "backward": whole.network_backward,
        "fused": whole.network_backward,
    }

    def times(name: str) -> tuple[float, ...]:
        found = []
        for chunk, (rank, time) in enumerate(zip(placement, getattr(whole, name), strict=True)):
            network = min(time, in_flight[name][chunk]) if name in in_flight else 0.0
            found.append((time - network) / speeds[rank] + network)
        return tuple(found)

    return whole._replace(**{name: times(name) for name in COMPUTED})


def _of_own_slices(
    whole: ChunkCosts, own_slices: Sequence[Sequence[int]], tokens: int | None
) -> tuple[ChunkCosts, ...]:
    if tokens is None:
        raise ValueError(
            "Costs: tokens must be given for a schedule whose sequences have slices of their own; got None"
        )
    found = []
    for lengths in own_slices:
        ends = [end / tokens for end in accumulate(lengths, initial=0)]
        kept: dict[str, tuple[float, ...]] = {
            name: tuple(each * ends[-1] for each in getattr(whole, name)) for name in ("carried", "carried_gradients")
        }
        if len(lengths) == 1:  # nothing is carried from slice to slice: keys and values are held as all else
            kept["activation"] = tuple(each * ends[-1] for each in whole.activation)
        found += [_of_slice(whole, b - a, b * b - a * a)._replace(**kept) for a, b in pairwise(ends)]
    return tuple(found)


def _of_slice(whole: ChunkCosts, length: float, context: float) -> ChunkCosts:
    """length, context: of the whole sequence, what it has of a cost that grows with its length, and of attention's."""
    forward, backward, weight, apart, communication, *network = (each.at(length, context) for each in Growths.of(whole))

    def scaled(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * length for value in values)

    activation = scaled(kept_by_slices(whole))
    again = zip(whole.recompute, forward, whole.forward, strict=True)
    return whole._replace(
        forward=forward,
        backward=backward,
        weight=weight,
        fused=tuple(max(0.0, b + w - split) for b, w, split in zip(backward, weight, apart, strict=True)),
        communication=communication,
        activation=activation,
        held=scaled(whole.held),
        merge_saving=tuple(map(min, whole.merge_saving, weight)),
        recompute=tuple(time * (of_slice / of_all if of_all else length) for time, of_slice, of_all in again),
        checkpoint=None if whole.checkpoint is None else scaled(whole.checkpoint),
        streamed=tuple(map(min, whole.streamed, activation)),
        network_forward=tuple(map(min, network[0], forward)),
        network_backward=tuple(map(min, network[1], backward)),
        message=scaled(whole.message),
    )
