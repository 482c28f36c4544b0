"""The network time of passes, as steps show it in which some run beside each other: what these hide of it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.simulation.timeline import Timeline, ended
from zbkern.planning.simulation.turns import Parts, in_turns
from zbkern.schedules.actions import Action

_SHARES = [number / 50 for number in range(46)]  # of an F
_COLLECTIVES = (1, 2, 4, 8, 16)


def with_network(costs: Costs, timelines: Sequence[Timeline]) -> Costs:
    """The costs, of passes by themselves, with the network time for which groups of passes take as long as they did.

    One share of F is tried for all chunks, and as long a time in B: the same tokens travel there.
    """
    spans = _spans(timelines)
    tried = [_with(costs, share, count) for share, count in product(_SHARES, _COLLECTIVES)]
    return min(tried, key=lambda each: _error(flat_costs(each, timelines[0].schedule), spans)) if spans else costs


def _with(costs: Costs, share: float, collectives: int) -> Costs:
    assert isinstance(costs.forward, Sequence)
    assert isinstance(costs.backward, Sequence)
    network = [share * time for time in costs.forward]
    behind = tuple(map(min, network, costs.backward))
    return replace(costs, network_forward=tuple(network), network_backward=behind, collectives=collectives)


def _spans(timelines: Sequence[Timeline]) -> dict[tuple[Action, ...], tuple[float, int]]:
    """How long groups of passes took, and how many they were; groups are alike in all but the number of a sequence."""
    found: dict[tuple[Action, ...], list[float]] = defaultdict(list)
    schedule = timelines[0].schedule
    count = len(schedule.slices)
    for timeline in timelines:
        for rank, row in enumerate(timeline.events):
            events = {event.action: event for event in row}
            for first, end in schedule.beside_of(rank):
                group = [events[action] for action in schedule.actions[rank][first:end] if action in events]
                alike = tuple(each.action._replace(unit=each.action.unit % count) for each in group)
                if group:
                    found[alike].append(ended(group) - min(each.start for each in group))
    return {group: (statistics.median(each), len(each)) for group, each in found.items()}


def _error(flat: FlatCosts, spans: dict[tuple[Action, ...], tuple[float, int]]) -> float:
    error = 0.0
    for group, (took, count) in spans.items():
        passes = in_turns([Parts.of(action, flat) for action in group], 0.0)
        error += count * (max(end for _, end in passes) - took) ** 2
    return error
