"""Random schedules and costs against rules that are written a second time: what is valid, and when it runs.

The slow run has another seed than the quick one: see `tests/support/seeds.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.support.schedules import is_valid, needed, random_rows
from tests.support.seeds import seed
from tests.support.ticks import Ticks, assert_equal
from zbkern.pipeline import Costs, Schedule, ScheduleError, simulate


def random_costs(rng: random.Random, chunks: int) -> Costs:
    """In whole numbers."""

    def each(low: int, high: int, count: int = chunks) -> list[int]:
        return [rng.randint(low, high) for _ in range(count)]

    times = {"forward": each(1, 6), "backward": each(1, 6), "weight": each(1, 12), "recompute": each(1, 4)}
    memory = {"activation": each(1, 6), "held": each(0, 6), "checkpoint": each(0, 1)}
    rates = {"offload_bandwidth": rng.randint(1, 3), "reload_bandwidth": rng.randint(1, 3)}
    rates |= {"merge_saving": each(0, 1), "split_overhead": each(0, 1)}
    return Costs(**times, **memory, **rates, communication=each(0, 5, count=chunks - 1))


def check_run(schedule: Schedule, costs: Costs, rng: random.Random) -> None:
    """Every pass runs once, in its rank's order, after what it needs, and at the end nothing is held; without R, O and
    L all is as ticks have it, also where W fills waits, which takes no more memory than the plan."""
    timeline = simulate(schedule, costs)
    flat = costs.per_chunk(len(schedule.placement))
    ends: dict[tuple[str, int, int], float] = {}
    for row in timeline.events:
        for event in row:
            kind, chunk, microbatch = event.action
            ends["B" if kind == "BW" else kind, chunk, microbatch] = event.end
    for rank, (row, planned) in enumerate(zip(timeline.events, schedule.actions, strict=True)):
        assert [event.action for event in row] == [action for action in planned if action.kind not in ("O", "L")]
        assert all(a.end <= b.start for a, b in pairwise(row))
        for event in row:
            for need in needed(event.action, len(schedule.placement)):
                distant = schedule.placement[need[1]] != rank
                travel = flat.communication[min(need[1], event.action.chunk)] if distant else 0
                assert event.start >= ends[need] + travel
    assert all(track[-1][1] == pytest.approx(0, abs=1e-9) for track in timeline.memory_held(costs))
    kinds = {action.kind for row in schedule.actions for action in row}
    if kinds & {"R", "O", "L"}:
        return
    assert_equal(timeline, Ticks(schedule, costs, False, float("inf")).run())
    limit = rng.randint(0, 30)
    eager = simulate(schedule, costs, fill="eager", memory_limit=limit)
    assert_equal(eager, Ticks(schedule, costs, True, limit).run())
    costs = replace(costs, held=[min(pair) for pair in zip(flat.held, flat.activation, strict=True)], merge_saving=0.0)
    planned, eager = simulate(schedule, costs), simulate(schedule, costs, fill="eager")
    assert sum(eager.busy) == pytest.approx(sum(planned.busy))
    assert all(here <= there + 1e-6 for here, there in zip(eager.peak_memory, planned.peak_memory, strict=True))


@pytest.mark.parametrize("cases", [500, pytest.param(600, marks=pytest.mark.slow)])
def test_random_schedules_are_judged_and_run_as_the_rules_say(cases: int) -> None:
    rng, valid = random.Random(seed(1 if cases > 500 else 0)), 0
    for number in range(cases):
        rows, placement, microbatches = random_rows(rng)
        schedule = Schedule(tuple(map(tuple, rows)), placement, microbatches, f"number {number}")
        if not is_valid(rows, placement, microbatches):
            with pytest.raises(ScheduleError):
                schedule.validate()
            continue
        schedule.validate()
        assert Schedule.from_csv(schedule.to_csv()) == schedule
        cells = {str(action) for row in rows for action in row}
        shown = {
            cell if cell[0].isdigit() else "" for line in schedule.to_text().split("\n") for cell in line.split()[2:]
        }
        assert len(placement) == schedule.ranks or cells == shown - {""}
        check_run(schedule, random_costs(rng, len(placement)), rng)
        valid += 1
    assert cases / 5 < valid < cases * 0.95
