"""The session without a GPU: programs that start slowly, hang, die or fail cost only their own result."""

from __future__ import annotations

import json
import os
import re
import shutil
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
from tests.support.patience import patiently

ROOT = Path(__file__).parents[2]


def program(name: str, text: str, share: float = 1.0, place: str = "") -> Job:
    return Job(name, ["-c", text], share, place)


def run(jobs: list[Job], seconds: float, folder: Path) -> dict[str, dict]:
    """What session.json has of each job then. Programs write to folder/work."""
    gpu_session.session(jobs, time.monotonic() + seconds, folder, folder / "work", {"gpu": "none"})
    return result(folder)


def result(folder: Path) -> dict[str, dict]:
    return {job["name"]: job for job in json.loads((folder / "session.json").read_text())["jobs"]}


ROWS = """
import json, os, sys
from pathlib import Path
file = Path({folder!r}) / "gpu.json"
found = json.loads(file.read_text())["figures"] if file.exists() else {{"rows": [], "left": ["a", "b", "c"]}}
while found["left"]:
    name, *found["left"] = found["left"]
    {fate}
    found["rows"].append({{"row": name, "why not": "no GPU"}})
    file.write_text(json.dumps({{"figures": found}}))
"""


def rows(folder: Path, fate: str) -> Job:
    """A program that has measured row after row; fate: what it does in each before."""
    return program("rows", ROWS.format(folder=str(folder / "work" / "rows"), fate=fate), share=3.0)


def test_every_failure_costs_only_its_own_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each program takes longer to start than its share is."""

    def check(scale: float) -> None:
        monkeypatch.setattr(gpu_session, "STARTING", 3.0 * scale)
        check_failures(tmp_path / f"{scale:g}", 40.0 * scale)

    patiently(check)


def check_failures(folder: Path, seconds: float) -> None:
    late = "import time; time.sleep(0.3); "
    crash = "file.write_text(json.dumps({'figures': found})); os.abort() if name == 'b' else None"
    jobs = [
        program("good", late + "print('so many'); print('11 passed')", 0.1),
        program("wrong", late + "raise AssertionError('differs')", 0.1),
        program("hangs", "import time; print('begun'); time.sleep(600)", 0.1),
        program("dies", "import os; os.kill(os.getpid(), 9)", 0.1),
        program("cannot", "print('cannot run: no extension'); raise SystemExit(2)", 0.1),
        rows(folder, crash),
        program("last", late + "print('done')", 0.1),
    ]
    found = run(jobs, seconds, folder)
    statuses = ["ok", "wrong", "timed out", "died", "cannot run", "ok", "ok"]
    assert [job["status"] for job in found.values()] == statuses
    assert found["good"]["said"] == "11 passed"
    assert found["wrong"]["said"] == "AssertionError: differs"
    assert found["hangs"]["said"] == "begun"
    assert [row["row"] for row in found["rows"]["results"]["gpu"]["figures"]["rows"]] == ["a", "c"]
    text = (folder / "session.md").read_text()
    assert "cannot run: no extension" in text
    assert re.search(r"^\| c .*no GPU", text, re.MULTILINE)
    assert (folder / "log.txt").read_text().startswith("---- good: ok\nso many\n")
    assert {path.name for path in folder.iterdir()} == {"session.json", "session.md", "log.txt", "work"}


def test_a_program_that_makes_no_progress_is_not_begun_for_ever(tmp_path: Path) -> None:
    before = "Path('begun').open('a').write('x'); sys.exit(1)"
    job = rows(tmp_path, f"import os; os.chdir({str(tmp_path)!r}); {before}")
    (tmp_path / "work" / "rows").mkdir(parents=True)
    (tmp_path / "work" / "rows" / "gpu.json").write_text(json.dumps({"figures": {"rows": [], "left": ["a", "b"]}}))
    assert run([job], 300.0, tmp_path)["rows"]["status"] == "wrong"
    assert (tmp_path / "begun").read_text() == "xx"


@pytest.mark.parametrize(
    ("fate", "other"),
    [
        ("raise SystemExit(1)", "not reached"),
        ("raise SystemExit(2)", "not reached"),
        ("import os; os.abort()", "ok"),
        ("import time; time.sleep(600)", "ok"),  # a cold disk, perhaps
    ],
)
def test_where_the_first_says_that_nothing_can_be_measured_nothing_begins(
    tmp_path: Path, fate: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "STARTING", 0.0 if "sleep" in fate else 30.0)
    jobs = [program(gpu_session.FIRST, fate, 1.0), program("other", "", 150.0)]
    assert run(jobs, 300.0, tmp_path)["other"]["status"] == other


@pytest.mark.parametrize(("said", "status"), [("3 skipped", "cannot run"), ("1 failed, 3 passed in 2s", "ok")])
def test_tests_that_were_not_run_have_shown_nothing(said: str, status: str) -> None:
    """Whether pytest found none (5) or skipped all (0)."""
    job = Job("tests", ["-m", "pytest"], 1.0, said=said)
    assert gpu_session.verdict(job, 0) == status
    assert gpu_session.verdict(job, 5) == "cannot run"
    assert gpu_session.verdict(program("other", "", 1.0), 0) == "ok"


@pytest.mark.parametrize("right", [True, False])
def test_launches_are_replayed_only_where_that_is_right(tmp_path: Path, right: bool) -> None:
    probe = program(gpu_session.REPLAYED, f"raise SystemExit({0 if right else 1})")
    ask = program("ask", "import os; print(os.environ['ZBKERN_REPLAY'])")
    assert run([probe, ask], 300.0, tmp_path)["ask"]["said"] == ("1" if right else "0")


def test_what_was_found_before_it_is_killed_stays(tmp_path: Path) -> None:
    """Also of the program that runs, once that has figures, and every file is whole."""
    text = f'''
import os
import time
from pathlib import Path
from bench import gpu_session
work = Path({str(tmp_path)!r}) / "work"
figures = f"""
import json, os
from pathlib import Path
file, count = Path({{str(work / 'second' / 'figures.json')!r}}), 0
while os.getppid() == {{os.getpid()}}:
    count += 1
    file.with_suffix('.new').write_text(json.dumps(list(range(count))))
    file.with_suffix('.new').replace(file)
