"""Finds tiles on this GPU: times candidates for the shapes of large layers and writes what `kernels/tiles.py` reads.

    python -m bench.tune [--seconds 600] [--op wgrad] [--shape 4096 4096 4096]

A table entry stands for all shapes within the same powers of two, so it is chosen over several of them. A candidate
counts only if its result is right, and the rules' own choice is among them: an entry is written only where another tile
is at least two percent faster. Entries of other GPUs and shapes stay. The time is shared by all problems.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from bench import ahead
from zbkern import testing
from zbkern.kernels import dispatch, tiles
from zbkern.kernels.tiles import Tile

OPS = ("fwd", "dgrad", "wgrad")
SHAPES = tuple((m, n, k) for m in (1024, 2048, 4096, 8192) for n, k in ((4096, 4096), (11008, 4096), (4096, 11008)))
WORTH = 1.02


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--op", choices=OPS, action="append", help="all when not given")
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("M", "N", "K"), help="of the layer")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--table", type=Path, default=tiles.TABLE)
    arguments = parser.parse_args(argv)
    reason = _why_not()
    if reason is not None:
        print(f"cannot run: {reason}")
        return 1
    dtype = getattr(torch, arguments.dtype)
    end = time.perf_counter() + arguments.seconds
    problems = [(op, tuple(shape)) for op in arguments.op or OPS for shape in arguments.shape or SHAPES]
    found = json.loads(arguments.table.read_text()) if arguments.table.exists() else {}
    compilers = ahead.Compilers()
    for index, (op, shape) in enumerate(problems):
        left = end - time.perf_counter()
        if left <= 0:
            print(
                f"no time left for {len(problems) - index} of {len(problems)} problems; run again with more --seconds"
            )
            break
        problem = Problem(op, shape, dtype, torch.device("cuda"))
        best, rules, times = search(problem, left / (len(problems) - index), compilers)
        gain = times[rules] / times[best]
        print(f"{problem.key:<40} {best}  {gain:.3f} x the rules' choice, of {len(times)} candidates", flush=True)
        if gain >= WORTH:
            found[problem.key] = astuple(best)
        else:
            found.pop(problem.key, None)
        arguments.table.write_text(text(found))
    compilers.close()
    print(f"{len(found)} entries in {arguments.table}")
    return 0


class Problem:
    """One matmul of a linear layer with M rows, N outputs and K inputs: its operands, its kernel, its result."""

    def __init__(self, op: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        from zbkern.kernels.triton import matmul_tile as triton_matmul_tile

        m, n, k = shape
        self.op, self.dtype = op, dtype
        self.shape = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[op]
        self.capability, self.num_sms = triton_matmul_tile._machine(device)
        self.key = tiles.key(op, *self.shape, str(dtype).removeprefix("torch."), self.capability)
        backend = dispatch.resolve("linear", "triton", device, dtype)
        x, weight, dy = (torch.randn(*s, device=device).to(dtype) for s in ((m, k), (n, k), (m, n)))
        outs: dict[str, Callable[[], Tensor]] = {
            "fwd": lambda: torch.empty_like(dy),
            "dgrad": lambda: torch.empty_like(x),
            "wgrad": lambda: torch.zeros(n, k, device=device),
        }
        self.out = outs[op]()
        runs: dict[str, Callable[[], None]] = {
            "fwd": lambda: backend.linear_fwd(x, weight, None, self.out),
            "dgrad": lambda: backend.linear_dgrad(dy, weight, self.out),
            "wgrad": lambda: backend.linear_wgrad([(x, dy)], (self.out, None), True),
        }
        self.run = runs[op]
        a, b = {"fwd": (x, weight.t()), "dgrad": (dy, weight), "wgrad": (dy.t(), x)}[op]
        self.answer = (a.float() @ b.float()).to(self.out.dtype)

    def rules(self) -> Tile:
        """What the rules choose without a table."""
        with table({}):
            dtype = str(self.dtype).removeprefix("torch.")
            return tiles.choose(self.op, *self.shape, dtype, self.capability, self.num_sms)

    def trial(self, entries: dict[str, Tile]) -> Callable[[], None]:
        """The kernel with tiles from that table."""

        def run() -> None:
            with table(entries):
                self.run()

        return run

    def right(self) -> bool:
        self.out.zero_()
        self.run()
        try:
            testing.assert_close(self.out, self.answer, tolerance=testing.TOLERANCE[self.dtype])
        except AssertionError:
            return False
        return True

    def time(self, rounds: int = 10) -> float:
        timing = testing.measure({"tile": lambda: [self.run]}, rounds=rounds, warmup=2, device=self.out.device)
        return statistics.median(timing["tile"].seconds)


def candidates(op: str, size: int, capability: int) -> list[Tile]:
    """Tiles that fit into shared memory with at least two stages; size: bytes of an operand's element."""
    limit = 1024 * tiles.SHARED_MEMORY.get(capability, 99)
    found = []
    for (m, n), k, group in itertools.product(
        ((64, 64), (64, 128), (128, 64), (64, 256), (128, 128), (128, 256), (256, 128)), (32, 64, 128), (4, 8, 16)
    ):
        warps = 4 if m * n <= 64 * 128 else 8
        fitting = [
            tile
            for stages in (2, 3, 4, 5, 6)
            if tiles.shared_memory(tile := Tile(m, n, k, warps, stages, group), op, size, capability) <= limit
        ]
        found += fitting[-2:]  # fewer stages than fit rarely help
    return found


