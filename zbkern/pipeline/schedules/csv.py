"""A schedule as CSV, in two dialects: ours and that of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zbkern.pipeline.schedules.actions import Action, ScheduleError

if TYPE_CHECKING:
    from zbkern.pipeline.schedules.schedule import Schedule

DIALECTS = ("zbkern", "torch")

_TO_TORCH = {"F": "F", "B": "I", "W": "W", "BW": "B"}
_FROM_TORCH = {letter: kind for kind, letter in _TO_TORCH.items()}
_TORCH_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_TORCH_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")  # run side by side there; here one after the other
_TORCH_OTHER = re.compile(r"\d+(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def write(schedule: Schedule, dialect: str) -> str:
    """See `Schedule.to_csv`."""
    _check_dialect("to_csv", dialect)
    lines = [",".join(_cell(action, dialect) for action in row) for row in schedule.actions]
    if dialect == "zbkern":
        placement = " ".join(map(str, schedule.placement))
        lines[:0] = [
            f"# name: {schedule.name}",
            f"# microbatches: {schedule.microbatches}",
            f"# placement: {placement}",
        ]
    return "\n".join(lines) + "\n"


def read(csv: str, dialect: str) -> tuple[list[tuple[Action, ...]], tuple[int, ...], int, str]:
    """Rows, placement, microbatches and name of the schedule; see `Schedule.from_csv`. They are not validated."""
    if not isinstance(csv, str):
        raise TypeError(
            f"from_csv: expected the text itself, as Path(file).read_text() gives it; got {type(csv).__name__} {csv!r}"
        )
    _check_dialect("from_csv", dialect)
    lines = csv.strip("\n").split("\n")
    header = dict(_header(line) for line in lines if line.startswith("#"))
    rows = [
        tuple(action for cell in line.split(",") for action in _actions(cell.strip(), dialect))
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
    return rows, placement, microbatches, header.get("name", "custom")


def _header(line: str) -> tuple[str, str]:
    key, _, value = line.lstrip("# ").partition(":")
    return key.strip(), value.strip()


def _cell(action: Action, dialect: str) -> str:
    if dialect == "zbkern":
        return str(action)
    if action.part is not None:
        raise ScheduleError(
            f'to_csv: torch has no slices of W, and the schedule has {action}; use dialect="zbkern", or whole W'
        )
    if action.kind not in _TO_TORCH:
        raise ScheduleError(
            f"to_csv: torch has no actions that offload, load or recompute, and the schedule has {action}; use "
            'dialect="zbkern", or a schedule without them'
        )
    return f"{action.chunk}{_TO_TORCH[action.kind]}{action.microbatch}"


def _actions(cell: str, dialect: str) -> list[Action]:
    if not cell:
        return []
    if dialect == "zbkern":
        return [Action.parse(cell)]
    pair = _TORCH_PAIR.fullmatch(cell)
    if pair is not None:
        return [action for part in pair[1].split(";") for action in _actions(part.strip(), dialect)]
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


def _check_dialect(function: str, dialect: str) -> None:
    if dialect not in DIALECTS:
        raise ScheduleError(f"{function}: dialect must be one of {DIALECTS}; got {dialect!r}")
