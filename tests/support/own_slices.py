"""A schedule for sequences of which each has slices of its own."""

from __future__ import annotations

from zbkern.pipeline import Action, Schedule


def all_forwards_first(own_slices: list[tuple[int, ...]], placement: tuple[int, ...], split: bool) -> Schedule:
    """Sequences forward in order, and backward in order, each from its last slice."""
    units, forward, backward = 0, [], []
    for lengths in own_slices:
        own = range(units, units + len(lengths))
        units += len(lengths)
        forward += own
        backward += reversed(own)
    rows = []
    for rank in range(max(placement) + 1):
        chunks = [chunk for chunk, owner in enumerate(placement) if owner == rank]
        row = [Action("F", chunk, unit) for chunk in chunks for unit in forward]
        for chunk in reversed(chunks):
            row += [Action("B" if split else "BW", chunk, unit) for unit in backward]
        if split:
            row += [Action("W", chunk, unit) for chunk in chunks for unit in backward]
        rows.append(row)
    return Schedule.build(rows, placement, len(own_slices), "all forwards first", own_slices=own_slices)
