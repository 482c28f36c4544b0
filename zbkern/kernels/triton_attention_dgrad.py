"""The backward of attention in Triton: dq by tiles of queries, then dk and dv by tiles of keys. Contract: spec.py.

Two launches that each compute the scores again: 7 products where one kernel would do with 5, but that one adds to dq
from many programs, in an order that changes from run to run. Here every output has one writer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.triton_attention import (
    LOG2_E,
    Tile,
    capability_of,
    check_head_size,
    describe,
    key_ranges,
    load_rows,
    place,
    place_tiles,
    precision_of,
    rows_dense,
    rows_of,
    sees,
    size_block,
    store_rows,
)
from zbkern.kernels.triton_common import INTERPRETED, Kernel, Variant, dot

_LOG2_E = tl.constexpr(LOG2_E)


class Tiles(NamedTuple):
    """The tiles of both launches."""

    dq: Tile
    dkdv: Tile


def dgrad_tiles(head_size: int, itemsize: int, capability: int) -> Tiles:
    """Tiles for heads of up to `head_size`: dk and dv are two accumulators, so their tiles are smaller."""
    if INTERPRETED:
        return Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))
    if itemsize == 4:
        return Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    if head_size <= 64:
        return Tiles(Tile(128, 64, 8, 3), Tile(64, 128, 8, 3))
    if head_size <= 128:
        return Tiles(Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    return Tiles(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2))


def attention_dgrad(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """dv = p^T dy; ds = p (dy v^T - sum(dy y)); dq = scale ds k; dk = scale ds^T q."""
    tokens, heads, size = q.shape
    if size == 0 or heads == 0:
        return
    check_head_size(size)
    dy, q, k, v, y = (rows_dense(t) for t in (dy, q, k, v, y))
    outputs = [(given, rows_dense(given, copy=False)) for given in (dq, dk, dv)]
    delta = torch.empty_like(lse)
    tiles = dgrad_tiles(size, q.element_size(), capability_of(q.device))
    common = (options.window, options.scale, tokens, heads // k.shape[1])
    strides = tuple(stride for t in (q, dy, k, v) for stride in t.stride()[:2])
    out_q, out_k, out_v = (out for _, out in outputs)
    constants = (options.causal, size, size_block(size))
    tile = tiles.dq
    places, grid, sequences = place_tiles(options, "queries", tile.queries, q.device)
    if grid:
        streamed = describe((k, v), sequences, tile.keys)
        arguments = (q, dy, *streamed, y, out_q, lse, delta, *places, *common, *strides)
        tma = streamed[0] is not k
        _dq(
            (grid, heads),
            (*arguments, *y.stride()[:2], *out_q.stride()[:2]),
            (*constants, tile.queries, tile.keys, precision_of(q.dtype), tma),
            warps=tile.warps,
            stages=tile.stages,
        )
    tile = tiles.dkdv
    places, grid, sequences = place_tiles(options, "keys", tile.keys, q.device)
    if grid:
        streamed = describe((q, dy), sequences, tile.queries)
        arguments = (*streamed, k, v, out_k, out_v, lse, delta, *places, *common, *strides)
        tma = streamed[0] is not q
        _dkdv(
            (grid, k.shape[1]),
            (*arguments, *out_k.stride()[:2], *out_v.stride()[:2]),
            (*constants, tile.queries, tile.keys, precision_of(q.dtype), tma),
            warps=tile.warps,
            stages=tile.stages,
        )
    for given, out in outputs:
        if out is not given:
            given.copy_(out)


@triton.jit
def _dq_range(
    total, q, dy, lse, delta, k, v, k_row, v_row, sequence, k_first, head, start, stop, query, queries, keys, window,
    scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds ds k of the keys start..stop to a tile of dq."""
    zeros = tl.zeros([q.shape[0], KEYS], tl.float32)
    for begin in tl.range(start, stop, KEYS):
        some_k = load_rows(k, sequence, k_first, head, begin, keys, k_row, KEYS, D, SIZE, not MASKED, TMA)
        some_v = load_rows(v, sequence, k_first, head, begin, keys, v_row, KEYS, D, SIZE, TMA or not MASKED, TMA)
        weights = tl.exp2(dot(q, tl.trans(some_k), zeros, PRECISION) * scale - lse[:, None])
        ds = weights * (dot(dy, tl.trans(some_v), zeros, PRECISION) - delta[:, None])
        if MASKED:
            key = begin + tl.arange(0, KEYS)
            ds = tl.where(sees(query[:, None], key[None, :], queries, keys, window, CAUSAL), ds, 0.0)
        total = dot(ds.to(some_k.dtype), some_k, total, PRECISION)
    return total


