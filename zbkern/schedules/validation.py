"""validate: proves that a schedule is complete, in place, in order and free of deadlock, or says where it is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NoReturn

from zbkern.schedules import grid
from zbkern.schedules.actions import COPIES, KINDS, Action, ScheduleError, check_count
from zbkern.schedules.dependencies import Result, order_of_running, producer
from zbkern.schedules.slices import Unit, slice_lengths, units_of

_Rows = Sequence[Sequence[Action]]


def validate(
    rows: _Rows,
    placement: Sequence[int],
    microbatches: int,
    name: str,
    slices: Sequence[int],
    own_slices: Sequence[Sequence[int]] = (),
) -> None:
    """Returns when the schedule can run to its end; raises ScheduleError that marks the first offending action."""
    _check_frame(len(rows), placement, microbatches, name)
    for lengths in (slices, *own_slices):
        slice_lengths(f"Schedule {name}", lengths)
    if own_slices and (len(slices) > 1 or len(own_slices) != microbatches):
        raise ScheduleError(
            f"Schedule {name}: own_slices must be those of the {microbatches} microbatches, and slices be left out; "
            f"got {len(own_slices)} and slices {slices}"
        )
    units = units_of(microbatches, slices, own_slices) if own_slices else len(slices)
    count = sum(map(len, own_slices)) or microbatches * len(slices)
    for rank in range(len(rows)):
        _Row(rows, placement, name, count, units, rank).check()
    _check_progress(rows, placement, name)


def _check_frame(ranks: int, placement: Sequence[int], microbatches: int, name: str) -> None:
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        check_count(f"Schedule {name}: {what}", number, error=ScheduleError)
    for rank in placement:
        check_count(f"Schedule {name}: placement", rank, 0, ScheduleError)
    if sorted(set(placement)) != list(range(ranks)):
        raise ScheduleError(
            f"Schedule {name}: placement must give every one of the {ranks} ranks at least one chunk, and no other "
            f"rank; got {placement}"
        )


class _Row:
    """One rank's row, and everything that can be checked in it alone; `index` is the action that is looked at."""

    def __init__(
        self,
        rows: _Rows,
        placement: Sequence[int],
        name: str,
        count: int,  # of units
        units: Sequence[Unit] | int,  # or the number of slices of every sequence
        rank: int,
    ) -> None:
        self._rows, self._placement, self._name = rows, placement, name
        self._count, self._units, self._rank = count, units, rank
        self._index = 0
        self._done: dict[tuple[int, int], list[str]] = defaultdict(list)  # by (chunk, microbatch): kinds in their order
        self._parts: dict[tuple[int, int], tuple[int, set[int]]] = {}  # into how many a W is cut, and those that ran

    def check(self) -> None:
        for index, action in enumerate(self._rows[self._rank]):
            self._index = index
            self._check_place(action)
            self._check_order(action, self._done[action.chunk, action.microbatch])
        self._check_complete()

    def _check_place(self, action: Action) -> None:
        kind, chunk, microbatch, _ = action
        if kind not in KINDS:
            self._fail(f"its kind must be one of {KINDS}")
        if not 0 <= chunk < len(self._placement):
            self._fail(f"chunks are 0 to {len(self._placement) - 1}")
        if self._placement[chunk] != self._rank:
            self._fail(f"chunk {chunk} is placed on rank {self._placement[chunk]}")
        if not 0 <= microbatch < self._count:
            self._fail(f"microbatches are 0 to {self._count - 1}")

    def _check_order(self, action: Action, before: list[str]) -> None:
        """Against what has run of the same microbatch in the same chunk: `before`, to which the action is added."""
        kind, chunk, microbatch, part = action
        in_parts = (chunk, microbatch) in self._parts
        if kind in COPIES:
            self._check_copy(action, before, in_parts)
            before.append(kind)
            return
        if (kind == "W" and part is None and in_parts) or (kind if part is None else "W") in before:
            self._fail("it has run before; every pass runs once")
        if part is not None:
            self._check_part(action, part)
        if kind != "F" and "F" not in before:
            self._fail(f"its forward {Action('F', chunk, microbatch)} has not run yet")
        if kind == "W" and "B" not in before:
            self._fail("its BW has computed this W" if "BW" in before else "its B has not run yet")
        if kind in ("B", "BW") and ("B" in before or "BW" in before):
            self._fail("the backward of this microbatch has run; use either BW, or B and W")
        self._check_slices(kind, chunk, microbatch)
        if kind == "R":
            self._check_recompute(before)
        elif before.count("O") > before.count("L"):
            self._fail(f"what it needs is offloaded; {Action('L', chunk, microbatch)} must come first")
        if part is None or len(self._parts[chunk, microbatch][1]) == part[1]:
            before.append(kind)

    def _check_slices(self, kind: str, chunk: int, microbatch: int) -> None:
        """Of an F or a backward, against the slice of the same sequence that must have passed this chunk before."""
        unit = self._unit(microbatch)
        if kind == "F" and unit.slice and "F" not in self._done[chunk, microbatch - 1]:
            self._fail(f"slices go forward in order; {Action('F', chunk, microbatch - 1)} must come first")
        after = None if unit.is_last else self._done[chunk, microbatch + 1]
        if kind in ("B", "BW") and after is not None and not {"B", "BW"} & {*after}:
            self._fail(f"slices go backward from the last; {Action('B', chunk, microbatch + 1)} must come first")

    def _unit(self, microbatch: int) -> Unit:
        if isinstance(self._units, int):  # no list of all: a wrong schedule may name a microbatch of any number
            return Unit(*divmod(microbatch, self._units), self._units)
        return self._units[microbatch]

    def _check_copy(self, action: Action, before: list[str], in_parts: bool) -> None:
        """Of an O or L: before B it is about activations, after B about what W needs; each is offloaded once."""
        kind, chunk, microbatch, part = action
        if part is not None:
            self._fail("only a W has parts")
        if "F" not in before:
            self._fail(f"its forward {Action('F', chunk, microbatch)} has not run yet")
        if "BW" in before or "W" in before:
            self._fail("all passes of this microbatch have run; nothing of it is left")
        if in_parts:
            self._fail("a part of its W has run; copy before the first part")
        since = before[before.index("B") :] if "B" in before else before
        if kind in since:
            self._fail("it has run before; tensors are offloaded and loaded once")
        if kind == "L" and "O" not in since:
            self._fail(f"nothing is offloaded; {Action('O', chunk, microbatch)} has not run yet")
        if kind == "O" and "R" in since:
            self._fail("its activations are recomputed; use either R, or O and L")

    def _check_recompute(self, before: list[str]) -> None:
        if "B" in before or "BW" in before:
            self._fail("the backward of this microbatch has run; recompute before it")
        if "O" in before:
            self._fail("its activations are offloaded; use either R, or O and L")

    def _check_part(self, action: Action, part: tuple[int, int]) -> None:
        if action.kind != "W":
            self._fail("only a W has parts")
        if not 0 <= part[0] < part[1]:
            self._fail("part=(i, n) needs 0 <= i < n")
        first, seen = self._parts.setdefault((action.chunk, action.microbatch), (part[1], set()))
        if first != part[1]:
            self._fail(f"earlier parts of this W are {first}ths")
        if part[0] in seen:
            self._fail("it has run before; every part runs once")
        seen.add(part[0])

    def _check_complete(self) -> None:
        for chunk in (chunk for chunk, owner in enumerate(self._placement) if owner == self._rank):
            for microbatch in range(self._count):
                before = self._done[chunk, microbatch]
                wanted = ("F",) if "BW" in before else ("F", "B", "W")
                missing = next((kind for kind in wanted if kind not in before), None)
                if missing is not None:
                    self._fail_missing(Action(missing, chunk, microbatch))

    def _fail(self, why: str) -> NoReturn:
        _fail(self._rows, self._placement, self._name, self._rank, self._index, why)

    def _fail_missing(self, action: Action) -> NoReturn:
        parts = self._parts.get((action.chunk, action.microbatch))
        if action.kind == "W" and parts is not None:
            action = action._replace(part=(next(number for number in count() if number not in parts[1]), parts[0]))
        around = grid.excerpt(self._rows, self._placement, self._rank, len(self._rows[self._rank]) - 1)
        raise ScheduleError(
            f"Schedule {self._name}: rank {self._rank}: {action} is missing; add it to this rank\n{around}"
        )


