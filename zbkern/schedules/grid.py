"""A schedule as a grid for a terminal, and the part of it that an error shows."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.schedules.actions import Action, ScheduleData
from zbkern.schedules.dependencies import Result, order_of_running, producer, result

_IDLE = "."
_EXCERPT_SLOTS = 5  # columns shown on each side of the action that an error marks
_EXCERPT_RANKS = 3  # rows shown on each side


def grid(schedule: ScheduleData) -> str:
    """See `Schedule.to_text`."""
    cells = cells_of(schedule)
    return "\n".join(lines(cells, *widths(cells)))


def excerpt(schedule: ScheduleData, rank: int, index: int) -> str:
    """The part of the grid around one action, which stands in brackets. Works for schedules that cannot run."""
    slots = _slots(schedule)
    marked = slots[rank][index] if slots[rank] else 0
    cells = cells_of(schedule, slots)
    if slots[rank]:
        cells[rank][marked] = f"[{cells[rank][marked]}]"
    first, stop = max(0, marked - _EXCERPT_SLOTS), marked + _EXCERPT_SLOTS + 1
    shown = slice(max(0, rank - _EXCERPT_RANKS), rank + _EXCERPT_RANKS + 1)
    column = widths([row[first:stop] for row in cells[shown]])[0]
    cut_out = [
        [*(["..."] if first else []), *row[first:stop], *(["..."] if stop < len(row) else [])] for row in cells[shown]
    ]
    return "\n".join(lines(cut_out, column, widths(cells)[1], shown.start))


def widths(cells: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Of a column, and of the names of the ranks before the first."""
    return 1 + max((len(cell) for row in cells for cell in row), default=1), len(f"rank {len(cells) - 1} ")


def lines(cells: Sequence[Sequence[str]], column: int, margin: int, first: int = 0) -> list[str]:
    """A line per rank, from rank `first` on."""
    return [
        (f"rank {rank}".ljust(margin) + "".join(cell.ljust(column) for cell in row)).rstrip()
        for rank, row in enumerate(cells, first)
    ]


def _slots(schedule: ScheduleData) -> list[list[int]]:
    """The time slot in which every action starts when each takes one, BW two, and messages none.

    Where the ranks can go no further, what is left follows without gaps, so that an excerpt can show it.
    """
    actions, chunks = schedule.actions, len(schedule.placement)
    ready: dict[Result | None, int] = {None: 0}
    slots: list[list[int]] = [[] for _ in actions]
    free = [0] * len(actions)

    def place(rank: int, action: Action, earliest: int) -> None:
        slot = max(free[rank], earliest)
        slots[rank].append(slot)
        free[rank] = slot + (2 if action.kind == "BW" else 1)
        made = result(action)
        if made is not None:
            ready[made] = free[rank]

    for rank, action in order_of_running(actions, chunks):
        place(rank, action, ready[producer(action, chunks)])
    for rank, row in enumerate(actions):
        for action in row[len(slots[rank]) :]:
            place(rank, action, 0)
    return slots


def cells_of(schedule: ScheduleData, slots: list[list[int]] | None = None) -> list[list[str]]:
    """What stands in the grid, by rank and slot. slots: in which every action starts, by default as early as it can."""
    slots = _slots(schedule) if slots is None else slots
    one_chunk_each = len(schedule.placement) == len(schedule.actions)
    width = max((row[-1] + 2 for row in slots if row), default=0)
    cells = []
    for rank, (row, starts) in enumerate(zip(schedule.actions, slots, strict=True)):
        line = [_IDLE] * width
        followed = {at for first, end in schedule.beside_of(rank) for at in range(first, end - 1)}
        for index, (action, slot) in enumerate(zip(row, starts, strict=True)):
            label = str(action) + "+" * (index in followed)
            line[slot] = label.removeprefix(str(action.chunk)) if one_chunk_each else label
            if action.kind == "BW":
                line[slot + 1] = "-"
        cells.append(line)
    while width and all(line[width - 1] == _IDLE for line in cells):
        width -= 1
    return [line[:width] for line in cells]
