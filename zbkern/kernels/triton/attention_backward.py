"""The backward of attention in Triton: dq by tiles of queries, then dk and dv by tiles of keys. Contract: spec.py.

Two launches that each compute the scores again: 7 products where one kernel would do with 5, but that one adds to dq
from many programs, in an order that changes from run to run. Here every output has one writer.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.triton.attention_forward import (
    LENGTHS,
    LOG2_E,
    check_head_sizes,
    describe,
    head_constants,
    key_ranges,
    load_rows,
    positive,
    regular,
    rows_of,
    sees,
    store_rows,
    tile_of,
)
from zbkern.kernels.triton.attention_tiles import line_length, place, place_tiles
from zbkern.kernels.triton.common import Kernel, capped, dot
from zbkern.kernels.triton.matmul_tile import precision

_LOG2_E = tl.constexpr(LOG2_E)


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
    delta: Tensor | None = None,
) -> None:
    tokens, heads, size = q.shape
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        if delta is not None:
            delta.zero_()
        return
    check_head_sizes(q, v)
    dy, q, k, v, y = (regular(t) for t in (dy, q, k, v, y))
    outputs = [(target, regular(target, copy=False)) for target in (dq, dk, dv)]
    out_q, out_k, out_v = (out for _, out in outputs)
    line = line_length(options.queries, tokens)
    lines = lse.new_empty(2, heads, line)
    group = heads // k.shape[1]
    strides = tuple(stride for t in (q, dy, k, v) for stride in t.stride()[:2])
    constants = (options.causal, *head_constants(size, v.shape[2]))
    tile, tile_after = (tile_of(launch, q, v, options) for launch in ("dq", "dkdv"))
    assert tile.queries % tile_after.queries == 0, "dkdv would read statistics that dq has not written"
    places, grid, sequences = place_tiles(options, "queries", tile.queries, q, k)
    factor, exponent, bend = positive(q, options)
    streamed = describe((k, v), sequences, tile.keys)
    described = streamed[0] is not k
    numbers = (options.window, options.scale, exponent, bend)
    of_q = (*factor.stride()[:2], *strides[2:], *y.stride()[:2], *out_q.stride()[:2])
    arguments = (factor, dy, *streamed, y, out_q, lse, lines, delta, *places, *numbers, tokens, line, group, *of_q)
    sizes = (tile.queries, tile.keys, precision(q.dtype), described)
    _dq((grid, heads), arguments, (*constants, *sizes), warps=tile.warps, stages=tile.stages)
    tile = tile_after
    places, grid, sequences = place_tiles(options, "keys", tile.keys, q, k)
    factor, *_ = positive(k, options)
    streamed = describe((q, dy), sequences, tile.queries)
    described = streamed[0] is not q
    if described:
        lines = TensorDescriptor(lines, [2 * heads, line], [line, 1], [1, tile.queries])
    sizes = (tile.queries, tile.keys, precision(q.dtype), described)
    strides = (*strides[:4], *factor.stride()[:2], *strides[6:], *out_k.stride()[:2], *out_v.stride()[:2])
    for pair in ((out_k, None), (None, out_v)) if tile.split else ((out_k, out_v),):
        arguments = (*streamed, factor, v, *pair, lines, *places, *numbers, line, group, *strides)
        _dkdv((grid, k.shape[1]), arguments, (*constants, *sizes), warps=tile.warps, stages=tile.stages)
    for target, out in outputs:
        if out is not target:
            target.copy_(out)


@Kernel
@triton.jit(do_not_specialize=LENGTHS)
def _dq(
    q, dy, k, v, y, dq, lse, lines, delta, table, queries, keys, blocks, window, scale, exponent, bend,
    tokens, length, group,
    q_row, q_head, dy_row, dy_head, k_row, k_head, v_row, v_head, y_row, y_head, dq_row, dq_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, V_D: tl.constexpr, V_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k; q, dq [T, Hq, D], dy, y [T, Hq, V_D], k [T', Hk, D], v [T', Hk, V_D], lse [Hq, T],
    lines [2, Hq, length], delta [Hq, T] or None.

    lines: for the next launch -lse in base 2 and sum(dy y), of queries that do not exist -inf and 0. One program:
    QUERIES rows of one head against all keys they see, in the order of the forward and for its reason; BRANCH is as
    there.
    """
    sequence, q_first, queries, k_first, keys, first, line = place(table, queries, keys, blocks, QUERIES, CAUSAL)
    head = tl.program_id(1)
    q = rows_of(q, sequence, q_first, queries, head, q_row, q_head, False)
    dy = rows_of(dy, sequence, q_first, queries, head, dy_row, dy_head, False)
    y = rows_of(y, sequence, q_first, queries, head, y_row, y_head, False)
    dq = rows_of(dq, sequence, q_first, queries, head, dq_row, dq_head, False)
    k = rows_of(k, sequence, k_first, keys, head // group, k_row, k_head, TMA)
    v = rows_of(v, sequence, k_first, keys, head // group, v_row, v_head, TMA)
    held = load_rows(q, sequence, q_first, head, first, queries, q_row, QUERIES, D, SIZE, False, False)
    above = load_rows(dy, sequence, q_first, head, first, queries, dy_row, QUERIES, V_D, V_SIZE, False, False)
    out = load_rows(y, sequence, q_first, head, first, queries, y_row, QUERIES, V_D, V_SIZE, False, False)
    sums = tl.sum(above.to(tl.float32) * out.to(tl.float32), 1)
    query = first + tl.arange(0, QUERIES)
    places = tl.cast(head, tl.int64) * tokens + sequence * queries + q_first + query
    if delta is not None:
        tl.store(delta + places, sums, query < queries)
    level = tl.load(lse + places, query < queries, other=float("-inf")) * _LOG2_E
    level = tl.where(level == float("-inf"), float("inf"), level)  # a query that sees nothing: all its weights are 0
    places = tl.cast(head, tl.int64) * length + line + query
    tl.store(lines + places, -level)
    tl.store(lines + places + tl.cast(tl.num_programs(1), tl.int64) * length, sums)
    total = tl.zeros([QUERIES, SIZE], tl.float32)
    start, whole, partial, stop = key_ranges(first, queries, keys, window, CAUSAL, QUERIES, KEYS)
    APART: tl.constexpr = TMA and table is not None  # a descriptor reads on into the next sequence
    BRANCH: tl.constexpr = (SIZE <= 128 and V_SIZE <= 128) or table is not None
    until = tl.minimum(stop, keys // KEYS * KEYS) if APART else stop
    for TAIL in tl.static_range(2 if APART else 1):
        begin, end = (tl.maximum(start, until), stop) if TAIL else (start, until)
        for block in tl.range(begin, end, KEYS):
            CLEAN: tl.constexpr = TAIL == 1
            some_k = load_rows(k, sequence, k_first, head // group, block, keys, k_row, KEYS, D, SIZE, CLEAN, TMA)
            some_v = load_rows(v, sequence, k_first, head // group, block, keys, v_row, KEYS, V_D, V_SIZE, CLEAN, TMA)
            scores = capped(dot(held, tl.trans(some_k), tl.zeros([QUERIES, KEYS], tl.float32), PRECISION), bend)
            slopes = dot(above, tl.trans(some_v), tl.zeros([QUERIES, KEYS], tl.float32), PRECISION)
            ds = tl.exp2(scores * exponent - level[:, None]) * (slopes - sums[:, None])
            if bend is not None:
                ds = ds * (1.0 - scores * scores)
            if not BRANCH or (block < whole) | (block + KEYS > partial):
                key = block + tl.arange(0, KEYS)
                ds = tl.where(sees(query[:, None], key[None, :], queries, keys, window, CAUSAL), ds, 0.0)
            total = dot(ds.to(some_k.dtype), some_k, total, PRECISION)
    store_rows(dq, first, queries, dq_row, total * scale, QUERIES, D, SIZE)


@triton.jit
def _query_ranges(first, queries, keys, window, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(start, whole, partial, stop): queries start..stop see some key of the tile, those of whole..partial see all.

    `start` is a multiple of QUERIES. Only the keys that exist count.
    """
    shift = keys - queries
    last = tl.minimum(first + KEYS, keys) - 1
    start, whole, partial, stop = first * 0, first * 0, first * 0 + queries, first * 0 + queries
    if CAUSAL:
        start = tl.minimum(tl.maximum(first - shift, 0), queries) // QUERIES * QUERIES
        whole = last - shift
        if window is not None:
            stop = tl.minimum(tl.maximum(last - shift + window, 0), queries)
            partial = tl.minimum(first - shift + window, queries)
    return start, whole, partial, stop


@triton.jit
def _load_line(lines, line, place, length, ROWS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS] numbers of one of the lines. As plain loads they would be fetched ahead one by one: 64 registers."""
    if TMA:
        return lines.load([line, place]).reshape(ROWS)
    else:
        return tl.load(lines + tl.cast(line, tl.int64) * length + place + tl.arange(0, ROWS))


@Kernel
@triton.jit(do_not_specialize=LENGTHS)
def _dkdv(
    q, dy, k, v, dk, dv, lines, table, queries, keys, blocks, window, scale, exponent, bend, length, group,
    q_row, q_head, dy_row, dy_head, k_row, k_head, v_row, v_head, dk_row, dk_head, dv_row, dv_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, V_D: tl.constexpr, V_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dv = p^T dy and dk = scale ds^T q, summed over the query heads of a group; q [T, Hq, D], dy [T, Hq, V_D],
    k, dk [T', Hk, D], v, dv [T', Hk, V_D].

    dk or dv may be None. One program: KEYS rows of one key head against all queries of its group that see them, head
    after head. The first tile of a causal sequence is seen by most queries and starts first.

    Scores are [keys, queries]. Queries that do not exist have -inf in their line and so no weight, without a mask. One
    loop for all heads: between two, the accumulators would have to leave Blackwell's tensor memory, and copies would
    not run ahead. With TMA all causal scores are masked: behind a branch around that, ptxas waits for every wgmma (the
    report looks).
    """
    sequence, q_first, queries, k_first, keys, first, line = place(table, queries, keys, blocks, KEYS, False)
    head = tl.program_id(1)
    k = rows_of(k, sequence, k_first, keys, head, k_row, k_head, False)
    v = rows_of(v, sequence, k_first, keys, head, v_row, v_head, False)
    held = load_rows(k, sequence, k_first, head, first, keys, k_row, KEYS, D, SIZE, False, False)
    values = load_rows(v, sequence, k_first, head, first, keys, v_row, KEYS, V_D, V_SIZE, False, False)
    key = first + tl.arange(0, KEYS)
    dk_sum = tl.zeros([KEYS, SIZE], tl.float32)
    dv_sum = tl.zeros([KEYS, V_SIZE], tl.float32)
    start, whole, partial, stop = _query_ranges(first, queries, keys, window, CAUSAL, QUERIES, KEYS)
    APART: tl.constexpr = TMA and table is not None  # a descriptor reads on into the next sequence
    until = tl.minimum(stop, queries // QUERIES * QUERIES) if APART else stop
    heads = tl.num_programs(1) * group
    zeros = tl.zeros([KEYS, QUERIES], tl.float32)
    DK: tl.constexpr = dk is not None
    DV: tl.constexpr = dv is not None
    for TAIL in tl.static_range(2 if APART else 1):
        begin, end = (tl.maximum(start, until), stop) if TAIL else (start, until)
        blocks_of_one = tl.cdiv(tl.maximum(end - begin, 0), QUERIES)
        for step in tl.range(0, group * blocks_of_one, num_stages=1 if TAIL else None):
            CLEAN: tl.constexpr = TAIL == 1
            one = head * group + step // blocks_of_one
            block = begin + step % blocks_of_one * QUERIES
            q_one = rows_of(q, sequence, q_first, queries, one, q_row, q_head, TMA)
            dy_one = rows_of(dy, sequence, q_first, queries, one, dy_row, dy_head, TMA)
            some_q = load_rows(q_one, sequence, q_first, one, block, queries, q_row, QUERIES, D, SIZE, CLEAN, TMA)
            scores = capped(dot(held, tl.trans(some_q), zeros, PRECISION), bend)
            line_of_one = _load_line(lines, one, line + block, length, QUERIES, TMA)
            weights = tl.exp2(scores * exponent + line_of_one[None, :])
            if CAUSAL:
                if TMA or (block < whole) | (block + QUERIES > partial):
                    query = block + tl.arange(0, QUERIES)
                    seen = sees(query[None, :], key[:, None], queries, keys, window, CAUSAL)
                    weights = tl.where(seen, weights, 0.0)
            above = load_rows(dy_one, sequence, q_first, one, block, queries, dy_row, QUERIES, V_D, V_SIZE, CLEAN, TMA)
            if DV:
                dv_sum = dot(weights.to(above.dtype), above, dv_sum, PRECISION)
            if DK:
                # The sums are subtracted: an addition would become the product's accumulator, and not be fetched ahead.
                slopes = dot(values, tl.trans(above), zeros, PRECISION)
                ds = weights * (slopes - _load_line(lines, heads + one, line + block, length, QUERIES, TMA)[None, :])
                if bend is not None:
                    ds = ds * (1.0 - scores * scores)
                dk_sum = dot(ds.to(some_q.dtype), some_q, dk_sum, PRECISION)
    if dk is not None:
        out = rows_of(dk, sequence, k_first, keys, head, dk_row, dk_head, False)
        store_rows(out, first, keys, dk_row, dk_sum * scale, KEYS, D, SIZE)
    if dv is not None:
        out = rows_of(dv, sequence, k_first, keys, head, dv_row, dv_head, False)
        store_rows(out, first, keys, dv_row, dv_sum, KEYS, V_D, V_SIZE)
