"""What runs beside each other, as data: text, CSV and checksum, what is valid, and what is torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.schedules import schedule_of
from zbkern.pipeline import Action, Schedule, ScheduleError, schedules
from zbkern.schedules.actions import Beside
from zbkern.schedules.program import program_of
from zbkern.schedules.warmup import speculative_forwards

LINE = "0F0 0F1 0BW0 0F2 0BW1 0BW2"


def beside(*ranges: tuple[int, int], line: str = LINE) -> Schedule:
    made = schedule_of(line, microbatches=1 + max(int(each[-1]) for each in line.split() if ":" not in each))
    return Schedule.build(made.actions, made.placement, made.microbatches, beside=[ranges])


def test_text_csv_and_checksum() -> None:
    schedule = beside((1, 3), (3, 5))
    assert schedule.to_text() == "rank 0 F0  F1+ BW0 -   F2+ BW1 -   BW2 -"
    assert schedule.to_csv(header=False) == "0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0B1)OVERLAP_F_B,0B2\n"
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert len({beside().checksum, schedule.checksum, beside((1, 3)).checksum, beside((3, 5)).checksum}) == 4
    assert beside().beside == ()


def test_two_ranks_differ_in_which_of_them_runs_passes_beside_each_other() -> None:
    plain = schedules.gpipe(2, 2)
    one, other = (replace(plain, beside=each) for each in ((((1, 3),), ()), ((), ((1, 3),))))
    assert one.checksum != other.checksum


def test_a_program_has_an_entry_for_what_runs_beside_each_other() -> None:
    row = [Action.parse(each) for each in ["0F0", "0B0", "0F1", "0W0", "0B1", "0W1"]]
    program = program_of(row, ((2, 4),))
    assert program[2] == (Beside((row[2], row[3])),)
    assert [str(group[0]) for group in program] == ["0F0", "0B0", "0F1+0W0", "0B1", "0W1"]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(1, 2)], r"two and more of its 6 actions, in order; got \(1, 2\) behind 0"),
        ([(1, 3), (2, 4)], r"got \(2, 4\) behind 3"),
        ([(5, 7)], r"got \(5, 7\)"),
        ([(-1, 2)], r"got \(-1, 2\)"),
        ([(0, 2)], "0F1: a chunk runs one forward and one backward at a time; it would run beside 0F0"),
        ([(4, 6)], "0BW2: a chunk runs one forward and one backward at a time"),
        ([(3, 6)], "0BW2: it needs 0F2, which it would run beside"),
    ],
)
def test_what_cannot_run_beside_each_other_is_refused(ranges: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        beside(*ranges)


def test_recomputation_is_a_forward_of_its_chunk() -> None:
    beside((3, 5), line="0F0 0F1 0B1 0R0 0W1 0BW0")
    with pytest.raises(ScheduleError, match="0R0: a chunk runs one forward and one backward at a time"):
        beside((1, 3), line="0F0 0F1 0R0 0BW0 0BW1")
    with pytest.raises(ScheduleError, match="0BW0: it needs 0R0"):
        beside((2, 4), line="0F0 0F1 0R0 0BW0 0BW1")


def test_copies_are_no_passes() -> None:
    with pytest.raises(ScheduleError, match="0L0: O and L are no passes, which run beside others; put them in front"):
        beside((3, 5), line="0F0 0O0 0F1 0L0 0BW1 0BW0")


def test_a_w_runs_beside_passes_of_its_chunk() -> None:
    beside((3, 6), line="0F0 0F1 0B0 0W0 0F2 0B1 0W1 0BW2")
    with pytest.raises(ScheduleError, match="0W0: it needs 0B0"):
        beside((2, 4), line="0F0 0F1 0B0 0W0 0F2 0B1 0W1 0BW2")


def test_waits_for_what_the_pair_itself_brings_about_are_deadlocks() -> None:
    """Within a rank, and by way of another: a backward that only its own pair's forward sets off."""
    v = schedule_of("0F0 1F0 1BW0 0BW0", microbatches=1, placement=[0, 0])
    with pytest.raises(ScheduleError, match=r"deadlock.*\n  rank 0 at 1F0 waits for 0F0, rank 0"):
        Schedule.build(v.actions, v.placement, 1, beside=[[(0, 2)]])
    rows = "0F0 0F1 0BW0 0BW1", "1F0 1F1 1BW0 1BW1"
    plain = schedule_of(*rows, microbatches=2)
    with pytest.raises(ScheduleError, match=r"rank 0 at 0BW0 waits for 1B0, rank 1\n  rank 1 at 1F1 waits for 0F1"):
        Schedule.build(plain.actions, plain.placement, 2, beside=[[(1, 3)], []])


def test_only_forwards_that_run_alone_come_before_an_optimizer_step_is_validated() -> None:
    line = "0F0 0F1 0F2 1F0 1B0 1W0 1F1 1B1 1W1 1F2 1B2 1W2 0B0 0W0 0B1 0W1 0B2 0W2"
    row = [Action.parse(each) for each in line.split()]
    assert speculative_forwards(Schedule.build([row], [0, 0], 3)) == [3]
    assert speculative_forwards(Schedule.build([row], [0, 0], 3, beside=[[(2, 4)]])) == [2]


def test_torch_has_no_other_groups_than_a_forward_and_a_backward() -> None:
    schedule = beside((3, 5), line="0F0 0F1 0B0 0W0 0F2 0B1 0W1 0BW2")
    with pytest.raises(ScheduleError, match=r"torch overlaps an F with one backward behind it.*0W0\+0F2"):
        schedule.to_csv(header=False)
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_dualpipe_v_has_its_pairs_where_it_has_a_steady_state() -> None:
    for stages in range(1, 6):
        for microbatches in range(1, 3 * stages + 2):
            for slices in (1, 2, 3):
                schedule = schedules.dualpipe_v(stages, microbatches, slices=slices)
                schedule.validate()
                assert Schedule.from_csv(schedule.to_csv()) == schedule
                if slices == 1 and microbatches > 1:
                    assert bool(schedule.beside) == (microbatches >= 2 * stages)
