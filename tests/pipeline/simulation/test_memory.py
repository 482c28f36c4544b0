from __future__ import annotations

import pytest

from zbkern.pipeline import Action, Costs, Event, Schedule, Timeline, schedules, simulate

COSTS = Costs(activation=10, held=6)


def steps(row: str) -> list[tuple[float, float]]:
    events = [Event(0, Action.parse(cell), float(at), at + 1.0) for at, cell in enumerate(row.split())]
    schedule = Schedule.build([[event.action for event in events]], [0], 1)
    return Timeline(schedule, (tuple(events),)).memory_held(COSTS)[0]


def test_forward_takes_at_its_start_and_the_rest_gives_back_at_its_end() -> None:
    assert steps("0F0 0B0 0W0") == [(0, 10), (2, 6), (3, 0)]
    assert steps("0F0 0BW0") == [(0, 10), (2, 0)]
    assert steps("0F0 0B0 0W0:0/2 0W0:1/2") == [(0, 10), (2, 6), (3, 3), (4, 0)]


@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_steps_of_a_timeline_end_empty_and_peak_where_simulate_says(name: str) -> None:
    schedule = getattr(schedules, name)(3, 7)
    costs = Costs(activation=0.7, held=0.3)
    timeline = simulate(schedule, costs)
    for found, peak in zip(timeline.memory_held(costs), timeline.peak_memory, strict=True):
        assert max(held for _, held in found) == peak
        assert found[-1][1] == pytest.approx(0, abs=1e-12)
        assert [time for time, _ in found] == sorted(time for time, _ in found)
