"""What to learn from a GPU that is available for ten minutes, the most important first.

    python -m bench.gpu_session --seconds 520 --out FOLDER [--prepared FOLDER]

Versions; whether launches without Triton's Python are right, without which the rest goes on where they are not; then
every kernel of ours in three dtypes against float64, and beside them the CUDA extension where none loads; the rows of
`bench.gpu` that matter, once CHECKING of the time is over at the latest; other programs of ours (gpu_jobs.PROGRAMS).
Each job is a process of its own with a time limit: one that hangs, dies or corrupts the GPU's context costs only its
own result. After each result FOLDER/session.json and FOLDER/session.md are rewritten, so that nothing is lost when this
is killed; what the jobs print is in FOLDER/log.txt, and of those that run in FOLDER/logs.

--rehearse runs all of it on a machine without a GPU, over a driver whose launches are checked and do nothing
(fake_driver.py), and --fault makes jobs fail, to see that this program does not. --prepare compiles, on a machine
without a GPU, what this would compile for --capability into FOLDER, and builds the CUDA extension for the interpreters
that --python names (gpu_prepare.py); --prepared takes it, wherever FOLDER is now, with the same Triton and any Python.
Where --mebibytes are too few, the kernels that are worth least are left out. It fails where the driver would refuse a
launch (descriptors.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench import gpu_jobs, gpu_prepare
from bench.gpu_jobs import REPLAYED, Job, Where
from zbkern import reporting

ROWS = (
    *("W, fp32 added", "W of 4, merged", "all W of a layer", "product, ceiling", "copy, ceiling"),
    *("dgrad with SwiGLU", "W of 8 experts"),
    *("8 experts, forward", "RMSNorm forward", "RMSNorm backward", "attention forward", "attention backward"),
    *("linear + cross entropy", "host time of a W"),
)
"""Of `bench.gpu`, in this order."""

PRELOADED = (
    *("torch", "bench.gpu", "bench.gpu_jobs", "zbkern.testing", "zbkern.kernels.reference"),
    *("zbkern.kernels.triton.kernels", "tests.support.every_launch"),
)
"""What jobs begin with."""

BUILD_LIMIT = 150.0
"""Seconds for the extension, beside the kernels that are checked: half a minute where its own are prepared."""

CHECKING = 0.4
"""Of the time: after so much of it no check begins until the rows are measured, or have had their time."""

Active = dict[Connection, tuple[Job, Any, float, Path]]


class Record:
    """The results so far, and the files they are in."""

    def __init__(self, folder: Path, environment: dict[str, Any], jobs: Sequence[Job]) -> None:
        self.folder, self.environment, self.jobs = folder, environment, jobs
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").unlink(missing_ok=True)

    def keep(self, log: Path, line: str) -> None:
        """Prints a line, and moves what a job has printed below it into the one log."""
        print(line, flush=True)
        with (self.folder / "log.txt").open("a") as whole:
            whole.write(f"== {line}\n{log.read_text(errors='replace') if log.exists() else ''}")
        log.unlink(missing_ok=True)

    def write(self) -> None:
        result = {"environment": self.environment, "jobs": [asdict(job) for job in self.jobs]}
        _replace(self.folder / "session.json", json.dumps(result, indent=1) + "\n")
        _replace(self.folder / "session.md", self.text())

    def text(self) -> str:
        """As Markdown: a count, the machine, the kernels, the rows."""
        counts = {status: sum(job.status == status for job in self.jobs) for status in _statuses(self.jobs)}
        lines = ["# A session on a GPU", "", ", ".join(f"{n} {status}" for status, n in counts.items()), ""]
        lines += [f"- {name}: {value}" for name, value in self.environment.items()]
        compiled = Counter[str]()
        for job in self.jobs:
            compiled.update(job.compiled)
        lines += ["- kernels: " + ", ".join(f"{n} {name}" for name, n in compiled.items())] if compiled else []
        kernels = [job for job in self.jobs if job.kind == "kernel"]
        cells = [(job.name, job.dtype, job.status, f"{job.seconds:.1f}", job.detail) for job in kernels]
        first = [job for job in self.jobs if job.kind in ("versions", "probe")]
        failed = [job for job in self.jobs if job.kind == "compile" and job.status not in ("ok", "not reached")]
        built = [job for job in self.jobs if job.kind == "build"]
        lines += ["", *(f"{job.name}: {job.status} {job.detail}  " for job in (*first, *built, *failed))]
        table = reporting.markdown_table(("kernel", "dtype", "", "s", ""), cells)
        lines += ["", "## Kernels against float64", "", table]
        rows = [cell for job in self.jobs if job.kind == "row" for cell in _row_cells(job)]
        header = ("row", "shape", "ours", "time of a peer over ours", "floor / target", "")
        lines += ["", "## Rows", "", reporting.markdown_table(header, rows), "", "## Programs", ""]
        programs = [job for job in self.jobs if job.kind == "program"]
        return "\n".join([*lines, *(f"- {job.name}: {job.status} {job.detail}" for job in programs), ""])


def _statuses(jobs: Sequence[Job]) -> list[str]:
    return list(dict.fromkeys(job.status for job in jobs))


def _row_cells(job: Job) -> Iterator[Sequence[str]]:
    from bench import gpu

    for figure in job.figures:
        yield gpu.cells(figure)
    if job.status != "ok":
        yield (job.name, "", job.status, job.detail, "", "")


def _replace(path: Path, text: str) -> None:
    """The old file or the new one, never half of one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=520.0, help="for everything")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="that --prepare filled")
    parser.add_argument("--only", default="", help="kernels, rows and programs whose name has this regular expression")
    parser.add_argument(
        "--dtype", action="append", choices=gpu_prepare.DTYPES, help="of the kernels; all when not given"
    )
    parser.add_argument("--kernel-limit", type=float, default=40.0, help="seconds for a kernel")
    parser.add_argument("--row-limit", type=float, default=40.0, help="seconds for a row")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="kernels checked at a time")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, over a driver that does nothing")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="hang|sticky|wrong|kill=NAME", help="to rehearse"
    )
    parser.add_argument("--prepare", action="store_true", help="compile for a GPU that is not here, into FOLDER")
    parser.add_argument("--mebibytes", type=float, default=50.0, help="that --prepare may fill")
    parser.add_argument(
        "--python", action="append", metavar="PATH",
        help=f"--prepare builds the extension for it; {', '.join(gpu_prepare.PYTHONS)} when not given",
    )  # fmt: skip
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that is not here")
    arguments = parser.parse_args(argv)
    if arguments.prepare:
        pythons, limit = arguments.python or gpu_prepare.PYTHONS, int(arguments.mebibytes * 2**20)
        return gpu_prepare.prepare(arguments.out, arguments.capability, arguments.only, limit, pythons, ROWS)
    capability = arguments.capability if arguments.rehearse else None
    faults = _faults(parser, arguments.fault)
    os.environ["TRITON_INTERPRET"] = "0"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs are ended, too
    end = time.monotonic() + arguments.seconds
    jobs = plan(arguments)
    record = Record(arguments.out, {"python": platform.python_version(), "command": " ".join(sys.argv)}, jobs)
    record.write()
    key, said = gpu_prepare.key_of(arguments.prepared)
    record.environment |= {"sha256 of libtriton": gpu_prepare.triton_identity()["library"], "prepared kernels": said}
    if arguments.prepared is not None:
        record.environment["prepared extension"] = gpu_prepare.adopt(arguments.prepared)
    where = Where(arguments.out, capability, faults, key=key, prepared=arguments.prepared)
    session(jobs, arguments.workers, end, where, record)
    print(record.text())
    return 1 if any(job.status in ("wrong", "timed out", "died") for job in jobs) else 0


