"""What to learn from a GPU that is available for ten minutes, the most important first.

    python -m bench.gpu_session --seconds 520 --out FOLDER [--prepare]

Versions; then every kernel of ours in three dtypes against float64; then the rows of `bench.gpu` that matter. Each job
is a process of its own with a time limit: one that hangs, dies or corrupts the GPU's context costs only its own result.
After each result FOLDER/session.json and FOLDER/session.md are rewritten, so that nothing is lost when this is killed;
what the jobs print is in FOLDER/logs.

--rehearse runs all of it on a CPU with torch's implementation and tiny shapes, and --fault makes jobs fail, to see that
this program does not. --prepare compiles, on a machine without a GPU, what the kernels need for --capability into
FOLDER, for TRITON_CACHE_DIR on the machine with a GPU (the same Triton and Python, at the same path), and with --python
a wheel of zbkern, CUDA extension included, for each interpreter named. The whole is at most --mebibytes: what is worth
least is left out. It fails where the driver would refuse a launch (descriptors.py).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from zbkern import reporting

ROOT = Path(__file__).resolve().parents[1]

DTYPES = ("bfloat16", "float16", "float32")

ROWS = (
    *("W, fp32 added", "W of 4, merged", "all W of a layer", "dgrad with SwiGLU", "W of 8 experts"),
    *("RMSNorm forward", "RMSNorm backward", "attention forward", "attention backward", "linear + cross entropy"),
    *("AdamW, fp32", "AdamW, bf16 + masters", "host time of a W"),
)
"""Of `bench.gpu`, in this order."""

FAULTS = ("hang", "wrong", "kill")

Send = Callable[[dict[str, Any]], None]


@dataclass
class Job:
    """kind: "kernel", "compile" (what a row is going to run) or "row". limit: seconds. figures: of a row, one a shape.

    status: "not reached", "running", and then "ok", "wrong", "cannot run", "timed out" or "died".
    """

    kind: str
    name: str
    dtype: str
    limit: float
    status: str = "not reached"
    seconds: float = 0.0
    detail: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Where:
    """What jobs are told: where they run, on what, and which fault each named job has."""

    device: str
    impl: str
    tiny: bool
    faults: dict[str, str]


class Record:
    """The results so far, and the files they are in."""

    def __init__(self, folder: Path, environment: dict[str, Any], jobs: Sequence[Job]) -> None:
        self.folder, self.environment, self.jobs = folder, environment, jobs
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def write(self) -> None:
        result = {"environment": self.environment, "jobs": [asdict(job) for job in self.jobs]}
        _replace(self.folder / "session.json", json.dumps(result, indent=1) + "\n")
        _replace(self.folder / "session.md", self.text())

    def text(self) -> str:
        """As Markdown: a count, the machine, the kernels, the rows."""
        counts = {status: sum(job.status == status for job in self.jobs) for status in _statuses(self.jobs)}
        lines = ["# A session on a GPU", "", ", ".join(f"{n} {status}" for status, n in counts.items()), ""]
        lines += [f"- {name}: {value}" for name, value in self.environment.items()]
        kernels = [job for job in self.jobs if job.kind == "kernel"]
        cells = [(job.name, job.dtype, job.status, f"{job.seconds:.1f}", job.detail) for job in kernels]
        compiled = [job for job in self.jobs if job.kind == "compile" and job.status not in ("ok", "not reached")]
        lines += ["", *(f"{job.name}: {job.status} {job.detail}" for job in compiled)]
        table = reporting.markdown_table(("kernel", "dtype", "", "s", ""), cells)
        lines += ["", "## Kernels against float64", "", table]
        rows = [cell for job in self.jobs if job.kind == "row" for cell in _row_cells(job)]
        header = ("row", "shape", "ours", "time of a peer over ours", "floor / target", "")
        return "\n".join([*lines, "", "## Rows", "", reporting.markdown_table(header, rows), ""])


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
    parser.add_argument("--only", default="", help="kernels and rows whose name has this regular expression")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of the kernels; all when not given")
    parser.add_argument("--kernel-limit", type=float, default=40.0, help="seconds for a kernel")
    parser.add_argument("--row-limit", type=float, default=40.0, help="seconds for a row")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="kernels checked at a time")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with torch's implementation")
    parser.add_argument("--fault", action="append", default=[], metavar="hang|wrong|kill=NAME", help="to rehearse")
    parser.add_argument("--prepare", action="store_true", help="compile for a GPU that is not here, into FOLDER")
    parser.add_argument("--mebibytes", type=float, default=50.0, help="that --prepare may fill")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="--prepare builds a wheel for it")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that --prepare compiles for")
    arguments = parser.parse_args(argv)
    if arguments.prepare:
        limit = int(arguments.mebibytes * 2**20)
        return prepare(arguments.out, arguments.capability, arguments.only, limit, arguments.python)
    where = Where("cpu" if arguments.rehearse else "cuda", "torch" if arguments.rehearse else "triton",
                  arguments.rehearse, _faults(parser, arguments.fault))  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs are ended, too
    os.environ["TRITON_INTERPRET"] = "0"
    begin = time.monotonic()
    jobs = plan(arguments)
    record = Record(arguments.out, environment(), jobs)
    record.write()
    end = begin + arguments.seconds
    rows = [job for job in jobs if job.kind == "row"]
    run([job for job in jobs if job.kind != "row"], arguments.workers, end, where, record)
    run(rows, 1, end, where, record)
    print(record.text())
    return 1 if any(job.status in ("wrong", "timed out", "died") for job in jobs) else 0


def _faults(parser: argparse.ArgumentParser, given: Sequence[str]) -> dict[str, str]:
    pairs = [fault.partition("=")[::2] for fault in given]
    if any(kind not in FAULTS for kind, _ in pairs):
        parser.error(f"--fault takes {', '.join(FAULTS)} and the name of a kernel or row; got {' '.join(given)}")
    return {name: kind for kind, name in pairs}


def plan(arguments: argparse.Namespace) -> list[Job]:
    """All jobs, in the order in which they are to run: bfloat16 of every kernel before the other dtypes."""
    from zbkern.kernels import spec

    names = [name for name in spec.KERNELS if name not in ("norm_partials", "adamw", "squared_norm")]
    names.sort(key=lambda name: "wgrad" not in name)
    first, *others = arguments.dtype or DTYPES
    jobs = [Job("kernel", name, first, arguments.kernel_limit) for name in names]
    jobs += [Job("compile", f"compile {name}", "bfloat16", arguments.row_limit) for name in ROWS]
    jobs += [Job("kernel", name, dtype, arguments.kernel_limit) for dtype in others for name in names]
    jobs += [Job("row", name, "bfloat16", arguments.row_limit) for name in ROWS]
    return [job for job in jobs if re.search(arguments.only, job.name)]


def environment() -> dict[str, Any]:
    """The machine and the versions; by the hash of Triton's library kernels compiled elsewhere are found, or not."""
    from bench import gpu_peers

    found = {**reporting.environment(), **gpu_peers.versions()}
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        for library in Path(triton.origin).parent.glob("_C/libtriton*.so"):
            found["sha256 of libtriton"] = hashlib.sha256(library.read_bytes()).hexdigest()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        found["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia-smi"] = type(error).__name__
    return found


