"""validate: proves that a schedule is complete, in place, in order and free of deadlock, or says where it is not."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NoReturn

from zbkern.pipeline.schedules import grid
from zbkern.pipeline.schedules.actions import COPIES, KINDS, Action, ScheduleError
from zbkern.pipeline.schedules.dependencies import Result, order_of_running, producer

if TYPE_CHECKING:
    from zbkern.pipeline.schedules.schedule import Schedule

_Done = dict[tuple[int, int], list[str]]  # (chunk, microbatch) -> the kinds that have run, in their order
_Slices = dict[
    tuple[int, int], tuple[int, set[int]]
]  # (chunk, microbatch) -> how many slices its W has, those that ran


def validate(schedule: Schedule) -> None:
    """Returns when `schedule` can run to its end; raises ScheduleError that marks the first offending action."""
    _check_frame(schedule)
    for rank in range(schedule.stages):
        _check_row(schedule, rank)
    _check_progress(schedule)


def _check_frame(schedule: Schedule) -> None:
    ranks = schedule.stages
    for what, value in (("microbatches", schedule.microbatches), *(("placement", rank) for rank in schedule.placement)):
        if not isinstance(value, int):
            raise TypeError(f"Schedule {schedule.name}: {what} must be int; got {type(value).__name__} {value!r}")
    if ranks < 1 or schedule.microbatches < 1:
        raise ScheduleError(
            f"Schedule {schedule.name}: stages and microbatches must be at least 1; got {ranks} and "
            f"{schedule.microbatches}"
        )
    if sorted(set(schedule.placement)) != list(range(ranks)):
        raise ScheduleError(
            f"Schedule {schedule.name}: placement must give every one of the {ranks} ranks at least one chunk, and no "
            f"other rank; got {schedule.placement}"
        )


def _check_row(schedule: Schedule, rank: int) -> None:
    """Everything that can be checked in one rank's row alone."""
    done: _Done = defaultdict(list)
    slices: _Slices = {}
    for index, action in enumerate(schedule.actions[rank]):
        _check_types(schedule, rank, index, action)
        _check_place(schedule, rank, index, action)
        _check_order(schedule, rank, index, action, done[action.chunk, action.microbatch], slices)
    _check_complete(schedule, rank, done, slices)


def _check_types(schedule: Schedule, rank: int, index: int, action: object) -> None:
    where = f"Schedule {schedule.name}: rank {rank}, action {index}"
    if not isinstance(action, Action):
        raise TypeError(
            f'{where} must be an Action, such as Action("F", chunk=0, microbatch=3); got '
            f"{type(action).__name__} {action!r}"
        )
    if not (isinstance(action.chunk, int) and isinstance(action.microbatch, int)):
        raise TypeError(f"{where}: chunk and microbatch must be int; got {action!r}")
    part = action.part
    if part is not None and not (isinstance(part, tuple) and [type(number) for number in part] == [int, int]):
        raise TypeError(f"{where}: part must be (i, n) or None; got {part!r}")


def _check_place(schedule: Schedule, rank: int, index: int, action: Action) -> None:
    kind, chunk, microbatch, _ = action
    if kind not in KINDS:
        _fail(schedule, rank, index, f"its kind must be one of {KINDS}")
    if not 0 <= chunk < len(schedule.placement):
        _fail(schedule, rank, index, f"chunks are 0 to {len(schedule.placement) - 1}")
    if schedule.placement[chunk] != rank:
        _fail(schedule, rank, index, f"chunk {chunk} is placed on rank {schedule.placement[chunk]}")
    if not 0 <= microbatch < schedule.microbatches:
        _fail(schedule, rank, index, f"microbatches are 0 to {schedule.microbatches - 1}")


def _check_order(schedule: Schedule, rank: int, index: int, action: Action, before: list[str], slices: _Slices) -> None:
    """Against what has run of the same microbatch in the same chunk: `before`, to which the action is added."""
    kind, chunk, microbatch, part = action
    if kind in COPIES:
        _check_copy(schedule, rank, index, before, sliced=(chunk, microbatch) in slices)
        before.append(kind)
        return
    whole_after_slice = kind == "W" and part is None and (chunk, microbatch) in slices
    if whole_after_slice or (kind if part is None else "W") in before:
        _fail(schedule, rank, index, "it has run before; every pass runs once")
    if part is not None:
        _check_part(schedule, rank, index, slices)
    if kind != "F" and "F" not in before:
        _fail(schedule, rank, index, f"its forward {Action('F', chunk, microbatch)} has not run yet")
    if kind == "W" and "B" not in before:
        _fail(schedule, rank, index, "its BW has computed this W" if "BW" in before else "its B has not run yet")
    if kind in ("B", "BW") and ("B" in before or "BW" in before):
        _fail(schedule, rank, index, "the backward of this microbatch has run; use either BW, or B and W")
    if kind == "R":
        _check_recompute(schedule, rank, index, before)
    elif before.count("O") > before.count("L"):
        _fail(schedule, rank, index, f"what it needs is offloaded; {Action('L', chunk, microbatch)} must come first")
    if part is None or len(slices[chunk, microbatch][1]) == part[1]:
        before.append(kind)


