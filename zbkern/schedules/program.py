"""What a rank's row of a schedule becomes before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from zbkern.schedules.actions import COPIES, Action, Beside, Ranges

FILLS = ("planned", "eager")  # W where the schedule has it, or wherever the rank would wait


Program = Sequence[tuple[Action | Beside, ...]]


def program_of(actions: Sequence[Action], beside: Ranges = ()) -> Program:
    """The program of a rank: its actions as `merge_neighbours` gives them, with an entry for what runs side by side."""
    program: list[tuple[Action | Beside, ...]] = []
    start = 0
    for first, end in beside:
        program += [*merge_neighbours(actions[start:first]), (Beside(tuple(actions[first:end])),)]
        start = end
    return [*program, *merge_neighbours(actions[start:])]


def merge_neighbours(actions: Sequence[Action]) -> Iterable[tuple[Action, ...]]:
    """The program of a rank: W of one chunk that follow each other are one entry, everything else its own."""
    run: list[Action] = []
    for action in actions:
        if run and not (action.kind == "W" and action.chunk == run[0].chunk):
            yield tuple(run)
            run = []
        if action.kind == "W":
            run.append(action)
        else:
            yield (action,)
    if run:
        yield tuple(run)


def fused(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """(chunk, unit) of every backward whose W does not wait."""
    return {action[1:] for action in actions if action.kind == "BW"}


def recomputed(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """(chunk, unit) of every R: what F keeps no activations of."""
    return {(action.chunk, action.unit) for action in actions if action.kind == "R"}


def offloaded_after(actions: Iterable[Action]) -> set[tuple[str, int, int]]:
    """(kind, chunk, unit) of the passes that leave what an O moves: F, or B where the O stands after it."""
    begun: set[tuple[int, int]] = set()
    passes: set[tuple[str, int, int]] = set()
    for kind, chunk, unit in actions:
        if kind == "B":
            begun.add((chunk, unit))
        elif kind == "O":
            passes.add(("B" if (chunk, unit) in begun else "F", chunk, unit))
    return passes


def streamed(actions: Sequence[Action]) -> set[tuple[int, int]]:
    """(chunk, unit) of every F whose O follows it directly: its activations leave while it runs."""
    pairs = pairwise(actions)
    return {before[1:] for before, after in pairs if (before.kind, *after) == ("F", "O", *before[1:])}


def offloads_or_recomputes(actions: Iterable[Action]) -> bool:
    """Whether any of them offloads, loads or recomputes."""
    return any(action.kind in ("R", *COPIES) for action in actions)


def peak_units(actions: Sequence[Action]) -> int:
    """The most units that this rank holds at once by the schedule: from their F until their W."""
    held = peak = 0
    for kind, _, _ in actions:
        if kind == "F":
            held += 1
            peak = max(peak, held)
        elif kind in ("BW", "W"):
            held -= 1
    return peak


def forwards(chunks: Iterable[int], units: int) -> list[Action]:
    """All forwards of these chunks by distance from the first input: an order in which every rank can reach its own."""
    actions = [Action("F", chunk, unit) for chunk in chunks for unit in range(units)]
    return sorted(actions, key=lambda action: (action.chunk + action.unit, action.chunk))
