from __future__ import annotations

import pytest

from zbkern.pipeline import Costs, report, schedules, simulate


@pytest.mark.parametrize("width", [30, 31, 40, 60, 79])
@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v"])
def test_a_grid_is_cut_to_the_width_in_its_middle(name: str, width: int) -> None:
    schedule = getattr(schedules, name)(3, 12)
    *lines, note = report.grid(schedule, width).split("\n")
    whole = [line.split()[2:] for line in schedule.to_text().split("\n")]
    assert max(map(len, lines)) <= width
    first, last, total = (int(word) for word in note.replace("(", " ").split() if word.isdigit())
    assert total == len(whole[0])
    for line, row in zip(lines, whole, strict=True):
        assert line.split()[2:] == [*row[:first], "..", *row[last + 1 :]]
    assert abs(first - (total - 1 - last)) <= 1


def test_a_grid_that_fits_is_whole() -> None:
    schedule = schedules.zb_h1(3, 4)
    assert report.grid(schedule, 200) == schedule.to_text()


def test_idle_is_of_the_objective() -> None:
    timeline = simulate(schedules.zb_h2(3, 6))
    assert report.idle(timeline, "cost") == timeline.bubble_rate == 0
    assert report.idle(timeline, "makespan") == pytest.approx(1 - 18 / (18 + 2))
    assert report.idle(simulate(schedules.gpipe(2, 2), Costs(0, 0, 0)), "makespan") == 0


def test_a_limit_is_exceeded_by_more_than_rounding() -> None:
    assert not report.exceeds(0.1 + 0.2, 0.3)
    assert report.exceeds(0.31, 0.3)
