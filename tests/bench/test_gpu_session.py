"""The whole session without a GPU, over a driver that does nothing: with launches that hang, fail, are wrong, processes
that die, and the session itself killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bench import gpu_rows, gpu_session
from bench.gpu_jobs import REPLAYED, Where

ROOT = Path(__file__).parents[2]


def start(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "bench.gpu_session", "--rehearse", "--out", str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


def result(folder: Path) -> dict:
    return json.loads((folder / "session.json").read_text())


def jobs(folder: Path) -> dict[str, dict]:
    return {job["name"]: job for job in result(folder)["jobs"]}


def faults(*options: str) -> list[str]:
    return [word for option in options for word in ("--fault", option)]


@pytest.mark.slow
def test_every_failure_costs_only_its_own_job(tmp_path: Path) -> None:
    options = faults("sticky=rotary_dgrad", "wrong=activation_fwd", "kill=activation_bwd", f"wrong={REPLAYED}")
    more = ["--only", "^(rotary|activation)_", "--dtype", "float32", "--kernel-limit", "60", "--workers", "4"]
    assert start(tmp_path, *options, *more).wait(150) == 1
    found = jobs(tmp_path)
    assert {name: job["status"] for name, job in found.items()} == {
        "versions": "ok",
        REPLAYED: "wrong",
        "rotary_fwd": "ok",
        "rotary_dgrad": "wrong",
        "activation_fwd": "wrong",
        "activation_bwd": "died",
    }
    assert "an illegal memory access" in found["rotary_dgrad"]["detail"]
    assert "output 0: differs by" in found["activation_fwd"]["detail"]
    assert found["activation_bwd"]["detail"] == "exit code -9"
    assert found["rotary_fwd"]["compiled"]
    assert result(tmp_path)["environment"][REPLAYED].startswith("off from here on: wrong turn 0: other bits")
    assert "exit code -9" in (tmp_path / "session.md").read_text()
    assert "an illegal memory access" in (tmp_path / "log.txt").read_text()
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.slow
def test_a_launch_that_hangs_costs_its_time_limit(tmp_path: Path) -> None:
    options = [*faults("hang=rotary_fwd", "hang=RMSNorm forward"), "--kernel-limit", "20", "--row-limit", "20"]
    selection = ["--only", "^rotary|^RMSNorm", "--dtype", "float32", "--workers", "2"]
    assert start(tmp_path, *options, *selection).wait(280) == 1
    found = jobs(tmp_path)
    hung = [name for name, job in found.items() if job["status"] == "timed out"]
    assert hung == ["rotary_fwd", "RMSNorm forward"]
    assert all(20 <= found[name]["seconds"] < 30 for name in hung)
    assert {job["status"] for name, job in found.items() if name not in hung} == {"ok"}


def test_what_jobs_begin_with_leaves_the_gpu_alone() -> None:
    """They are forked: a process that has asked for the GPU leaves its children without one."""
    text = """