@Kernel
@triton.jit
def _dq(
    q, dy, k, v, y, dq, lse, delta, table, queries, keys, blocks, window, scale, tokens, group,
    q_row, q_head, dy_row, dy_head, k_row, k_head, v_row, v_head, y_row, y_head, dq_row, dq_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k, and delta = sum(dy y) for the next launch; q, dy, y, dq [T, Hq, D], k, v [T', Hk, D].

    One program: QUERIES rows of one head against all keys they see, in the order of the forward and for its reason.
    """
    sequence, q_first, queries, k_first, keys, first = place(table, queries, keys, blocks, QUERIES, CAUSAL)
    head = tl.program_id(1)
    q = rows_of(q, sequence, q_first, queries, head, q_row, q_head, False)
    dy = rows_of(dy, sequence, q_first, queries, head, dy_row, dy_head, False)
    y = rows_of(y, sequence, q_first, queries, head, y_row, y_head, False)
    dq = rows_of(dq, sequence, q_first, queries, head, dq_row, dq_head, False)
    k = rows_of(k, sequence, k_first, keys, head // group, k_row, k_head, TMA)
    v = rows_of(v, sequence, k_first, keys, head // group, v_row, v_head, TMA)
    mine = load_rows(q, sequence, q_first, head, first, queries, q_row, QUERIES, D, SIZE, False, False)
    above = load_rows(dy, sequence, q_first, head, first, queries, dy_row, QUERIES, D, SIZE, False, False)
    out = load_rows(y, sequence, q_first, head, first, queries, y_row, QUERIES, D, SIZE, False, False)
    sums = tl.sum(above.to(tl.float32) * out.to(tl.float32), 1)
    query = first + tl.arange(0, QUERIES)
    places = tl.cast(head, tl.int64) * tokens + sequence * queries + q_first + query
    tl.store(delta + places, sums, query < queries)
    level = tl.load(lse + places, query < queries, other=float("-inf")) * _LOG2_E
    level = tl.where(level == float("-inf"), float("inf"), level)  # a query that sees nothing: all its weights are 0
    total = tl.zeros([QUERIES, SIZE], tl.float32)
    start, whole, partial, stop = key_ranges(first, queries, keys, window, CAUSAL, QUERIES, KEYS)
    fast = scale * _LOG2_E
    if window is not None:
        total = _dq_range(
            total, mine, above, level, sums, k, v, k_row, v_row, sequence, k_first, head // group, start, whole,
            query, queries, keys, window, fast, True, CAUSAL, D, SIZE, KEYS, PRECISION, TMA,
        )  # fmt: skip
    total = _dq_range(
        total, mine, above, level, sums, k, v, k_row, v_row, sequence, k_first, head // group, whole, partial,
        query, queries, keys, window, fast, False, CAUSAL, D, SIZE, KEYS, PRECISION, TMA,
    )  # fmt: skip
    total = _dq_range(
        total, mine, above, level, sums, k, v, k_row, v_row, sequence, k_first, head // group, partial, stop,
        query, queries, keys, window, fast, True, CAUSAL, D, SIZE, KEYS, PRECISION, TMA,
    )  # fmt: skip
    store_rows(dq, first, queries, dq_row, total * scale, QUERIES, D, SIZE)


@triton.jit
def _query_ranges(first, queries, keys, window, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """start <= whole <= partial <= stop: queries start..stop see some key of the tile, whole..partial see all.

    All but `stop` are multiples of QUERIES. Only the keys that exist count.
    """
    shift = keys - queries
    last = tl.minimum(first + KEYS, keys) - 1
    start, whole, partial, stop = first * 0, first * 0, first * 0 + queries, first * 0 + queries
    if CAUSAL:
        start = tl.minimum(tl.maximum(first - shift, 0), queries) // QUERIES * QUERIES
        whole = tl.minimum(tl.maximum(last - shift, 0), queries)
        if window is not None:
            stop = tl.minimum(tl.maximum(last - shift + window, 0), queries)
            partial = tl.minimum(tl.maximum(first - shift + window, 0), queries)
        whole = tl.cdiv(tl.minimum(whole, stop), QUERIES) * QUERIES
    return start, whole, tl.maximum(partial // QUERIES * QUERIES, whole), stop


@triton.jit
def _dkdv_range(
    dk, dv, q, dy, lse, delta, k, v, q_row, dy_row, sequence, q_first, head, start, stop, key, queries, keys, window,
    scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds what the queries start..stop of one head give to a tile of dk and dv. Scores are [keys, queries]."""
    zeros = tl.zeros([k.shape[0], QUERIES], tl.float32)
    for begin in tl.range(start, stop, QUERIES):
        query = begin + tl.arange(0, QUERIES)
        some_q = load_rows(q, sequence, q_first, head, begin, queries, q_row, QUERIES, D, SIZE, not MASKED, TMA)
        above = load_rows(dy, sequence, q_first, head, begin, queries, dy_row, QUERIES, D, SIZE, not MASKED, TMA)
        if MASKED:
            level = tl.load(lse + query, query < queries, other=float("-inf")) * _LOG2_E
            sums = tl.load(delta + query, query < queries, other=0)
        else:
            level = tl.load(lse + query) * _LOG2_E
            sums = tl.load(delta + query)
        level = tl.where(level == float("-inf"), float("inf"), level)
        weights = tl.exp2(dot(k, tl.trans(some_q), zeros, PRECISION) * scale - level[None, :])
        if MASKED:
            weights = tl.where(sees(query[None, :], key[:, None], queries, keys, window, CAUSAL), weights, 0.0)
        dv = dot(weights.to(above.dtype), above, dv, PRECISION)
        ds = weights * (dot(v, tl.trans(above), zeros, PRECISION) - sums[None, :])
        dk = dot(ds.to(some_q.dtype), some_q, dk, PRECISION)
    return dk, dv


@Kernel
@triton.jit
def _dkdv(
    q, dy, k, v, dk, dv, lse, delta, table, queries, keys, blocks, window, scale, tokens, group,
    q_row, q_head, dy_row, dy_head, k_row, k_head, v_row, v_head, dk_row, dk_head, dv_row, dv_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dv = p^T dy and dk = scale ds^T q, summed over the query heads of a group; q, dy [T, Hq, D], others [T', Hk, D].

    One program: KEYS rows of one key head against all queries of its group that see them, head after head. The first
    tile of a causal sequence is seen by most queries and starts first.
    """
    sequence, q_first, queries, k_first, keys, first = place(table, queries, keys, blocks, KEYS, False)
    head = tl.program_id(1)
    k = rows_of(k, sequence, k_first, keys, head, k_row, k_head, False)
    v = rows_of(v, sequence, k_first, keys, head, v_row, v_head, False)
    dk = rows_of(dk, sequence, k_first, keys, head, dk_row, dk_head, False)
    dv = rows_of(dv, sequence, k_first, keys, head, dv_row, dv_head, False)
    mine = load_rows(k, sequence, k_first, head, first, keys, k_row, KEYS, D, SIZE, False, False)
    values = load_rows(v, sequence, k_first, head, first, keys, v_row, KEYS, D, SIZE, False, False)
    key = first + tl.arange(0, KEYS)
    dk_sum = tl.zeros([KEYS, SIZE], tl.float32)
    dv_sum = tl.zeros([KEYS, SIZE], tl.float32)
    start, whole, partial, stop = _query_ranges(first, queries, keys, window, CAUSAL, QUERIES, KEYS)
    fast = scale * _LOG2_E
    for member in range(group):
        one = head * group + member
        places = tl.cast(one, tl.int64) * tokens + sequence * queries + q_first
        q_one = rows_of(q, sequence, q_first, queries, one, q_row, q_head, TMA)
        dy_one = rows_of(dy, sequence, q_first, queries, one, dy_row, dy_head, TMA)
        if CAUSAL:
            dk_sum, dv_sum = _dkdv_range(
                dk_sum, dv_sum, q_one, dy_one, lse + places, delta + places, mine, values, q_row, dy_row,
                sequence, q_first, one, start, whole, key, queries, keys, window, fast,
                True, CAUSAL, D, SIZE, QUERIES, PRECISION, TMA,
            )  # fmt: skip
        dk_sum, dv_sum = _dkdv_range(
            dk_sum, dv_sum, q_one, dy_one, lse + places, delta + places, mine, values, q_row, dy_row,
            sequence, q_first, one, whole, partial, key, queries, keys, window, fast,
            False, CAUSAL, D, SIZE, QUERIES, PRECISION, TMA,
        )  # fmt: skip
        dk_sum, dv_sum = _dkdv_range(
            dk_sum, dv_sum, q_one, dy_one, lse + places, delta + places, mine, values, q_row, dy_row,
            sequence, q_first, one, partial, stop, key, queries, keys, window, fast,
            True, CAUSAL, D, SIZE, QUERIES, PRECISION, TMA,
        )  # fmt: skip
    store_rows(dk, first, keys, dk_row, dk_sum * scale, KEYS, D, SIZE)
    store_rows(dv, first, keys, dv_row, dv_sum, KEYS, D, SIZE)


def variants(capability: int) -> list[Variant]:
    """bf16, heads of every size that has its own tiles; causal, with a window, and of different lengths."""
    found = []
    for size, causal, window, table in (
        (64, True, None, None),
        (96, True, None, None),
        (128, False, None, None),
        (128, True, None, None),
        (128, True, "i32:16", "*i32"),
        (256, True, None, None),
    ):
        tma, padded = capability >= 90, size_block(size)
        places = (table, "i32", "i32", "i32", window, "fp32", "i32", "i32", *("i32:16",) * 12)
        for kernel, tile, rows in (
            (_dq, dgrad_tiles(size, 2, capability).dq, "keys"),
            (_dkdv, dgrad_tiles(size, 2, capability).dkdv, "queries"),
        ):
            streamed = (f"tensordesc<bf16[1, {getattr(tile, rows)}, 1, {padded}]>" if tma else "*bf16",) * 2
            held = ("*bf16", "*bf16")
            types = (*held, *streamed) if kernel is _dq else (*streamed, *held)
            types = (*types, "*bf16", "*bf16", "*fp32", "*fp32", *places)
            constants = (causal, size, padded, tile.queries, tile.keys, "ieee", tma)
            name = f"attention {'dq' if kernel is _dq else 'dkdv'} {size}"
            name += " causal" * causal + " window" * bool(window) + " table" * bool(table)
            found.append(Variant(name, kernel, types, constants, tile.warps, tile.stages, wgmma=True, bulk=tma))
    return found
