"""Schedules as text: the grid for a terminal, the excerpt that an error shows, and CSV in two dialects."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zbkern.pipeline.actions import Action, Schedule, ScheduleError
from zbkern.pipeline.dependencies import Result, order_of_running, producer, result

DIALECTS = ("zbkern", "torch")

_IDLE = "."
_EXCERPT_SLOTS = 5  # columns shown on each side of the action that an error marks
_EXCERPT_RANKS = 3  # rows shown on each side

_TO_TORCH = {"F": "F", "B": "I", "W": "W", "BW": "B"}
_FROM_TORCH = {letter: kind for kind, letter in _TO_TORCH.items()}
_TORCH_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_TORCH_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")  # run side by side there; here one after the other
_TORCH_OTHER = re.compile(r"\d+(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


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


def to_csv(schedule: Schedule, dialect: str) -> str:
    """See `Schedule.to_csv`."""
    _check_dialect("to_csv", dialect)
    lines = [",".join(_write(action, dialect) for action in row) for row in schedule.actions]
    if dialect == "zbkern":
        placement = " ".join(map(str, schedule.placement))
        lines[:0] = [
            f"# name: {schedule.name}",
            f"# microbatches: {schedule.microbatches}",
            f"# placement: {placement}",
        ]
    return "\n".join(lines) + "\n"


def from_csv(csv: str, dialect: str, name: str | None = None) -> Schedule:
    """See `Schedule.from_csv`."""
    if not isinstance(csv, str):
        raise TypeError(
            f"from_csv: expected the text itself, as Path(file).read_text() gives it; got {type(csv).__name__} {csv!r}"
        )
    _check_dialect("from_csv", dialect)
    lines = csv.strip("\n").split("\n")
    header = dict(_header(line) for line in lines if line.startswith("#"))
    rows = [
        tuple(action for cell in line.split(",") for action in _read(cell.strip(), dialect))
        for line in lines
        if not line.startswith("#")
    ]
    microbatches = 1 + max((action.microbatch for row in rows for action in row), default=-1)
    placement = _placement(rows)
    if header.get("microbatches", str(microbatches)) != str(microbatches):
        raise ScheduleError(
            f"from_csv: the header says {header['microbatches']} microbatches and the actions have {microbatches}"
        )
    if header.get("placement", placement) not in (placement, " ".join(map(str, placement))):
        raise ScheduleError(
            f"from_csv: the header says placement {header['placement']} and the actions have {placement}"
        )
    return Schedule.build(rows, placement, microbatches, name or header.get("name", "custom"))


def _header(line: str) -> tuple[str, str]:
    key, _, value = line.lstrip("# ").partition(":")
    return key.strip(), value.strip()


def _write(action: Action, dialect: str) -> str:
    if dialect == "zbkern":
        return str(action)
    if action.part is not None:
        raise ScheduleError(
            f'to_csv: torch has no slices of W, and the schedule has {action}; use dialect="zbkern", or whole W'
        )
    return f"{action.chunk}{_TO_TORCH[action.kind]}{action.microbatch}"


def _read(cell: str, dialect: str) -> list[Action]:
    if not cell:
        return []
    if dialect == "zbkern":
        return [Action.parse(cell)]
    pair = _TORCH_PAIR.fullmatch(cell)
    if pair is not None:
        return [action for part in pair[1].split(";") for action in _read(part.strip(), dialect)]
    if _TORCH_OTHER.fullmatch(cell):
        return []
    match = _TORCH_ACTION.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"from_csv: expected an action of torch.distributed.pipelining, such as '0F3', '0I3', '0W3' or '0B3'; "
            f"got {cell!r}"
        )
    chunk, letter, microbatch = match.groups()
    return [Action(_FROM_TORCH[letter], int(chunk), int(microbatch))]


def _placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    homes: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if homes.setdefault(action.chunk, rank) != rank:
                raise ScheduleError(
                    f"from_csv: chunk {action.chunk} is on rank {homes[action.chunk]} and, in {action}, on rank {rank}"
                )
    if sorted(homes) != list(range(len(homes))):
        raise ScheduleError(f"from_csv: chunks must be numbered from 0 without gaps; got {sorted(homes)}")
    return tuple(homes[chunk] for chunk in range(len(homes)))


def _check_dialect(function: str, dialect: str) -> None:
    if dialect not in DIALECTS:
        raise ScheduleError(f"{function}: dialect must be one of {DIALECTS}; got {dialect!r}")


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
