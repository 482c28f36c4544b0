"""Which forwards of a step may begin before the optimizer step before it is validated."""

from __future__ import annotations

from zbkern.schedules.schedule import Schedule


def rank_order(schedule: Schedule) -> list[int]:
    """The ranks in the order in which the model first uses them; partial norms travel along it, the total back."""
    return list(dict.fromkeys(schedule.placement))


def speculative_forwards(schedule: Schedule) -> list[int]:
    """By rank: how many of its first actions can run before the last optimizer step is validated.

    They are forwards of the first chunk of each rank, in rank order, with nothing beside them. Their inputs come only
    from ranks that validate later, so that no rank waits for an input that its sender, having rolled back, no longer
    computes; and none of them needs an action that is not among them, so that every rank gets to validate.
    """
    order = rank_order(schedule)
    position = [0] * schedule.ranks
    done: set[tuple[int, int]] = set()
    for chunk, rank in enumerate(order):
        if schedule.placement[chunk] != rank or chunk == len(schedule.placement) - 1:
            break
        alone = next((first for first, end in schedule.beside_of(rank)), None)
        for kind, other, unit in schedule.actions[rank][:alone]:
            if kind != "F" or other != chunk or (chunk > 0 and (chunk - 1, unit) not in done):
                break
            done.add((chunk, unit))
            position[rank] += 1
    return position
