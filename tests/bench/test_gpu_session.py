"""The session without a GPU: programs that hang, die or fail cost only their own result; the list itself is right."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch

from bench import gpu_prepare, gpu_rows, gpu_session
from bench.gpu_session import Job

ROOT = Path(__file__).parents[2]


def program(name: str, text: str, limit: float = 60.0) -> Job:
    return Job(name, ["-c", text], limit)


def folders(path: Path) -> tuple[Path, Path]:
    """Of results, and of what programs write."""
    return path, path / "work"


def result(folder: Path) -> dict[str, dict]:
    return {job["name"]: job for job in json.loads((folder / "session.json").read_text())["jobs"]}


def test_every_failure_costs_only_its_own_job(tmp_path: Path) -> None:
    jobs = [
        program("good", "print('so many'); print('11 passed')"),
        program("wrong", "raise AssertionError('differs')"),
        program("hangs", "import time; print('begun'); time.sleep(600)", limit=3.0),
        program("dies", "import os; os.kill(os.getpid(), 9)"),
        program("cannot", "print('cannot run: no extension'); raise SystemExit(2)"),
        program("last", "print('done')"),
    ]
    gpu_session.session(jobs, time.monotonic() + 100, *folders(tmp_path))
    found = result(tmp_path)
    statuses = ["ok", "wrong", "timed out", "wrong", "cannot run", "ok"]
    assert [job["status"] for job in found.values()] == statuses
    assert found["good"]["said"] == "11 passed"
    assert found["wrong"]["said"] == "AssertionError: differs"
    assert found["hangs"]["said"] == "begun"
    assert 3 <= found["hangs"]["seconds"] < 30
    assert "cannot run: no extension" in (tmp_path / "session.md").read_text()
    assert (tmp_path / "log.txt").read_text().startswith("---- good: ok\nso many\n")
    assert {path.name for path in tmp_path.iterdir()} == {"session.json", "session.md", "log.txt", "work"}


@pytest.mark.parametrize("fate", ["raise SystemExit(1)", "raise SystemExit(2)"])
def test_without_an_answer_from_the_gpu_nothing_begins(tmp_path: Path, fate: str) -> None:
    jobs = [program("a copy", fate), program("other", "")]
    gpu_session.session(jobs, time.monotonic() + 60, *folders(tmp_path))
    assert result(tmp_path)["other"]["status"] == "not reached"


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_launches_are_replayed_only_where_that_is_right(
    tmp_path: Path, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = program(gpu_session.REPLAYED, f"raise SystemExit({0 if right else 1})")
    (tmp_path / "told.py").write_text("from zbkern.kernels.triton.replay import replay; print(replay._paused)")
    ask = Job("ask", ["-m", "told"], 60.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpu_session.session([program("a copy", ""), probe, ask], time.monotonic() + 100, *folders(tmp_path))
    assert (ask.status, ask.said) == ("ok", "0" if right else "1")


def test_what_was_found_before_it_is_killed_stays(tmp_path: Path) -> None:
    """Also of the program that runs, once that has figures, and every file is whole."""
    text = f'''
import os
import time
from pathlib import Path
from bench import gpu_session
work = Path({str(tmp_path)!r}) / "work"
figures = f"""
import os
from pathlib import Path
from bench.report import write_json
count = 0
while os.getppid() == {{os.getpid()}}:
    count += 1
    write_json("figures", list(range(count)), Path({{str(work / 'second')!r}}))
