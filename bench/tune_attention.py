"""Finds tiles of attention on this GPU, as `bench/tune.py` does for matmuls, and writes them into the same table.

    python -m bench.tune_attention [--seconds 600] [--kernel dkdv] [--size 128]

A candidate counts only if outputs and gradients are those of the rules' own tiles up to rounding. dq and dkdv are timed
as the whole backward, whose other kernel is the same for all candidates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor

from bench import ahead
from bench.tune import WORTH, table, text
from zbkern import testing
from zbkern.kernels import dispatch, tiles
from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.tiles import AttentionTile

KERNELS = ("fwd", "dq", "dkdv")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="all when not given")
    parser.add_argument("--size", type=int, action="append", help="of a head; 64, 128 and 256 when not given")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--table", type=Path, default=tiles.TABLE)
    arguments = parser.parse_args(argv)
    reason = "no CUDA device; tiles can only be timed on the GPU they are for"
    if torch.cuda.is_available():
        reason = dispatch.why_not("attention", "triton", "cuda", torch.bfloat16)
    if reason is not None:
        print(f"cannot run: {reason}")
        return 1
    found = json.loads(arguments.table.read_text()) if arguments.table.exists() else {}
    problems = list(
        itertools.product(arguments.size or (64, 128, 256), (False, True), arguments.kernel or KERNELS)
    )  # the other kernels keep the rules' tiles while one is tuned
    end = time.perf_counter() + arguments.seconds
    compilers = ahead.Compilers()
    for index, (size, packed, kernel) in enumerate(problems):
        problem = Problem(kernel, size, packed, arguments.tokens, "cuda")
        share = (end - time.perf_counter()) / (len(problems) - index)
        best, rules, times = search(problem, share, compilers)
        gain = times[rules] / times[best]
        print(f"{problem.key:<44} {best}  {gain:.3f} x the rules' choice, of {len(times)} candidates", flush=True)
        if gain >= WORTH:
            found[problem.key] = astuple(best)
        else:
            found.pop(problem.key, None)
        arguments.table.write_text(text(found))
    compilers.close()
    return 0


class Problem:
    """A kernel of causal bf16 attention, on one long sequence or (packed) the same tokens in two sequences."""

    def __init__(self, kernel: str, size: int, packed: bool, tokens: int, device: str) -> None:
        from zbkern.kernels.triton.attention_forward import capability_of

        self.kernel, self.size, self.packed, self.device = kernel, size, packed, device
        self.capability = capability_of(torch.device(device))
        self.key = tiles.attention_key(kernel, size, "bfloat16", self.capability, packed)
        self.backend = dispatch.resolve("attention", "triton", device, torch.bfloat16)
        heads = max(1, 2048 // size) if device == "cuda" else 1
        ends = (0, tokens // 3, tokens) if packed else (0, tokens)
        self.options = AttentionOptions(size**-0.5, True, None, ends, ends)
        self.q, self.k, self.v, self.dy = (
            torch.randn(tokens, heads, size, device=device).to(torch.bfloat16) for _ in range(4)
        )
        self.y, self.dq, self.dk, self.dv = (torch.empty_like(self.q) for _ in range(4))
        self.lse = torch.empty(heads, tokens, device=device)
        with table({}):
            self.rules = tiles.attention(kernel, size, "bfloat16", self.capability, packed)
            self.forward()
            self.backward()
        self.answers = [t.clone() for t in self.outputs()]

    def forward(self) -> None:
        self.backend.attention_fwd(self.q, self.k, self.v, self.options, self.y, self.lse)

    def backward(self) -> None:
        inputs = self.dy, self.q, self.k, self.v, self.y, self.lse
        self.backend.attention_dgrad(*inputs, self.options, self.dq, self.dk, self.dv)

    def trial(self, tile: AttentionTile) -> Callable[[], None]:
        """Both kernels, the tuned one with that tile."""

        def run() -> None:
            with table({self.key: tile}):
                self.forward()
                self.backward()

        return run

    def outputs(self) -> list[Tensor]:
        return [self.y, self.dq, self.dk, self.dv]

    def time(self, rounds: int = 10) -> float:
        """Seconds of a candidate in the table, after a check of its results."""
        self.forward()
        self.backward()
        for got, wanted in zip(self.outputs(), self.answers, strict=True):
            testing.assert_close(got, wanted)
        run = self.forward if self.kernel == "fwd" else self.backward
        return testing.measure({"tile": lambda: [run]}, rounds=rounds, warmup=2, device=self.device)["tile"].median


def candidates(kernel: str, size: int, capability: int) -> list[AttentionTile]:
    """Those that fit into shared memory. dkdv streams no more queries at a time than dq holds: it reads its results."""
    room = next(room for room in (64, 128, 256) if size <= room)
    queries, keys = {
        "fwd": ((64, 128), (32, 64, 128)),
        "dq": ((64, 128), (32, 64, 128)),
        "dkdv": ((16, 32, 64), (64, 128)),
    }[kernel]
    splits = (False, True) if kernel == "dkdv" else (False,)
    every = (AttentionTile(*row) for row in itertools.product(queries, keys, (4, 8), (1, 2, 3, 4), splits))
    limit = 1024 * tiles.SHARED_MEMORY.get(capability, 99)
    return [tile for tile in every if tiles.attention_shared_memory(tile, kernel, room, 2) <= limit]


def search(
    problem: Problem, seconds: float, compilers: ahead.Compilers | None = None
) -> tuple[AttentionTile, AttentionTile, dict[AttentionTile, float]]:
    """(fastest, the rules' choice, time of every candidate that was right), the nearest to the rules' choice first."""
    end = time.perf_counter() + seconds
    rules = problem.rules
    area = rules.queries * rules.keys
    every = candidates(problem.kernel, problem.size, problem.capability)
    near = sorted(every, key=lambda t: (abs(t.queries * t.keys - area), abs(t.stages - rules.stages)))
    times: dict[AttentionTile, float] = {}
    some = list(dict.fromkeys((rules, *near)))
    several = 1 if compilers is None else 2 * compilers.processes  # are compiled at a time
    for first in range(0, len(some), several):
        part = some[first : first + several]
        if compilers is not None and time.perf_counter() < end:
            compilers.compile(problem.trial(tile) for tile in part)
        for tile in part:
            if times and time.perf_counter() > end:
                return min(times, key=times.__getitem__), rules, times
            with table({problem.key: tile}):
                try:
                    times[tile] = problem.time()
                except Exception:  # wrong, or does not compile or fit: Triton's errors have no common base
                    if tile == rules:
                        raise
    return min(times, key=times.__getitem__), rules, times


if __name__ == "__main__":
    sys.exit(main())
