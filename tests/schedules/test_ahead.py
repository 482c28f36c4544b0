from __future__ import annotations

import random

import pytest

from zbkern import schedules
from zbkern.schedules.ahead import messages_ahead
from zbkern.schedules.dependencies import order_of_running, producer, result
from zbkern.schedules.schedule import Schedule


def sent(schedule: Schedule, rank: int, actions: int) -> int:
    """Messages to a rank that others can send while it has run so many actions, less those that these have taken."""
    rows = [row[:actions] if number == rank else row for number, row in enumerate(schedule.actions)]
    placement, chunks = schedule.placement, len(schedule.placement)
    made = {result(action) for sender, action in order_of_running(rows, chunks) if sender != rank}
    needed = [producer(action, chunks) for action in schedule.actions[rank] if producer(action, chunks) is not None]
    taken = [producer(action, chunks) for action in rows[rank]]
    from_others = [need for need in needed if need and placement[need[1]] != rank]
    return sum(need in made for need in from_others) - sum(need in taken for need in from_others)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_no_more_messages_are_ahead_than_can_be_sent(name: str) -> None:
    rng = random.Random(name)
    for size in (1, 2, 4):
        schedule = getattr(schedules, name)(size, rng.choice([size, 2 * size]))
        most = [
            max(sent(schedule, rank, actions) for actions in range(len(row)))
            for rank, row in enumerate(schedule.actions)
        ]
        assert messages_ahead(schedule) == most


def test_one_f_one_b_sends_as_many_inputs_as_there_are_stages_behind() -> None:
    assert messages_ahead(schedules.one_f_one_b(4, 8)) == [4, 4, 3, 2]
