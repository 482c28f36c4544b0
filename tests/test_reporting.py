"""The table and the line about the machine that benchmarks and examples print."""

from __future__ import annotations

from pathlib import Path

import torch

import zbkern
from zbkern import reporting


def test_a_table_is_aligned() -> None:
    rows = [("ZB-H1", 7, "1.50"), ("1F1B, long name", 812, "")]
    assert reporting.markdown_table(("schedule", "step ms", "x"), rows).splitlines() == [
        "| schedule        | step ms |    x |",
        "| --------------- | ------: | ---: |",
        "| ZB-H1           |       7 | 1.50 |",
        "| 1F1B, long name |     812 |      |",
    ]


def test_the_line_about_the_machine() -> None:
    machine = reporting.environment()
    line = reporting.machine_line(machine)
    assert machine["cores"] >= 1
    assert f"torch {torch.__version__}, zbkern {zbkern.__version__}" in line
    assert "GPU X; torch" in reporting.machine_line({**machine, "gpu": "GPU X"})


def test_the_commit_is_that_of_this_checkout_alone(tmp_path: Path) -> None:
    inside = tmp_path / "site-packages"
    inside.mkdir()
    (tmp_path / ".git").mkdir()  # of another project, not even a good one
    assert reporting._commit(inside) == "unknown"
    assert reporting._commit(tmp_path) == "unknown"