"""
programs = {{"first": "print('found')", "second": figures}}
jobs = [gpu_session.Job(name, ["-c", program], 99.0) for name, program in programs.items()]
print("begins", flush=True)
gpu_session.session(jobs, time.monotonic() + 100, Path({str(tmp_path)!r}), work)
'''
    command = [sys.executable, "-c", text]
    session = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert session.stdout is not None
        session.stdout.readline()
        while not (tmp_path / "log.txt").exists():
            time.sleep(0.1)
        end = time.monotonic() + 60
        while time.monotonic() < end and not result(tmp_path)["second"]["results"]:
            time.sleep(0.1)
    finally:
        os.killpg(session.pid, signal.SIGKILL)
        session.wait()
    found = result(tmp_path)
    assert found["first"]["status"] == "ok"
    assert (tmp_path / "session.md").read_text().endswith("\n")
    assert found["second"]["results"]["figures"]["figures"][:1] == [0]


def test_the_list_names_programs_and_rows_that_there_are() -> None:
    names = {*gpu_session.FIRST, *(name for names in gpu_session.ROWS.values() for name in names)}
    assert names <= {row.name for row in gpu_rows.ROWS}
    jobs = gpu_session.plan(Path("out"), 520.0, None)
    assert [job.name for job in jobs[:2]] == ["a copy", "first figures"]
    for job in jobs:
        files = [word for word in job.command if word.endswith(".py")]
        modules = [word.replace(".", "/") + ".py" for word in job.command if word.startswith("bench.")]
        assert all((ROOT / name).exists() for name in files + modules), job.command


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_or_what_was_prepared_it_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = str(tmp_path / "out")
    assert gpu_session.main(["--out", out]) == 2
    assert "sees no CUDA device" in capsys.readouterr().out
    assert gpu_session.main(["--out", out, "--rehearse", "--prepared", str(tmp_path)]) == 2
    assert "has no prepared.json; fill it by --prepare" in capsys.readouterr().out
    assert not Path(out).exists()


@pytest.mark.slow
def test_a_rehearsal_takes_what_was_prepared_and_moved_since(tmp_path: Path) -> None:
    made, moved, out = tmp_path / "made", tmp_path / "moved", tmp_path / "out"

    def session(*options: str, **environment: str) -> str:
        command = [sys.executable, "-m", "bench.gpu_session", *options]
        variables = {**os.environ, **environment}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert re.match(r"1\d\d kernels and ", session("--prepare", "--out", str(made)))
    assert sum(path.stat().st_size for path in made.rglob("*") if path.is_file()) < 40 * 2**20
    assert not list(made.glob("triton/*/*.ptx"))  # only what is loaded
    assert list(made.glob(f"triton/*/*{sysconfig.get_config_var('EXT_SUFFIX')}"))
    made.rename(moved)
    options = ["--rehearse", "--prepared", str(moved), "--out", str(out), "--seconds", "800"]
    session(*options, "--only", "^replayed launches$", PATH="/no compiler here")
    assert result(out)["replayed launches"]["said"].endswith(" files prepared, 0 compiled")
    assert session(*options, "--only", "^(a copy|rows of norms)$").startswith("kernels for 90: taken; ")
    assert {job["status"] for job in result(out).values()} == {"ok"}
    figures = result(out)["rows of norms"]["results"]["gpu"]["figures"]["rows"]
    assert {figure["row"] for figure in figures} == set(gpu_session.ROWS["rows of norms"])
    assert all("rate" in figure for figure in figures)


def test_the_extension_goes_where_a_build_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.setattr(gpu_prepare, "_triton_key", lambda: "this")
    package, folder = tmp_path / "zbkern", tmp_path / "prepared"
    package.mkdir()
    (folder / "extension").mkdir(parents=True)
    (folder / "extension" / "_cuda.cpython-312-x.so").write_text("built elsewhere")
    (package / "_cuda.cpython-312-x.so").write_text("loaded by a process")
    loaded = (package / "_cuda.cpython-312-x.so").open()
    for triton, said in (("this", "taken"), ("another", "not used: another Triton")):
        (folder / "prepared.json").write_text(json.dumps({"capability": 90, "triton": triton}))
        assert gpu_prepare.adopt(folder, package).startswith(f"kernels for 90: {said}")
    assert (package / "_cuda.cpython-312-x.so").read_text() == "built elsewhere"
    with loaded:
        assert loaded.read() == "loaded by a process"
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
