"""Sequences of which each has slices of its own, beside packs and whole ones."""

from __future__ import annotations

import pytest

from tests.support.schedules import all_forwards_first
from zbkern.pipeline import Costs, Schedule, ScheduleError, schedules, simulate


def test_text_and_checksum_keep_the_slices() -> None:
    schedule = all_forwards_first([(3, 2), (4,), (1, 1, 2)], (0, 1), split=True)
    again = Schedule.from_csv(schedule.to_csv())
    assert again == schedule
    assert again.checksum == schedule.checksum
    assert schedule.checksum != all_forwards_first([(2, 3), (4,), (1, 1, 2)], (0, 1), split=True).checksum
    assert [*map(tuple, schedule.units)] == [(0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 3), (2, 1, 3), (2, 2, 3)]
    with pytest.raises(ScheduleError, match="torch has no slices"):
        schedule.to_csv(header=False)


@pytest.mark.parametrize("own", [[(3, 2)], [(4,)], [(1,)], [(1,), (1,)], [(1, 1), (1, 1)]])
def test_those_of_one_microbatch_are_not_those_of_all(own: list[tuple[int, ...]]) -> None:
    for schedule in (all_forwards_first(own, (0, 1), split=True), schedules.zb_h1(2, len(own), slices=own[0])):
        assert Schedule.from_csv(schedule.to_csv()) == schedule
        assert Schedule.from_csv(schedule.to_csv()).checksum == schedule.checksum


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda row: [row[1], row[0], *row[2:]], "slices go forward in order; 0F0 must come first"),
        (lambda row: [*row[:6], row[7], row[6], *row[8:]], "slices go backward from the last"),
    ],
)
def test_slices_of_a_sequence_have_an_order(change: object, expected: str) -> None:
    schedule = all_forwards_first([(3, 2), (4,), (1, 1, 2)], (0,), split=True)
    with pytest.raises(ScheduleError, match=expected):
        Schedule.build([change(list(schedule.actions[0]))], (0,), 3, own_slices=schedule.own_slices)  # type: ignore[operator]
    with pytest.raises(ScheduleError, match="own_slices must be those of the 6 microbatches"):
        Schedule.build(schedule.actions, (0,), 6, own_slices=[(1, 2), (3,)])


def test_simulated_times_and_memory_are_those_of_each_slice() -> None:
    """A quarter of a sequence takes a quarter of what grows with its length, and a sixteenth of its attention."""
    costs = Costs(4.0, 6.0, 2.0, attention_forward=2.0, attention_backward=3.0, activation=8.0, carried=2.0, tokens=16)
    schedule = all_forwards_first([(4, 4), (8,)], (0,), split=True)
    timeline = simulate(schedule, costs)
    length = {str(event.action): event.end - event.start for event in timeline.events[0]}
    assert length["0F0"] == pytest.approx(2 / 4 + 2 / 16)
    assert length["0F1"] == pytest.approx(2 / 4 + 2 * 3 / 16)
    assert length["0F2"] == pytest.approx(length["0F0"] + length["0F1"])
    assert length["0B1"] == pytest.approx(3 / 4 + 3 * 3 / 16)
    assert length["0W2"] == pytest.approx(2 / 2)
    held = [memory for _, memory in timeline.memory_held(costs)[0]]
    assert held[1] == pytest.approx((8 - 2) / 2 + 2 / 2)  # half of a sequence, and its keys
    with pytest.raises(ValueError, match="tokens must be given"):
        simulate(schedule, Costs())
