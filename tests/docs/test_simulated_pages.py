"""Formulas, tables and pictures of the pages are those of schedules as they are simulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import overlap_counted, overlap_planned
from tests.support.pages import DOCS, page, script, tables
from zbkern.pipeline import Costs, schedules, simulate
from zbkern.planning.planner import native

gallery = script("gallery")


def test_tables_and_figures_are_those_of_the_simulator() -> None:
    shown = gallery.PAGE.read_text(encoding="utf-8")
    parts = re.findall(r"<!-- ([a-z0-9_ ]+) -->\n", shown)
    assert sorted(name for name in parts if name != "end") == sorted([*gallery.PARTS, *gallery.FORMULAS])
    for made, kept in zip(gallery.fill(shown).split("\n"), shown.split("\n"), strict=True):
        assert made == kept, "the page is out of date: python docs/gallery.py"


@pytest.mark.parametrize("name", gallery.FORMULAS)
def test_pictures_are_those_of_the_simulator(name: str) -> None:
    kept = (gallery.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert gallery.picture(name) == kept, "the picture is out of date: python docs/gallery.py"
    assert f"(images/{name}.svg)" in gallery.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("stages", [4, 5, 6, 7, 9])
@pytest.mark.parametrize("name", gallery.FORMULAS)
def test_formulas_are_those_of_the_simulator(name: str, stages: int) -> None:
    formulas, interleaved = gallery.FORMULAS[name], name in gallery.INTERLEAVED
    any_costs = set("FBW") & set(formulas.bubble)
    for f, b, w in [(1, 1, 1), *([(5, 4, 2), (3, 6, 3)] if any_costs else [])]:
        for v in (2, 3) if interleaved else (1,):
            for m in (2 * stages, 3 * stages):
                found = gallery.timeline(name, stages, m, Costs(f, b, w, held=1), v)
                values = {"p": stages, "m": m, "v": v, "F": f, "B": b, "W": w}
                bounds = [eval(each, dict(values)) for each in formulas.bubble.split(" to ")]
                bubble = found.cost - m * (f + b + w)
                assert bounds[0] - 1e-9 <= bubble <= bounds[-1] + 1e-9
                assert max(found.peak_memory) == pytest.approx(eval(formulas.memory, dict(values)))


@pytest.mark.skipif(native.core is None, reason="one needs the planner's search, which is not compiled")
def test_other_pictures_are_those_of_their_script(tmp_path: Path) -> None:
    for path in script("figures").save_all(tmp_path):
        kept = DOCS / "images" / path.name
        assert path.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), "python docs/figures.py"


GENERATORS = {
    "GPipe": "gpipe",
    "1F1B": "one_f_one_b",
    "ZB-H1": "zb_h1",
    "ZB-H2": "zb_h2",
    "ZB-V": "zb_v",
    "V-Half": "v_half",
}


def formulas(second_column: str) -> list[tuple[str, str]]:
    """(schedules, formula) of the table whose second column begins with these words."""
    rows = tables(page("glossary.md"), "schedule", rf"{second_column}[^|]*")
    return [(row[0], re.findall("^`([^`]+)`", row[1])[0]) for row in rows]


@pytest.mark.parametrize(("title", "formula"), formulas("bubble"))
def test_bubbles(title: str, formula: str) -> None:
    for p, (f, b, w, c) in [(4, (5, 4, 2, 0.3)), (6, (10, 9, 5, 1.0)), (8, (3, 3, 3, 0.5))]:
        c = c if "c" in formula else 0.0
        timeline = simulate(getattr(schedules, GENERATORS[title])(p, 2 * p), Costs(f, b, w, communication=c))
        work = 2 * p * (f + b + w)
        bubble = eval(formula, {"p": p, "F": f, "B": b, "W": w, "c": c})
        assert timeline.cost - work == pytest.approx(bubble)
        assert timeline.bubble_rate == pytest.approx(bubble / (work + bubble))


@pytest.mark.parametrize(("titles", "formula"), formulas("peak memory"))
def test_memory(titles: str, formula: str) -> None:
    for title in titles.split(", "):
        for p in (4, 6, 9):
            m = 2 * p
            schedule = getattr(schedules, GENERATORS[title])(p, m)
            activation = p / len(schedule.placement)  # of a chunk, where one stage's is 1
            timeline = simulate(schedule, Costs(activation=activation, held=activation))
            assert max(timeline.peak_memory) == pytest.approx(eval(formula, {"p": p, "m": m})), title


@pytest.mark.parametrize("row", tables(page("overlap.md"), "all-to-alls, of the step in turn"), ids=lambda row: row[0])
def test_the_counted_table(row: list[str]) -> None:
    share, *expected = row
    _, *found = overlap_counted.row_of(int(share.removesuffix(" %")) / 100, 8).values()
    assert [f"{each:.2f}" for each in found] == expected


PLANNED = tables(page("overlap.md"), "ranks, microbatches", "all-to-alls")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row[0] == "4, 8" else [pytest.mark.slow], id=", ".join(row[:2])) for row in PLANNED],
)
def test_the_planned_table(row: list[str]) -> None:
    ranks, microbatches = map(int, row[0].split(", "))
    share = int(row[1].removesuffix(" %")) / 100
    found = [overlap_planned.measure(ranks, microbatches, share, memory, 0) for memory in (1.25, 1.5, 2.0)]
    figures = [found[0]["turns"], found[0]["dualpipe"], *(each["planned"] for each in found)]
    assert [f"{each:.3f}" for each in figures] == row[2:]
    assert all(each["planned"] > each["dualpipe"] for each in found if each["dualpipe_fits"])