"""
programs = {{"first": "print('found')", "second": figures}}
jobs = [gpu_session.Job(name, ["-c", program], 99.0) for name, program in programs.items()]
print("begins", flush=True)
gpu_session.session(jobs, time.monotonic() + 1000, Path({str(tmp_path)!r}), work, {{}})
'''
    command = [sys.executable, "-c", text]
    session = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert session.stdout is not None
        session.stdout.readline()
        while not (tmp_path / "log.txt").exists():
            time.sleep(0.1)
        end = time.monotonic() + 300
        while time.monotonic() < end and not result(tmp_path)["second"]["results"]:
            time.sleep(0.1)
    finally:
        os.killpg(session.pid, signal.SIGKILL)
        session.wait()
    found = result(tmp_path)
    assert found["first"]["status"] == "ok"
    assert (tmp_path / "session.md").read_text().endswith("\n")
    assert found["second"]["results"]["figures"][:1] == [0]


def test_the_list_names_programs_tests_and_rows_that_there_are() -> None:
    assert {*gpu_rows.HEADLINE} <= {row.name for row in gpu_rows.ROWS}
    assert all(any(part in row.name for row in gpu_rows.ROWS) for part in gpu_rows.DECIDING)
    jobs = gpu_session.plan(Path("out"))
    assert [job.name for job in jobs[:3]] == [gpu_session.FIRST, gpu_session.REPLAYED, "processes on one GPU"]
    assert sum(job.share for job in jobs) <= 280 + 370  # about seconds
    for job in jobs:
        files = [word for word in job.command if word.startswith("tests/")]
        modules = [word.replace(".", "/") + ".py" for word in job.command if word.startswith("bench.")]
        assert all((ROOT / name).exists() for name in files + modules), job.command


def test_its_two_commands_run_every_job_once() -> None:
    text = (ROOT / "bench" / "gpu_minutes.sh").read_text()
    chosen = [re.search(rf"^  {number}\) seconds=(\d+) jobs='(.*)' ;;$", text, re.MULTILINE) for number in (1, 2)]
    assert [int(found[1]) for found in chosen] == [280, 370]  # of 5 and of 6.5 minutes
    for job in gpu_session.plan(Path("out")):
        assert [bool(re.search(found[2], job.name)) for found in chosen].count(True) == 1, job.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert gpu_session.main(["--out", str(tmp_path / "out")]) == 2
    assert "sees no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_the_extensions_go_where_a_build_puts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.setattr(gpu_prepare, "_triton_key", lambda: "this")
    package, folder = tmp_path / "zbkern", tmp_path / "prepared"
    package.mkdir()
    (folder / "extension").mkdir(parents=True)
    (folder / "extension" / "_cuda.cpython-312-x.so").write_text("built elsewhere")
    (package / "_cuda.cpython-312-x.so").write_text("loaded by a process")
    loaded = (package / "_cuda.cpython-312-x.so").open()
    for triton, said in (("this", "taken"), ("another", "not used: another Triton")):
        (folder / "prepared.json").write_text(json.dumps({"capability": 90, "triton": triton, "commit": "abc"}))
        assert gpu_prepare.adopt(folder, package).startswith(f"kernels for 90 of commit abc: {said}")
    assert (package / "_cuda.cpython-312-x.so").read_text() == "built elsewhere"
    with loaded:
        assert loaded.read() == "loaded by a process"
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")


def test_all_extensions_that_are_built_are_prepared() -> None:
    """Without the planner a machine that has not built it would measure published schedules for planned ones."""
    carried = {path.name.partition(".")[0] for path in gpu_prepare._built()}
    assert carried == {path.name.partition(".")[0] for path in (ROOT / "zbkern").glob("_*.so")}


CRASH = """
def crashes(bench):
    import os
    yield Case("some", lambda: None, {}, os.abort)

