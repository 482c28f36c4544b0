"""Costs of measured steps: medians of what passes took, messages, bandwidths of copies; and how steady these are."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.costs.memory import Memory
from zbkern.planning.simulation.network_fit import with_network
from zbkern.planning.simulation.timeline import Timeline, ends_of, own_times
from zbkern.schedules.dependencies import result


def costs(timelines: Sequence[Timeline], memory: Costs | None = None) -> Costs:
    """Costs, in the timelines' unit, of measured steps of one schedule: medians over microbatches and steps.

    Where passes ran beside each other, times are those of passes that ran alone, if there are any, and network time is
    what fits (`network_fit.py`); of others each counts its share of the time that they took together.

    memory: whose `activation` and `held` to keep; a timeline has none. A pass in several events (layers of a W)
    counts as their sum; that of the slices of a sequence, too, and by how much the time per length rises along the
    sequence is attention. Bandwidths are those of all O or L together. communication is the least time from the end of
    a pass to the start of the one that needs it, over all edges, mean of both directions, so that a difference between
    two ranks' clocks cancels.
    """
    schedule = timelines[0].schedule
    if schedule.own_slices:
        raise ValueError("drift: costs must be given for a schedule whose sequences have slices of their own; got None")
    chunks = range(len(schedule.placement))
    by_slice: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for (kind, chunk, slice), length in medians(timelines).items():
        by_slice[kind, chunk][slice] = length
    wholes = {key: sum(each.values()) * len(schedule.slices) / len(each) for key, each in by_slice.items()}
    times = [[wholes.get((kind, chunk), 0.0) for chunk in chunks] for kind in ("F", "B", "W")]
    for chunk in chunks:  # a fused pass: both halves in one
        if ("BW", chunk) in wholes and ("B", chunk) not in wholes:
            times[1][chunk] = times[2][chunk] = wholes["BW", chunk] / 2
    memory = memory or Costs()
    attention = [
        tuple(_attention(by_slice.get((kind, chunk), {}), schedule.slices) for chunk in chunks) for kind in "FB"
    ]
    again = {chunk: wholes["R", chunk] for chunk in chunks if ("R", chunk) in wholes}
    found = replace(
        memory,
        recompute=tuple(again.get(chunk, times[0][chunk]) for chunk in chunks) if again else memory.recompute,
        checkpoint=0.0 if again and memory.checkpoint is None else memory.checkpoint,
        offload_bandwidth=_bandwidth(timelines, "O", memory),
        reload_bandwidth=_bandwidth(timelines, "L", memory),
        forward=times[0],
        backward=times[1],
        weight=times[2],
        communication=min(hops(timelines).values(), default=0.0) * len(schedule.slices),
        attention_forward=tuple(map(min, attention[0], times[0])),
        attention_backward=tuple(map(min, attention[1], times[1])),
        overhead=0.0,
        network_forward=0.0,
        network_backward=0.0,
        split_overhead=0.0,
        merge_saving=0.0,
        latency=0.0,
        speeds=None,  # are in the times
        time_unit=timelines[0].unit or None,
    )
    return with_network(found, timelines) if schedule.beside else found


def medians(timelines: Sequence[Timeline]) -> dict[tuple[str, int, int], float]:
    """(kind, chunk, slice) -> how long such a pass took."""
    return {key: statistics.median(lengths) for key, lengths in _lengths(timelines).items()}


def spread(timelines: Sequence[Timeline]) -> float:
    """How far apart the quartiles of a pass's times are, over microbatches and steps: the most of all passes.

    Relative to the median of that pass, or to the mean of all passes where this is longer, so that the noise of a pass
    that takes next to no time does not count. Infinite where a pass was measured once.
    """
    samples = [*_lengths(timelines).values()]
    if any(len(lengths) < 2 for lengths in samples):
        return math.inf
    mean = statistics.fmean(map(statistics.median, samples))
    quartiles = [statistics.quantiles(lengths, n=4, method="inclusive") for lengths in samples]
    return max((high - low) / (max(middle, mean) or 1.0) for low, middle, high in quartiles)


def _lengths(timelines: Sequence[Timeline]) -> dict[tuple[str, int, int], list[float]]:
    """(kind, chunk, slice) -> how long each of these passes took; of those that ran alone, if there are any."""
    alone: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    beside: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    schedule = timelines[0].schedule
    grouped = {
        action
        for rank, row in enumerate(schedule.actions)
        for first, end in schedule.beside_of(rank)
        for action in row[first:end]
    }
    for timeline in timelines:
        for action, length in passes(timeline).items():
            kind, chunk, unit = action
            found = beside if action in grouped else alone
            found[kind, chunk, unit % len(schedule.slices)].append(length)
    return {**beside, **alone}


def _attention(times: Mapping[int, float], slices: Sequence[int]) -> float:
    """What the passes of a sequence's slices take that grows with the length and with what came before; 0 where some
    slices are not known."""
    if len(times) < max(2, len(slices)):
        return 0.0
    whole = sum(slices)
    ends = [end / whole for end in accumulate(slices, initial=0)]
    context = [a + b for a, b in pairwise(ends)]
    per_length = [times[slice] * whole / length for slice, length in enumerate(slices)]
    return max(0.0, statistics.linear_regression(context, per_length).slope)


def hops(timelines: Sequence[Timeline]) -> dict[int, float]:
    """The least time of a message over every edge between ranks, by its first chunk, mean of both directions."""
    schedule = timelines[0].schedule
    found: dict[int, float] = {}
    for timeline in timelines:
        ends = ends_of(timeline)
        starts = {result(event.action): event.start for row in timeline.events for event in row}
        for low, high in pairwise(range(len(schedule.placement))):
            if schedule.placement[low] != schedule.placement[high]:
                pairs = range(len(schedule.units))
                there = min(starts["F", high, m] - ends["F", low, m] for m in pairs)
                back = min(starts["B", low, m] - ends["B", high, m] for m in pairs)
                found[low] = min(found.get(low, math.inf), max(0.0, (there + back) / 2))
    return found


def _bandwidth(timelines: Sequence[Timeline], kind: str, memory: Costs) -> float | None:
    """Memory per time of all copies in one direction; that of `memory` where there are none."""
    copies = [event for each in timelines for row in each.copies for event in row if event.action.kind == kind]
    spent, moved, schedule = sum(copy.end - copy.start for copy in copies), 0.0, timelines[0].schedule
    for row in schedule.actions if copies else ():
        held = Memory(flat_costs(memory, schedule))
        for action in row:
            moved += held.copied(action.chunk, action.unit) if action.kind == kind else 0.0
            held.account(action)
    given = memory.offload_bandwidth if kind == "O" else memory.reload_bandwidth
    return moved * len(timelines) / spent if moved > 0 and spent > 0 else given


def passes(timeline: Timeline) -> dict[tuple[str, int, int], float]:
    """(kind, chunk, unit) -> how long its events took together; of passes beside each other, their shares."""
    found: dict[tuple[str, int, int], float] = defaultdict(float)
    for row in timeline.events:
        for event, length in zip(row, own_times(row), strict=True):
            found[event.action] += length
    return found
