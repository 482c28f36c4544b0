"""Actions and schedules as data: text, grid, CSV, and validation that names the cell."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbkern.pipeline import Action, Schedule, ScheduleError, schedules


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, zbkern.pipeline as p; p.schedules.zb_v(4, 8).to_csv(); p.simulate(p.schedules.zb_h1(2, 4));"
        "assert callable(p.simulate); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(
    kind=st.sampled_from(["F", "B", "W", "BW"]),
    chunk=st.integers(0, 10**6),
    unit=st.integers(0, 10**6),
)
def test_action_text_round_trip(kind: str, chunk: int, unit: int) -> None:
    action = Action(kind, chunk, unit)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0W1:0/2", "0 F1", "-1F0", "0I3", 3])
def test_action_parse_refuses_other_text(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"Action\.parse: expected chunk, kind and unit"):
        Action.parse(text)


def test_grid() -> None:
    assert schedules.zb_h1(3, 4).to_text() == (
        "rank 0 F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3\n"
        "rank 1 .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3\n"
        "rank 2 .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    )
    assert schedules.one_f_one_b(2, 2).to_text() == (
        "rank 0 F0  F1  .   .   BW0 -   .   BW1 -\nrank 1 .   F0  BW0 -   F1  BW1 -   .   ."
    )
    assert schedules.zb_v(2, 1).to_text() == (
        "rank 0 0F0 .   .   3F0 3B0 3W0 .   .   0B0 0W0\nrank 1 .   1F0 2F0 .   .   2B0 2W0 1B0 1W0 ."
    )


def test_torch_letters_are_not_ours() -> None:
    assert schedules.zb_h1(1, 1).to_csv(header=False) == "0F0,0I0,0W0\n"
    assert schedules.gpipe(1, 1).to_csv(header=False) == "0F0,0B0\n"
    ours = Schedule.from_csv("0F0,,0SEND_F0,0WAIT_SEND_F0,(0F1;0B0)OVERLAP_F_B,0B1,0WAIT_REDUCE_GRAD\r\n")
    assert [str(action) for action in ours.actions[0]] == ["0F0", "0F1", "0BW0", "0BW1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0I0", "0W0 is missing"),
        ("0F0,nonsense", "expected an action of torch.distributed.pipelining"),
        ("0F0,0B0\n0F1,0B1", r"chunk 0 is on rank 0 and, in 0F1, on rank 1"),
        ("0F0,0B0\n2F0,2B0", "chunks must be numbered from 0 without gaps"),
        ("0F0,0I0,0W0:0/2", "expected an action of torch.distributed.pipelining"),
        ("0F0,0B0,0F999999999999", "0F1 is missing"),
        (f"0F{'9' * 5000},0B0", "Action.parse: expected chunk, kind and unit"),
        ("", "must be at least 1"),
    ],
)
def test_csv_that_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_a_line_of_commas_takes_no_memory() -> None:
    text = "," * 2_000_000
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError):
            Schedule.from_csv(text)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text)
    finally:
        tracemalloc.stop()


def build(*rows: str, placement: tuple[int, ...] | None = None, microbatches: int = 1) -> Schedule:
    actions = [[Action.parse(cell) for cell in row.split()] for row in rows]
    return Schedule.build(actions, placement or tuple(range(len(rows))), microbatches)


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (["0F0 0F0 0BW0"], {}, "rank 0, action 1, 0F0: it has run before"),
        (["0F0 0W0 0B0"], {}, "rank 0, action 1, 0W0: its B has not run yet"),
        (["0BW0 0F0"], {}, "rank 0, action 0, 0BW0: its forward 0F0 has not run yet"),
        (["0F0 0BW0 0W0"], {}, "rank 0, action 2, 0W0: its BW has computed this W"),
        (["0F0 0B0 0BW0 0W0"], {}, "rank 0, action 2, 0BW0: the backward of this unit has run"),
        (["0F0 0BW0"], {"microbatches": 2}, "rank 0: 0F1 is missing"),
        (["0F0 0B0"], {}, "rank 0: 0W0 is missing"),
        (["0F0 0B0 0W0 0W0"], {}, "action 3, 0W0: it has run before; every pass runs once"),
        (["0F0 0BW0 0F1"], {}, "rank 0, action 2, 0F1: units are 0 to 0"),
        (["0F0 0BW0 1F0"], {}, "rank 0, action 2, 1F0: chunks are 0 to 0"),
        (["0F0 1F0 0BW0", "1BW0"], {}, "rank 0, action 1, 1F0: chunk 1 is placed on rank 1"),
        (["0F0 0BW0"], {"placement": (1,)}, "placement must give every one of the 1 ranks"),
        (["0F0 0BW0"], {"microbatches": 0}, "must be at least 1"),
        (["0O0 0F0 0L0 0BW0"], {}, r"action 0, 0O0: its forward 0F0 has not run yet\nrank 0 \[O0\] F0"),
        (["0F0 0O0 0BW0 0L0"], {}, "action 2, 0BW0: what it needs is offloaded; 0L0 must come first"),
        (["0F0 0L0 0O0 0BW0"], {}, "action 1, 0L0: nothing is offloaded; 0O0 has not run yet"),
        (["0F0 0O0 0L0 0O0 0L0 0BW0"], {}, "action 3, 0O0: it has run before; tensors are offloaded and loaded once"),
        (["0F0 0BW0 0O0 0L0"], {}, "action 2, 0O0: all passes of this unit have run"),
        (["0F0 0B0 0W0 0O0 0L0"], {}, "action 3, 0O0: all passes of this unit have run"),
        (["0F0 0B0 0R0 0W0"], {}, "action 2, 0R0: the backward of this unit has run; recompute before it"),
        (["0F0 0O0 0R0 0L0 0BW0"], {}, "action 2, 0R0: its activations are offloaded; use either R, or O and L"),
        (["0F0 0R0 0O0 0L0 0BW0"], {}, "action 2, 0O0: its activations are recomputed; use either R, or O and L"),
    ],
)
def test_validate_names_the_first_offence(rows: list[str], arguments: dict, message: str) -> None:
    """A row for each rule; tests/planning/simulation/test_differential.py breaks them at random."""
    with pytest.raises(ScheduleError, match=message):
        build(*rows, **arguments)


def test_offload_and_recomputation_are_printed_and_parsed_like_any_other() -> None:
    schedule = build("0F0 0F1 0O0 0B1 0O1 0L0 0BW0 0L1 0W1", microbatches=2)
    assert schedule.to_text() == "rank 0 F0  F1  O0  B1  O1  L0  BW0 -   L1  W1"
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    recomputing = build("0F0 0R0 0B0 0W0")
    assert Schedule.from_csv(recomputing.to_csv()) == recomputing


@pytest.mark.parametrize("row", ["0F0 0O0 0L0 0BW0", "0F0 0R0 0BW0"])
def test_torch_has_no_word_for_them(row: str) -> None:
    with pytest.raises(ScheduleError, match="torch has no actions that offload, load or recompute"):
        build(row).to_csv(header=False)


def test_an_error_marks_the_cell_in_the_grid_around_it() -> None:
    with pytest.raises(ScheduleError) as error:
        build("0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1F1 1W1 1B1 1W0", microbatches=2)
    assert str(error.value) == (
        "Schedule custom: rank 1, action 3, 1W1: its B has not run yet\n"
        "rank 0 F0   F1   .    B0   W0   .    B1   W1\n"
        "rank 1 .    F0   B0   F1   [W1] B1   W0   ."
    )


def test_a_deadlock_names_those_that_wait_for_each_other() -> None:
    with pytest.raises(ScheduleError) as error:
        build("0F0 0F1 0BW0 0BW1", "1F0 1B0 1W0 1F1 1BW1", "2F0 2F1 2BW0 2BW1", microbatches=2)
    message = str(error.value)
    assert "rank 1, action 1, 1B0: deadlock" in message
    assert "rank 1 at 1B0 waits for 2B0, rank 2" in message
    assert "rank 2 at 2F1 waits for 1F1, rank 1" in message
    assert "rank 0 at" not in message
    assert "[B0]" in message