ROWS = (*ROWS[:5], Row("crashes", "us", "rate", crashes), *ROWS[5:])
"""
FEW = {
    "gpu_prepare.py": (
        ("(torch.bfloat16, torch.float16, torch.float32)", "(torch.bfloat16,)"),
        (
            'for name, case in every_launch.cases(kernels, every_launch.Random(dtype, "cpu")).items():',
            "for name, case in [*every_launch.cases(kernels, every_launch.Random(dtype, 'cpu')).items()][::12]:",
        ),
    ),
    "w_sweep.py": (("\n}\n\n\nclass Shape", "\n}\nDESIGNS = dict([*DESIGNS.items()][::6])\n\n\nclass Shape"),),
    "virtual_stages.py": (("(1, 2, 3, 4, 8), (False, True)", "(1,), (False, True)"),),
    "ahead.py": (("FOUND = 0.3", "FOUND = 300.0"),),  # so few kernels are compiled sooner than a process starts
}
"""Less of what other tests have all of: in test_w_sweep.py, test_gpu.py and the emulator's tests."""

KEPT = (*gpu_rows.HEADLINE, gpu_rows.DECIDING[1], "host time of a W", "rotary, halves")
FEW_ROWS = f"""
ROWS = tuple(row for row in ROWS if any(part in row.name for part in {KEPT}))
"""


@pytest.mark.slow
def test_the_whole_session_is_rehearsed_with_a_row_that_crashes(tmp_path: Path) -> None:
    """From copies of this checkout in other folders, as a lent machine has one: what was prepared in the first is
    taken in the second."""
    made, moved, out = tmp_path / "made", tmp_path / "moved", tmp_path / "out"
    for name in ("bench", "build_tools", "tests", "zbkern", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, made / name)
    environment = {**os.environ, "OUT": str(out), "REHEARSE": "--rehearse", "PYTHON": sys.executable}
    environment |= {"PYTHONPATH": "", "SECONDS_GIVEN": "900"}

    def call(*command: str, **settings: str) -> str:
        variables = {**environment, **settings}
        done = subprocess.run(command, cwd=made, env=variables, capture_output=True, text=True, timeout=1200)
        return done.stdout + done.stderr

    for name, changes in FEW.items():
        text = (made / "bench" / name).read_text()
        for all_of_them, some in changes:
            assert all_of_them in text
            text = text.replace(all_of_them, some)
        (made / "bench" / name).write_text(text)
    with (made / "bench" / "gpu_rows.py").open("a") as file:
        file.write(FEW_ROWS)
    prepared = made / ".cache" / "prepared"
    assert re.search(r"^\d+ kernels and ", call(sys.executable, "-m", "bench.gpu_prepare", str(prepared)), re.MULTILINE)
    assert sum(path.stat().st_size for path in prepared.rglob("*") if path.is_file()) < 40 * 2**20
    assert not list(prepared.glob("triton/*/*.ptx"))  # only what is loaded
    assert list(prepared.glob(f"triton/*/*{sysconfig.get_config_var('EXT_SUFFIX')}"))
    made.rename(moved)
    made = moved
    with (moved / "bench" / "gpu_rows.py").open("a") as file:
        file.write(CRASH)
    said = call("bench/gpu_minutes.sh", "1", PATH=f"/no compiler here:{os.environ['PATH']}")
    found = result(out)
    names = [gpu_session.FIRST, "every launch", "processes on one GPU", "rehearsal", "headline"]
    assert {name: job["status"] for name, job in found.items()} == dict.fromkeys(names, "ok"), said
    assert found["every launch"]["said"].endswith(" files prepared, 0 compiled")
    schedules = [row["schedule"] for row in found["processes on one GPU"]["results"]["one_gpu"]["figures"]["rows"]]
    assert schedules[6:] == ["torch's 1F1B", "plan", "plan in a V", "unequal, 1F1B", "unequal, planned"]
    assert {*gpu_rows.HEADLINE} == {row["row"] for row in found["headline"]["results"]["gpu"]["figures"]["rows"]}
    said = call("bench/gpu_minutes.sh", "2", PATH=f"/no compiler here:{os.environ['PATH']}")
    found = result(out)
    ended = [found.pop(name)["status"] for name in ("deciding rows", "passes beside each other", "virtual stages")]
    assert ended == ["ok", "ok", "cannot run"], said
    rows = found.pop("rows")
    assert rows["status"] == "wrong", said
    figures = rows["results"]["gpu"]["figures"]["rows"]
    others = {row.name for row in gpu_rows.ROWS if any(part in row.name for part in KEPT)} - {*gpu_rows.HEADLINE}
    assert {figure["row"] for figure in figures} == {"crashes", *others}
    assert [figure for figure in figures if "rate" not in figure] == [
        {"row": "crashes", "wrong": "the process ended in it"}
    ]
    assert {job["status"] for job in found.values()} == {"cannot run"}
    assert all(re.search(r"^cannot run: no CUDA|\d skipped", job["said"]) for job in found.values())
    assert {path.name for path in out.iterdir()} == {"session.json", "session.md", "log.txt"}
