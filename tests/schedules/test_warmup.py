from __future__ import annotations

import pytest

from zbkern.pipeline import schedules
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.warmup import rank_order, speculative_forwards


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", [8, 8, 8, 0]),  # the last chunk has the loss: nothing may run ahead
        ("one_f_one_b", [4, 3, 2, 0]),
        ("zb_h1", [4, 3, 2, 0]),
        ("zb_h2", [7, 5, 3, 0]),
        ("zb_v", [7, 5, 3, 1]),
        ("interleaved", [4, 4, 4, 4]),
    ],
)
def test_counts(name: str, expected: list[int]) -> None:
    assert speculative_forwards(getattr(schedules, name)(4, 8)) == expected


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (5, 9)])
def test_inputs_come_from_forwards_that_run_ahead_before_on_the_chain(
    name: str, stages: int, microbatches: int
) -> None:
    schedule = getattr(schedules, name)(stages, microbatches)
    counts, done = speculative_forwards(schedule), set()
    for rank in rank_order(schedule):
        for kind, chunk, unit in schedule.actions[rank][: counts[rank]]:
            assert kind == "F"
            assert chunk < len(schedule.placement) - 1
            assert chunk == 0 or (chunk - 1, unit) in done
            done.add((chunk, unit))


def test_the_chain_follows_the_model_and_ends_where_it_turns_back() -> None:
    whole = schedules.gpipe(3, 2)
    order = (2, 0, 1)
    rows = [next(whole.actions[chunk] for chunk, rank in enumerate(order) if rank == r) for r in range(3)]
    moved = Schedule(tuple(rows), order, 2)
    assert rank_order(moved) == [2, 0, 1]
    assert speculative_forwards(moved) == [2, 0, 2]
