"""Finds tiles on this GPU: times candidates for the shapes of large layers and writes what `kernels/tiles.py` reads.

    python -m bench.tune [--seconds 600] [--op wgrad] [--shape 4096 4096 4096] [--op "attention dkdv"] [--size 128]

A table entry of a product stands for all shapes within the same powers of two, so it is chosen over several of them. A
candidate counts only if its result is right, and the rules' own choice is among them: an entry is written only where
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
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from bench import ahead
from zbkern import testing
from zbkern.kernels import dispatch, tiles
from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.tiles import AttentionTile, Tile

PRODUCTS = ("fwd", "dgrad", "wgrad")
ATTENTION = ("attention fwd", "attention dq", "attention dkdv")
SHAPES = tuple((m, n, k) for m in (1024, 2048, 4096, 8192) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)))
WORTH = 1.02

AnyTile = Any  # a Tile or an AttentionTile


class Problem(Protocol):
    """What tiles are sought for. key: of its entry in the table. rules: what the rules choose without one."""

    key: str
    rules: AnyTile

    def candidates(self) -> list[AnyTile]:
        """What fits the GPU, the most promising first."""

    def variants(self, best: list[AnyTile]) -> list[AnyTile]:
        """What else to try when these were the best."""

    def run(self) -> None:
        """The kernel, with the tile that is in the table."""

    def right(self) -> bool:
        """Whether it gives what it should; runs it."""

    def time(self, rounds: int = 10) -> float:
        """Seconds."""


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
        return _close([self.out], [self.answer], testing.TOLERANCE[self.dtype])

    def time(self, rounds: int = 10) -> float:
        return _time(self.run, rounds, self.out.device)


class Attention:
    """A kernel of causal bf16 attention, on one long sequence or (packed) the same tokens in two sequences.

    Outputs and gradients must be those of the rules' own tiles up to rounding. dq and dkdv are timed as the whole
    backward, whose other kernel is the same for all candidates.
    """

    def __init__(self, launch: str, size: int, packed: bool, tokens: int, device: torch.device) -> None:
        from zbkern.kernels.triton.matmul_tile import capability_of

        self.launch, self.size, self.device = launch, size, device
        self.capability = capability_of(device)
        self.key = tiles.attention_key(launch, size, "bfloat16", self.capability, packed)
        self.backend = dispatch.resolve("attention", "triton", device, torch.bfloat16)
        heads = max(1, 2048 // size) if device.type == "cuda" else 1
        ends = (0, tokens // 3, tokens) if packed else (0, tokens)
        self.options = AttentionOptions(size**-0.5, True, None, ends, ends)
        self.q, self.k, self.v, self.dy = (
            torch.randn(tokens, heads, size, device=device).to(torch.bfloat16) for _ in range(4)
        )
        self.outputs = [torch.empty_like(self.q) for _ in range(4)]  # y, dq, dk, dv
        self.lse = torch.empty(heads, tokens, device=device)
        with table({}):
            self.rules = tiles.attention(launch, size, "bfloat16", self.capability, packed)
            self.run()
        self.answers = [output.clone() for output in self.outputs]

    def candidates(self) -> list[AttentionTile]:
        """The nearest to the rules' choice first."""
        rules, every = self.rules, attention_tiles(self.launch, self.size, self.capability)
        area = rules.queries * rules.keys
        return sorted(every, key=lambda t: (abs(t.queries * t.keys - area), abs(t.stages - rules.stages)))

    def variants(self, best: list[AttentionTile]) -> list[AttentionTile]:
        return []

    def _forward(self) -> None:
        self.backend.attention_fwd(self.q, self.k, self.v, self.options, self.outputs[0], self.lse)

    def _backward(self) -> None:
        y, *gradients = self.outputs
        self.backend.attention_dgrad(self.dy, self.q, self.k, self.v, y, self.lse, self.options, *gradients)

    def run(self) -> None:
        self._forward()
        self._backward()

    def right(self) -> bool:
        self.run()
        return _close(self.outputs, self.answers)

    def time(self, rounds: int = 10) -> float:
        return _time(self._forward if self.launch == "fwd" else self._backward, rounds, self.device)


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