def session(jobs: Sequence[Job], workers: int, end: float, where: Where, record: Record) -> None:
    """All jobs. Without an answer from the GPU nothing else begins."""
    begin = time.monotonic()
    of_kind = {kind: [job for job in jobs if job.kind == kind] for kind in ("versions", "probe", "row", "program")}
    run(of_kind["versions"], 1, end, where, record)
    if any(job.status != "ok" for job in of_kind["versions"]):
        return
    run(of_kind["probe"], 1, end, where, record)
    for probe in of_kind["probe"]:
        if probe.status != "ok":
            where = replace(where, replay=False)
            record.environment[REPLAYED] = f"off from here on: {probe.status} {probe.detail}"
    checks = [job for job in jobs if job.kind in ("build", "kernel", "compile")]
    run(checks, workers, end, where, record, until=begin + CHECKING * (end - begin))
    run(of_kind["row"], 1, end, where, record)
    left = [job for job in checks if job.kind == "kernel" and job.status == "not reached"]
    run(left, workers, end, where, record)
    run(of_kind["program"], 1, end, where, record)


def _faults(parser: argparse.ArgumentParser, given: Sequence[str]) -> dict[str, str]:
    pairs = [fault.partition("=")[::2] for fault in given]
    if any(kind not in gpu_jobs.FAULTS for kind, _ in pairs):
        parser.error(
            f"--fault takes {', '.join(gpu_jobs.FAULTS)} and the name of a kernel or row; got {' '.join(given)}"
        )
    return {name: kind for kind, name in pairs}


