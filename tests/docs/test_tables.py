"""The tables and figures of the pages are those of the code and of bench/results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from bench import context, gpu, layouts, models, planner, planner_exact, published_runs
from tests.support.pages import DOCS, ROOT, page, tables
from zbkern.kernels import dispatch, spec
from zbkern.planning.cost_model import exactness
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.software import under

# ---- performance.md and the README


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


def of_perfect(name: str, microbatches: int, which: str) -> str:
    return f"{median(results('pipeline')[f'{microbatches} microbatches, {name}'][which]):.3f}"


def test_engines_on_the_same_layers() -> None:
    for schedule, engine, four, eight in tables(page("performance.md"), "schedule, layers of zbkern"):
        name = NAMES[f"{schedule}|{engine}"]
        assert [four, eight] == [of_perfect(name, m, "of_perfect_with_layers") for m in (4, 8)], schedule


def test_engines_beside_torchs_layers() -> None:
    for name, four, eight in tables(page("performance.md"), "layers and engine"):
        assert [four, eight] == [of_perfect(NAMES.get(name, name), m, "of_perfect") for m in (4, 8)], name


def test_sequence_parallelism() -> None:
    figures = {row["way"]: row for row in results("tensor_parallel")}
    rows = tables(page("performance.md"), "W, 2 ranks")
    assert [row[0] for row in rows] == list(figures)
    for way, kept, held in rows:
        figure = figures[way]
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
    rows = [row for row in tables((ROOT / "README.md").read_text(encoding="utf-8"), "schedule") if len(row) == 6]
    assert len(check_demo(rows, names)) == 5


def test_the_first_screen() -> None:
    rows = [row[1:3] for row in tables((ROOT / "README.md").read_text(encoding="utf-8"), "the same model and batch")]
    demo = {row["name"]: f"{median(row['seconds']) * 1e3:.0f} ms" for row in results("demo")}
    ((_, *unequal),) = (row for row in tables(page("batches.md"), "planned step, relative to") if "usual" in row[0])
    block = results("gpu_block")[-1]
    gains = []
    for first, *others in (run["schedules"] for run in results("virtual_stages")):
        chosen = (row for row in others if row["name"] in ("ZB-H1", "planned, memory of 1F1B"))
        gains += [first["measured"] / row["measured"] for row in chosen]
    assert rows == [
        [demo["1F1B"], demo["ZB-V, 2 slices"]],
        ["1", f"0{min(unequal)} to 0{max(unequal)} of the time"],
        [f"{block['torch']:.1f} ms", f"{block['zbkern']:.1f} ms"],
        ["1", f"{min(gains):.2f} to {max(gains):.2f} times as fast, in two runs"],
    ]


def test_the_demo() -> None:
    assert check_demo(tables(page("performance.md"), "schedule"), {}) == {row["name"] for row in results("demo")}


def shown_in(cell: str, rate: float) -> bool:
    """Whether a cell has this share, in as many digits as it has."""
    digits = len(cell.rstrip("%").partition(".")[2])
    return cell == f"{abs(rate):.{digits}%}"


def test_plans_beside_a_published_search() -> None:
    found = results("planner_one")
    differences = [round(row["plan"], 4) - row["published"] for row in found]
    better, equal = (sum(map(which, differences)) for which in (lambda d: d < -1e-9, lambda d: abs(d) < 1e-9))
    proven = sum(row["optimal"] for row in found)
    assert f"better in {better} and equal in {equal}, and {proven} are proven" in page("schedules.md").replace(
        "\n", " "
    )
    for name in ("performance.md", "comparison.md"):
        assert f"better in {better} of {len(found)}" in page(name).replace("\n", " ")
    for model, microbatches, limit, *cells in tables(page("schedules.md"), "model", "m", "memory", "published search"):
        of_row = {"model": model, "stages": 16, "microbatches": int(microbatches), "limit": float(limit)}
        (row,) = (row for row in found if of_row.items() <= row.items())
        assert all(map(shown_in, cells, (row["published"], row["plan"], row["lower_bound"]))), (cells, row)


def test_plans_in_a_v() -> None:
    found = {row["limit"]: row for row in results("planner_v")}
    for limit, *cells in tables(page("schedules.md"), "memory", "published", "plan", "lower bound"):
        row = found[float(limit.partition(" ")[0])]
        assert all(map(shown_in, cells, (row["published"], row["plan"], row["lower_bound"]))), (cells, row)


@pytest.mark.slow
@pytest.mark.parametrize("section", ["one", "v"])
def test_saved_plans_are_of_the_planner_as_it_is(section: str) -> None:
    """Those found in a second, of 8 ranks or 16: then run the benchmark again."""
    saved = [row for row in results(f"planner_{section}") if row["seconds"] < 1 and row["optimal"]][::12]
    cells = {cell[:1] + cell[2:6]: cell for cell in planner.SECTIONS[section]()}
    for row in saved:
        cell = cells[tuple(row[name] for name in ("model", "stages", "microbatches", "chunks", "limit"))]
        assert planner.measure(cell, row["effort"])["plan"] == pytest.approx(row["plan"], abs=1e-6), row


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_plans_beside_their_bounds(chunks: int) -> None:
    """The rows of four ranks and eight microbatches; the others take minutes."""
    (row,) = (row for row in tables(page("schedules.md"), "p", "m", "chunks") if row[:3] == ["4", "8", str(chunks)])
    cases = [case for case in planner_exact.usual() if case[2:5] == (4, 8, chunks)]
    found = [planner_exact.measure(case, None, planner_exact.EFFORT) for case in cases]
    rates = [rate for each in found for rate in (each["plan"], each["lower_bound"])]
    assert len(row[3:]) == len(rates)
    assert all(map(shown_in, row[3:], rates))


def test_offload_and_recomputation() -> None:
    expected = []
    for row in results("offload"):
        chunks, copy, limit, *steps = row.values()
        expected.append([f"{chunks}", f"{copy:g} F", f"{limit:g}", *(f"{step:.3f}" for step in steps)])
    assert tables(page("offload.md"), "chunks", "a copy takes") == expected


def test_ranks_that_sleep() -> None:
    above = [measured / simulated - 1 for simulated, measured in results("sleeping_ranks").values()]
    assert f"{100 * min(above):.1f} to {100 * max(above):.1f} % above the simulated" in page("performance.md")
    assert len(above) == 13


def test_every_file_of_figures_is_named_on_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    files = [path.name for path in (ROOT / "bench" / "results").iterdir()]
    assert [name for name in files if f"`bench/results/{name}`" not in pages] == []


@pytest.mark.parametrize(
    ("table_of", "figures_of", "columns"),
    [
        (("layers", "in one piece"), "split", ("whole", "split", "torch_split")),
        (("layers", "merged"), "merge", ("merged", "separate")),
    ],
)
def test_the_split(table_of: tuple[str, str], figures_of: str, columns: tuple[str, ...]) -> None:
    found = [row[1:] for row in tables(page("performance.md"), *table_of)]
    expected = [[f"{figure[column]:.2f}" for column in columns] for figure in results("split")[figures_of]]
    assert found
    assert [row for row in found if row not in expected] == []


def test_kernels_on_an_h200() -> None:
    alone = [gpu.cells(row)[:4] for row in results("gpu_w")["rows"]]
    rows = [row for row in map(gpu.cells, results("gpu")["rows"]) if row[0] not in {name for name, *_ in alone}]
    shown = tables(page("performance.md"), "kernel")
    assert shown
    assert [row for row in shown if row not in [*alone, *(row[:4] for row in rows)]] == []


def test_blocks_on_an_h200() -> None:
    columns = ("torch F", "zbkern F", "torch", "zbkern", "F + B", "W", "4 W", "merged")
    figures = results("gpu_block")
    expected = [[f"{row['tokens']}", *(f"{row[name]:.2f}" for name in columns)] for row in figures]
    assert tables(page("performance.md"), "tokens", "torch F") == expected
    torch, ours, apart, merged = tables(page("../README.md"), "on an H200")
    assert torch[1:] == [f"{row['torch']:.2f}" for row in figures]
    assert ours[1:] == [f"{row['torch'] / row['zbkern']:.2f}" for row in figures]
    assert apart[1:] == [f"{row['torch'] / (row['F + B'] + row['W']):.2f}" for row in figures]
    assert merged[1:] == [f"{row['4 W'] / row['merged']:.2f}" for row in figures]


def test_virtual_stages_on_an_h200() -> None:
    runs = [run["schedules"] for run in results("virtual_stages")]
    for name, *cells in tables(page("performance.md"), "schedule on four virtual stages"):
        expected = []
        for first, *others in runs:
            row = next(row for row in (first, *others) if row["name"] == name)
            expected += [f"{1e3 * row['measured']:.0f}"]
            expected += [f"{first[kind] / row[kind]:.2f}" for kind in ("measured", "simulated")]
        assert cells == expected, name


def test_the_plans_for_known_models() -> None:
    rows = tables(page("performance.md"), "model")
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


def of_layout(row: dict[str, Any]) -> Setting:
    sizes = {name: size for name, size in row["options"].items() if name not in ("stages", "microbatches")}
    model = load_architecture(layouts.CONFIGURATIONS / f"{row['model']}.json")
    return Setting(model, under(load_hardware("h100"), "megatron"), Job(**sizes))


@pytest.mark.parametrize(
    ("name", "setting_of"),
    [
        ("models", lambda row: models.CASES[row["model"]].setting(row["model"], "h100")),
        ("context", lambda row: context.CASES[row["model"]].setting(row["model"], "h100", sequence=row["tokens"])),
        ("layouts", of_layout),
    ],
)
def test_plans_for_known_models_are_of_the_cost_model_as_it_is(name: str, setting_of: Callable[[Any], Setting]) -> None:
    """Another fit of the shares, or another rule, changes what a layer takes: then run the benchmark again."""
    for row in results(name)["rows"]:
        layer = setting_of(row).costs.layers[1]
        assert row["layer"] == pytest.approx([layer.forward, layer.backward, layer.weight]), row["model"]


def test_long_context() -> None:
    title = {"llama-3-8b": "Llama-3 8B", "llama-3-70b": "Llama-3 70B", "llama-3-405b": "Llama-3 405B"}
    title["deepseek-v3"] = "DeepSeek-V3"
    rows, figures = tables(page("long_context.md"), "model, stages"), results("context")["rows"]
    for (model, tokens, *cells), found in zip(rows, figures, strict=True):
        assert model in ("", f"{title[found['model']]}, {found['stages']}")
        shown = ("one_f_one_b", "seq1f1b", "whole", "plan", "quarter")
        assert (tokens, cells) == (f"{found['tokens'] // 1024}K", [context.cell(found[name]) for name in shown])


def test_layouts_beside_published_ones() -> None:
    rows = tables(page("cost_model.md"), "model, GPUs, batch, sequence")
    assert rows == [layouts.row(found) for found in results("layouts")["rows"]]


def test_the_errors_of_the_cost_model() -> None:
    errors = json.loads(exactness.TABLE.read_text(encoding="utf-8"))
    fitted, unseen = errors["speeds"], errors["unseen"]
    rows = tables(page("cost_model.md"), "group")
    pairs = {(kind, ran) for table in (fitted, unseen) for kind, found in table.items() for ran in found}
    assert [(row[0], row[1]) for row in rows] == sorted(pairs)
    for kind, ran, *cells in rows:
        assert cells == [published_runs.cell(table.get(kind, {}).get(ran)) for table in (fitted, unseen)], (kind, ran)


# ---- kernels.md


def test_why_backends_cannot_run() -> None:
    """As `zbkern info` prints them on a machine without a GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    quoted = dict(re.findall(r"^  not (\w+): (.*)$", page("kernels.md"), re.MULTILINE))
    assert quoted.keys() == {"cuda", "triton"}
    dispatch.why_not.cache_clear()
    try:
        for backend, reason in quoted.items():
            assert dispatch.why_not("linear", backend, "cpu") == reason
    finally:
        dispatch.why_not.cache_clear()


def test_the_backends() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", page("kernels.md"), re.MULTILINE)
    assert sorted(rows) == sorted(spec.IMPLEMENTATIONS)
