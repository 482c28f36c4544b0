"""Who needs whose result, and the order in which a schedule can run."""

from __future__ import annotations

import pytest

from zbkern.pipeline import Action, schedules
from zbkern.pipeline.schedules.dependencies import order_of_running, producer, result


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F3", None),
        ("2F3", ("F", 1, 3)),
        ("0B3", ("B", 1, 3)),
        ("0BW3", ("B", 1, 3)),
        ("3B3", None),
        ("3BW3", None),
        ("1W3", None),
        ("1W3:0/2", None),
    ],
)
def test_a_pass_needs_the_result_of_its_neighbour(action: str, needed: tuple[str, int, int] | None) -> None:
    assert producer(Action.parse(action), chunks=4) == needed


def test_a_fused_backward_makes_what_a_backward_makes() -> None:
    assert result(Action.parse("1BW3")) == result(Action.parse("1B3")) == ("B", 1, 3)
    assert result(Action.parse("1F3")) == ("F", 1, 3)
    assert result(Action.parse("1W3")) is None


@pytest.mark.parametrize("name", schedules.NAMES)
def test_everything_runs_after_what_it_needs(name: str) -> None:
    schedule = getattr(schedules, name)(3, 5)
    chunks, done, rows = len(schedule.placement), {None}, [[] for _ in schedule.actions]
    for rank, action in order_of_running(schedule.actions, chunks):
        assert producer(action, chunks) in done
        done.add(result(action))
        rows[rank].append(action)
    assert tuple(map(tuple, rows)) == schedule.actions


def test_ranks_that_wait_for_each_other_end_it_early() -> None:
    rows = [["0F0", "0B0", "0F1"], ["1F0", "1F1", "1B0"]]
    ran = list(order_of_running([[Action.parse(each) for each in row] for row in rows], 2))
    assert [(rank, str(action)) for rank, action in ran] == [(0, "0F0"), (1, "1F0")]