def _check_copy(schedule: Schedule, rank: int, index: int, before: list[str], sliced: bool) -> None:
    """Of an O or L: before B it is about activations, after B about what W needs; each is offloaded once."""
    kind, chunk, microbatch, part = schedule.actions[rank][index]
    if part is not None:
        _fail(schedule, rank, index, "only a W can be sliced")
    if "F" not in before:
        _fail(schedule, rank, index, f"its forward {Action('F', chunk, microbatch)} has not run yet")
    if "BW" in before or "W" in before:
        _fail(schedule, rank, index, "all passes of this microbatch have run; nothing of it is left")
    if sliced:
        _fail(schedule, rank, index, "a slice of its W has run; copy before the first slice")
    since = before[before.index("B") :] if "B" in before else before
    if kind in since:
        _fail(schedule, rank, index, "it has run before; tensors are offloaded and loaded once")
    if kind == "L" and "O" not in since:
        _fail(schedule, rank, index, f"nothing is offloaded; {Action('O', chunk, microbatch)} has not run yet")
    if kind == "O" and "R" in since:
        _fail(schedule, rank, index, "its activations are recomputed; use either R, or O and L")


def _check_recompute(schedule: Schedule, rank: int, index: int, before: list[str]) -> None:
    if "B" in before or "BW" in before:
        _fail(schedule, rank, index, "the backward of this microbatch has run; recompute before it")
    if "O" in before:
        _fail(schedule, rank, index, "its activations are offloaded; use either R, or O and L")


def _check_complete(schedule: Schedule, rank: int, done: _Done, slices: _Slices) -> None:
    for chunk in schedule.chunks_of(rank):
        for microbatch in range(schedule.microbatches):
            before = done[chunk, microbatch]
            wanted = ("F",) if "BW" in before else ("F", "B", "W")
            missing = next((kind for kind in wanted if kind not in before), None)
            if missing is not None:
                _fail_missing(schedule, rank, Action(missing, chunk, microbatch), slices.get((chunk, microbatch)))


def _check_part(schedule: Schedule, rank: int, index: int, slices: _Slices) -> None:
    kind, chunk, microbatch, part = schedule.actions[rank][index]
    if kind != "W":
        _fail(schedule, rank, index, "only a W can be sliced")
    assert part is not None
    number, count = part
    if not 0 <= number < count:
        _fail(schedule, rank, index, "part=(i, n) needs 0 <= i < n")
    first, seen = slices.setdefault((chunk, microbatch), (count, set()))
    if first != count:
        _fail(schedule, rank, index, f"earlier slices of this W are {first}ths")
    if number in seen:
        _fail(schedule, rank, index, "it has run before; every slice runs once")
    seen.add(number)


def _check_progress(schedule: Schedule) -> None:
    """Runs every rank as far as it gets. A rank that stops waits for a pass that its owner never reaches."""
    chunks = len(schedule.placement)
    position = [0] * schedule.stages
    for rank, _ in order_of_running(schedule.actions, chunks):
        position[rank] += 1
    stuck: dict[int, Result] = {}
    for rank, row in enumerate(schedule.actions):
        need = producer(row[position[rank]], chunks) if position[rank] < len(row) else None
        if need is not None:
            stuck[rank] = need
    if not stuck:
        return
    owner = {rank: schedule.placement[need[1]] for rank, need in stuck.items()}
    cycle = _cycle(owner)
    lines = [
        f"rank {rank} at {schedule.actions[rank][position[rank]]} waits for {Action(*stuck[rank])}, rank {owner[rank]}"
        for rank in cycle
    ]
    _fail(schedule, cycle[0], position[cycle[0]], "deadlock: these wait for each other\n  " + "\n  ".join(lines))


def _cycle(owner: dict[int, int]) -> list[int]:
    """The ranks that wait for each other in a ring, from the lowest on; owner[rank] is whom a stuck rank waits for.

    There is one: a stuck rank waits for a pass that the other rank has (rows are complete) and is stuck before.
    """
    seen: list[int] = []
    rank = min(owner)
    while rank not in seen:
        seen.append(rank)
        rank = owner[rank]
    ring = seen[seen.index(rank) :]
    first = ring.index(min(ring))
    return ring[first:] + ring[:first]


def _fail(schedule: Schedule, rank: int, index: int, why: str) -> NoReturn:
    action = schedule.actions[rank][index]
    around = grid.excerpt(schedule, rank, index)
    raise ScheduleError(f"Schedule {schedule.name}: rank {rank}, action {index}, {action}: {why}\n{around}")


def _fail_missing(schedule: Schedule, rank: int, action: Action, slices: tuple[int, set[int]] | None) -> NoReturn:
    if action.kind == "W" and slices is not None:
        count, seen = slices
        action = action._replace(part=(min(set(range(count)) - seen), count))
    around = grid.excerpt(schedule, rank, len(schedule.actions[rank]) - 1)
    raise ScheduleError(f"Schedule {schedule.name}: rank {rank}: {action} is missing; add it to this rank\n{around}")
