"""What to learn from a GPU that is available for ten minutes, the most important first.

    python -m bench.gpu_session --seconds 520 --out FOLDER [--prepared FOLDER]

A list of programs of this repository, each a process with a time limit: one that hangs or dies costs only its own
result. First a copy, without which nothing else begins, and in the same half minute W, merged W and the product's
ceiling; then whether launches that bypass Triton's Python are right, without which the rest goes on without them; every
test that needs a GPU; the other rows of `bench.gpu` that matter; and other programs. FOLDER/session.md, session.json
(with all figures so far) and log.txt (what ended programs have printed) are rewritten every two seconds, each the old
file or the new one: this may be killed at any time. What programs write goes elsewhere, so FOLDER has these three.

--prepare compiles the kernels for --capability into FOLDER on a machine without a GPU (gpu_prepare.py), with the
versions of Python and Triton that the session will have; --prepared takes them, wherever FOLDER is by then. --rehearse
runs the list without a GPU, over a driver whose launches are checked and do nothing (tests/emulator). Without a GPU, or
where the folder of --prepared is missing, it ends with status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import gpu_prepare
from bench.report import as_text
from zbkern import reporting

ROOT = Path(__file__).resolve().parents[1]

FIRST = ("W, fp32 added", "W of 4, merged", "product, ceiling")
ROWS = {
    "rows of W": ("all W of a layer", "W of 8 experts", "host time of a W"),
    "rows of fused products": ("dgrad with SwiGLU", "8 experts, forward", "linear + cross entropy"),
    "rows of FP8": ("FP8 forward", "FP8 dgrad", "FP8 W"),
    "rows of norms": ("RMSNorm forward", "RMSNorm backward"),
    "rows of attention": ("attention forward", "attention backward"),
}
"""Of `bench.gpu`, in this order."""

REPLAYED = "replayed launches"


@dataclass
class Job:
    """A program of this repository, as the arguments of Python, and how many seconds it may take.

    status: "not reached", "running", and then "ok", "wrong", "cannot run" or "timed out". said: its last line. printed:
    all of them. results: by name, the JSON that it has written so far.
    """

    name: str
    command: list[str]
    limit: float
    status: str = "not reached"
    seconds: float = 0.0
    said: str = ""
    printed: str = ""
    results: dict[str, Any] = field(default_factory=dict)

    def folder(self, work: Path) -> Path:
        """Where it writes."""
        return work / self.name.replace(" ", "-")


def plan(work: Path, seconds: float, rehearsed: int | None) -> list[Job]:
    """All jobs, in the order in which they are to run. work: where they write, each into a folder of its name.
    rehearsed: on which capability that is not here."""
    over, where = ["-m"], []
    if rehearsed is not None:
        over, where = ["-m", "tests.emulator.gpu", str(rehearsed)], ["--device", "cpu", "--tiny"]
    every_launch = ["-m", "pytest", "-q", "tests/gpu/test_triton_every_launch.py", "-k", "linear_wgrad and bfloat16"]
    if rehearsed is not None:
        every_launch = ["-m", "bench.gpu_prepare", str(rehearsed)]

    def program(name: str, command: list[str], limit: float, out: str = "--out", file: str = "") -> Job:
        job = Job(name, command, limit)
        job.command += [out, str(job.folder(work) / file)]
        return job

    def rows(name: str, names: Sequence[str], limit: float) -> Job:
        return program(name, [*over, "bench.gpu", *where, "--seconds", f"{0.8 * limit:.0f}", "--rows", *names], limit)

    part = seconds / 100
    tests = ["tests/gpu/run.py", "--seconds", f"{36 * part:.0f}"]
    stages = ["-m", "bench.virtual_stages", "--rounds", "5"]
    tiles = ["-m", "bench.tune", "--op", "wgrad", "--seconds", f"{6 * part:.0f}"]
    return [
        rows("a copy", ["copy, ceiling"], 4 * part),
        rows("first figures", FIRST, 5 * part),
        Job(REPLAYED, every_launch, 10 * part),
        program("tests", tests, 40 * part),
        *(rows(name, names, 10 * part) for name, names in ROWS.items()),
        program("virtual stages", stages, 10 * part),
        program("tiles of W", tiles, 10 * part, "--table", "tiles.json"),
        Job("sanitizer", ["-m", "pytest", "-q", "--slow", "tests/gpu/test_cuda_sanitizer.py"], 20 * part),
    ]


def session(jobs: Sequence[Job], end: float, out: Path, work: Path) -> None:
    """All jobs, as long as there is time. Where the first is not ok, nothing else begins."""
    write(jobs, out)
    for job in jobs:
        if time.monotonic() >= end or jobs[0].status not in ("not reached", "ok"):
            break
        replays = all(other.status in ("ok", "not reached") for other in jobs if other.name == REPLAYED)
        before = [] if replays else ["-m", "bench.no_replay"]
        for _ in run(job, min(job.limit, end - time.monotonic()), work, before):
            write(jobs, out)
        print(f"{job.name}: {job.status}, {job.seconds:.0f} s, {job.said}", flush=True)


def run(job: Job, seconds: float, work: Path, before: Sequence[str] = ()) -> Iterator[None]:
    """One job, in a process group of its own, which is killed when its time is up; yields every two seconds, and at the
    end. before: what the program is given to, where it is a module."""
    module = job.command[0] == "-m"
    command = [*before, *job.command[1:]] if before and module else job.command
    job.folder(work).mkdir(parents=True)
    log = job.folder(work) / "log.txt"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    environment["TRITON_INTERPRET"] = "0"
    job.status, begin = "running", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            while job.status == "running":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(max(0.0, min(2.0, begin + seconds - time.monotonic())))
                    job.status = {0: "ok", 2: "cannot run", 5: "ok"}.get(code, "wrong")  # 5: pytest: nothing to run
                if job.status == "running" and time.monotonic() >= begin + seconds:
                    job.status = "timed out"
                take(job, work, time.monotonic() - begin)
                yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def take(job: Job, work: Path, seconds: float) -> None:
    """What it has printed and written so far; its programs replace files whole."""
    job.seconds = seconds
    job.printed = (job.folder(work) / "log.txt").read_text(errors="replace")
    lines = [line for line in job.printed.splitlines() if line.strip()]
    job.said = lines[-1][:300] if lines else ""
    for path in job.folder(work).glob("*.json"):
        job.results[path.stem] = json.loads(path.read_text())


def write(jobs: Sequence[Job], out: Path) -> None:
    """session.json, session.md and log.txt, each the old file or the new one and never half of one."""
    environment = reporting.environment()
    table = reporting.markdown_table(
        ("job", "", "s", "its last line"), [(job.name, job.status, f"{job.seconds:.0f}", job.said) for job in jobs]
    )
    lines = ["# A session on a GPU", "", *(f"- {name}: {value}" for name, value in environment.items()), "", table, ""]
    found = [{key: value for key, value in asdict(job).items() if key != "printed"} for job in jobs]
    result = as_text({"environment": environment, "jobs": found}) + "\n"
    log = "".join(f"---- {job.name}: {job.status}\n{job.printed}\n" for job in jobs if job.printed)
    for name, text in (("session.json", result), ("session.md", "\n".join(lines)), ("log.txt", log)):
        beside = out / f"{name}.new"
        beside.write_text(text)
        beside.replace(out / name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=520.0, help="for everything")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="that --prepare filled")
    parser.add_argument("--only", default="", help="jobs, or kernels and rows, with this regular expression")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, over a driver that does nothing")
    parser.add_argument("--prepare", action="store_true", help="compile for a GPU that is not here, into FOLDER")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that is not here")
    arguments = parser.parse_args(argv)
    if arguments.prepare:
        return gpu_prepare.prepare(arguments.out, arguments.capability, arguments.only)
    reason = None if arguments.rehearse else gpu_prepare.why_no_gpu()
    if arguments.prepared is not None and not (arguments.prepared / "prepared.json").exists():
        reason = f"{arguments.prepared} has no prepared.json; fill it by --prepare, or leave --prepared out"
    if reason is not None:
        print(f"cannot run: {reason}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is ended, too
    if arguments.prepared is not None:
        print(gpu_prepare.adopt(arguments.prepared))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        jobs = plan(Path(folder), arguments.seconds, arguments.capability if arguments.rehearse else None)
        chosen = [job for job in jobs if gpu_prepare.matches(arguments.only, job.name)]
        for job in chosen if arguments.rehearse else ():
            job.limit = arguments.seconds  # rows of tiny shapes are compiled then
        session(chosen, time.monotonic() + arguments.seconds, arguments.out.resolve(), Path(folder))
    print("\n" + (arguments.out / "session.md").read_text())
    return 1 if any(job.status in ("wrong", "timed out") for job in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