def run(jobs: Sequence[Job], workers: int, end: float, where: Where, record: Record) -> None:
    """Runs jobs, so many at a time, as long as there is time; writes the record after each message of one."""
    context = multiprocessing.get_context("forkserver")  # its children have torch from the start, and no CUDA context
    context.set_forkserver_preload(["torch", "bench.gpu", "zbkern.testing", "zbkern.kernels.reference"])
    waiting = list(jobs)
    active: dict[Connection, tuple[Job, Any, float]] = {}
    try:
        while waiting or active:
            while waiting and len(active) < workers and time.monotonic() < end:
                job = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                log = record.folder / "logs" / f"{job.name} {job.dtype}.txt".replace(" ", "_")
                seconds = min(job.limit, end - time.monotonic())
                process = context.Process(target=_child, args=(theirs, job, seconds, where, log), daemon=True)
                job.status = "running"
                process.start()
                theirs.close()
                active[ours] = job, process, time.monotonic()
            if not active:
                return  # no time left
            for connection in wait(list(active), timeout=0.2):
                assert isinstance(connection, Connection)
                _receive(connection, active)
                record.write()
            for connection, (job, process, begin) in list(active.items()):
                if time.monotonic() > min(begin + job.limit, end):
                    _finish(connection, active, "timed out", "the job's time was up")
                    process.kill()
                    record.write()
    finally:
        for _, process, _ in active.values():
            process.kill()


