"""What benchmarks save: only with --out, so that a quick run does not replace the figures in bench/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import ranks, report, sleeping_ranks
from zbkern.pipeline.transport.local import LocalTransport

QUICK = ["--stages", "2", "--microbatches", "2", "--unit", "0.001", "--only", "zb_h1"]


def kept() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(report.__file__).parent.rglob("*.json")}


def test_figures_are_kept_where_they_are_told_to_be(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = kept()
    sleeping_ranks.main(QUICK)
    assert "not saved: --out FOLDER writes these figures" in capsys.readouterr().out
    sleeping_ranks.main([*QUICK, "--out", str(tmp_path / "new")])
    assert kept() == before
    written = json.loads((tmp_path / "new/sleeping_ranks.json").read_text())
    assert written["figures"].keys() == {"zb_h1"}
    assert {"commit", "torch", "cores"} <= written["environment"].keys()


def test_an_error_of_one_thread_ends_all_and_is_raised() -> None:
    rings = [LocalTransport.ring(2), LocalTransport.ring(2)]

    def waits(rank: int) -> int:
        if rank == 0:
            raise KeyError("mine")
        return rings[1][rank].receive(0, "never", 30.0)

    with pytest.raises(KeyError, match="mine"):
        ranks.run_in_threads(rings, waits)
    assert ranks.run_in_threads([LocalTransport.ring(3)], lambda rank: rank + 5) == 5


@pytest.mark.parametrize(
    "path", [*Path(report.__file__).with_name("results").glob("*.json")], ids=lambda path: path.stem
)
def test_a_file_of_figures_has_one_row_a_line(path: Path) -> None:
    assert report.as_text(json.loads(path.read_text())) + "\n" == path.read_text()


def test_a_row_is_a_line() -> None:
    text = report.as_text({"a": {"rows": [{"x": [1, 2]}, {"x": []}], "n": 3}, "b": {}})
    assert text.splitlines() == [
        "{",
        ' "a": {',
        '  "rows": [',
        '   {"x": [1, 2]},',
        '   {"x": []}',
        "  ],",
        '  "n": 3',
        " },",
        ' "b": {}',
        "}",
    ]
