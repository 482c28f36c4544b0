"""validate: proves that a schedule is complete, in place, in order and free of deadlock, or says where it is not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

from zbkern.schedules import grid
from zbkern.schedules.actions import COPIES, KINDS, Action, ScheduleData, ScheduleError, check_count
from zbkern.schedules.dependencies import Result, order_of_running, producer, result
from zbkern.schedules.slices import Unit, slice_lengths, units_of

_ONCE = "it has run before; every pass runs once"
_RULES = (
    *((kind, ran, _ONCE) for kind, ran in ("FF", "BB", "XX", "RR", "WW")),
    ("BWXROL", r"^[^F]*$", "its forward {1}F{2} has not run yet"),
    ("W", r"X", "its BW has computed this W"),
    ("W", r"^[^B]*$", "its B has not run yet"),
    ("BX", r"[BX]", "the backward of this unit has run; use either BW, or B and W"),
    ("R", r"[BX]", "the backward of this unit has run; recompute before it"),
    ("R", r"O", "its activations are offloaded; use either R, or O and L"),
    ("OL", r"[WX]", "all passes of this unit have run; nothing of it is left"),
    ("O", r"O[^B]*$", "it has run before; tensors are offloaded and loaded once"),
    ("L", r"L[^B]*$", "it has run before; tensors are offloaded and loaded once"),
    ("L", r"(^|B)[^OB]*$", "nothing is offloaded; {1}O{2} has not run yet"),
    ("O", r"R[^B]*$", "its activations are recomputed; use either R, or O and L"),
    ("FBWX", r"O[^L]*$", "what it needs is offloaded; {1}L{2} must come first"),
)
"""Which actions may not run after what has run before of their unit in their chunk, and why.

What has run is a string with a letter for each kind, in order; X is a BW.
"""


def validate(schedule: ScheduleData) -> None:
    """Returns when the schedule can run to its end; raises ScheduleError that marks the first offending action."""
    ranks, microbatches, placement = len(schedule.actions), schedule.microbatches, schedule.placement
    slices, own_slices, where = schedule.slices, schedule.own_slices, f"Schedule {schedule.name}"
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        check_count(f"{where}: {what}", number, error=ScheduleError)
    for rank in placement:
        check_count(f"{where}: placement", rank, 0, ScheduleError)
    if sorted(set(placement)) != list(range(ranks)):
        raise ScheduleError(
            f"{where}: placement must give every one of the {ranks} ranks at least one chunk, and no other rank; got "
            f"{placement}"
        )
    for lengths in (slices, *own_slices):
        slice_lengths(where, lengths)
    if own_slices and (len(slices) > 1 or len(own_slices) != microbatches):
        raise ScheduleError(
            f"{where}: own_slices must be those of the {microbatches} microbatches, and slices be left out; got "
            f"{len(own_slices)} and slices {slices}"
        )
    units = units_of(microbatches, slices, own_slices) if own_slices else len(slices)
    for rank in range(ranks):
        _Row(schedule, units, rank).check()
    if schedule.beside:
        _check_beside(schedule)
    _check_progress(schedule)


class _Row:
    """One rank's row, and everything that can be checked in it alone."""

    def __init__(self, schedule: ScheduleData, units: Sequence[Unit] | int, rank: int) -> None:
        """units: or the number of slices of every sequence."""
        self._schedule, self._placement, self._units, self._rank = schedule, schedule.placement, units, rank
        self._count = schedule.microbatches * units if isinstance(units, int) else len(units)
        self._ran: dict[tuple[int, int], str] = defaultdict(str)  # by (chunk, unit): letters, as in _RULES

    def check(self) -> None:
        for index, action in enumerate(self._schedule.actions[self._rank]):
            why = self._wrong_place(action) or self._wrong_order(action)
            if why is not None:
                _fail(self._schedule, self._rank, index, why)
        for chunk in (chunk for chunk, owner in enumerate(self._placement) if owner == self._rank):
            for unit in range(self._count):
                ran = self._ran[chunk, unit]
                missing = next((kind for kind in "FBW" if kind not in ran), None)
                if missing is not None and "X" not in ran:
                    self._fail_missing(Action(missing, chunk, unit))

    def _wrong_place(self, action: Action) -> str | None:
        kind, chunk, unit = action
        if kind not in KINDS:
            return f"its kind must be one of {KINDS}"
        if not 0 <= chunk < len(self._placement):
            return f"chunks are 0 to {len(self._placement) - 1}"
        if self._placement[chunk] != self._rank:
            return f"chunk {chunk} is placed on rank {self._placement[chunk]}"
        return None if 0 <= unit < self._count else f"units are 0 to {self._count - 1}"

    def _wrong_order(self, action: Action) -> str | None:
        """Against what has run of the same unit in the same chunk, to which the action is added."""
        kind, chunk, unit = action
        ran, letter = self._ran[chunk, unit], "X" if kind == "BW" else kind
        why = _why_not(letter, ran)
        if why is not None:
            return why.format(kind, chunk, unit)
        self._ran[chunk, unit] = ran + letter
        return self._wrong_slice(kind, chunk, unit) if kind in ("F", "B", "BW") else None

    def _wrong_slice(self, kind: str, chunk: int, unit: int) -> str | None:
        """Against the slice of the same sequence that must have passed this chunk before."""
        units = self._units  # no list where all are alike: a wrong schedule may name a unit of any number
        what = Unit(*divmod(unit, units), units) if isinstance(units, int) else units[unit]
        if kind == "F" and what.slice and "F" not in self._ran[chunk, unit - 1]:
            return f"slices go forward in order; {Action('F', chunk, unit - 1)} must come first"
        if kind != "F" and not what.is_last and not {*"BX"} & {*self._ran[chunk, unit + 1]}:
            return f"slices go backward from the last; {Action('B', chunk, unit + 1)} must come first"
        return None

    def _fail_missing(self, action: Action) -> NoReturn:
        around = grid.excerpt(self._schedule, self._rank, len(self._schedule.actions[self._rank]) - 1)
        raise ScheduleError(
            f"Schedule {self._schedule.name}: rank {self._rank}: {action} is missing; add it to this rank\n{around}"
        )


