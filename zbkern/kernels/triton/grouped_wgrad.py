"""W of a linear layer per group of rows (mixture of experts): of all groups and several microbatches in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import INTERPRETED, Kernel, dot, offset, rows_dense, widen
from zbkern.kernels.triton.grouped_tile import (
    Stack,
    as_rows,
    group_end,
    load_rows,
    padded,
    plan_groups,
    ragged_descriptor,
    row_counts,
)
from zbkern.kernels.triton.matmul_tile import (
    Matrix,
    has_bulk_copies,
    load,
    pieces,
    precision,
    store,
    tile_index,
)

SLOTS = 8
"""Microbatches whose W is one launch; more run as further launches."""


@Kernel
@triton.jit(do_not_specialize=["used"])
def _grouped_sums(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, e0, e1, e2, e3, e4, e5, e6, e7,
    out, used, groups, P, Q, a_stride, b_stride, o_group, o_stride,
    SEGMENTS: tl.constexpr, DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr, ACCUMULATE: tl.constexpr,
    REDUCE: tl.constexpr, PRECISION: tl.constexpr,
    GROUPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [groups, P, Q] (+)= per group, the sum over segments s < used and the group's rows r of A_s[r, p] B_s[r, q].

    One program computes every num_programs-th tile [M, N], through all groups without a pause. Tiles, segments and
    steps are one loop, as in multi_matmul.py, so copies run ahead across the borders of groups and segments, and an
    output is read and written once.
    """
    a_s = (a0, a1, a2, a3, a4, a5, a6, a7)
    b_s = (b0, b1, b2, b3, b4, b5, b6, b7)
    ends = (e0, e1, e2, e3, e4, e5, e6, e7)
    per_group = tl.cdiv(P, M) * tl.cdiv(Q, N)
    group = tl.arange(0, GROUPS)
    steps = tl.zeros((GROUPS,), tl.int32)
    for s in tl.static_range(SEGMENTS):
        steps += tl.where(s < used, tl.cdiv(row_counts(ends[s], groups, GROUPS), K), 0)
    steps = tl.where(group < groups, tl.maximum(steps, 1), 0)  # a group of no rows takes one step
    first = tl.cdiv(tl.maximum(group * per_group - tl.program_id(0), 0), tl.num_programs(0))
    after = tl.cdiv(tl.maximum((group + 1) * per_group - tl.program_id(0), 0), tl.num_programs(0))
    total = tl.sum((after - first) * steps, 0)  # of this program's tiles

    tile, segment, turn, length, last = tl.program_id(0) - tl.num_programs(0), 0, 0, 1, True
    e, p, q, begin, end = 0, 0, 0, 0, 0
    accumulator = tl.zeros((M, N), tl.float32)
    for _ in range(total):
        turn = tl.where(turn == length - 1, 0, turn + 1)
        if turn == 0:  # the next segment with rows of this tile's group, or the first of the next tile
            over = last | (SEGMENTS == 1)  # known without a look at the turn before, or no copy runs ahead of the loop
            start = tl.where(over, 0, segment + 1)
            tile += tl.where(over, tl.num_programs(0), 0)
            e = tile // per_group
            p, q = tile_index(tile - e * per_group, P, Q, M, N, GROUP)
            begin, end, segment, last = 0, 0, 0, True
            for i in tl.static_range(SEGMENTS - 1, -1, -1):
                low, high = group_end(ends[i], e - 1), group_end(ends[i], e)
                has = (high > low) & (i >= start) & (i < used)
                last = tl.where(has, end == begin, last)
                begin, end, segment = tl.where(has, low, begin), tl.where(has, high, end), tl.where(has, i, segment)
            length = tl.maximum(tl.cdiv(end - begin, K), 1)
        a, b = a0, b0
        for i in tl.static_range(1, SEGMENTS):
            if segment == i:
                a, b = a_s[i], b_s[i]
        x = load_rows(a, begin, end, turn * K, p, P, a_stride, True, K, M, DESCRIPTORS)
        y = load_rows(b, begin, end, turn * K, q, Q, b_stride, False, K, N, DESCRIPTORS)
        accumulator = dot(x, y, accumulator, PRECISION)
        if (turn == length - 1) & last & ((not ACCUMULATE) | (end > begin)):
            parts = pieces(accumulator, M, N, PARTS)
            for i in tl.static_range(PARTS):
                column = q + i * (N // PARTS)
                _store_matrix(
                    parts[i], out, e, p, column, P, Q, o_group, o_stride,
                    ACCUMULATE, REDUCE, O_DESCRIPTOR, M, N // PARTS,
                )  # fmt: skip
            accumulator = tl.zeros((M, N), tl.float32)


@triton.jit
def _store_matrix(
    value, out, group, p, q, P, Q, o_group, o_stride,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, O_DESCRIPTOR: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Writes or adds a tile of a group's matrix. REDUCE: the addition happens on its way to memory, in L2."""
    if O_DESCRIPTOR:
        if REDUCE:
            out.atomic_add([group, p, q], tl.reshape(value, (1, M, N)))
        else:
            if ACCUMULATE:
                value += widen(tl.reshape(out.load([group, p, q]), (M, N)))
            out.store([group, p, q], tl.reshape(value.to(out.dtype), (1, M, N)))
    else:
        target = out + offset(group, o_group)
        if ACCUMULATE:
            value += widen(load(target, p, q, P, Q, o_stride, M, N, False))
        store(target, value, p, q, P, Q, o_stride, M, N, False)


@Kernel
@triton.jit
def _grouped_rows(
    dy, ends, dbias, groups, N, outer, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dbias [groups, N] (+)= sum over the rows of every group of dy.

    One program: COLUMNS columns of one group at a time, its rows in order.
    """
    across = tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), groups * across, tl.num_programs(0)):
        group = tile // across
        begin, end = group_end(ends, group - 1), group_end(ends, group)
        j = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(begin, end, ROWS):
            i = first + tl.arange(0, ROWS)
            place = dy + (offset(i[:, None], outer) + j[None, :])
            total += widen(tl.load(place, (i < end)[:, None] & (j < N)[None, :], 0.0))
        sums = dbias + (offset(group, N) + j)
        value = tl.sum(total, 0)
        if ADD:
            value += widen(tl.load(sums, j < N, 0.0))
        tl.store(sums, value.to(dbias.dtype.element_ty), j < N)


def grouped_linear_wgrad(
    segments: Sequence[tuple[Tensor, ...]],
    outputs: Sequence[Tensor | None],
    accumulate: bool,
    num_sms: int | None = None,
) -> None:
    """dweight[e] (+)= sum of dy^T x and dbias[e] (+)= sum of dy, over the rows of group e in all segments.

    Allocates a copy of every x and dy whose rows do not begin at multiples of 16 bytes.
    """
    dweight, dbias = outputs
    if dbias is not None and dbias.numel():
        for index, (_, dy, ends) in enumerate(segments):
            _add_rows(dy, ends, dbias, accumulate or index > 0, num_sms)
    if dweight is None or dweight.numel() == 0:
        return
    if Stack(dweight).transposed:  # the same matmul with its operands exchanged
        dweight, pairs = dweight.mT, [(x, dy, ends) for x, dy, ends in segments]
    else:
        pairs = [(dy, x, ends) for x, dy, ends in segments]
    written = rows_dense(dweight, copy=accumulate)
    found = [(as_rows(a), as_rows(b), ends) for a, b, ends in pairs]
    while found:
        left, right = found[0][0].layout, found[0][1].layout
        same = [pair for pair in found if pair[0].layout == left and pair[1].layout == right][:SLOTS]
        _run_sums(same, written, accumulate, num_sms)
        found = [pair for pair in found if pair not in same] if len(same) < len(found) else []
        accumulate = True
    if written is not dweight:
        dweight.copy_(written)


def _run_sums(
    pairs: Sequence[tuple[Matrix, Matrix, Tensor]], out: Tensor, accumulate: bool, num_sms: int | None
) -> None:
    (groups, p, q), used = out.shape, len(pairs)
    segments = padded(used)
    left, right, _ = pairs[0]
    dtype, device, target = left.tensor.dtype, out.device, Stack(out)
    bulk = has_bulk_copies(device)
    reads = bulk and all(a.describable and b.describable for a, b, _ in pairs)
    writes = bulk and target.describable
    most = -(-sum(a.tensor.shape[0] for a, _, _ in pairs) // groups)
    tile, programs = plan_groups("wgrad", groups, p, q, most, dtype, device, reads and writes, num_sms)
    parts = tile.parts(writes)
    factors = [
        (ragged_descriptor(a, tile.k, tile.m), ragged_descriptor(b, tile.k, tile.n)) if reads else (a.tensor, b.tensor)
        for a, b, _ in pairs
    ]
    left_out = ((*factors[0], pairs[0][2]),) * (segments - used) + ((None,) * 3,) * (SLOTS - segments)
    slots = [*((*pair, ends) for pair, (*_, ends) in zip(factors, pairs, strict=True)), *left_out]
    strides = [1, 1] if reads else [left.stride, right.stride]
    result, strides[2:] = (target.descriptor(tile.m, tile.n // parts), [1, 1]) if writes else (out, target.strides)
    reduces = writes and accumulate and out.dtype == torch.float32 and not INTERPRETED
    flags = (segments, reads, writes, accumulate, reduces, precision(dtype), padded(groups))
    _grouped_sums(
        programs,
        (*(slot[i] for i in range(3) for slot in slots), result, used, groups, p, q, *strides),
        (*flags, tile.m, tile.n, tile.k, tile.group, parts),
        tile.warps,
        tile.stages,
    )


def _add_rows(dy: Tensor, ends: Tensor, dbias: Tensor, accumulate: bool, num_sms: int | None) -> None:
    dy, written = rows_dense(dy), dbias if dbias.is_contiguous() else dbias.contiguous()
    groups, n = dbias.shape
    count = groups * triton.cdiv(n, 64)
    arguments = (dy, ends, written, groups, n, dy.stride(0))
    _grouped_rows(min(count, num_sms or count), arguments, (accumulate, 32, 64), warps=4, stages=3)
    if written is not dbias:
        dbias.copy_(written)