def _receive(connection: Connection, active: dict[Connection, tuple[Job, Any, float]]) -> None:
    """One message: a figure, or how a job ended; the end of messages without that is the end of its process."""
    job, process, _ = active[connection]
    try:
        message = connection.recv()
    except EOFError:
        process.join(timeout=5)
        _finish(connection, active, "died", f"exit code {process.exitcode}")
        return
    if "figure" in message:
        job.figures.append(message["figure"])
    else:
        _finish(connection, active, message["status"], message["detail"])


def _finish(connection: Connection, active: dict[Connection, tuple[Job, Any, float]], status: str, detail: str) -> None:
    job, _, begin = active.pop(connection)
    job.status, job.detail, job.seconds = status, detail, time.monotonic() - begin
    connection.close()
    print(f"{job.kind} {job.name} {job.dtype}: {status} {detail}", flush=True)


def _child(connection: Connection, job: Job, seconds: float, where: Where, log: Path) -> None:
    """A job in its own process. What it prints, and what compilers and drivers print, goes to its log."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    fault = where.faults.get(job.name)
    if fault == "hang":
        time.sleep(3600)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    work = {"kernel": check_kernel, "compile": compile_row, "row": measure_row}[job.kind]
    from zbkern.kernels import dispatch

    try:
        status, detail = work(job, seconds, where, connection.send)
    except dispatch.UnavailableError as error:
        status, detail = "cannot run", str(error)
    except AssertionError as error:
        status, detail = "wrong", str(error)
    except Exception as error:
        status, detail = "wrong", f"{type(error).__name__}: {str(error).strip()[:500]}"
    connection.send({"status": status, "detail": detail})


def check_kernel(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """One kernel against the reference in float64, from the same inputs."""
    import torch

    from tests.support import every_launch
    from zbkern import testing
    from zbkern.kernels import dispatch, reference, spec

    class Exact(every_launch.Random):
        """The same values, rounded as the kernel gets them, in float64."""

        def __call__(self, *shape: int, layout: str = "plain") -> torch.Tensor:
            return super().__call__(*shape, layout=layout).double()

    dtype = getattr(torch, job.dtype)
    op = next(op for op, names in spec.OPS.items() if job.name in names)
    backend = dispatch.resolve(op, where.impl, where.device, dtype)
    shape = (21, 48, 32) if where.tiny else (1000, 528, 784)
    results = []
    for module, kind in ((backend, every_launch.Random), (reference, Exact)):
        torch.manual_seed(0)
        random = kind(dtype, where.device, scale=0.3)
        case = every_launch.cases(module, random, *shape)[job.name]
        results.append(case.results())
    got, wanted = results
    if where.faults.get(job.name) == "wrong":
        got[0].view(-1)[0] += 1 + got[0].abs().max()
    rounds = any(word in job.name for word in ("cross_entropy", "attention", "gated_linear"))  # on the way, to dtype
    for index, (mine, exact) in enumerate(zip(got, wanted, strict=True)):
        if job.name.startswith("fp8"):  # 8-bit products are summed with 14 bits
            mine = mine.bfloat16()
        tolerance = max(testing.tolerance_of(dtype if rounds else mine.dtype, shape[0]), testing.TOLERANCE[mine.dtype])
        testing.assert_close(mine, exact, f"output {index}", tolerance)
    return "ok", ""


def _row(name: str, where: Where) -> tuple[list[Any], Any]:
    """A row of `bench.gpu`, and what it runs on."""
    import torch

    from bench import gpu_rows
    from bench.gpu_case import Bench, Sizes

    dtype = torch.float32 if where.tiny else torch.bfloat16
    sizes = Sizes.tiny() if where.tiny else Sizes()
    bench = Bench(torch.device(where.device), dtype, where.impl, sizes)
    return [row for row in gpu_rows.ROWS if row.name == name], bench


def compile_row(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """Fills Triton's cache with the kernels of a row, beside other jobs, while nothing is timed."""
    from bench import ahead, gpu

    found = ahead.jobs(gpu.ours(*_row(job.name.removeprefix("compile "), where)))
    for variant in found:
        ahead.compile_job(variant)
    return "ok", f"{len(found)} kernels"


