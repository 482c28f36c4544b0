"""What to learn from a GPU that is lent for fifteen minutes, the most important first: bench/gpu_minutes.sh runs it.

    python -m bench.gpu_session --seconds 280 --out FOLDER [--prepared PREPARED] [--only REGEX]

A list of programs of this repository, each a process with a share of the time that is left when it begins: one that
hangs or dies costs only its own result. FOLDER/session.md, session.json (with all figures so far) and log.txt (what
programs have printed) are rewritten every two seconds, each the old file or the new one: this may be killed at any
time. What programs write goes elsewhere, so FOLDER has these three.

PREPARED is what bench.gpu_prepare made for this GPU, Python and Triton, wherever it is by now; without it kernels are
compiled here. Rows that a program had not begun when it lost the GPU are measured by another. Where launches that
bypass Triton's Python are wrong, what follows goes on without them. --rehearse runs the list without a GPU, over a
driver whose launches are checked and do nothing (tests/emulator). Without a GPU it ends with status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import gpu, gpu_prepare, gpu_rows
from bench.report import as_text
from zbkern import reporting

ROOT = Path(__file__).resolve().parents[1]

FIRST, REPLAYED = "W designs", "every launch"

STARTING = 40.0
"""Seconds that a program may take beyond its share: it reads torch from a cold disk, and makes a CUDA context."""

MOST_PRINTED = 2**20
"""Characters of what a program has printed that are kept, the last."""


@dataclass
class Job:
    """A program of this repository, as the arguments of Python, in which {seconds} is what it is given, and its share
    of the time, in the same unit for all.

    place: the folder that it writes to, if not one of its name. status: "not reached", "running", and then "ok",
    "wrong", "cannot run", "died" or "timed out". said: its last line. printed: all of them. results: by name, the JSON
    that it has written so far.
    """

    name: str
    command: list[str]
    share: float
    place: str = ""
    status: str = "not reached"
    seconds: float = 0.0
    said: str = ""
    printed: str = ""
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return self.place or self.name.replace(" ", "-")

    @property
    def rows(self) -> Mapping[str, Any]:
        """What `bench.gpu` has written."""
        return self.results.get("gpu", {}).get("figures", {"rows": [], "left": []})


def plan(work: Path, prepared: Path | None = None, rehearsed: bool = False) -> list[Job]:
    """All jobs, in the order in which they are to run. work: where they write."""
    over = ["-m", "tests.emulator.gpu", "90"] if rehearsed else ["-m"]
    where = ["--device", "cpu", "--tiny"] if rehearsed else []
    few = ["--tiny", "--ranks", "2"] if rehearsed else []
    processes = "0" if rehearsed else str(os.cpu_count() or 1)
    several = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--seconds", "{seconds}", "-n", processes]

    def program(name: str, command: Sequence[str], share: float, place: str = "") -> Job:
        job = Job(name, [*command], share, place)
        job.command += ["--out", str(work / job.folder)]
        return job

    rows = [*over, "bench.gpu", *where, "--seconds", "{seconds}", "--continue"]
    others = [row.name for row in gpu_rows.ROWS if row.name not in gpu_rows.HEADLINE]
    launches = "tests/gpu/test_triton_every_launch.py"
    every_launch = [*several, launches]
    if rehearsed:
        every_launch = ["-m", "bench.gpu_prepare", "--rehearse", str(prepared)]
    tiles = ["-m", "bench.tune", "--op", "wgrad", "--seconds", "{seconds}", "--table"]
    sanitizer = ["-m", "pytest", "-v", "--slow", "tests/gpu/test_cuda_sanitizer.py"]
    return [
        program(FIRST, [*over, "bench.w_sweep", *where, "--seconds", "{seconds}"], 60),
        Job(REPLAYED, every_launch, 25),
        program("processes on one GPU", ["-m", "bench.one_gpu", *few, "--seconds", "{seconds}"], 110),
        program("rehearsal", ["-m", "bench.gpu_rehearse", *few[:1], "--seconds", "{seconds}"], 50),
        program("headline", [*rows, "--rows", *gpu_rows.HEADLINE], 35, "rows"),
        program("deciding rows", [*rows, "--rows", *gpu_rows.DECIDING], 40, "rows"),
        Job("tests alone", [*several[:-2], "-m", "gpu and alone", "tests/gpu"], 35),
        Job("tests", [*several, "-m", "gpu and not alone", "--deselect", launches, "tests/gpu"], 110),
        program("passes beside each other", ["-m", "bench.overlap_gpu", *few[:1]], 20),
        program("virtual stages", ["-m", "bench.virtual_stages", "--rounds", "5"], 30),
        program("rows", [*rows, "--rows", *others], 65),
        Job("tiles of W", [*tiles, str(work / "tiles-of-W" / "tiles.json")], 35),
        Job("sanitizer", sanitizer, 35),
    ]


def session(jobs: Sequence[Job], end: float, out: Path, work: Path, heading: Mapping[str, Any]) -> None:
    """All jobs, as long as there is time. Where the first says that nothing can be measured, nothing else begins."""
    for index, job in enumerate(jobs):
        before = None
        while (left := end - time.monotonic()) > 0 and job.rows["left"] != before:
            before = job.rows["left"]
            seconds = left * job.share / sum(other.share for other in jobs[index:])
            replay = all(other.status in ("ok", "not reached") for other in jobs if other.name == REPLAYED)
            for _ in run(job, seconds, min(seconds + STARTING, left), work, {"ZBKERN_REPLAY": str(int(replay))}):
                write(jobs, out, heading)
            print(f"{job.name}: {job.status}, {job.seconds:.0f} s, {job.said}", flush=True)
            if not job.rows["left"] or job.status in ("ok", "timed out"):
                break
        if job.name == FIRST and job.status in ("wrong", "cannot run") and not job.results:
            break
    write(jobs, out, heading)


def run(job: Job, seconds: float, limit: float, work: Path, settings: Mapping[str, str]) -> Iterator[None]:
    """One job, in a process group of its own, which is killed at the limit; yields every two seconds, and at the end.
    seconds: what it is told. settings: beside those of the environment."""
    folder = work / job.folder
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    environment |= {"TRITON_INTERPRET": "0", **settings}
    command = [word.replace("{seconds}", f"{seconds:.0f}") for word in job.command]
    job.status, begin = "running", time.monotonic()
    spent, log = job.seconds, folder / f"{job.name}.txt"
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            while job.status == "running":
                code = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(max(0.0, min(2.0, begin + limit - time.monotonic())))
                job.seconds = spent + time.monotonic() - begin
                take(job, log)
                if code is not None:
                    job.status = verdict(job, code)
                elif time.monotonic() >= begin + limit:
                    job.status = "timed out"
                yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def verdict(job: Job, code: int) -> str:
    """Of a program that has ended. Tests of which none has run, or all were skipped, have shown nothing."""
    if code == 0 and "pytest" in job.command and not re.search(r"\d passed", job.said):
        return "cannot run"
    return {0: "ok", 1: "wrong", 2: "cannot run", 5: "cannot run"}.get(code, "died")


def take(job: Job, log: Path) -> None:
    """What it has printed and written so far."""
    job.printed = log.read_text(errors="replace")[-MOST_PRINTED:]
    lines = [line for line in job.printed.splitlines() if line.strip()]
    job.said = lines[-1][:300] if lines else ""
    for path in log.parent.glob("*.json"):
        with contextlib.suppress(ValueError):  # half of it is written
            job.results[path.stem] = json.loads(path.read_text())


def write(jobs: Sequence[Job], out: Path, heading: Mapping[str, Any]) -> None:
    """session.json, session.md and log.txt, each the old file or the new one and never half of one."""
    table = reporting.markdown_table(
        ("job", "", "s", "its last line"), [(job.name, job.status, f"{job.seconds:.0f}", job.said) for job in jobs]
    )
    figures = max((job.rows["rows"] for job in jobs), key=len)
    rows = reporting.markdown_table(gpu.HEADER, [gpu.cells(figure) for figure in figures]) if figures else ""
    lines = [
        "# A session on a GPU",
        "",
        *(f"- {name}: {value}" for name, value in heading.items()),
        "",
        table,
        "",
        rows,
    ]
    found = [{key: value for key, value in asdict(job).items() if key != "printed"} for job in jobs]
    result = as_text({"environment": heading, "jobs": found})
    log = "".join(f"---- {job.name}: {job.status}\n{job.printed}\n" for job in jobs if job.printed)
    for name, text in (("session.json", result), ("session.md", "\n".join(lines)), ("log.txt", log)):
        beside = out / f"{name}.new"
        beside.write_text(text + "\n")
        beside.replace(out / name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=280.0, help="for everything")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prepared", type=Path, metavar="PREPARED", help="that bench.gpu_prepare filled")
    parser.add_argument("--only", default="", help="jobs with this regular expression")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, over a driver that does nothing")
    arguments = parser.parse_args(argv)
    end = time.monotonic() + arguments.seconds
    if not arguments.rehearse and not torch.cuda.is_available():
        print("cannot run: torch sees no CUDA device (--rehearse tries the program without one)")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is ended, too
    said = "nothing: kernels are compiled here"
    if arguments.prepared is not None and (arguments.prepared / "prepared.json").exists():
        said = gpu_prepare.adopt(arguments.prepared)
    print(f"prepared: {said}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    heading = {**reporting.environment(), "prepared": said}
    with tempfile.TemporaryDirectory() as folder:
        jobs = plan(Path(folder), arguments.prepared, arguments.rehearse)
        chosen = [job for job in jobs if re.search(arguments.only, job.name)]
        session(chosen, end, arguments.out.resolve(), Path(folder), heading)
    print("\n" + (arguments.out / "session.md").read_text())
    return 0 if all(job.status == "ok" for job in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
