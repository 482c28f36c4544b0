"""How many messages a rank may have been sent before it takes them, where the others are as far ahead as can be."""

from __future__ import annotations

from zbkern.schedules.dependencies import Result, producer, result
from zbkern.schedules.schedule import Schedule


def messages_ahead(schedule: Schedule) -> list[int]:
    """By rank, the most messages that wait there at once, whatever passes take: their memory is beside what passes
    hold. Each is an input of a chunk, or a gradient of its output.
    """
    return [_most_ahead(schedule, rank) for rank in range(schedule.ranks)]


def _most_ahead(schedule: Schedule, receiver: int) -> int:
    """While `receiver` stands before each of its actions in turn, all others run until they need it."""
    rows, placement = schedule.actions, schedule.placement
    chunks = len(placement)
    done: set[Result | None] = {None}
    waiting: dict[Result | None, list[int]] = {}
    position = [0] * schedule.ranks
    runnable = [rank for rank in range(schedule.ranks) if rank != receiver]
    held = most = 0
    for taken in rows[receiver]:
        while runnable:
            rank = runnable.pop()
            while position[rank] < len(rows[rank]):
                action = rows[rank][position[rank]]
                if (need := producer(action, chunks)) not in done:
                    waiting.setdefault(need, []).append(rank)
                    break
                position[rank] += 1
                if (made := result(action)) is not None:
                    done.add(made)
                    runnable += waiting.pop(made, [])
                    following = made[1] + (1 if made[0] == "F" else -1)
                    held += 0 <= following < chunks and placement[following] == receiver
        most = max(most, held)
        need = producer(taken, chunks)
        held -= need is not None and placement[need[1]] != receiver
        made = result(taken)
        done.add(made)
        runnable += waiting.pop(made, [])
    return most