def measure_row(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """One row of `bench.gpu`, each shape sent as soon as it is measured."""
    import torch

    from bench import gpu

    rows, bench = _row(job.name, where)
    torch.optim.SGD([torch.zeros(1)])  # imports the compiler at its first use
    wrong, missing = [], []
    for figure in gpu.measure(rows, bench, 0.8 * seconds):
        if where.faults.get(job.name) == "wrong":
            figure = {"row": job.name, "wrong": "as --fault asked for"}
        send({"figure": figure})
        wrong += [figure["wrong"]] if "wrong" in figure else []
        missing += [figure["why not"]] if "why not" in figure else []
    return ("wrong", wrong[0]) if wrong else ("ok", "; ".join(dict.fromkeys(missing)))


def prepare(folder: Path, capability: int, only: str, limit: int, pythons: Sequence[str] = ()) -> int:
    """Compiles what the kernels of this session would compile on a GPU of that capability; prints how much it is.

    limit: bytes that may stay. pythons: interpreters to build wheels for. Returns 1 where one cannot be built, or where
    the driver would refuse a launch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TRITON_CACHE_DIR": str(folder.resolve()), "TRITON_STORE_BINARY_ONLY": "1", "TRITON_INTERPRET": "0"}
    import triton
    from triton.backends.compiler import GPUTarget

    from bench import ahead, descriptors, kernels_launched

    missing = [python for python in pythons if not build_wheel(folder, python)]
    absent = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(absent)
    with kernels_launched.machine(capability), ahead.Compilers() as compilers:
        runs = [(name, run) for name, run in _to_prepare() if re.search(only, name)]
        refused = descriptors.faults_of_runs(runs)
        count = compilers.compile(run for _, run in runs)
    dropped = drop_youngest(folder, limit)
    without = f", {dropped} left out" if dropped else ""
    print(f"{count} kernels{without}, {_size(folder) / 2**20:.1f} MiB in {folder}")
    for problem in [f"no wheel for {python}" for python in missing] + [f"refused: {fault}" for fault in refused]:
        print(problem)
    return 1 if missing or refused else 0


def build_wheel(folder: Path, python: str) -> bool:
    """A wheel of zbkern for an interpreter, in FOLDER/wheels; False where that fails, which its output then says."""
    command = [python, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder / "wheels"), str(ROOT)]
    try:
        return subprocess.run(command, env={**os.environ, "ZBKERN_BUILD": "cuda"}).returncode == 0
    except OSError as error:
        print(error, file=sys.stderr)
        return False


def drop_youngest(folder: Path, limit: int) -> int:
    """Deletes kernels of Triton's cache, those compiled last first, until all files take at most so many bytes; how
    many. They were compiled in the order of their worth, so the last are worth least."""
    kernels = sorted({path.parent for path in folder.glob("*/*.cubin")}, key=lambda kernel: kernel.stat().st_mtime_ns)
    dropped, size = 0, _size(folder)
    while size > limit and kernels:
        youngest = kernels.pop()
        size -= _size(youngest)
        shutil.rmtree(youngest)
        dropped += 1
    return dropped


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _to_prepare() -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, run), on tensors of the CPU, the most worth first: every kernel as `check_kernel` calls it in bfloat16,
    then the large shapes of the rows, then the other dtypes."""
    import torch

    from bench import kernels_launched
    from bench.gpu_case import Sizes
    from tests.support import every_launch
    from zbkern.kernels.triton import kernels as triton_kernels

    def kernels(dtype: str) -> Iterator[tuple[str, Callable[[], object]]]:
        random = every_launch.Random(getattr(torch, dtype), "cpu")
        for name, case in every_launch.cases(triton_kernels, random, 1000, 528, 784).items():
            yield f"{name} {dtype}", case.run

    first, *others = DTYPES
    yield from kernels(first)
    for shape in Sizes().layers:
        for name, run in kernels_launched.linear(shape, torch.bfloat16, ("plain",) * 3):
            yield f"{name} {shape[0]} x {shape[1]}", run
    _, size, tokens = Sizes().heads
    yield "attention", kernels_launched.attention(size, torch.bfloat16, True, None, [tokens])
    for dtype in others:
        yield from kernels(dtype)


if __name__ == "__main__":
    sys.exit(main())
