"""`zbkern plan`: what it prints, every file it writes, read back, and what it says when something is wrong."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from zbkern import __main__
from zbkern.pipeline import Costs, LayerCosts, ModelCosts, Schedule, schedules, simulate

SIZES = ["--stages", "3", "--microbatches", "5"]
SECOND = ["--effort", "0"]  # the constructive answer


@pytest.fixture
def run(run_plan: Callable[..., str]) -> Callable[..., str]:
    return functools.partial(run_plan, *SIZES)


@pytest.fixture
def fails(run: Callable[..., str]) -> Callable[..., str]:
    return functools.partial(run, status=2)


def figures(text: str) -> dict[str, str]:
    """The lines below the grid, by their names."""
    lines = [line.split(maxsplit=1) for line in text.split("\n") if line]
    return {words[0]: words[1] for words in lines if words[0] in ("bubble", "cost", "makespan", "memory")}


def test_costs_of_layers_are_cut(run, fails, tmp_path: Path) -> None:
    blocks = [LayerCosts(f"block {n}", 1, 1, 1, 1, held=1.15, output=0.1) for n in range(9)]
    costs = ModelCosts([*blocks, LayerCosts("head", 3, 3, 3, 1)])
    path = costs.save(tmp_path / "layers.json")
    text = run("--costs", path, "--memory", "1.5x", "--compare", "--out", tmp_path / "plan.svg", *SECOND)
    (sizes,) = re.findall(r"^cut +([\d ]+) layers by chunk$", text, re.MULTILINE)
    assert sum(map(int, sizes.split())) == 10
    assert {"zb_v", "one_f_one_b", "interleaved"} <= set(re.findall(r"^([a-z_0-9-]+) +\d+ +\d", text, re.MULTILINE))
    assert (tmp_path / "plan.svg").exists()
    assert "3 ranks, 1 chunk each" in run("--costs", path, "--chunks", 1, *SECOND)
    assert "--recompute: without a limit" in fails("--costs", path, "--recompute")
    assert "BW" in run("--costs", path, "--recompute", "--memory", "0.5x", *SECOND)
    assert "--costs has layers, which are cut differently" in fails("--costs", path, "--schedule", "zb_v")
    assert "argument --stages: plan: 11 stages with 1 chunks" in fails("--costs", path, "--stages", 11)


def test_what_saves_memory_is_tried_where_passes_wait_for_it(run, fails, tmp_path: Path) -> None:
    blocks = [LayerCosts(f"block {n}", 1, 1, 1, 1, held=0.5, output=0.1) for n in range(9)]
    path = ModelCosts(blocks, time_unit="ms").save(tmp_path / "layers.json")
    few = ["--costs", path, "--microbatches", 12, "--chunks", 1, "--effort", 0]
    tight = run(*few, "--memory", 4)
    (gain,) = re.findall(r"^try +--recompute: cost ([\d.]+) ms, [\d.]+% less \(a quick search\)$", tight, re.MULTILINE)
    assert float(gain) < float(figures(tight)["cost"].removesuffix(" ms"))
    assert figures(run(*few, "--memory", 4, "--recompute"))["cost"] == f"{gain} ms"
    assert "--recompute:" not in run(*few, "--memory", 50)
    assert re.search(
        r"memory: plan: no schedule fits .*; it fits with --recompute, cost [\d.]+ ms",
        fails(*few, "--chunks", 3, "--memory", 2.5),
    )


def test_what_was_asked_for_and_does_not_help_is_not_advised(run, tmp_path: Path) -> None:
    path = str(Costs(checkpoint=0.9, offload_bandwidth=0.01, reload_bandwidth=0.01).save(tmp_path / "costs.json"))
    short = ["--costs", path, "--memory", "1", *SIZES]
    assert "forwards wait for memory: a higher limit, offloading or recomputation" in run(*short)
    text = run(*short, "--recompute", "--offload", "0.01")
    assert "saving" not in text
    assert "forwards wait for memory: a higher limit\n" in text


def test_a_named_schedule_is_printed_with_its_figures(run) -> None:
    text = run("--schedule", "zb_h1")
    schedule = schedules.zb_h1(3, 5)
    timeline = simulate(schedule)
    assert schedule.to_text() in text
    found = figures(text)
    unknown = "how much less any order of these chunks could have is not known"  # the lower bound is 0
    assert found["bubble"] == f"{timeline.bubble_rate:.2%} ({unknown})"
    assert float(found["cost"]) == timeline.cost
    assert found["memory"] == "3 3 3 by rank (no limit)"  # W holds as much as the activation


def test_memory_is_relative_or_in_the_unit_of_activation(run, tmp_path: Path) -> None:
    costs = Costs(activation=10, held=4).save(tmp_path / "costs.json")
    relative, plain = (run("--costs", costs, "--memory", limit, *SECOND) for limit in ("0.5x", "15"))
    assert relative == plain
    assert "(limit 15, 0.5x)" in plain
    two = run("--costs", costs, "--memory", "1x", "--chunks", 2, "--placement", "v", *SECOND)
    assert "(limit 60, 1x)" in two  # three ranks with two chunks of 10
    static = Costs(activation=10, static=7).save(tmp_path / "static.json")
    assert "(limit 27)" in run("--costs", static, "--memory", 27, *SECOND)  # what 1F1B holds there is no 0.9x


def test_a_placement_can_be_spelt_out(run) -> None:
    named, spelt = (run("--chunks", 2, "--placement", place, *SECOND) for place in ("v", "0,1,2,2,1,0"))
    assert named.split("\n")[1:] == spelt.split("\n")[1:]


def test_compare_has_every_schedule_and_the_plan_sorted_by_bubble(run) -> None:
    text = run("--compare", "--memory", "1x", *SECOND)
    header, *rows = text.split("\n\n")[3].strip().split("\n")
    assert header.split() == ["schedule", "chunks", "bubble", "makespan", "memory", "of", "1x"]
    cells = {row.split()[0]: row.split() for row in rows}
    assert set(cells) == {*schedules.NAMES, "plan-linear"}
    rates = [float(row.split()[2].rstrip("%")) for row in rows]
    assert rates == sorted(rates)
    assert [name for name, row in cells.items() if row[-1] == "limit"] == [
        name for name, row in cells.items() if float(row[4]) > 3
    ]
    whole_model = Costs(0.5, 0.5, 0.5, activation=0.5, held=0.25)  # two chunks per rank do what one did
    for name, costs in {"zb_h2": Costs(), "v_min": whole_model}.items():
        timeline = simulate(getattr(schedules, name)(3, 5), costs)
        assert cells[name][2:5] == [
            f"{timeline.bubble_rate:.2%}",
            f"{timeline.makespan:g}",
            f"{max(timeline.peak_memory):g}",
        ]


def test_sequences_in_slices(run, tmp_path: Path) -> None:
    costs = Costs(4, 6, 2, attention_forward=2.5, attention_backward=4.5, tokens=4096).save(tmp_path / "costs.json")
    whole = run("--costs", costs, *SECOND)
    text = run("--costs", costs, "--slices", "auto", "--compare", "--out", tmp_path / "plan.csv", *SECOND)
    assert float(figures(text)["cost"]) < 0.9 * float(figures(whole)["cost"])
    (lengths,) = re.findall(r"^slices +([\d ]+) tokens, first to last$", text, re.MULTILINE)
    assert sum(map(int, lengths.split())) == 4096
    assert Schedule.from_csv((tmp_path / "plan.csv").read_text()).slices == tuple(map(int, lengths.split()))
    count = len(lengths.split())
    assert f"5 microbatches in {count} slices each" in text
    assert re.search(rf"^one_f_one_b, {count} slices +1 ", text, re.MULTILINE)
    assert re.search(r"^one_f_one_b +1 ", text, re.MULTILINE)


def test_there_are_no_more_slices_than_tokens(run, fails, tmp_path: Path) -> None:
    costs = Costs(tokens=2).save(tmp_path / "costs.json")
    message = "argument --slices, --stages: plan: slices must be at most as many as the 2 tokens of a sequence; got 3"
    for slices in ("3", "1,1,1"):
        assert message in fails("--costs", costs, "--slices", slices)
    assert "2 slices each" in run("--costs", costs, "--slices", "2", *SECOND)


def test_a_named_schedule_in_slices(run) -> None:
    text = run("--schedule", "one_f_one_b", "--slices", "3,2,1")
    assert "one_f_one_b: 3 ranks, 1 chunk each, 5 microbatches in 3 slices each" in text
    assert "slices    3 2 1 of 6, first to last" in text


def test_compare_says_what_it_did_not_cut(run, tmp_path: Path) -> None:
    costs = Costs(forward=[4, 4, 7], activation=2).save(tmp_path / "costs.json")
    text = run("--compare", "--costs", costs, *SECOND)
    assert "the same model cut evenly; more work of its first or last chunk is not divided" in text


def test_every_kind_of_file_is_written(run, tmp_path: Path) -> None:
    names = ["a.svg", "a.html", "a.json", "a.csv", "a.torch.csv", "a.txt"]
    text = run("--schedule", "zb_v", "--out", *(tmp_path / name for name in names))
    assert text.split("\n")[-7:-1] == [f"wrote {tmp_path / name}" for name in names]
    schedule = schedules.zb_v(3, 5)
    actions = sum(map(len, schedule.actions))
    svg = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    assert sum(each.get("class") == "action" for each in svg.iter()) == actions
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    trace = json.loads((tmp_path / "a.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == actions
    assert Schedule.from_csv((tmp_path / "a.csv").read_text()) == schedule
    assert Schedule.from_csv((tmp_path / "a.torch.csv").read_text()).actions == schedule.actions
    assert (tmp_path / "a.txt").read_text() == schedule.to_text() + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--microbatches", "0"], "argument --microbatches: expected a whole number, at least 1; got '0'"),
        (["--stages", str(10**20)], "argument --stages: plan: 3 x stages x microbatches x chunks x slices must be"),
        (
            ["--chunks", str(10**20)],
            "argument --chunks, --stages: plan: 3 x stages x microbatches x chunks x slices must be",
        ),
        (["--stages", "9" * 5000], "argument --stages: expected a whole number, at least 1; got"),
        (["--memory", "lots"], "argument --memory: expected a limit such as 1.5x"),
        (["--memory", "0.1x"], "argument --memory: plan: no schedule fits memory_limit=0.3 on rank 0"),
        (["--schedule", "gpipe", "--memory", "4"], "argument --memory: gpipe holds 5 on one rank, more than 4; raise"),
        (["--schedule", "zb_h9"], "argument --schedule: invalid choice: 'zb_h9'"),
        (["--schedule", "zb_v", "--chunks", "3"], "argument --chunks: zb_v has 2 per rank; leave --chunks out"),
        (["--schedule", "zb_v", "--placement", "v"], "argument --placement: zb_v has its own"),
        (["--slices", "some"], "argument --slices: expected auto, a number of slices, or lengths such as 3,2,2; got"),
        (["--slices", "2,0"], "argument --slices: expected auto, a number of slices, or lengths such as 3,2,2; got"),
        (["--slices", "9" * 5000], "argument --slices: expected auto, a number of slices, or lengths such as"),
        (["--placement", "9" * 5000], "argument --placement: expected linear, loop, v, zigzag or a rank per chunk"),
        (["--slices", "auto", "--schedule", "gpipe"], "argument --slices: gpipe is as it is told: give a number, or"),
        (["--slices", str(10**20)], "argument --slices, --stages: plan: slices must be at most 1000000"),
        (["--slices", "900000"], "argument --slices, --stages: plan: 3 x stages x microbatches x chunks x slices must"),
        (["--placement", "v", "--chunks", "3"], 'argument --placement, --chunks, --stages: plan: placement "v" needs'),
        (
            ["--placement", "0,1,1"],
            "argument --placement, --stages: plan: placement must name every rank below 3 1 times",
        ),
        (["--placement", "w"], "argument --placement: expected linear, loop, v, zigzag or a rank per chunk; got 'w'"),
        (["--out", "plan.gif"], "argument --out: plan.gif must end in one of .svg, .html, .json"),
        (["--out", "nowhere/plan.svg"], "argument --out: cannot write nowhere/plan.svg: there is no folder nowhere"),
        (["--costs", "missing.json"], "argument --costs: cannot read missing.json: No such file or directory"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(fails, arguments: list[str], message: str) -> None:
    error = fails(*arguments)
    assert message in error
    assert "Traceback" not in error


def test_files_without_an_end_are_refused(fails) -> None:
    for option in ("--costs", "--config"):
        assert f"argument {option}: /dev/zero is larger than 16 MiB, or has no end" in fails(option, "/dev/zero")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"foward": 1}', "unknown fields ['foward']"),
        ('{"forward": "fast"}', "forward must be a number"),
        ('{"forward": [1, 2]}', "forward has 2 entries and the schedule 3 chunks"),
    ],
)
def test_costs_that_are_none_are_refused(fails, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    error = fails("--costs", path)
    assert f"argument --costs: {path}: " in error
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_written_is_an_error_after_the_plan(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "plan.csv").mkdir()
    assert __main__.main(["plan", *SIZES, "--schedule", "gpipe", "--out", str(tmp_path / "plan.csv")]) == 2
    assert f"argument --out: cannot write {tmp_path / 'plan.csv'}: Is a directory" in capsys.readouterr().err


def test_the_command_loads_no_torch() -> None:
    code = (
        "import sys; from zbkern import __main__;"
        f"__main__.main(['plan', *{SIZES}, '--schedule', 'zb_h1']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(
    importlib.util.find_spec("zbkern._planner") is None,
    reason="the planner's core, which finds that plan in time, is not compiled",
)
@pytest.mark.slow
def test_the_readme_shows_what_the_command_prints(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```text\n\$ zbkern (plan .*?)\n(.*?)```", readme, re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    Path("costs.json").write_text(re.search(r"^echo '(\{.*?\})' > costs.json$", readme, re.DOTALL | re.MULTILINE)[1])
    assert __main__.main(command.split()) == 0

    def lasting(text: str) -> list[str]:
        """All but the order and what each rank holds, of which several are as good."""
        return [line for line in text.split("\n") if not line.startswith(("rank ", "(columns ", "memory "))]

    def without_memory(lines: list[str]) -> list[str]:
        return [re.sub(r" +\S+ +\S+x$", "", line) if line.startswith("plan-") else line for line in lines]

    assert without_memory(lasting(capsys.readouterr().out)) == without_memory(lasting(shown))


def test_a_plan_that_offloads_is_printed_and_drawn(run, fails, tmp_path: Path) -> None:
    costs = Costs(10, 11, 9, activation=1e9, held=1e9, checkpoint=1e7, time_unit="ms", memory_unit="bytes")
    costs.save(tmp_path / "costs.json")
    command = ["--costs", tmp_path / "costs.json", "--memory", "0.5x", *SECOND]
    text = run(*command, "--offload", "100", "--out", tmp_path / "plan.csv", tmp_path / "plan.svg")
    assert "-saving" in text
    assert "0.5x" in text
    assert set("OL") <= {
        action.kind for row in Schedule.from_csv((tmp_path / "plan.csv").read_text()).actions for action in row
    }
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    for wrong, message in ((["--offload"], "expected GB/s"), (["--recompute", "--schedule", "zb_h1"], "as published")):
        assert message in fails(*command, *wrong)
    assert "above 0" in fails(*command, "--offload", "0")
