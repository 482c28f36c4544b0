"""Where attention's tiles are, one per program. Sequences of one length are found by arithmetic, others in a table,
which a kernel writes: the host knows no lengths that are on the device."""

import functools
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
    """The arguments with which `place` finds a program's tile, the number of tiles, and of sequences it tells apart.

    side: whether tiles are blocks of "queries" or of "keys". q, k: [T, ...] and [T', ...].
    """
    uniform = one_length(options)
    if uniform is None:
        table = _table(options, side, block, q, k)
        return (table, 0, 0, 1), table.shape[0], 1
    sequences, queries, keys = uniform
    blocks = triton.cdiv(queries if side == "queries" else keys, block)
    return (None, queries, keys, max(blocks, 1)), sequences * blocks, sequences


def line_length(queries: tuple[int, ...] | Tensor, tokens: int) -> int:
    """Numbers in a line that has one for each query, when every sequence begins where `line_of` says.

    Queries after the last sequence are one more, and LINE numbers are for programs without a tile.
    """
    return (tokens // LINE + len(queries) + 1) * LINE


def one_length(options: AttentionOptions) -> tuple[int, int, int] | None:
    """(sequences, queries of each, keys of each) when all are known to have one length."""
    if isinstance(options.queries, Tensor) or isinstance(options.keys, Tensor):
        return None
    return _one_length(options.queries, options.keys)


@functools.lru_cache(maxsize=256)
def _one_length(queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, int, int] | None:
    lengths = {(b - a, d - c) for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True)}
    return (len(queries) - 1, *lengths.pop()) if len(lengths) == 1 else None


def _table(options: AttentionOptions, side: str, block: int, q: Tensor, k: Tensor) -> Tensor:
    """[tiles, 6] int32, what `place` returns of each tile: as many as sequences of any lengths can have."""
    queries, keys = _there(options.queries, q.device), _there(options.keys, q.device)
    sequences = len(queries) - 1
    tiles = (q if side == "queries" else k).shape[0] // block + sequences + 1
    table = torch.empty(tiles, 6, dtype=torch.int32, device=q.device)
    arguments = (queries, keys, table, sequences, q.shape[0], k.shape[0])
    constants = (triton.next_power_of_2(sequences + 1), block, side == "queries", options.causal)
    _tabulate(tiles, arguments, constants, warps=4, stages=1)
    return table


def _there(ends: tuple[int, ...] | Tensor, device: torch.device) -> Tensor:
    """The ends on the device. Raises RuntimeError for numbers of the host where a graph is captured."""
    if isinstance(ends, Tensor):
        return ends
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Each replay would copy them again, which may be gone by then.
        raise RuntimeError(
            "attention: sequences of different lengths inside a CUDA graph capture need cu_seqlens that are tensors on "
            "q's device; got numbers of the host"
        )
    return _on_host(ends, device.type == "cuda").to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def _on_host(ends: tuple[int, ...], pinned: bool) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cpu", pin_memory=pinned)


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
    length = q_length if OF_QUERIES else k_length
    blocks = tl.cdiv(length, BLOCK)
    if OF_QUERIES:
        k_length = tl.where(beyond, 0, k_length)
    else:
        q_length = tl.where(beyond, 0, q_length)
    before = tl.cumsum(blocks, 0) - blocks
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
    exists = tl.sum(here.to(tl.int32), 0) > 0
    line = tl.sum(tl.where(here, line_of(q_first.to(tl.int32), i), 0), 0)
    tl.store(row + 5, tl.where(exists, line, line_of(tokens, sequences + 1)))


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
        return sequence, 0, queries, 0, keys, block * BLOCK, line_of(sequence * queries, sequence)


@triton.jit
def line_of(first, sequence):
    """Where a sequence whose first query this is begins in a line: a multiple of LINE, after all before it."""
    return (first // _LINE + sequence) * _LINE
