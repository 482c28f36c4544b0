"""Who needs whose result: F the F of the chunk before, B and BW the B of the chunk behind, the others of no chunk's.

A result is named (kind, chunk, unit), with kind "F" or "B"; "B" stands for a BW, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from zbkern.schedules.actions import Action, Ranges

Result = tuple[str, int, int]
_GIVING = ("F", "B", "BW")  # what other chunks wait for, and what waits for them


def result(action: Action) -> Result | None:
    """What `action` makes for other chunks; None for all but F, B and BW."""
    kind, chunk, unit = action
    return ("F" if kind == "F" else "B", chunk, unit) if kind in _GIVING else None


def producer(action: Action, chunks: int) -> Result | None:
    """The result of another chunk that `action` needs; None for all but F, B and BW, and for the batch and the loss.

    chunks: of the whole pipeline.
    """
    kind, chunk, unit = action
    if kind == "F":
        return ("F", chunk - 1, unit) if chunk > 0 else None
    return ("B", chunk + 1, unit) if kind in _GIVING and chunk < chunks - 1 else None


def order_of_running(
    rows: Sequence[Sequence[Action]], chunks: int, beside: Sequence[Ranges] = ()
) -> Iterator[tuple[int, Action]]:
    """(rank, action) of all that can run, each after what it needs: every rank as far as its row gets.

    Ends early where ranks wait for each other. rows: the actions of each rank; chunks: of the whole pipeline. beside:
    for each rank what begins only when all of it can, of which the first then stands for all.
    """
    done: set[Result | None] = {None}
    waiting: dict[Result | None, list[int]] = {}
    position = [0] * len(rows)
    groups = [dict(ranges) for ranges in beside or [()] * len(rows)]
    runnable = deque(range(len(rows)))
    while runnable:
        rank = runnable.popleft()
        while position[rank] < len(rows[rank]):
            row = rows[rank]
            action = row[position[rank]]
            end = groups[rank].get(position[rank])
            need = producer(action, chunks) if end is None else _missing(row[position[rank] : end], chunks, done)
            if need not in done:
                waiting.setdefault(need, []).append(rank)
                break
            position[rank] += 1
            yield rank, action
            made = result(action)
            done.add(made)
            runnable.extend(waiting.pop(made, ()))


def _missing(passes: Sequence[Action], chunks: int, done: set[Result | None]) -> Result | None:
    return next((need for need in (producer(action, chunks) for action in passes) if need not in done), None)