@cache
def _why_not(letter: str, ran: str) -> str | None:
    """The first rule against an action of this letter; there are few such histories of a unit."""
    return next((why for letters, before, why in _RULES if letter in letters and re.search(before, ran)), None)


def _check_beside(schedule: ScheduleData) -> None:
    """What runs side by side: neighbours, of which none waits for another, or changes what another is in the midst of.

    That they wait for no F or B of another chunk that is among them is for `_check_progress`.
    """
    if len(schedule.beside) != len(schedule.actions):
        raise ScheduleError(
            f"Schedule {schedule.name}: beside must be ranges for each of the {len(schedule.actions)} ranks, or (); "
            f"got {len(schedule.beside)}"
        )
    for rank, ranges in enumerate(schedule.beside):
        row, behind = schedule.actions[rank], 0
        for first, end in ranges:
            if not behind <= first <= end - 2 < len(row) - 1:
                raise ScheduleError(
                    f"Schedule {schedule.name}: rank {rank}: beside must be ranges of two and more of its {len(row)} "
                    f"actions, in order; got {(first, end)} behind {behind}"
                )
            behind = end
            for index in range(first, end):
                if row[index].kind in COPIES:
                    _fail(schedule, rank, index, "O and L are no passes, which run beside others; put them in front")
                why = next(filter(None, (_apart(row[index], row[other]) for other in range(first, index))), None)
                if why is not None:
                    _fail(schedule, rank, index, why)


def _apart(later: Action, earlier: Action) -> str | None:
    """Why two actions of a rank cannot run beside each other, if so."""
    if later.chunk != earlier.chunk:
        return None
    if later.unit == earlier.unit:
        return f"it needs {earlier}, which it would run beside"
    if any({later.kind, earlier.kind} <= alike for alike in ({"F", "R"}, {"B", "BW"})):
        return f"a chunk runs one forward and one backward at a time; it would run beside {earlier}"
    return None


def _check_progress(schedule: ScheduleData) -> None:
    """Runs every rank as far as it gets. A rank that stops waits for a pass that its owner never reaches."""
    rows, placement = schedule.actions, schedule.placement
    position, done = [0] * len(rows), set()
    for rank, action in order_of_running(rows, len(placement), schedule.beside):
        position[rank] += 1
        done.add(result(action))
    stuck: dict[int, Result] = {}
    for rank, row in enumerate(rows):
        first = position[rank]
        begins = row[first : dict(schedule.beside_of(rank)).get(first, first + 1)]
        for index, action in enumerate(begins, first):
            need = producer(action, len(placement))
            if need is not None and need not in done:
                stuck[rank], position[rank] = need, index
                break
    if not stuck:
        return
    # a stuck rank waits for a pass that another one has (rows are complete) and is stuck before: some wait in a ring
    owner = {rank: placement[need[1]] for rank, need in stuck.items()}
    rank = min(owner)
    for _ in owner:
        rank = owner[rank]
    ring = [rank]
    while (rank := owner[rank]) != ring[0]:
        ring.append(rank)
    lowest = ring.index(min(ring))
    ring = ring[lowest:] + ring[:lowest]
    waits = [
        f"rank {rank} at {rows[rank][position[rank]]} waits for {Action(*stuck[rank])}, rank {owner[rank]}"
        for rank in ring
    ]
    why = "deadlock: these wait for each other\n  " + "\n  ".join(waits)
    _fail(schedule, ring[0], position[ring[0]], why)


def _fail(schedule: ScheduleData, rank: int, index: int, why: str) -> NoReturn:
    around, action = grid.excerpt(schedule, rank, index), schedule.actions[rank][index]
    raise ScheduleError(f"Schedule {schedule.name}: rank {rank}, action {index}, {action}: {why}\n{around}")
