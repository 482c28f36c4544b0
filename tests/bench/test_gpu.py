"""The GPU benchmark without a GPU: every row runs, what is wrong is not timed, and it ends in time."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_block, gpu_rows, gpu_rows_w
from bench.gpu_case import Bench, Case, Row, Sizes
from zbkern import testing

CPU = ["--device", "cpu", "--tiny", "--dtype", "float32"]


def test_every_row_is_measured_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch's compiler, whose import takes a second."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    assert gpu.main([*CPU, "--impl", "torch", "--seconds", "20", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert {"commit", "torch", "gpu"} <= result["environment"].keys()
    figures = result["figures"]["rows"]
    assert [figure["row"] for figure in figures] == [row.name for row in gpu_rows.ROWS]
    assert not [figure for figure in figures if "rate" not in figure]
    assert not [figure for figure in figures if figure.get("missing")]
    assert all(peer["ratio"] > 0 for figure in figures for peer in figure["peers"].values())
    assert not [figure for figure in figures if figure["goal met"]]  # the goals are a GPU's
    out = capsys.readouterr().out
    assert out.count("W of 4, merged") == 2  # as it was measured, and in the table


@pytest.mark.parametrize("row", [row.name for row in gpu_rows.ROWS[2:]])
@pytest.mark.slow
def test_the_rows_fit_our_kernels(row: str, tmp_path: Path) -> None:
    """On an emulated GPU: arguments and results; its times mean nothing."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.emulator import gpu as emulated

    options = ["--impl", "triton", "--rows", row, "--seconds", "0.1", "--out", str(tmp_path)]
    with emulated.gpu(90):
        assert gpu.main([*CPU, *options]) == 0
    (figure,) = json.loads((tmp_path / "gpu.json").read_text())["figures"]["rows"]
    assert "rate" in figure or figure["why not"] == "the row's time was up"


def bench() -> Bench:
    return Bench(torch.device("cpu"), torch.float32, "torch", Sizes.tiny())


def case(check=lambda: None, ours=lambda: None, **peers) -> Case:  # type: ignore[no-untyped-def]
    return Case("shape", ours, peers, check, 10, 0.9, 1.0)


def row(*cases: Case, goal: str = "ratio", unit: str = "TFLOP/s") -> Row:
    return Row("row", unit, goal, lambda bench: iter(cases))


def fine() -> None:
    pass


ACCESS = "CUDA error: an illegal memory access was encountered"


def fails() -> None:
    raise AssertionError("differs")


def test_what_is_wrong_is_not_timed() -> None:
    bad = case(check=fails, peer=lambda: None)
    broken = case(ours=lambda: 1 / 0)
    figures = list(gpu.measure([row(bad), row(broken), row(case())], bench(), 1.0))
    assert [figure.get("wrong") for figure in figures] == ["differs", "ZeroDivisionError: division by zero", None]
    assert [("rate" in figure) for figure in figures] == [False, False, True]
    assert gpu.cells(figures[0])[2:4] == ["WRONG", "differs"]


def test_a_peer_that_fails_is_named_and_the_others_count() -> None:
    (figure,) = gpu.measure([row(case(ok=lambda: None, broken=fails))], bench(), 1.0)
    assert figure["missing"] == {"broken": "AssertionError: differs"}
    assert figure["peers"].keys() == {"ok"}
    assert "broken failed" in gpu.cells(figure)[3]


def test_nothing_is_measured_that_could_not_be_checked() -> None:
    (figure,) = gpu.measure([row(case(check=lambda: 1 / 0))], bench(), 1.0)
    assert figure["why not"] == "its check failed: ZeroDivisionError: division by zero"
    assert "rate" not in figure


@pytest.mark.parametrize("name", ["W, fp32 added", "W of 4, merged", "all W of a layer", "W of 8 experts"])
def test_w_is_measured_where_torch_cannot_add_to_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows_w, "addmm", lambda *arguments: fails())
    (found,) = (each for each in gpu_rows.ROWS if each.name == name)
    figures = list(gpu.measure([found], bench(), 5.0))
    assert all("rate" in figure and any("addmm" in peer for peer in figure["missing"]) for figure in figures)


def illegal_access() -> None:
    raise torch.AcceleratorError(ACCESS)