def _check_progress(rows: _Rows, placement: Sequence[int], name: str) -> None:
    """Runs every rank as far as it gets. A rank that stops waits for a pass that its owner never reaches."""
    position = [0] * len(rows)
    for rank, _ in order_of_running(rows, len(placement)):
        position[rank] += 1
    stuck: dict[int, Result] = {}
    for rank, row in enumerate(rows):
        need = producer(row[position[rank]], len(placement)) if position[rank] < len(row) else None
        if need is not None:
            stuck[rank] = need
    if not stuck:
        return
    owner = {rank: placement[need[1]] for rank, need in stuck.items()}
    cycle = _cycle(owner)
    waits = [
        f"rank {rank} at {rows[rank][position[rank]]} waits for {Action(*stuck[rank])}, rank {owner[rank]}"
        for rank in cycle
    ]
    why = "deadlock: these wait for each other\n  " + "\n  ".join(waits)
    _fail(rows, placement, name, cycle[0], position[cycle[0]], why)


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


def _fail(rows: _Rows, placement: Sequence[int], name: str, rank: int, index: int, why: str) -> NoReturn:
    around = grid.excerpt(rows, placement, rank, index)
    raise ScheduleError(f"Schedule {name}: rank {rank}, action {index}, {rows[rank][index]}: {why}\n{around}")
