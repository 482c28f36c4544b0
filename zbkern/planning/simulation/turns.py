"""When passes beside each other run: they take turns on one compute lane, and their collectives on one network lane.

A pass with n collectives computes in n + 1 equal parts, and has one of them in flight after each part but the last. The
next pass then has its turn. A pass whose turn it is waits for its own collective before it goes on: whose turn it is
depends on the passes alone, as in the engine. A network that has one collective in flight begins no other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zbkern.planning.costs.flat import FlatCosts
from zbkern.schedules.actions import Action


class Parts(NamedTuple):
    """A pass: the time in which it computes, that of its collectives, and how many these are.

    A W has none; it gives way as often as the chunk's F does, between weights.
    """

    compute: float
    network: float
    collectives: int

    @classmethod
    def of(cls, action: Action, costs: FlatCosts, length: float | None = None) -> Parts:
        """length: of the pass in turn, which is what costs say, or so times a factor; None for the former."""
        kind, chunk, unit = action
        each = costs.of_unit(unit)
        count = max(1, round(each.collectives[chunk]))
        passes = {"F": each.forward, "R": each.recompute, "B": each.backward, "BW": each.fused, "W": each.weight}
        length = passes[kind][chunk] if length is None else length
        if kind == "W":
            return cls(length, 0.0, count)
        network = each.network_forward[chunk] if kind in ("F", "R") else each.network_backward[chunk]
        whole = passes["F" if kind == "R" else kind][chunk]
        network = min(length, network * length / whole) if whole else 0.0
        return cls(length - network, network, count if network else 0)


def in_turns(passes: Sequence[Parts], start: float) -> list[tuple[float, float]]:
    """When each begins and ends, where the first begins at `start` and each one's input is there."""
    now = lane = start  # when the rank can compute, and when its network is free
    begun: list[float | None] = [None] * len(passes)
    ends, arrived, left = [start] * len(passes), [start] * len(passes), [each.collectives for each in passes]
    waiting = [*range(len(passes))]
    at = 0
    while waiting:
        index = waiting[at]
        compute, network, count = passes[index]
        now = max(now, arrived[index])
        if begun[index] is None:
            begun[index] = now
        now += compute / (count + 1)
        if left[index]:
            left[index] -= 1
            if network:
                lane = arrived[index] = max(now, lane) + network / count
            at += 1
        else:
            ends[index] = now
            del waiting[at]
        at = at if at < len(waiting) else 0
    return [(begin or 0.0, end) for begin, end in zip(begun, ends, strict=True)]
