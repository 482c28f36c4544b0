"""What the processes of a session on a GPU do: one job each (bench/gpu_session.py)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import gpu_prepare
from zbkern import reporting

ROOT = Path(__file__).resolve().parents[1]

FAULTS = ("hang", "sticky", "wrong", "kill")
"""To rehearse: a launch that never ends; an error of the driver that stays; a wrong result; a process that dies."""

PROGRAMS = {
    "tests of the extension": "-m pytest -q -x tests/gpu/test_cuda_wgrad.py tests/gpu/test_cuda_optimizer.py",
    "W of the extension": "-m bench.cuda_wgrad --out {out}",
    "virtual stages": "-m bench.virtual_stages --rounds 5 --out {out}",
    "tiles of W": "-m bench.tune --op wgrad --seconds {seconds:.0f} --table {out}/tiles.json",
    "sanitizer": "-m pytest -q --slow tests/gpu/test_cuda_sanitizer.py",
}
"""What runs after the rows, in this order."""

REPLAYED = "replayed launches"

Send = Callable[[dict[str, Any]], None]


@dataclass
class Job:
    """kind: "versions", "probe", "build" (the extension), "kernel", "compile" (what a row is going to run), "row" or
    "program". limit: seconds. figures: of a row, one a shape. compiled: kernels found in Triton's cache, and compiled.

    status: "not reached", "running", and then "ok", "wrong", "cannot run", "timed out" or "died".
    """

    kind: str
    name: str
    dtype: str
    limit: float
    status: str = "not reached"
    seconds: float = 0.0
    detail: str = ""
    compiled: dict[str, int] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Where:
    """What jobs are told. rehearsed: on which capability that is not here, None on a GPU. faults: of named jobs.
    replay: launches are repeated without Triton's Python. key: names kernels in Triton's cache (gpu_prepare.key_of).
    prepared: the folder of what was made for this GPU without it."""

    out: Path
    rehearsed: int | None
    faults: dict[str, str]
    replay: bool = True
    key: str = ""
    prepared: Path | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.rehearsed is None else "cpu"


def child(connection: Connection, job: Job, seconds: float, where: Where, log: Path) -> None:
    """A job in its own process group. What it prints, and what compilers and drivers print, goes to its log."""
    os.setsid()
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the session
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work = {"versions": versions, "probe": probe_replay, "kernel": check_kernel, "compile": compile_row,
            "build": build_extension, "row": measure_row, "program": run_program}[job.kind]  # fmt: skip
    from zbkern.kernels import dispatch

    compiled: dict[str, int] = {}
    try:
        if where.key:
            gpu_prepare.use_key(where.key)
            gpu_prepare.name_kernels()
        with _counted(compiled), _rehearsed(where, job), _replayed(where):
            status, detail = work(job, seconds, where, connection.send)
    except dispatch.UnavailableError as error:
        status, detail = "cannot run", str(error)
    except AssertionError as error:
        status, detail = "wrong", str(error)
    except Exception as error:
        traceback.print_exc()
        status, detail = "wrong", f"{type(error).__name__}: {str(error).strip()[:500]}"
    connection.send({"status": status, "detail": detail, "compiled": compiled})


@contextlib.contextmanager
def _counted(compiled: dict[str, int]) -> Iterator[None]:
    """Counts kernels that Triton finds in its cache, and those that it compiles; and the same of launchers in C."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import knobs
    from triton.runtime import build

    def count(name: str) -> None:
        compiled[name] = compiled.get(name, 0) + 1

    def built(*arguments: Any, make: Any = build._build) -> Any:
        count("launchers built")
        return make(*arguments)

    knobs.compilation.listener = lambda cache_hit, **_: count("from the cache" if cache_hit else "compiled")
    build._build = built
    yield


@contextlib.contextmanager
def _rehearsed(where: Where, job: Job) -> Iterator[None]:
    """On a GPU that is not here, whose launches have the job's fault."""
    fault = where.faults.get(job.name)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if where.rehearsed is None:
        yield
        return
    from bench import fake_driver

    with fake_driver.gpu(where.rehearsed, answers=job.kind != "compile"):
        fake_driver.load().fake_fault(fake_driver.FAULTS.get(fault or "", 0))
        yield


@contextlib.contextmanager
def _replayed(where: Where) -> Iterator[None]:
    if where.replay:
        yield
        return
    from zbkern.kernels.triton.replay import replay

    with replay.paused():
        yield


# ---- jobs ----


