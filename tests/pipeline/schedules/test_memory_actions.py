"""R, O and L in a schedule: as text, as CSV, and where they may stand."""

from __future__ import annotations

import pytest

from zbkern.pipeline import Action, Schedule, ScheduleError


def build(*rows: str, microbatches: int = 1) -> Schedule:
    actions = [[Action.parse(text) for text in row.split()] for row in rows]
    return Schedule.build(actions, range(len(rows)), microbatches)


BOTH = "0F0 0F1 0O0 0B1 0O1 0L0 0BW0 0L1 0W1"


def test_it_is_printed_and_parsed_like_any_other() -> None:
    schedule = build(BOTH, microbatches=2)
    assert schedule.to_text() == "rank 0 F0  F1  O0  B1  O1  L0  BW0 -   L1  W1"
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    recomputing = build("0F0 0R0 0B0 0W0")
    assert Schedule.from_csv(recomputing.to_csv()) == recomputing


@pytest.mark.parametrize("row", ["0F0 0O0 0L0 0BW0", "0F0 0R0 0BW0"])
def test_torch_has_no_word_for_it(row: str) -> None:
    with pytest.raises(ScheduleError, match="torch has no parts of W, and no actions that offload, load or recompute"):
        build(row).to_csv(header=False)


@pytest.mark.parametrize(
    "row",
    [
        "0F0 0O0 0L0 0BW0",
        "0F0 0O0 0L0 0B0 0W0",
        "0F0 0B0 0O0 0L0 0W0:1/2 0W0:0/2",
        "0F0 0O0 0L0 0B0 0O0 0L0 0W0",
        "0F0 0R0 0B0 0O0 0L0 0W0",
    ],
)
def test_what_may_be_offloaded_and_recomputed(row: str) -> None:
    build(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0O0 0F0 0L0 0BW0", r"action 0, 0O0: its forward 0F0 has not run yet\nrank 0 \[O0\] F0"),
        ("0R0 0F0 0BW0", "action 0, 0R0: its forward 0F0 has not run yet"),
        ("0F0 0O0 0BW0 0L0", "action 2, 0BW0: what it needs is offloaded; 0L0 must come first"),
        ("0F0 0O0 0B0 0W0", "action 2, 0B0: what it needs is offloaded"),
        ("0F0 0B0 0O0 0W0 0L0", "action 3, 0W0: what it needs is offloaded"),
        ("0F0 0B0 0O0 0W0:0/2 0L0 0W0:1/2", "action 3, 0W0:0/2: what it needs is offloaded"),
        ("0F0 0L0 0O0 0BW0", "action 1, 0L0: nothing is offloaded; 0O0 has not run yet"),
        ("0F0 0O0 0L0 0B0 0L0 0W0", "action 4, 0L0: nothing is offloaded"),
        ("0F0 0O0 0L0 0O0 0L0 0BW0", "action 3, 0O0: it has run before; tensors are offloaded and loaded once"),
        ("0F0 0O0 0L0 0L0 0BW0", "action 3, 0L0: it has run before"),
        ("0F0 0BW0 0O0 0L0", "action 2, 0O0: all passes of this microbatch have run"),
        ("0F0 0B0 0W0 0O0 0L0", "action 3, 0O0: all passes of this microbatch have run"),
        ("0F0 0B0 0W0:0/2 0O0 0L0 0W0:1/2", "action 3, 0O0: a part of its W has run"),
        ("0F0 0O0:0/2 0L0 0BW0", "action 1, 0O0:0/2: only a W has parts"),
        ("0F0 0B0 0R0 0W0", "action 2, 0R0: the backward of this microbatch has run; recompute before it"),
        ("0F0 0R0 0R0 0BW0", "action 2, 0R0: it has run before"),
        ("0F0 0O0 0R0 0L0 0BW0", "action 2, 0R0: its activations are offloaded; use either R, or O and L"),
        ("0F0 0R0 0O0 0L0 0BW0", "action 2, 0O0: its activations are recomputed; use either R, or O and L"),
    ],
)
def test_the_first_offence_is_named(row: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(row)
