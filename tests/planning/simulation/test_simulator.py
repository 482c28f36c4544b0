"""simulate: equal to an independent tick-by-tick simulation on random costs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from zbkern.pipeline import Action, Costs, Schedule, ScheduleError, schedules, simulate

PUBLISHED = json.loads((Path(__file__).parent.parent.parent / "data" / "zb_profiles.json").read_text())


# ---- the on-line mode and jitter


def test_jitter_samples_passes_and_not_their_order() -> None:
    schedule = schedules.zb_h1(4, 8)

    def lengths(**keywords: object) -> dict[Action, float]:
        timeline = simulate(schedule, Costs(4, 5, 3), jitter=0.1, **keywords)
        return {event.action: event.end - event.start for row in timeline.events for event in row}

    planned, eager = lengths(seed=3), lengths(seed=3, fill="eager", memory_limit=100.0)
    assert planned.keys() == eager.keys()
    assert all(planned[action] == pytest.approx(eager[action]) for action in planned)
    assert lengths(seed=3) == planned
    assert lengths(seed=4) != planned
    forwards = [length for seed in range(50) for action, length in lengths(seed=seed).items() if action.kind == "F"]
    assert mean(forwards) == pytest.approx(4, rel=0.01)
    assert mean((length - 4) ** 2 for length in forwards) ** 0.5 == pytest.approx(0.4, rel=0.1)


def test_eager_w_gains_under_jitter_what_it_loses_without() -> None:
    """8 stages, the 1.5B profile, 24 microbatches, all ranks limited to 1F1B's memory, and passes random by 20%."""
    cell = PUBLISHED["one_chunk"][0]
    times = [cell[name] for name in ("forward", "backward", "weight", "communication")]
    costs, schedule = Costs(*times, activation=cell["activation"], held=cell["held"]), schedules.zb_h1(8, 24)

    def idle(jitter: float, fill: dict[str, Any]) -> float:
        return mean(simulate(schedule, costs, jitter=jitter, seed=seed, **fill).bubble_rate for seed in range(12))

    eager = {"fill": "eager", "memory_limit": 8 * cell["activation"]}
    assert idle(0.2, eager) < idle(0.2, {})
    assert idle(0.0, {}) < idle(0.0, eager) - 0.02


def test_the_first_forward_of_a_sequence_needs_room_for_all_keys_and_values() -> None:
    costs, schedule = Costs(carried=0.8), schedules.zb_h2(3, 6, slices=2)
    assert max(simulate(schedule, costs, fill="eager", memory_limit=5).peak_memory) <= 5


def test_a_schedule_that_cannot_run_is_refused() -> None:
    lost = Schedule(((Action("F", 0, 0), Action("BW", 0, 0)), (Action("F", 1, 0),)), (0, 1), 1, "lost")
    with pytest.raises(ScheduleError, match="rank 1: 1B0 is missing"):
        simulate(lost)
