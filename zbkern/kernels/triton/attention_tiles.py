"""Where attention's tiles are, one per program. Sequences of one length are found by arithmetic, others in a table."""

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.triton.common import outside_capture

LINE = 128
"""Where the backward keeps a number per query, sequences begin at multiples of this: no tile meets two of them."""

_LINE = tl.constexpr(LINE)


def place_tiles(options: AttentionOptions, side: str, block: int, device: torch.device) -> tuple[tuple, int, int]:
    """What `place` needs to find a program's tile, how many tiles there are, and how many sequences it tells apart.

    side: whether tiles are blocks of "queries" or of "keys".
    """
    uniform = one_length(options.queries, options.keys)
    if uniform is None:
        table = _table(options, side, block, device.type == "cuda")
        return (_on_device(table, device), 0, 0, 1), table.shape[0], 1
    sequences, queries, keys = uniform
    blocks = triton.cdiv(queries if side == "queries" else keys, block)
    return (None, queries, keys, max(blocks, 1)), sequences * blocks, sequences


@functools.lru_cache(maxsize=256)
def line_length(queries: tuple[int, ...]) -> int:
    """Numbers in a line that has one for each query, when every sequence begins at a multiple of LINE."""
    return sum(triton.cdiv(end - start, LINE) * LINE for start, end in pairwise(queries))


@functools.lru_cache(maxsize=256)
def one_length(queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(sequences, queries of each, keys of each) when all have one length."""
    lengths = {(b - a, d - c) for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True)}
    return (len(queries) - 1, *lengths.pop()) if len(lengths) == 1 else None


@functools.lru_cache(maxsize=64)
def _table(options: AttentionOptions, side: str, block: int, pinned: bool) -> Tensor:
    """[tiles, 6] int32 on the CPU, what `place` returns of each tile; most work first, so that none ends long after."""
    if pinned:
        outside_capture("attention of sequences of different lengths")
    rows = sorted(_tiles(options, side, block), reverse=True)
    table = torch.tensor([row[1:] for row in rows], dtype=torch.int32).view(-1, 6)
    return table.pin_memory() if pinned else table


def _tiles(options: AttentionOptions, side: str, block: int) -> Iterator[tuple[int, ...]]:
    """(how much it must look at, and the columns of the table) of each tile."""
    line = 0
    for (q0, q1), (k0, k1) in zip(pairwise(options.queries), pairwise(options.keys), strict=True):
        queries, keys = q1 - q0, k1 - k0
        shift, span = keys - queries, keys + queries if options.window is None else options.window
        mine, others = (queries, keys) if side == "queries" else (keys, queries)
        for first in range(0, mine, block):
            last = min(first + block, mine) - 1
            start, stop = 0, others
            if options.causal and side == "queries":
                start, stop = max(0, first + shift - span + 1), min(keys, last + shift + 1)
            elif options.causal:
                start, stop = max(0, first - shift), min(queries, last - shift + span)
            yield max(stop - start, 0), q0, queries, k0, keys, first, line
        line += triton.cdiv(queries, LINE) * LINE


_CAPTURED: list[Tensor] = []
"""Tables that CUDA graphs copy from again at each replay; they must outlive them."""


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return table
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(table)
    return table.to(device, non_blocking=True)


@triton.jit
def place(table, queries, keys, blocks, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(sequence, first query, queries, first key, keys) of this program, the first row of its tile in the sequence, and
    where the sequence begins in a line of `line_length`.

    Without a table all sequences have `queries` and `keys`, and `blocks` tiles each. LAST_FIRST: the last tile of a
    causal forward sees the most keys, and a long tile should not start last. With a table all is one sequence.
    """
    program = tl.program_id(0)
    if table is not None:
        row = table + program.to(tl.int64) * 6
        place = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
        return 0, place[0], place[1], place[2], place[3], place[4], place[5]
    else:
        sequence, block = program // blocks, program % blocks
        if LAST_FIRST:
            block = blocks - 1 - block
        return sequence, 0, queries, 0, keys, block * BLOCK, sequence * tl.cdiv(queries, _LINE) * _LINE
