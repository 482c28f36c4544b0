"""The formulas and definitions of docs/glossary.md are those of the simulator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zbkern.pipeline import Costs, Schedule, schedules, simulate

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
GENERATORS = {
    "GPipe": "gpipe",
    "1F1B": "one_f_one_b",
    "ZB-H1": "zb_h1",
    "ZB-H2": "zb_h2",
    "ZB-V": "zb_v",
    "V-Half": "v_half",
}


def rows(second_column: str) -> list[tuple[str, str]]:
    """(schedules, formula) of the table whose second column begins with these words."""
    pattern = rf"^\| schedule \| {second_column}[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)"
    (body,) = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return re.findall(r"^\| ([^|]+) \| `([^`]+)`", body, re.MULTILINE)


def generate(title: str, stages: int, microbatches: int) -> Schedule:
    return getattr(schedules, GENERATORS[title])(stages, microbatches)


@pytest.mark.parametrize(("title", "formula"), rows("bubble"))
def test_bubbles(title: str, formula: str) -> None:
    for p, (f, b, w, c) in [(4, (5, 4, 2, 0.3)), (6, (10, 9, 5, 1.0)), (8, (3, 3, 3, 0.5))]:
        c = c if "c" in formula else 0.0
        timeline = simulate(generate(title, p, 2 * p), Costs(f, b, w, communication=c))
        work = 2 * p * (f + b + w)
        bubble = eval(formula, {"p": p, "F": f, "B": b, "W": w, "c": c})
        assert timeline.cost - work == pytest.approx(bubble)
        assert timeline.bubble_rate == pytest.approx(bubble / (work + bubble))


@pytest.mark.parametrize(("titles", "formula"), rows("peak memory"))
def test_memory(titles: str, formula: str) -> None:
    for title in titles.split(", "):
        for p in (4, 6, 9):
            m = 2 * p
            schedule = generate(title, p, m)
            activation = p / len(schedule.placement)  # of a chunk, where one stage's is 1
            timeline = simulate(schedule, Costs(activation=activation, held=activation))
            assert max(timeline.peak_memory) == pytest.approx(eval(formula, {"p": p, "m": m})), title
