"""W alone: designs that hide the epilogue, beside cuBLAS, by shape. For five minutes of a GPU.

    python -m bench.w_sweep --seconds 280 --out FOLDER            (--device cpu --tiny: a rehearsal)

A design is a tile, how many programs an SM runs at a time, and by how much programs begin later than others. Each is
checked against float32 first. FOLDER/w_sweep.json is written anew after every shape. What wins becomes a row of
zbkern/kernels/tiles.json, whose keys know the tokens."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench import report, tune
from bench.gpu_rows_w import addmm, exact
from zbkern import testing
from zbkern.kernels import dispatch, tiles
from zbkern.kernels.cuda import wgrad as extension
from zbkern.kernels.tiles import Tile
from zbkern.kernels.triton import matmul_tile


class Design(NamedTuple):
    """tile: None for what is chosen today. spread: microseconds from the first program's begin to the last's, None for
    what the tile says."""

    tile: Tile | None = None
    spread: float | None = None


TALL, SQUARE = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 6)
TWO = Tile(128, 128, 64, 4, 3, parts=4, share=2)
DESIGNS = {
    "as it is": Design(),
    "128x256": Design(TALL),
    "128x256, 4 parts": Design(Tile(128, 256, 64, 8, 3, parts=4)),
    "128x128, 6 stages": Design(SQUARE),
    "two 128x128, in step": Design(TWO, 0.0),
    "two 128x128, half apart": Design(TWO),
    "two 128x128, bands of 16": Design(Tile(128, 128, 64, 4, 3, 16, 4, 2)),
    "two 128x128, 32 deep": Design(Tile(128, 128, 32, 4, 6, 8, 4, 2)),
    "two 64x256, half apart": Design(Tile(64, 256, 64, 4, 2, 8, 4, 2)),
    "128x256, spread 4 us": Design(TALL, 4.0),
    "128x256, spread 8 us": Design(TALL, 8.0),
    "128x128, 6 stages, spread 4 us": Design(SQUARE, 4.0),
}


class Shape(NamedTuple):
    """tokens of all groups; dweight is [n, k], of each group where there are groups."""

    tokens: int
    n: int
    k: int
    groups: int = 0


SHAPES = (
    *(Shape(8192, 4096, 4096, 8), Shape(2048, 4096, 4096), Shape(1024, 4096, 4096), Shape(4096, 4096, 4096)),
    *(Shape(16384, 4096, 4096, 8), Shape(8192, 4096, 4096)),
    *(Shape(tokens, 14336, 4096) for tokens in (2048, 1024, 4096, 8192)),
    *(Shape(2048, 4096, 14336), Shape(4096, 4096, 14336), Shape(2048, 1024, 4096), Shape(4096, 8192, 8192)),
    Shape(4096, 28672, 8192),
)
TINY = Shape(130, 264, 520), Shape(72, 512, 256, 3)


@contextlib.contextmanager
def chosen(design: Design) -> Iterator[None]:
    """Inside, W has this design."""
    real_choose, real_late = tiles.choose, matmul_tile.late_start

    def choose(op: str, *arguments: object) -> Tile:
        return design.tile if design.tile is not None and op == "wgrad" else real_choose(op, *arguments)  # type: ignore[arg-type]

    def late_start(tile: Tile, rows: int, device: torch.device) -> tuple[int | None, int]:
        if design.spread is None:
            return real_late(tile, rows, device)
        each = int(1000 * design.spread / matmul_tile.processors(device))
        return (each, 1) if each else (None, 1)

    patches = mock.patch.object(tiles, "choose", choose), mock.patch.object(matmul_tile, "late_start", late_start)
    with tune.table({}), patches[0], patches[1]:
        yield


class Sweep:
    """W of one shape: `runs` by design, and of peers, all adding to `out`."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        tokens, n, k, groups = shape
        self.tokens = tokens // max(groups, 1)  # of a sum
        x, dy = (torch.randn(tokens, width, device=device).bfloat16() for width in (k, n))
        size = (groups, n, k) if groups else (n, k)
        self.out, self.wanted = (torch.zeros(size, device=device) for _ in range(2))
        pairs = [*zip(x.split(self.tokens), dy.split(self.tokens), strict=True)]
        outs = [*self.out] if groups else [self.out]
        for out, pair in zip(self.wanted if groups else [self.wanted], pairs, strict=True):
            exact(out, [pair])
        ends = ends_of(groups, self.tokens, device)
        self.runs: dict[str, Callable[[], None]] = {
            name: partial(_ours, design, x, dy, ends, self.out) for name, design in DESIGNS.items()
        }
        self.runs["addmm"] = partial(_theirs, outs, pairs)
        if not groups and extension.why_not(device) is None:
            self.runs["CUDA extension"] = partial(extension.linear_wgrad, [(x, dy)], (self.out, None), True)

    def wrong(self, name: str) -> str:
        """What is wrong with a design's result, "" for nothing."""
        self.out.zero_()
        try:
            self.runs[name]()
            testing.assert_close(self.out, self.wanted, name, terms=self.tokens)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def ends_of(groups: int, tokens: int, device: torch.device) -> Tensor | None:
    """Where so many groups end; None for none."""
    return torch.arange(1, groups + 1, device=device, dtype=torch.int32) * tokens if groups else None


