"""W of a linear layer per group of rows (mixture of experts): of all groups and several microbatches in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments
from zbkern.kernels.triton import matmul_tile
from zbkern.kernels.triton.common import Kernel, dot, offset, rows_dense, widen
from zbkern.kernels.triton.grouped_tile import (
    as_rows,
    group_end,
    load_rows,
    padded,
    ragged_argument,
    row_counts,
)
from zbkern.kernels.triton.matmul_tile import (
    Matrix,
    has_bulk_copies,
    pause,
    pieces,
    plan,
    precision,
    tile_index,
)
from zbkern.kernels.triton.multi_matmul import columns, of_one_layout, store_tile
from zbkern.kernels.triton.wgrad import sum_rows


@Kernel
@triton.jit(do_not_specialize=["used", "late", "late_of"])
def _grouped_sums(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, e0, e1, e2, e3, e4, e5, e6, e7,
    out, used, groups, P, Q, a_stride, b_stride, o_group, o_stride, late, late_of,
    SEGMENTS: tl.constexpr, DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr, ACCUMULATE: tl.constexpr,
    REDUCE: tl.constexpr, PRECISION: tl.constexpr,
    GROUPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [groups, P, Q] (+)= per group, the sum over segments s < used and the group's rows r of A_s[r, p] B_s[r, q].

    One program computes every num_programs-th tile [M, N], through all groups without a pause. Tiles, segments and
    steps are one loop, as in multi_matmul.py, so copies run ahead across the borders of groups and segments, and an
    output is read and written once. late, late_of: as there.
    """
    if late is not None:
        pause(tl.program_id(0) // late_of * late)
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
        store_tile(value, p, q, out + offset(group, o_group), P, Q, o_stride, ACCUMULATE, False, False, M, N)


def grouped_linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    """Allocates a copy of every x and dy whose rows do not begin at multiples of 16 bytes."""
    dweight, dbias = outputs
    if dbias is not None and dbias.numel():
        sum_rows([(dy, ends) for _, dy, ends in segments], dbias, accumulate)
    if dweight is None or dweight.numel() == 0:
        return
    if Matrix(dweight).transposed:  # the same matmul with its operands exchanged
        dweight, pairs = dweight.mT, [(x, dy, ends) for x, dy, ends in segments]
    else:
        pairs = [(dy, x, ends) for x, dy, ends in segments]
    written = rows_dense(dweight, copy=accumulate)
    waiting = [(as_rows(a), as_rows(b), ends) for a, b, ends in pairs]
    while waiting:
        same = of_one_layout(waiting)
        _run_sums(same, written, accumulate)
        waiting = [pair for pair in waiting if pair not in same] if len(same) < len(waiting) else []
        accumulate = True
    if written is not dweight:
        dweight.copy_(written)


def _run_sums(pairs: Sequence[tuple[Matrix, Matrix, Tensor]], out: Tensor, accumulate: bool) -> None:
    (groups, p, q), used = out.shape, len(pairs)
    segments = padded(used)
    left, right, _ = pairs[0]
    dtype, device, target = left.tensor.dtype, out.device, Matrix(out)
    bulk = has_bulk_copies(device)
    reads = bulk and all(a.describable and b.describable for a, b, _ in pairs)
    writes = bulk and target.describable
    rows = -(-sum(a.tensor.shape[0] for a, _, _ in pairs) // groups)
    tile, programs = plan("wgrad", p, q, rows, dtype, device, reads and writes, groups=groups)
    parts = tile.epilogue_parts(writes)
    slots = [
        (ragged_argument(a, tile.k, tile.m, reads)[0], ragged_argument(b, tile.k, tile.n, reads)[0], ends)
        for a, b, ends in pairs
    ]
    slots += slots[:1] * (segments - used)
    result, o_stride = target.argument(tile.m, tile.n // parts, writes)
    strides = (*((1, 1) if reads else (left.stride, right.stride)), target.group_stride, o_stride)
    reduces = writes and accumulate and out.dtype == torch.float32
    flags = (segments, reads, writes, accumulate, reduces, precision(dtype), padded(groups))
    late = matmul_tile.late_start(tile, rows, device)
    arguments = (*columns(slots), result, used, groups, p, q, *strides, *late)
    constants = (*flags, tile.m, tile.n, tile.k, tile.group, parts)
    _grouped_sums(programs, arguments, constants, tile.warps, tile.stages)
