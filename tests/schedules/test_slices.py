"""Schedules of sequences in slices: valid for every generator and size, in the order of Seq1F1B, and in CSV."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbkern.pipeline import Action, Schedule, ScheduleError, schedules, simulate

LENGTHS = st.one_of(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5))


@given(st.sampled_from(schedules.NAMES), st.integers(1, 6), st.integers(1, 8), LENGTHS)
def test_every_schedule_takes_slices(name: str, ranks: int, microbatches: int, slices: Any) -> None:
    schedule = getattr(schedules, name)(ranks, microbatches, slices=slices)
    schedule.validate()
    assert schedule.microbatches == microbatches
    assert len(schedule.slices) == (slices if isinstance(slices, int) else len(slices))
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_1f1b_in_slices_is_seq1f1b() -> None:
    """The order of arXiv 2406.03488, figure 3: as many forwards more as there are slices after the first."""
    text = schedules.one_f_one_b(3, 2, slices=3).to_text()
    assert [line.rstrip(" .") for line in text.splitlines()] == [
        "rank 0 F0  F1  F2  F3  F4  .   .   .   .   BW2 -   F5  BW1 -   .   BW0 -   .   BW5 -   BW4 -   BW3 -",
        "rank 1 .   F0  F1  F2  F3  .   .   BW2 -   F4  BW1 -   F5  BW0 -   .   BW5 -   BW4 -   BW3 -",
        "rank 2 .   .   F0  F1  F2  BW2 -   F3  BW1 -   F4  BW0 -   F5  BW5 -   BW4 -   BW3 -",
    ]


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_v"])
def test_the_idle_time_is_that_of_as_many_microbatches(name: str) -> None:
    build = getattr(schedules, name)
    idle = [simulate(schedule).bubble_rate for schedule in (build(4, 8, slices=4), build(4, 8 * 4))]
    assert idle[0] == pytest.approx(idle[1], abs=0.02)


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ("F1 F0 B1 B0 W0 W1", r"slices go forward in order; 0F0 must come first"),
        ("F0 F1 B0 B1 W0 W1", r"slices go backward from the last; 0B1 must come first"),
        ("F0 F1 BW0 BW1", r"slices go backward from the last; 0B1 must come first"),
        ("F0 F1 F2 BW1 BW0 BW2", "slices go backward from the last; 0B3 must come first"),
    ],
)
def test_another_order_of_slices_is_refused(order: str, error: str) -> None:
    row = [Action.parse(f"0{cell}") for cell in order.split()]
    count = 1 + max(action.unit for action in row)
    with pytest.raises(ScheduleError, match=error):
        Schedule.build([row], [0], -(-count // 2), "mine", slices=(1, 1))


def test_csv_says_what_is_wrong_with_slices() -> None:
    schedule = schedules.zb_h1(2, 2, slices=2)
    with pytest.raises(ScheduleError, match="torch has no slices"):
        schedule.to_csv(header=False)
    with pytest.raises(ScheduleError, match="slices must be lengths"):
        Schedule.from_csv(schedule.to_csv().replace("# slices: 1 1", "# slices: one"))