def test_one_illegal_access_is_not_blamed_on_the_rows_that_follow() -> None:
    """After it no call of the process reaches the GPU: they are not begun."""
    begun: list[Row] = []
    some = [row(case()), row(case(ours=illegal_access), case()), row(case())]
    figures = list(gpu.measure(some, bench(), 1.0, begun.append))
    assert [figure.get("wrong", "") for figure in figures] == ["", "AcceleratorError: " + ACCESS]
    assert begun == some[:2]


@pytest.mark.parametrize("bad", [case(peer=illegal_access), case(check=illegal_access)])
def test_nothing_more_is_measured_once_the_gpu_does_not_answer(bad: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "answers", lambda device: False)
    assert len(list(gpu.measure([row(bad, case()), row(case())], bench(), 1.0))) == 1
    assert len(list(gpu.measure([row(case(), case()), row(case())], bench(), 1.0))) == 3


def test_rows_that_were_not_begun_are_measured_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = [
        replace(row(case(ours=ours)), name=name) for name, ours in (("a", fine), ("b", illegal_access), ("c", fine))
    ]
    monkeypatch.setattr(gpu_rows, "ROWS", rows)
    options = [*CPU, "--impl", "torch", "--seconds", "1", "--out", str(tmp_path), "--continue"]

    def found() -> dict:
        return json.loads((tmp_path / "gpu.json").read_text())["figures"]

    assert gpu.main(options) == 1
    assert found()["left"] == ["c"]
    assert "not begun, as this process has lost the GPU: c" in capsys.readouterr().out
    assert gpu.main(options) == 1
    assert [(figure["row"], "rate" in figure) for figure in found()["rows"]] == [("a", True), ("b", False), ("c", True)]
    assert (found()["left"], found()["running"]) == ([], None)
    killed = json.loads((tmp_path / "gpu.json").read_text())
    killed["figures"] |= {"rows": killed["figures"]["rows"][:1], "running": "b"}
    (tmp_path / "gpu.json").write_text(json.dumps(killed))
    gpu.main(options)
    assert [figure.get("wrong") for figure in found()["rows"]] == [None, "the process ended in it", None]


def test_a_row_without_time_left_says_so() -> None:
    figures = list(gpu.measure([row(case(), case())], bench(), -1.0))
    assert [figure["why not"] for figure in figures] == ["the row's time was up"] * 2


@pytest.mark.parametrize(
    ("goal", "unit", "rate", "ratio", "expected"),
    [
        ("ratio", "TFLOP/s", 1e9, 0.89, "below"),
        ("ratio", "TFLOP/s", 0.0, 0.91, "floor"),
        ("ratio", "TFLOP/s", 0.0, 1.01, "target"),
        ("rate", "TB/s", 0.95, 0.1, "floor"),
        ("rate", "us", 0.95, 0.1, "target"),
        ("rate", "us", 2.0, 9.0, "below"),
    ],
)
def test_goals(goal: str, unit: str, rate: float, ratio: float, expected: str) -> None:
    result = {"rate": rate, "peers": {"peer": {"ratio": ratio}}}
    assert gpu.goal_met(row(goal=goal, unit=unit), case(peer=lambda: None), result) == expected


def test_goals_may_be_about_another_peer_than_results_are_checked_with() -> None:
    result = {"rate": 0.0, "peers": {"peer": {"ratio": 0.1}, "library": {"ratio": 2.0}}}
    about = Case("shape", fails, {"peer": fails, "library": fails}, fails, 1, 0.9, 1.0, "library")
    assert gpu.goal_met(row(), about, result) == "target"
    del result["peers"]["library"]  # it failed
    assert gpu.goal_met(row(), about, result) == ""


def test_no_figure_without_a_gpu(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "cannot run: no CUDA device" in capsys.readouterr().out
    assert gpu.main([*CPU, "--rows", "nothing like this"]) == 2


def test_what_is_timed_on_a_gpu_finds_the_caches_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, on the stream: the cache is swept, the host gets ahead, then time runs."""
    seen = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.append("event")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 2.0

    class Sweep:
        def max(self) -> None:
            seen.append("sweep")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("sleep"), raising=False)
    monkeypatch.setattr(testing, "_beyond_cache", lambda device: Sweep())
    candidates = {"one": lambda: [lambda: seen.append("run")] * 2}
    assert testing.measure(candidates, rounds=1, warmup=0, device="cuda")["one"].seconds == (0.002,)
    assert seen == ["wait", "sweep", "sleep", "event", "run", "run", "event"]


def test_blocks_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert gpu_block.main(["--tiny", "--rounds", "1", "--tokens", "16", "32"]) == 0
    assert capsys.readouterr().out.count("\n| ") == 4