def versions(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """The machine and the versions; whether the GPU multiplies at all."""
    import torch

    from bench import gpu_peers
    from zbkern import testing
    from zbkern.kernels.cuda import wgrad as cuda_wgrad

    found = gpu_peers.versions()
    send({"environment": found})
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        found = {"nvidia-smi": subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()}
    except (OSError, subprocess.TimeoutExpired) as error:
        found = {"nvidia-smi": type(error).__name__}
    send({"environment": found})
    if where.rehearsed is None and not torch.cuda.is_available():
        return "cannot run", "torch sees no CUDA device (--rehearse tries the program without one)"
    from build_tools import cuda

    of_these = "" if cuda_wgrad._cuda is None or cuda.sources_hash() == cuda_wgrad._cuda.SOURCES_HASH else ", OUTDATED"
    state = cuda_wgrad.why_not(where.device) or f"{cuda_wgrad._cuda.__file__}, for {cuda_wgrad._cuda.ARCHITECTURES}"
    send({"environment": {**reporting.environment(), "CUDA extension": state + of_these}})
    a, b = torch.randn(2, 256, 256, device=where.device)
    testing.assert_close(a @ b, a.double() @ b.double(), "torch's product of two matrices", 1e-2)
    return "ok", ""


def probe_replay(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """A W again and again, on the same operands and on others: the bits of one that goes through Triton's Python."""
    import torch

    from zbkern.kernels import dispatch
    from zbkern.kernels.triton.replay import replay

    backend = dispatch.resolve("linear", "triton", where.device, torch.bfloat16)
    tokens, n, k = gpu_prepare.PROBED
    draws = [[torch.randn(tokens, m, device=where.device).bfloat16() for m in (k, n)] for _ in range(2)]
    for turn in range(3):  # recorded; made of the record, and remembered by its addresses; found by them
        for x, dy in draws:
            wanted, got = torch.zeros(2, n, k, device=where.device)
            with replay.paused():
                backend.linear_wgrad([(x, dy)], (wanted, None), True)
            for _ in range(turn + 1):
                backend.linear_wgrad([(x, dy)], (got.zero_(), None), True)
            if where.faults.get(job.name) == "wrong":
                got.add_(1)
            assert torch.equal(got, wanted), f"turn {turn}: other bits than a launch through Triton's Python"
    if not replay._direct:
        return "ok", "this Triton's launcher is not known: each launch goes through its Python"
    return "ok", ""


def check_kernel(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """One kernel against the reference in float64, from the same inputs; the second run must give the same bits."""
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
    backend = dispatch.resolve(op, "triton", where.device, dtype)
    results = []
    for module, kind in ((backend, every_launch.Random), (reference, Exact)):
        torch.manual_seed(0)
        case = every_launch.cases(module, kind(dtype, where.device, scale=0.3), *gpu_prepare.SHAPE)[job.name]
        results.append(case.results())
        if module is backend:
            again = case.results()
            assert all(map(torch.equal, results[0], again)), "the second run gave other bits"
    got, wanted = results
    if where.faults.get(job.name) == "wrong":
        got[0].view(-1)[0] += 1 + got[0].abs().max()
    rounds = any(word in job.name for word in ("cross_entropy", "attention", "gated_linear"))  # on the way, to dtype
    for index, (mine, exact) in enumerate(zip(got, wanted, strict=True)):
        if job.name.startswith("fp8"):  # 8-bit products are summed with 14 bits
            mine = mine.bfloat16()
        if job.name.endswith("norm_dgrad") and mine.shape != exact.shape:  # each backend sums in parts of its own
            mine, exact = mine.sum(-2), exact.sum(-2)
        tolerance = max(
            testing.tolerance_of(dtype if rounds else mine.dtype, gpu_prepare.SHAPE[0]), testing.TOLERANCE[mine.dtype]
        )
        testing.assert_close(mine, exact, f"output {index}", tolerance)
    return "ok", ""


def build_extension(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """The CUDA extension for this Python, where none is there that loads. A rehearsal leaves the package alone."""
    import torch

    folder = ROOT / "zbkern" if where.rehearsed is None else where.out
    module = folder / gpu_prepare.module_name()
    if gpu_prepare.module_loads(module):
        return "ok", f"{module.name} is there"
    if where.rehearsed is not None and where.prepared is None:
        return "cannot run", "a rehearsal compiles no kernels; give it --prepared"
    major, minor = divmod(where.rehearsed or 0, 10) if where.rehearsed else torch.cuda.get_device_capability()
    try:
        gpu_prepare.build_extension(where.prepared, module, 10 * major + minor)
    except (RuntimeError, ValueError, ImportError) as error:
        print(error)
        return "cannot run", str(error).strip().splitlines()[-1][:300]
    if not gpu_prepare.module_loads(module):
        return "wrong", f"{module.name} was built and does not load"
    return "ok", f"{module.name} was built"


def compile_row(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """Fills Triton's cache with the kernels of a row, beside other jobs, while nothing is timed."""
    from bench import ahead, gpu

    row = gpu_prepare.row_and_bench(job.name.removeprefix("compile "), where.device, "triton")
    for variant in (found := ahead.jobs(gpu.ours(*row))):
        ahead.compile_job(variant)
    return "ok", f"{len(found)} kernels"


def measure_row(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """One row of `bench.gpu`, each shape sent as soon as it is measured."""
    from bench import gpu

    tiny = where.rehearsed is not None
    rows, bench = gpu_prepare.row_and_bench(job.name, where.device, "triton", tiny, written=True)
    wrong, missing = [], []
    for figure in gpu.measure(rows, bench, 0.8 * seconds):
        if where.faults.get(job.name) == "wrong":
            figure = {"row": job.name, "wrong": "as --fault asked for"}
        send({"figure": figure})
        wrong += [figure["wrong"]] if "wrong" in figure else []
        missing += [figure["why not"]] if "why not" in figure else []
    return ("wrong", wrong[0]) if wrong else ("ok", "; ".join(dict.fromkeys(missing)))


def run_program(job: Job, seconds: float, where: Where, send: Send) -> tuple[str, str]:
    """A program of this repository; its last line says how it went."""
    if where.faults.get(job.name) == "hang":
        time.sleep(3600)
    words = PROGRAMS[job.name].format(out=where.out.resolve(), seconds=0.8 * seconds).split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    if last.startswith(("cannot run", "nothing measured")):
        return "cannot run", last.partition(": ")[2]
    return "ok" if done.returncode in (0, 5) else "wrong", last[:300]