def attention_tiles(launch: str, size: int, capability: int) -> list[AttentionTile]:
    """Those that fit into shared memory. dkdv streams no more queries at a time than dq holds: it reads its results."""
    longest = next(longest for longest in (64, 128, 256) if size <= longest)
    queries, keys = ((16, 32, 64), (64, 128)) if launch == "dkdv" else ((64, 128), (32, 64, 128))
    splits = (False, True) if launch == "dkdv" else (False,)
    every = (AttentionTile(*row) for row in itertools.product(queries, keys, (4, 8), (1, 2, 3, 4), splits))
    limit = 1024 * tiles.SHARED_MEMORY.get(capability, 99)
    return [tile for tile in every if tiles.attention_shared_memory(tile, launch, longest, 2) <= limit]


def search(
    problem: Problem, seconds: float, compilers: ahead.Compilers | None = None
) -> tuple[AnyTile, dict[AnyTile, float]]:
    """(fastest, time of every candidate that was right), within about so many seconds: the rules' choice, then the
    candidates, then variants of the three best. Raises RuntimeError where the rules' choice is wrong."""
    end = time.perf_counter() + seconds
    times: dict[AnyTile, float] = {}
    _try_all(problem, [problem.rules, *problem.candidates()], times, end, compilers)
    _try_all(problem, problem.variants(sorted(times, key=times.__getitem__)[:3]), times, end, compilers)
    if problem.rules not in times:
        raise RuntimeError(f"tune: the rules' own tile {problem.rules} gives a wrong result for {problem.key}")
    return min(times, key=times.__getitem__), times


def _try_all(
    problem: Problem, some: list[AnyTile], times: dict[AnyTile, float], end: float, compilers: ahead.Compilers | None
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


def _with(problem: Problem, tile: AnyTile) -> Callable[[], None]:
    def run() -> None:
        with table({problem.key: tile}):
            problem.run()

    return run


def _close(found: list[Tensor], wanted: list[Tensor], tolerance: float | None = None) -> bool:
    try:
        for got, expected in zip(found, wanted, strict=True):
            testing.assert_close(got, expected, tolerance=tolerance)
    except AssertionError:
        return False
    return True


def _time(run: Callable[[], None], rounds: int, device: torch.device) -> float:
    return testing.measure({"tile": lambda: [run]}, rounds=rounds, warmup=2, device=device)["tile"].median


@contextlib.contextmanager
def table(entries: dict[str, AnyTile]) -> Iterator[None]:
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


def problems(arguments: argparse.Namespace) -> list[Callable[[], Problem]]:
    """Each made when its turn comes. While one kernel of attention is tuned, the others keep the rules' tiles."""
    dtype, device = getattr(torch, arguments.dtype), torch.device("cuda")
    ops = arguments.op or (*PRODUCTS, *ATTENTION)
    found: list[Callable[[], Problem]] = []
    for op, shape in itertools.product([op for op in ops if op in PRODUCTS], arguments.shape or SHAPES):
        found.append(lambda op=op, shape=shape: Product(op, tuple(shape), dtype, device))
    launches = [op.removeprefix("attention ") for op in ops if op in ATTENTION]
    for size, packed, launch in itertools.product(arguments.size or (64, 128, 256), (False, True), launches):
        found.append(
            lambda launch=launch, size=size, packed=packed: Attention(launch, size, packed, arguments.tokens, device)
        )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--op", choices=(*PRODUCTS, *ATTENTION), action="append", help="all when not given")
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("M", "N", "K"), help="of the layer")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="of products")
    parser.add_argument("--size", type=int, action="append", help="of a head; 64, 128 and 256 when not given")
    parser.add_argument("--tokens", type=int, default=8192, help="of attention")
    parser.add_argument("--table", type=Path, default=tiles.TABLE)
    arguments = parser.parse_args(argv)
    reason = _why_not()
    if reason is not None:
        print(f"cannot run: {reason}")
        return 2
    end = time.perf_counter() + arguments.seconds
    found = json.loads(arguments.table.read_text()) if arguments.table.exists() else {}
    left_over = problems(arguments)
    with ahead.Compilers() as compilers:
        while left_over and (left := end - time.perf_counter()) > 0:
            problem = left_over[0]()
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
