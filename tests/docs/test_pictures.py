"""The pictures that docs/figures.py draws are those that are kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from zbkern.planning.planner import native

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(native.core is None, reason="one needs the planner's search, which is not compiled")
def test_pictures_are_those_of_the_script(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    for path in figures.save_all(tmp_path):
        kept = DOCS / "images" / path.name
        assert path.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), "python docs/figures.py"
