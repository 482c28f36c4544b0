"""Where attention's tiles are, one per program. Sequences of one length are found by arithmetic, others in a table,
which the host writes, or where their ends are on the device, a kernel."""

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.triton.common import Kernel

LINE = 128
"""Where the backward keeps a number per query, sequences begin at multiples of this: no tile meets two of them."""

_LINE = tl.constexpr(LINE)


def place_tiles(options: AttentionOptions, side: str, block: int, q: Tensor, k: Tensor) -> tuple[tuple, int, int]:
    """What `place` needs to find a program's tile, how many tiles there are, and how many sequences it tells apart.

    side: whether tiles are blocks of "queries" or of "keys". q, k: [T, ...] and [T', ...].
    """
    if isinstance(options.queries, Tensor):
        table = _table_there(options, side, block, q.shape[0], k.shape[0])
        return (table, 0, 0, 1), table.shape[0], 1
    uniform = one_length(options)
    if uniform is None:
        # Each replay of a graph would copy the table again, which may be gone by then.
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attention: sequences of different lengths inside a CUDA graph capture need cu_seqlens that are "
                "tensors on q's device; got numbers of the host"
            )
        table = _table(options, side, block, q.is_cuda)
        return (table.to(q.device, non_blocking=True), 0, 0, 1), table.shape[0], 1
    sequences, queries, keys = uniform
    blocks = triton.cdiv(queries if side == "queries" else keys, block)
    return (None, queries, keys, max(blocks, 1)), sequences * blocks, sequences


def line_length(queries: tuple[int, ...] | Tensor, tokens: int) -> int:
    """Numbers in a line that has one for each query, when every sequence begins at a multiple of LINE.

    Where only the device knows the lengths it is what they need at most, and LINE more for programs without a tile.
    """
    if isinstance(queries, Tensor):
        return (tokens // LINE + len(queries) + 1) * LINE
    return _line_length(queries)


@functools.lru_cache(maxsize=256)
def _line_length(queries: tuple[int, ...]) -> int:
    return sum(triton.cdiv(end - start, LINE) * LINE for start, end in pairwise(queries))


def one_length(options: AttentionOptions) -> tuple[int, int, int] | None:
    """(sequences, queries of each, keys of each) when all are known to have one length."""
    if isinstance(options.queries, Tensor) or isinstance(options.keys, Tensor):
        return None
    return _one_length(options.queries, options.keys)


@functools.lru_cache(maxsize=256)
def _one_length(queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, int, int] | None:
    lengths = {(b - a, d - c) for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True)}
    return (len(queries) - 1, *lengths.pop()) if len(lengths) == 1 else None


@functools.lru_cache(maxsize=64)
def _table(options: AttentionOptions, side: str, block: int, pinned: bool) -> Tensor:
    """[tiles, 6] int32 on the CPU, what `place` returns of each tile; most work first, so that none ends long after."""
    rows = sorted(_tiles(options, side, block), reverse=True)
    table = torch.tensor([row[1:] for row in rows], dtype=torch.int32).view(-1, 6)
    return table.pin_memory() if pinned else table


def _tiles(options: AttentionOptions, side: str, block: int) -> Iterator[tuple[int, ...]]:
    """(how much it must look at, and the columns of the table) of each tile."""
    line = 0
    assert isinstance(options.queries, tuple)
    assert isinstance(options.keys, tuple)
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


def _table_there(options: AttentionOptions, side: str, block: int, queries: int, keys: int) -> Tensor:
    """[tiles, 6] int32 as `_table` has it, with as many tiles as sequences of any lengths can have, in their order."""
    assert isinstance(options.queries, Tensor)
    sequences = len(options.queries) - 1
    tiles = (queries if side == "queries" else keys) // block + sequences + 1
    table = torch.empty(tiles, 6, dtype=torch.int32, device=options.queries.device)
    arguments = (options.queries, options.keys, table, sequences, queries, keys)
    constants = (triton.next_power_of_2(sequences + 1), block, side == "queries", options.causal)
    _tabulate(tiles, arguments, constants, warps=4, stages=1)
    return table


@Kernel
@triton.jit(do_not_specialize=["sequences", "tokens", "key_tokens"])
def _tabulate(
    queries, keys, table, sequences, tokens, key_tokens,
    SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, OF_QUERIES: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Row i of table [tiles, 6]: what `place` returns of tile i, from the ends queries and keys [sequences + 1].

    Tokens beyond the last sequence are one more, whose queries see no keys. One program: one row, by the number of
    tiles before each sequence. A row that no sequence needs has no queries, no keys, and its own place in the line.
    """
    tile = tl.program_id(0)
    i = tl.arange(0, SEQUENCES)
    there, beyond = i <= sequences, i == sequences
    q_first, k_first = tl.load(queries + i, there, other=0), tl.load(keys + i, there, other=0)
    q_end = tl.where(beyond, tokens, tl.load(queries + i + 1, i < sequences, other=0))
    k_end = tl.where(beyond, key_tokens, tl.load(keys + i + 1, i < sequences, other=0))
    q_length, k_length = (q_end - q_first).to(tl.int32), (k_end - k_first).to(tl.int32)
    mine = q_length if OF_QUERIES else k_length
    blocks = tl.cdiv(mine, BLOCK)
    if OF_QUERIES:
        k_length = tl.where(beyond, 0, k_length)
    else:
        q_length = tl.where(beyond, 0, q_length)
    padded = tl.cdiv(q_length, _LINE) * _LINE
    before, line = tl.cumsum(blocks, 0) - blocks, tl.cumsum(padded, 0) - padded
    block = tile - before
    here = (block >= 0) & (block < blocks)
    if LAST_FIRST and OF_QUERIES:  # it sees the most keys
        block = blocks - 1 - block
    row = table + tile.to(tl.int64) * 6
    tl.store(row, tl.sum(tl.where(here, q_first.to(tl.int32), 0), 0))
    tl.store(row + 1, tl.sum(tl.where(here, q_length, 0), 0))
    tl.store(row + 2, tl.sum(tl.where(here, k_first.to(tl.int32), 0), 0))
    tl.store(row + 3, tl.sum(tl.where(here, k_length, 0), 0))
    tl.store(row + 4, tl.sum(tl.where(here, block * BLOCK, 0), 0))
    found = tl.sum(here.to(tl.int32), 0) > 0
    tl.store(row + 5, tl.where(found, tl.sum(tl.where(here, line, 0), 0), tl.sum(padded, 0)))


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
