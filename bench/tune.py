"""Finds tiles on this GPU: times candidates for the shapes of large layers and writes what `kernels/tiles.py` reads.

    python -m bench.tune [--seconds 600] [--op wgrad] [--shape 4096 4096 4096]

A table entry stands for all shapes within the same powers of two, so it is chosen over several of them. A candidate
counts only if its result is right, and the rules' own choice is among them: an entry is written only where
another tile is at least two percent faster. Entries of other GPUs and shapes stay. The time is shared by all problems.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from bench import ahead
from zbkern import testing
from zbkern.kernels import dispatch, tiles
from zbkern.kernels.tiles import Tile

PRODUCTS = ("fwd", "dgrad", "wgrad")
SHAPES = tuple((m, n, k) for m in (1024, 2048, 4096, 8192) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)))
WORTH = 1.02


class Product:
    """One matmul of a linear layer with M rows, N outputs and K inputs: its operands, its kernel, its result."""

    def __init__(self, op: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        from zbkern.kernels.triton import matmul_tile as triton_matmul_tile

        m, n, k = shape
        self.op, self.dtype = op, dtype
        self.shape = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[op]
        self.capability, num_sms = triton_matmul_tile._machine(device)
        name = str(dtype).removeprefix("torch.")
        self.key = tiles.key(op, *self.shape, name, self.capability)
        with table({}):
            self.rules = tiles.choose(op, *self.shape, name, self.capability, num_sms)
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

    def candidates(self) -> list[Tile]:
        """With group 8, from the rules' choice outwards."""
        rules, every = self.rules, product_tiles(self.op, self.dtype.itemsize, self.capability)
        near = (tile for tile in every if tile.group == 8)
        return sorted(near, key=lambda tile: abs(tile.m * tile.n - rules.m * rules.n) + tile.k / 1e3)

    def variants(self, best: list[Tile]) -> list[Tile]:
        """The other groups."""
        every = product_tiles(self.op, self.dtype.itemsize, self.capability)
        return [tile for tile in every if any(replace(tile, group=good.group) == good for good in best)]

    def right(self) -> bool:
        self.out.zero_()
        self.run()
        try:
            testing.assert_close(self.out, self.answer, tolerance=testing.TOLERANCE[self.dtype])
        except AssertionError:
            return False
        return True

    def time(self, rounds: int = 10) -> float:
        candidates = {"tile": lambda: [self.run]}
        return testing.measure(candidates, rounds=rounds, warmup=2, device=self.out.device)["tile"].median


def product_tiles(op: str, size: int, capability: int) -> list[Tile]:
    """Tiles that fit into shared memory with at least two stages; size: bytes of an operand's element."""
    limit = 1024 * tiles.SHARED_MEMORY.get(capability, 99)
    found: list[Tile] = []
    edges = ((64, 64), (64, 128), (128, 64), (64, 256), (128, 128), (128, 256), (256, 128))
    written = (0, 1) if op == "wgrad" and tiles.unit(capability) == "wgmma" else (0,)
    for (m, n), k, group, parts in itertools.product(edges, (32, 64, 128), (4, 8, 16), written):
        warps = 4 if m * n <= 64 * 128 else 8
        every = [Tile(m, n, k, warps, stages, group, parts) for stages in (2, 3, 4, 5, 6)]
        if every[0].epilogue_parts() == parts == replace(every[0], parts=0).epilogue_parts():
            continue  # the same as without a word
        fitting = [tile for tile in every if tiles.shared_memory(tile, op, size, capability) <= limit]
        found += fitting[-2:]  # fewer stages than fit rarely help
    return found


def search(
    problem: Product, seconds: float, compilers: ahead.Compilers | None = None
) -> tuple[Tile, dict[Tile, float]]:
    """(fastest, time of every candidate that was right), within about so many seconds: the rules' choice, then the
    candidates, then variants of the three best. Raises RuntimeError where the rules' choice is wrong."""
    end = time.perf_counter() + seconds
    times: dict[Tile, float] = {}
    _try_all(problem, [problem.rules, *problem.candidates()], times, end, compilers)
    _try_all(problem, problem.variants(sorted(times, key=times.__getitem__)[:3]), times, end, compilers)
    if problem.rules not in times:
        raise RuntimeError(f"tune: the rules' own tile {problem.rules} gives a wrong result for {problem.key}")
    return min(times, key=times.__getitem__), times


def _try_all(
    problem: Product, some: list[Tile], times: dict[Tile, float], end: float, compilers: ahead.Compilers | None
) -> None:
    """Two for each core are compiled at a time."""
    several = 1 if compilers is None else 2 * compilers.processes
    fresh = [tile for tile in dict.fromkeys(some) if tile not in times]
    for first in range(0, len(fresh), several):
        part = fresh[first : first + several]
        if compilers is not None and time.perf_counter() < end:
            compilers.compile(_with(problem, tile) for tile in part)
        for tile in part:
            if times and time.perf_counter() > end:
                return
            with contextlib.suppress(Exception), table({problem.key: tile}):  # Triton's errors have no common base
                if problem.right():
                    times[tile] = problem.time()


def _with(problem: Product, tile: Tile) -> Callable[[], None]:
    def run() -> None:
        with table({problem.key: tile}):
            problem.run()

    return run


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--op", choices=PRODUCTS, action="append", help="all when not given")
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("M", "N", "K"), help="of the layer")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--table", type=Path, default=tiles.TABLE)
    arguments = parser.parse_args(argv)
    reason = _why_not()
    if reason is not None:
        print(f"cannot run: {reason}")
        return 2
    end = time.perf_counter() + arguments.seconds
    found = json.loads(arguments.table.read_text()) if arguments.table.exists() else {}
    dtype = getattr(torch, arguments.dtype)
    left_over = [*itertools.product(arguments.op or PRODUCTS, arguments.shape or SHAPES)]
    with ahead.Compilers() as compilers:
        while left_over and (left := end - time.perf_counter()) > 0:
            op, shape = left_over[0]
            problem = Product(op, tuple(shape), dtype, torch.device("cuda"))
            best, times = search(problem, left / len(left_over), compilers)
            gain = times[problem.rules] / times[best]
            print(f"{problem.key:<44} {best}  {gain:.3f} x the rules' choice, of {len(times)} candidates", flush=True)
            found.pop(problem.key, None)
            if gain >= WORTH:
                found[problem.key] = astuple(best)
            arguments.table.write_text(text(found))
            left_over.pop(0)
    if left_over:
        print(f"no time left for {len(left_over)} problems; run again with more --seconds")
    print(f"{len(found)} entries in {arguments.table}")
    return 0


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device; tiles can only be timed on the GPU they are for"
    return dispatch.why_not("linear", "triton", "cuda", torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
