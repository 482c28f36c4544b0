"""docs/schedules.md says what the simulator says: its formulas, its tables and its pictures."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from zbkern.pipeline import Costs

DOCS = Path(__file__).parents[2] / "docs"
_spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
assert _spec is not None
assert _spec.loader is not None
gallery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gallery)


def test_tables_and_figures_are_those_of_the_simulator() -> None:
    page = gallery.PAGE.read_text(encoding="utf-8")
    parts = re.findall(r"<!-- ([a-z0-9_ ]+) -->\n", page)
    assert sorted(name for name in parts if name != "end") == sorted([*gallery.PARTS, *gallery.FORMULAS])
    for made, kept in zip(gallery.fill(page).split("\n"), page.split("\n"), strict=True):
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


def test_a_part_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        gallery.fill("<!-- nothing -->\n<!-- end -->")