def search(
    problem: Problem, seconds: float, compilers: ahead.Compilers | None = None
) -> tuple[Tile, Tile, dict[Tile, float]]:
    """(fastest, the rules' choice, time of every candidate that was right), within about so many seconds.

    One pass with group 8, from the rules' choice outwards; then the other groups for the three best.
    """
    end = time.perf_counter() + seconds
    rules = problem.rules()
    size = torch.empty(0, dtype=problem.dtype).element_size()
    every = candidates(problem.op, size, problem.capability)
    near = sorted((t for t in every if t.group == 8), key=lambda t: abs(t.m * t.n - rules.m * rules.n) + t.k / 1e3)
    times: dict[Tile, float] = {}
    _try_all(problem, [rules, *near], times, end, compilers)
    best = sorted(times, key=times.__getitem__)[:3]
    others = [tile for tile in every if any(astuple(tile)[:-1] == astuple(good)[:-1] for good in best)]
    _try_all(problem, others, times, end, compilers)
    if rules not in times:
        raise RuntimeError(f"tune: the rules' own tile {rules} gives a wrong result for {problem.key}")
    return min(times, key=times.__getitem__), rules, times


def _try_all(
    problem: Problem, some: list[Tile], times: dict[Tile, float], end: float, compilers: ahead.Compilers | None
) -> None:
    """Two for each core are compiled at a time."""
    several = 1 if compilers is None else 2 * compilers.processes
    for first in range(0, len(some), several):
        part = some[first : first + several]
        if compilers is not None and time.perf_counter() < end:
            compilers.compile(problem.trial({problem.key: tile}) for tile in part)
        for tile in part:
            _try(problem, tile, times, end)


def _try(problem: Problem, tile: Tile, times: dict[Tile, float], end: float) -> None:
    if tile in times or (times and time.perf_counter() > end):
        return
    with table({problem.key: tile}):
        try:
            if problem.right():
                times[tile] = problem.time()
        except Exception:  # it does not compile, or needs more than there is: Triton's errors have no common base
            return


@contextlib.contextmanager
def table(entries: dict[str, Tile]) -> Iterator[None]:
    """Inside, kernels take their tiles from this table instead of the file's."""
    from zbkern.kernels.triton import matmul_tile as triton_matmul_tile
    from zbkern.kernels.triton.replay import replay

    try:
        with replay.paused(), mock.patch.object(tiles, "table", return_value=entries):
            triton_matmul_tile.plan.cache_clear()
            yield
    finally:
        triton_matmul_tile.plan.cache_clear()


def text(found: dict[str, list[int] | tuple[int, ...]]) -> str:
    """The table as JSON, an entry a line, sorted."""
    lines = [f"{json.dumps(key)}: {json.dumps(list(found[key]))}" for key in sorted(found)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device; tiles can only be timed on the GPU they are for"
    return dispatch.why_not("linear", "triton", "cuda", torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
