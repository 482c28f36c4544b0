"""A schedule as a grid for a terminal, and the part of it that an error shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.dependencies import Result, order_of_running, producer, result

if TYPE_CHECKING:
    from zbkern.pipeline.schedules.schedule import Schedule

_IDLE = "."
_EXCERPT_SLOTS = 5  # columns shown on each side of the action that an error marks
_EXCERPT_RANKS = 3  # rows shown on each side


def grid(schedule: Schedule, width: int | None = None) -> str:
    """See `Schedule.to_text`."""
    if width is not None and not isinstance(width, int):
        raise TypeError(f"to_text: width must be a number of characters or None; got {type(width).__name__} {width!r}")
    cells = _cells(schedule, _slots(schedule))
    column = 1 + max((len(cell) for row in cells for cell in row), default=1)
    margin = len(f"rank {schedule.stages - 1} ")
    total = max((len(row) for row in cells), default=0)
    per_block = total if width is None else max(1, (width - margin) // column)
    blocks = []
    for first in range(0, max(total, 1), max(per_block, 1)):
        lines = [
            (
                f"rank {rank}".ljust(margin) + "".join(cell.ljust(column) for cell in row[first : first + per_block])
            ).rstrip()
            for rank, row in enumerate(cells)
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def excerpt(schedule: Schedule, rank: int, index: int) -> str:
    """The part of the grid around one action, which stands in brackets. Works for schedules that cannot run."""
    slots = _slots(schedule)
    marked = slots[rank][index] if slots[rank] else 0
    cells = _cells(schedule, slots)
    if slots[rank]:
        cells[rank][marked] = f"[{cells[rank][marked]}]"
    first, stop = max(0, marked - _EXCERPT_SLOTS), marked + _EXCERPT_SLOTS + 1
    ranks = range(max(0, rank - _EXCERPT_RANKS), min(schedule.stages, rank + _EXCERPT_RANKS + 1))
    column = 1 + max((len(cell) for each in ranks for cell in cells[each][first:stop]), default=1)
    margin = len(f"rank {schedule.stages - 1} ")
    lines = []
    for each in ranks:
        row = [*(["..."] if first else []), *cells[each][first:stop], *(["..."] if stop < len(cells[each]) else [])]
        lines.append((f"rank {each}".ljust(margin) + "".join(cell.ljust(column) for cell in row)).rstrip())
    return "\n".join(lines)


def _slots(schedule: Schedule) -> list[list[int]]:
    """The time slot in which every action starts when each takes one, BW two, and messages none.

    Where the ranks can go no further, what is left follows without gaps, so that an excerpt can show it.
    """
    chunks = len(schedule.placement)
    ready: dict[Result | None, int] = {None: 0}
    slots: list[list[int]] = [[] for _ in schedule.actions]
    free = [0] * schedule.stages

    def place(rank: int, action: Action, earliest: int) -> None:
        slot = max(free[rank], earliest)
        slots[rank].append(slot)
        free[rank] = slot + (2 if action.kind == "BW" else 1)
        made = result(action)
        if made is not None:
            ready[made] = free[rank]

    for rank, action in order_of_running(schedule.actions, chunks):
        place(rank, action, ready[producer(action, chunks)])
    for rank, row in enumerate(schedule.actions):
        for action in row[len(slots[rank]) :]:
            place(rank, action, 0)
    return slots


def _cells(schedule: Schedule, slots: list[list[int]]) -> list[list[str]]:
    one_chunk_each = len(schedule.placement) == schedule.stages
    width = max((row[-1] + 2 for row in slots if row), default=0)
    cells = []
    for row, starts in zip(schedule.actions, slots, strict=True):
        line = [_IDLE] * width
        for action, slot in zip(row, starts, strict=True):
            label = str(action)
            line[slot] = label.removeprefix(str(action.chunk)) if one_chunk_each else label
            if action.kind == "BW":
                line[slot + 1] = "-"
        cells.append(line)
    while width and all(line[width - 1] == _IDLE for line in cells):
        width -= 1
    return [line[:width] for line in cells]
