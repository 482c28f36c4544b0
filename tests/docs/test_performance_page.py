"""The tables of docs/performance.md, and those of them that the README quotes, are the figures in bench/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"

NAMES = {  # rows of the page -> benchmark's
    "ZB-V|zbkern": "zbkern zb_v",
    "ZB-V|torch.distributed.pipelining": "torch ZBVZeroBubble with zbkern's layers",
    "1F1B|zbkern": "zbkern one_f_one_b",
    "1F1B|torch.distributed.pipelining": "torch 1F1B with zbkern's layers",
    "ZB-H2|zbkern": "zbkern zb_h2",
    "ZB-H2, eager W|zbkern": "zbkern zb_h2 eager",
    "ZB-V, eager W|zbkern": "zbkern zb_v eager",
    "ZB-H1|zbkern": "zbkern zb_h1",
    "GPipe|zbkern": "zbkern gpipe",
    "zbkern, ZB-H2": "zbkern zb_h2",
    "zbkern, ZB-V": "zbkern zb_v",
    "zbkern's layers in torch's ZBVZeroBubble": "torch ZBVZeroBubble with zbkern's layers",
    "zbkern, ZB-H1": "zbkern zb_h1",
    "zbkern, 1F1B": "zbkern one_f_one_b",
    "zbkern's layers in torch's 1F1B": "torch 1F1B with zbkern's layers",
}


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def table(page: Path, first_column: str) -> list[list[str]]:
    """The rows of the one table whose first column has that name."""
    pattern = rf"^\|\s*{re.escape(first_column)}\s*\|[^\n]*\n\|[-: |]+\n((?:\|[^\n]*\n)+)"
    (rows,) = re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.strip().split("\n")]


def of_perfect(name: str, microbatches: int, which: str) -> str:
    return f"{median(results('pipeline')[f'{microbatches} microbatches, {name}'][which]):.3f}"


def test_engines_on_the_same_layers() -> None:
    for schedule, engine, four, eight in table(PAGE, "schedule, layers of zbkern"):
        name = NAMES[f"{schedule}|{engine}"]
        assert [four, eight] == [of_perfect(name, m, "of_perfect_with_layers") for m in (4, 8)], schedule


def test_engines_beside_torchs_layers() -> None:
    for name, four, eight in table(PAGE, "layers and engine"):
        assert [four, eight] == [of_perfect(NAMES.get(name, name), m, "of_perfect") for m in (4, 8)], name


def test_sequence_parallelism() -> None:
    figures = {row["way"]: row for row in results("tensor_parallel")}
    rows = table(PAGE, "W, 2 ranks")
    assert [row[0] for row in rows] == list(figures)
    for way, of_torch, fastest, kept, held in rows:
        figure = figures[way]
        assert [of_torch, fastest] == [f"{figure['of_torch']:.2f}", f"{figure['fastest_ms']:.0f}"], way
        assert [kept, held] == [f"{figure[name] / 2**20:.1f}" for name in ("f_to_b_bytes", "held_bytes")], way


def check_demo(rows: list[list[str]], names: dict[str, str]) -> set[str]:
    """The rows of a page against the figures of `make demo`; their names in these."""
    figures = {row["name"]: row for row in results("demo")}
    seconds = {name: median(figure["seconds"]) for name, figure in figures.items()}
    for shown, step, idle, planned, peak, *ratios in rows:
        figure = figures[names.get(shown, shown)]
        own = seconds[figure["name"]]
        assert step == f"{own * 1e3:.0f}"
        assert idle == (f"{median(figure['idle']):.1%}" if figure["idle"] else "")
        assert planned == (f"{figure['planned']:.1%}" if figure["planned"] is not None else "")
        assert peak == f"{figure['memory'] / 1e6:.0f}"
        assert ratios == [f"{seconds[base] / own:.2f}" for base in ("1F1B", "one process")][: len(ratios)]
    return {names.get(row[0], row[0]) for row in rows}


def test_the_readme_quotes_the_demo() -> None:
    names = {"1F1B, torch.distributed.pipelining": "1F1B, torch's engine", "ZB-V in 2 slices": "ZB-V, 2 slices"}
    rows = [row for row in table(ROOT / "README.md", "schedule") if len(row) == 6]
    assert len(check_demo(rows, names)) == 5


def test_the_demo() -> None:
    assert check_demo(table(PAGE, "schedule"), {}) == {row["name"] for row in results("demo")}


@pytest.mark.parametrize(
    ("table_of", "figures_of", "columns"),
    [
        ("layers|in one piece", "split", ("whole", "split", "torch_split")),
        ("layers|merged", "merge", ("merged", "separate")),
    ],
)
def test_the_split(table_of: str, figures_of: str, columns: tuple[str, ...]) -> None:
    header, second = table_of.split("|")
    pattern = rf"^\| {header} \| {second} \|[^\n]*\n\|[-: |]+\n((?:\|[^\n]*\n)+)"
    (rows,) = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    found = [[cell.strip() for cell in row.strip("|").split("|")][1:] for row in rows.strip().split("\n")]
    expected = [[f"{figure[column]:.2f}" for column in columns] for figure in results("split")[figures_of]]
    assert sorted(found) == sorted(expected)


def test_the_plans_for_known_models() -> None:
    rows = table(PAGE, "model")
    figures = results("models")["rows"]
    assert len(rows) == len(figures)
    for (name, sizes, limit, held, base, best, *plans), found in zip(rows, figures, strict=True):
        planned, bubble, *gains, halves, finer = plans
        assert (name, sizes) == (found["model"], f"{found['stages']}, {found['microbatches']}")
        assert (limit, held) == (f"{found['limit'] / 1e9:.0f} GB", f"{found['held']:.2f}")
        assert base == f"{found['one_f_one_b']:.0f}"
        assert best == f"{found['best']}, {found['best_cost']:.0f}"
        assert planned == f"{found['plan_name']} x{found['plan_chunks']}, {found['plan']:.0f}"
        assert bubble == f"{found['bubble']:.1%}"
        assert gains == [f"{found[which] / found['plan'] - 1:.1%}" for which in ("one_f_one_b", "best_cost")]
        assert halves == f"{found['halves_name']} x{found['halves_chunks']}, {found['halves']:.0f}"
        assert finer == f"{found['halves_bubble']:.1%}"