def plan(arguments: argparse.Namespace) -> list[Job]:
    """All jobs, in the order in which they are to run: bfloat16 of every kernel before the other dtypes."""
    from zbkern.kernels import spec

    names = [name for name in spec.KERNELS if name != "norm_partials"]
    names.sort(key=lambda name: "wgrad" not in name)
    first, *others = arguments.dtype or gpu_prepare.DTYPES
    jobs = [Job("build", "extension", "", BUILD_LIMIT)]
    jobs += [Job("kernel", name, first, arguments.kernel_limit) for name in names]
    compiled = [f"compile {name}" for name in ROWS if gpu_prepare.has_kernels(name)]
    jobs += [Job("compile", name, "bfloat16", arguments.row_limit) for name in compiled]
    jobs += [Job("kernel", name, dtype, arguments.kernel_limit) for dtype in others for name in names]
    jobs += [Job("row", name, "bfloat16", arguments.row_limit) for name in ROWS]
    jobs += [Job("program", name, "", 2 * arguments.row_limit) for name in gpu_jobs.PROGRAMS]
    chosen = [job for job in jobs if re.search(arguments.only, job.name)]
    first_of_all = Job("versions", "versions", "", 60.0), Job("probe", REPLAYED, "bfloat16", arguments.kernel_limit)
    return [*first_of_all, *chosen]


def run(
    jobs: Sequence[Job], workers: int, end: float, where: Where, record: Record, until: float | None = None
) -> None:
    """Runs jobs, so many at a time, as long as there is time; writes the record after each message of one.

    until: when the last may begin, `end` where it is None. Both are of time.monotonic().
    """
    until = end if until is None else min(until, end)
    context = multiprocessing.get_context("forkserver")  # its children have torch from the start, and no CUDA context
    context.set_forkserver_preload(list(PRELOADED))
    waiting = list(jobs)
    active: Active = {}
    try:
        while waiting or active:
            while waiting and len(active) < workers and time.monotonic() < until:
                job = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                log = record.folder / "logs" / f"{job.name} {job.dtype}.txt".replace(" ", "_")
                seconds = min(job.limit, end - time.monotonic())
                process = context.Process(target=gpu_jobs.child, args=(theirs, job, seconds, where, log), daemon=True)
                job.status = "running"
                process.start()
                theirs.close()
                active[ours] = job, process, time.monotonic(), log
            if not active:
                return  # no time left
            for connection in wait(list(active), timeout=0.2):
                assert isinstance(connection, Connection)
                _receive(connection, active, record)
                record.write()
            for connection, (job, process, begin, _) in list(active.items()):
                if time.monotonic() > min(begin + job.limit, end):
                    _kill(process)
                    _finish(connection, active, record, "timed out", "the job's time was up")
                    record.write()
    finally:
        for _, process, _, _ in active.values():
            _kill(process)


def _kill(process: Any) -> None:
    """The process, and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come so far as to lead a group
        process.kill()


def _receive(connection: Connection, active: Active, record: Record) -> None:
    """One message: versions, a figure, or how a job ended; where messages end without that, its process has died."""
    job, process, _, _ = active[connection]
    try:
        message = connection.recv()
    except EOFError:
        process.join(timeout=5)
        _finish(connection, active, record, "died", f"exit code {process.exitcode}")
        return
    if "environment" in message:
        record.environment |= message["environment"]
    elif "figure" in message:
        job.figures.append(message["figure"])
    else:
        job.compiled = message["compiled"]
        _finish(connection, active, record, message["status"], message["detail"])


def _finish(connection: Connection, active: Active, record: Record, status: str, detail: str) -> None:
    job, _, begin, log = active.pop(connection)
    job.status, job.detail, job.seconds = status, detail, time.monotonic() - begin
    connection.close()
    record.keep(log, f"{job.kind} {job.name} {job.dtype}: {status} {detail}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a process that hangs in the driver cannot be waited for
