"""Schedules for tests: of rows of text, with offload and recomputation, with slices of each sequence's own; and random
ones with R, O and L, every other one disturbed, with rules of their own of what is valid."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from zbkern.pipeline import Action, Schedule, ScheduleError, schedules

ORDER = re.compile(r"F(R|OL)?(BW|B(OL)?W)")  # of a microbatch in a chunk
Rows = list[list[Action]]


def schedule_of(*rows: str, microbatches: int, placement: Sequence[int] | None = None) -> Schedule:
    """Of one row of actions per rank, as text; a chunk on every rank unless placement says otherwise."""
    actions = [[Action.parse(text) for text in row.split()] for row in rows]
    return Schedule.build(actions, [*range(len(rows))] if placement is None else [*placement], microbatches)


def with_actions(schedule: Schedule, choose: Callable[[Action], str | None]) -> Schedule:
    """The schedule with what `choose` says of an F or B saved: "copied" right after it until right before the next
    pass of its microbatch, or (of an F) "recomputed" right before it."""
    rows = []
    for row in schedule.actions:
        found: list[Action] = []
        saved: dict[tuple[int, int], str] = {}
        for action in row:
            key = action.chunk, action.unit
            how = saved.pop(key, None)
            if how is not None:
                found.append(Action("L" if how == "copied" else "R", *key))
            found.append(action)
            how = choose(action) if action.kind in ("F", "B") else None
            if how is not None:
                saved[key] = how
                if how == "copied":
                    found.append(Action("O", *key))
        rows.append(found)
    cut = {"slices": schedule.slices, "own_slices": schedule.own_slices}
    return Schedule.build(rows, schedule.placement, schedule.microbatches, **cut)


def saved_in_turn(*how: str | None) -> Callable[[Action], str | None]:
    return lambda action: how[action.unit % len(how)] if action.kind == "F" else None


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


def with_neighbours_beside(rng: random.Random, schedule: Schedule, forwards: int = 3) -> Schedule:
    """The schedule with neighbours that run beside each other, at random: at most so many forwards together."""
    found: list[list[tuple[int, int]]] = [[] for _ in schedule.actions]
    for rank, row in enumerate(schedule.actions):
        behind = 0
        for first in range(len(row) - 1):
            end = min(first + rng.choice([2, 2, 3]), len(row))
            if first < behind or rng.random() < 0.4 or sum(each.kind == "F" for each in row[first:end]) > forwards:
                continue
            found[rank].append((first, end))
            try:
                replace(schedule, beside=tuple(map(tuple, found))).validate()
                behind = end
            except ScheduleError:
                found[rank].pop()
    return replace(schedule, beside=tuple(map(tuple, found)) if any(found) else ())


@functools.cache
def published() -> dict[tuple[int, ...], list[Callable[..., Schedule]]]:
    """Functions of a number of microbatches that make published schedules, by where these have their chunks."""
    found: dict[tuple[int, ...], list[Callable[..., Schedule]]] = {}
    for name in schedules.NAMES:
        for ranks in range(1, 5):
            make = functools.partial(getattr(schedules, name), ranks)
            found.setdefault(make(4).placement, []).append(make)
    return found


def random_schedule(rng: random.Random, placement: tuple[int, ...]) -> Schedule:
    while True:
        rows, _, microbatches = random_rows(rng, rng.choice(published()[placement])(rng.randint(1, 5)))
        if is_valid(rows, placement, microbatches):
            return Schedule.build(rows, placement, microbatches)


def sliced_schedule(rng: random.Random, placement: tuple[int, ...]) -> Schedule:
    """Of slices that all sequences have, or of their own; every other one offloads and recomputes."""
    if rng.random() < 0.3:
        own = [tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 4))]
        schedule = all_forwards_first(own, placement, split=rng.random() < 0.5)
    else:
        make = rng.choice(published()[placement])
        schedule = make(rng.randint(1, 3), slices=rng.choice([2, 3, (1, 2, 3), (4, 2)]))
    if rng.random() < 0.5:
        return schedule
    saved = {"F": [None, "copied", "recomputed"], "B": [None, "copied"]}
    return with_actions(schedule, lambda action: rng.choice(saved[action.kind]))


def random_rows(rng: random.Random, published: Schedule | None = None) -> tuple[Rows, tuple[int, ...], int]:
    """A published schedule whose backwards are split, with R, O and L; every other is disturbed."""
    if published is None:
        published = getattr(schedules, rng.choice(schedules.NAMES))(rng.randint(1, 4), rng.randint(1, 5))
    rows = [list(row) for row in published.actions]
    for row in rows:
        for action in [each for each in row if each.kind in ("BW", "W") and rng.random() < 0.4]:
            at, kind = row.index(action), action.kind
            row[at : at + 1] = [action._replace(kind="B")] if kind == "BW" else []
            row.insert(rng.randint(at + (kind == "BW"), len(row)), action._replace(kind="W"))
        for action in [each for each in row if each.kind in ("F", "B") and rng.random() < 0.3]:
            first, last = row.index(action) + 1, last_before_next(row, action)
            added = ["R"] if action.kind == "F" and rng.random() < 0.5 else ["O", "L"]
            places = sorted(rng.randint(first, last) for _ in added)
            for kind, place in reversed(list(zip(added, places, strict=True))):
                row.insert(place, action._replace(kind=kind))
    if rng.random() < 0.5:
        disturb(rng, rows)
    return rows, published.placement, published.microbatches


def last_before_next(row: list[Action], action: Action) -> int:
    """Where the next pass of its unit is: the backward after an F, the first of W after a B."""
    kinds = ("B", "BW") if action.kind == "F" else ("W",)
    return next(i for i, each in enumerate(row) if each[1:] == action[1:] and each.kind in kinds)


def disturb(rng: random.Random, rows: Rows) -> None:
    row = rng.choice(rows)
    at, other = rng.randrange(len(row)), rng.randrange(len(row))
    change = rng.choice(["swap", "lose", "double", "change"])
    if change == "swap":
        row[at], row[other] = row[other], row[at]
    elif change == "lose":
        del row[at]
    elif change == "double":
        row.insert(other, row[at])
    else:
        row[at] = row[at]._replace(kind=rng.choice(["F", "B", "W", "BW", "R", "O", "L"]))


def is_valid(rows: Rows, placement: tuple[int, ...], units: int) -> bool:
    """By the rules of `actions.py`, and by running the ranks until none gets any further."""
    for chunk, owner in enumerate(placement):
        for unit in range(units):
            mine = [action for action in rows[owner] if action[1:] == (chunk, unit)]
            if not ORDER.fullmatch("".join(action.kind for action in mine)):
                return False
    done: set[tuple[str, int, int]] = set()
    left = [list(row) for row in rows]
    while any(left):
        ready = [row for row in left if row and needed(row[0], len(placement)) <= done]
        if not ready:
            return False
        for row in ready:
            kind, chunk, unit = row.pop(0)
            done.add(("B" if kind == "BW" else kind, chunk, unit))
    return True


def needed(action: Action, chunks: int) -> set[tuple[str, int, int]]:
    kind, chunk, unit = action
    if kind == "F" and chunk:
        return {("F", chunk - 1, unit)}
    return {("B", chunk + 1, unit)} if kind in ("B", "BW") and chunk + 1 < chunks else set()
