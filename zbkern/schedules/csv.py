"""A schedule as CSV: a row per rank, in the letters of torch.distributed.pipelining (I is our B, and B our BW).

Our R, O and L are written as in `Action`; torch has no word for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zbkern.schedules.actions import Action, Ranges, ScheduleData, ScheduleError

Rows = Sequence[Sequence[Action]]

_TO_TORCH = {"F": "F", "B": "I", "W": "W", "BW": "B"}
_TO_OURS = {letter: kind for kind, letter in _TO_TORCH.items()} | {"R": "R", "O": "O", "L": "L"}
_CELL = re.compile(r"(\d+)([FIWBROL])(\d+)")
_FILLED = re.compile(r"[^,]+")  # one after the other: a line may be long, and have nothing but commas
_GROUP = re.compile(r"\((.*)\)OVERLAP_F_B")  # side by side
_OTHER = re.compile(r"\d+(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def write(schedule: ScheduleData, header: bool) -> str:
    """See `Schedule.to_csv`."""
    lines = [",".join(_cells(schedule, rank)) for rank in range(len(schedule.actions))]
    if not header:
        _check_torch_has(schedule)
        return "\n".join(lines) + "\n"
    cut = ", ".join(" ".join(map(str, each)) for each in schedule.own_slices or (schedule.slices,))
    cut += "," * (len(schedule.own_slices) == 1)  # of one microbatch its own, as a tuple of one is written
    above = [f"# name: {schedule.name}", *([] if cut == "1" else [f"# slices: {cut}"])]
    return "\n".join([*above, *lines]) + "\n"


def read(text: str) -> ScheduleData:
    """See `Schedule.from_csv`; not validated."""
    lines = text.strip("\n").split("\n")
    comments = [line.lstrip("# ").partition(":") for line in lines if line.startswith("#")]
    header = {key.strip(): value.strip() for key, _, value in comments}
    read_rows = [_row(line) for line in lines if line[:1] != "#"]
    rows, beside = tuple(row for row, _ in read_rows), tuple(ranges for _, ranges in read_rows)
    units = 1 + max((action.unit for row in rows for action in row), default=-1)
    slices, comma, own = header.get("slices", "1").partition(",")
    cut = tuple(_slices(part) for part in (slices, *(own.split(",") if own else ())))
    same, own_slices = ((1,), cut) if comma else (cut[0], ())
    microbatches = len(own_slices) or -(-units // len(same))
    return ScheduleData(rows, _placement(rows), microbatches, header.get("name", "custom"), same, own_slices, beside)


def _slices(text: str) -> tuple[int, ...]:
    lengths = text.split()
    if not lengths or not all(length.isdecimal() for length in lengths):
        raise ScheduleError(f"from_csv: slices must be lengths, such as '# slices: 3 2 2'; got {text[:60]!r}")
    return tuple(map(int, lengths))


def _row(line: str) -> tuple[tuple[Action, ...], Ranges]:
    row: list[Action] = []
    ranges = []
    for cell in _FILLED.finditer(line):
        first, group = len(row), _GROUP.fullmatch(cell[0].strip())
        for part in group[1].split(";") if group else [cell[0]]:
            row += _actions(part.strip())
        if len(row) - first > 1:
            ranges.append((first, len(row)))
    return tuple(row), tuple(ranges)


def _cells(schedule: ScheduleData, rank: int) -> list[str]:
    cells = [*map(_cell, schedule.actions[rank])]
    for first, end in reversed(schedule.beside_of(rank)):
        cells[first:end] = [f"({';'.join(cells[first:end])})OVERLAP_F_B"]
    return cells


def _cell(action: Action) -> str:
    text = str(action)
    return text.replace(action.kind, _TO_TORCH.get(action.kind, action.kind))


def _check_torch_has(schedule: ScheduleData) -> None:
    if any(len(each) > 1 for each in (schedule.slices, *schedule.own_slices)):
        raise ScheduleError(
            "to_csv: torch has no slices of sequences, and the schedule has; leave header=False out, or use a schedule "
            "without them"
        )
    for action in (action for row in schedule.actions for action in row):
        if action.kind not in _TO_TORCH:
            raise ScheduleError(
                f"to_csv: torch has no actions that offload, load or recompute, and the schedule has {action}; leave "
                "header=False out, or use a schedule without them"
            )
    for rank, ranges in enumerate(schedule.beside):
        for passes in (schedule.actions[rank][first:end] for first, end in ranges):
            if [action.kind for action in passes] not in (["F", "BW"], ["F", "B"]):
                raise ScheduleError(
                    "to_csv: torch overlaps an F with one backward behind it, and the schedule has "
                    f"{'+'.join(map(str, passes))}; leave header=False out, or use a schedule without it"
                )


def _actions(cell: str) -> list[Action]:
    if not cell or _OTHER.fullmatch(cell):
        return []
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"from_csv: expected an action of torch.distributed.pipelining, such as '0F3', '0I3', '0W3' or '0B3', or "
            f"one of ours, such as '0R3', '0O3' or '0L3'; got {cell[:60]!r}"
        )
    chunk, letter, rest = match.groups()
    return [Action.parse(f"{chunk}{_TO_OURS[letter]}{rest}")]


def _placement(rows: Rows) -> tuple[int, ...]:
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if owners.setdefault(action.chunk, rank) != rank:
                raise ScheduleError(
                    f"from_csv: chunk {action.chunk} is on rank {owners[action.chunk]} and, in {action}, on rank {rank}"
                )
    if sorted(owners) != list(range(len(owners))):
        raise ScheduleError(f"from_csv: chunks must be numbered from 0 without gaps; got {sorted(owners)}")
    return tuple(owners[chunk] for chunk in range(len(owners)))