import torch
def refuse(*_, **__): raise AssertionError("the GPU was asked for")
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
import importlib
from bench import gpu_session
for name in gpu_session.PRELOADED: importlib.import_module(name)
import sys
assert "zbkern.kernels.cuda.wgrad" not in sys.modules  # it looks for the extension, which a job may still build
"""
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, check=True)


@pytest.mark.slow
def test_every_kind_of_job_is_rehearsed(tmp_path: Path) -> None:
    """A kernel, some rows and all programs: all kernels and rows would compile some 250 variants."""
    rows = ("RMSNorm forward", "host time of a W")
    programs = ("tests of the extension", "W of the extension", "virtual stages", "tiles of W", "sanitizer")
    names = "|".join(("rotary_fwd", *rows, *programs, *(f"compile {row}" for row in rows)))
    options = ["--only", f"^({names})$", "--dtype", "bfloat16", "--kernel-limit", "200", "--row-limit", "200"]
    assert start(tmp_path, *options, "--seconds", "1000").wait(1100) == 0, (tmp_path / "session.md").read_text()
    found = jobs(tmp_path)
    assert {"rotary_fwd", *rows, *programs} < found.keys()
    others = {(name, job["status"]) for name, job in found.items() if job["status"] != "ok"}
    assert others <= {(name, "cannot run") for name in ("W of the extension", "virtual stages", "tiles of W")}
    figures = [figure for job in found.values() for figure in job["figures"]]
    assert {figure["row"] for figure in figures} == set(rows)
    assert all("rate" in figure for figure in figures)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, 8])
def test_what_was_found_before_it_is_killed_stays(tmp_path: Path, seconds: int) -> None:
    session = start(tmp_path, "--only", "^(rotary|activation)_", "--dtype", "float32", "--workers", "1")
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (tmp_path / "session.md").exists():
            time.sleep(0.02)
        time.sleep(seconds)
    finally:
        os.killpg(session.pid, signal.SIGKILL)
        session.wait()
    found = jobs(tmp_path)
    assert len(found) == 6
    assert {job["status"] for job in found.values()} <= {"ok", "running", "not reached"}
    text = (tmp_path / "session.md").read_text()
    assert "activation_fwd" in text
    assert text.endswith("\n")


def test_without_an_answer_from_the_gpu_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(only="rotary", dtype=None, kernel_limit=1.0, row_limit=1.0)
    planned = gpu_session.plan(arguments)
    began = []

    def run(some: list, workers: int, end: float, where: Where, record: gpu_session.Record, **_: float) -> None:
        began.extend(some)
        for job in some:
            job.status = "timed out"

    monkeypatch.setattr(gpu_session, "run", run)
    gpu_session.session(planned, 1, 0.0, Where(tmp_path, None, {}), gpu_session.Record(tmp_path, {}, planned))
    assert [job.name for job in began] == ["versions"]


@pytest.mark.parametrize("fate", ["ok", "died"])
def test_launches_are_replayed_only_where_that_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    arguments = SimpleNamespace(only="^rotary_fwd", dtype=["float32"], kernel_limit=1.0, row_limit=1.0)
    planned = gpu_session.plan(arguments)
    replayed = {}

    def run(some: list, workers: int, end: float, where: Where, record: gpu_session.Record, **_: float) -> None:
        for job in some:
            job.status = fate if job.kind == "probe" else "ok"
            replayed[job.name] = where.replay

    monkeypatch.setattr(gpu_session, "run", run)
    record = gpu_session.Record(tmp_path, {}, planned)
    gpu_session.session(planned, 1, 0.0, Where(tmp_path, None, {}), record)
    assert replayed == {"versions": True, REPLAYED: True, "rotary_fwd": fate == "ok"}
    assert (REPLAYED in record.environment) == (fate != "ok")


def test_rows_do_not_wait_until_everything_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels have to be compiled first, checks of all of them can take all of the time."""
    arguments = SimpleNamespace(only="", dtype=None, kernel_limit=1.0, row_limit=1.0)
    planned = gpu_session.plan(arguments)
    began, real = [], gpu_session.run

    def run(
        some: list, workers: int, end: float, where: Where, record: gpu_session.Record, until: float | None = None
    ) -> None:
        if until is None:
            taken = some
        else:  # as if only so many of them could begin
            assert 0 < until - time.monotonic() < 0.5 * (end - time.monotonic())
            taken = some[:60]
            real(some[60:], workers, end, where, record, until=0.0)
        for job in taken:
            assert job.status == "not reached"
            job.status = "ok"
            began.append(job)

    monkeypatch.setattr(gpu_session, "run", run)
    record = gpu_session.Record(tmp_path, {}, planned)
    gpu_session.session(planned, 1, time.monotonic() + 100.0, Where(tmp_path, None, {}), record)
    assert sorted(map(id, began)) == sorted(map(id, planned))
    kinds = [job.kind for job in began]
    first, last = kinds.index("row"), len(kinds) - kinds[::-1].index("row")
    assert {"build", "kernel"} <= set(kinds[:first])
    assert set(kinds[first:last]) == {"row"}
    assert "kernel" in kinds[last:]
    assert kinds[-len(gpu_session.gpu_jobs.PROGRAMS) :] == ["program"] * len(gpu_session.gpu_jobs.PROGRAMS)


def test_rows_are_those_of_the_benchmark() -> None:
    assert set(gpu_session.ROWS) <= {row.name for row in gpu_rows.ROWS}


def test_a_fault_that_does_not_exist(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpu_session.main(["--out", "nowhere", "--rehearse", "--fault", "sleep=rms_norm_fwd"])
    assert "hang, sticky, wrong, kill" in capsys.readouterr().err
