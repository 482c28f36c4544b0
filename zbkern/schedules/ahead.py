"""How many messages a rank may have been sent before it takes them, where the others are as far ahead as can be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from zbkern.schedules.dependencies import order_of_running
from zbkern.schedules.schedule import Schedule


def messages_ahead(schedule: Schedule) -> list[int]:
    """By rank, the most messages that wait there at once, whatever passes take: their memory is beside what passes
    hold. Each is an input of a chunk, or a gradient of its output.
    """
    return [round(most) for most in memory_ahead(schedule, lambda edge, unit: 1.0)]


def memory_ahead(schedule: Schedule, size: Callable[[int, int], float]) -> list[float]:
    """By rank, the most memory of such messages. size: of one between a chunk and the next, of a unit.

    A message is there as soon as the receiver has done what its sender must have heard of: each sender runs as far as
    it can, and so do all others. It waits until the receiver has taken it.
    """
    rows, placement = schedule.actions, schedule.placement
    last, units = len(placement) - 1, len(schedule.units)
    places = [0] * (2 * len(placement) * units)  # in their rows, of F and behind them of B, by chunk and unit
    behind = len(placement) * units
    for row in rows:
        for place, (kind, chunk, unit) in enumerate(row):
            if kind == "F":
                places[chunk * units + unit] = place
            elif kind in ("B", "BW"):
                places[behind + chunk * units + unit] = place
    # in a line of ranks whatever a sender has heard of the receiver's actions came from the receiver itself
    in_line = all(abs(a - b) <= 1 for a, b in pairwise(placement))
    told: dict[int, list[int]] = {}  # with each message, what its sender has heard
    heard = [[0] * len(rows) for _ in rows]  # by rank and by other rank, how many of its actions have been done
    changes = [[0.0] * (len(row) + 1) for row in rows]  # of what waits before each action
    by_row = ((rank, action) for rank, row in enumerate(rows) for action in row)
    for rank, (kind, chunk, unit) in by_row if in_line else order_of_running(rows, last + 1, schedule.beside):
        if kind not in ("F", "B", "BW"):
            continue
        source, target, first = (chunk - 1, chunk + 1, 0) if kind == "F" else (chunk + 1, chunk - 1, behind)
        if 0 <= source <= last and (peer := placement[source]) != rank:
            made = first + source * units + unit
            if not in_line:
                heard[rank] = [*map(max, heard[rank], told[made])]
            heard[rank][peer] = max(heard[rank][peer], places[made] + 1)
        if 0 <= target <= last and (peer := placement[target]) != rank:
            message = size(min(chunk, target), unit)
            changes[peer][heard[rank][peer]] += message
            changes[peer][places[first + target * units + unit] + 1] -= message
            if not in_line:
                told[first + chunk * units + unit] = heard[rank]
    return [max(accumulate(each)) for each in changes]