def _ours(design: Design, x: Tensor, dy: Tensor, ends: Tensor | None, out: Tensor) -> None:
    with chosen(design):
        if ends is None:
            dispatch.resolve("linear", "triton", x.device, x.dtype).linear_wgrad([(x, dy)], (out, None), True)
            return
        backend = dispatch.resolve("grouped_linear", "triton", x.device, x.dtype)
        backend.grouped_linear_wgrad([(x, dy, ends)], (out, None), True)


def _theirs(outs: list[Tensor], pairs: list[tuple[Tensor, Tensor]]) -> None:
    for out, pair in zip(outs, pairs, strict=True):
        addmm(out, [pair])


def launches(device: torch.device) -> Iterator[Callable[[], None]]:
    """What `bench.gpu_prepare` compiles: every design once, of a weight and of experts, on operands without values."""
    x = torch.empty(2048, 4096, device=device, dtype=torch.bfloat16)
    for size in ((4096, 4096), (8, 4096, 4096)):
        out, ends = torch.empty(size, device=device), ends_of(len(size) // 3 * 8, 256, device)
        yield from (partial(_ours, design, x, x, ends, out) for design in DESIGNS.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    report.add_out(parser)
    arguments = parser.parse_args(argv)
    end, device, rows = time.monotonic() + arguments.seconds, torch.device(arguments.device), []
    for shape in TINY if arguments.tiny else SHAPES:
        if time.monotonic() > end:
            break
        sweep = Sweep(shape, device)
        wrong = {name: fault for name in sweep.runs if (fault := sweep.wrong(name))}
        candidates = {name: lambda run=run: [run] for name, run in sweep.runs.items() if name not in wrong}
        rounds = 1 if arguments.tiny else arguments.rounds
        times = testing.measure(candidates, rounds, 2, device)  # type: ignore[arg-type]
        us = {name: 1e6 * timing.median for name, timing in times.items()}
        of_addmm = {name: times["addmm"].ratio(timing) for name, timing in times.items() if "addmm" in times}
        rows.append({**shape._asdict(), "us": us, "addmm over it": of_addmm, "wrong": wrong})
        said = report.write_json("w_sweep", rows, arguments.out)
        figures = "; ".join(f"{name} {value:.1f} us {of_addmm.get(name, 0.0):.2f}" for name, value in us.items())
        print(f"T={shape.tokens} N={shape.n} K={shape.k} groups={shape.groups}: {figures}", wrong or "", flush=True)
    print(said if rows else "no time for a shape")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
