"""A linear layer per group of rows (mixture of experts) as Triton kernels: one launch for all groups.

Where the rows of each group end is read on the device, so the host never waits. Tiles of rows begin where a group does, so none has rows of two.
What a tile would read or write beyond the end of its group is cut off: with pointers by a mask, with bulk copies by a
descriptor that has a border at any row (`ragged`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zbkern.kernels import tiles
from zbkern.kernels.triton.common import INTERPRETED, Kernel, dot, offset, rows_dense, widen
from zbkern.kernels.triton.matmul_tile import (
    Matrix,
    as_operand,
    has_bulk_copies,
    load,
    pieces,
    plan,
    precision,
    store,
    tile_index,
)

SLOTS = 8
"""Microbatches whose W is one launch; more run as further launches."""

_BILLION = 1 << 30


@triton.jit
def ragged(begin, end, row):
    """Coordinates of row `row` among rows begin to end, for a descriptor of `_ragged`: what is not among them is not
    read (zeros come instead) nor written."""
    return [1 << 30, end, (1 << 30) - (end - begin) + row]


@triton.jit
def load_rows(
    source, begin, end, row, column, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] from (row, column) on of the rows begin to end, zeros beyond the last."""
    if DESCRIPTOR:
        return tl.reshape(source.load(ragged(begin, end, row) + [column]), (ROWS, COLUMNS))  # noqa: RUF005
    else:
        return load(source, begin + row, column, end, columns, stride, ROWS, COLUMNS, False)


@triton.jit
def store_rows(
    target, value, begin, end, row, column, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """value [ROWS, COLUMNS] to (row, column) of the rows begin to end, nothing beyond the last."""
    if DESCRIPTOR:
        value = tl.reshape(value.to(target.dtype), (1, 1, ROWS, COLUMNS))
        target.store(ragged(begin, end, row) + [column], value)  # noqa: RUF005
    else:
        store(target, value, begin + row, column, end, columns, stride, ROWS, COLUMNS, False)


@triton.jit
def group_end(ends, group):
    """Where the rows of a group end; of the group before the first: 0."""
    return tl.load(ends + group, group >= 0, 0)


@triton.jit
def matrix_of(
    source, group, row, column, rows, columns, group_stride, stride,
    TRANSPOSED: tl.constexpr, DESCRIPTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] from (row, column) on of a group's matrix, which is stored [columns, rows] if TRANSPOSED."""
    if DESCRIPTOR:
        if TRANSPOSED:
            return tl.reshape(source.load([group, column, row]), (COLUMNS, ROWS)).T
        else:
            return tl.reshape(source.load([group, row, column]), (ROWS, COLUMNS))
    else:
        i = (row + tl.arange(0, ROWS))[:, None]
        j = (column + tl.arange(0, COLUMNS))[None, :]
        place = offset(i, 1) + offset(j, stride) if TRANSPOSED else offset(i, stride) + offset(j, 1)
        return tl.load(source + offset(group, group_stride) + place, (i < rows) & (j < columns), 0.0)


@triton.jit
def row_counts(ends, groups, GROUPS: tl.constexpr):
    """[GROUPS]: how many rows every group has; 0 beyond the last group."""
    e = tl.arange(0, GROUPS)
    end = tl.load(ends + e, e < groups, 0)
    return end - tl.load(ends + e - 1, (e > 0) & (e < groups), 0)


@triton.jit
def row_tiles(ends, groups, GROUPS: tl.constexpr, M: tl.constexpr):
    """[GROUPS]: for every group, the number of row tiles of it and of those before."""
    return tl.cumsum(tl.cdiv(row_counts(ends, groups, GROUPS), M), 0)


@triton.jit
def find_rows(tile, last, ends, M: tl.constexpr):
    """(group, its first row, its end, the row of it where row tile number `tile` begins)."""
    before = last <= tile
    group = tl.sum(before.to(tl.int32), 0)
    row = (tile - tl.max(tl.where(before, last, 0), 0)) * M
    return group, group_end(ends, group - 1), group_end(ends, group), row


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _grouped_product(
    a, b, out, bias, ends, rows, groups, Q, R,
    a_stride, b_group, b_stride, o_stride,
    B_T: tl.constexpr, DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
    GROUPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [rows, Q] = A B_e + bias_e in rows of group e, 0 in rows of none; A [rows, R], B [groups, R, Q], bias
    [groups, Q].

    One program computes every num_programs-th tile [M, N]. Tiles go down bands of GROUP tile rows of all groups, whose
    operands then stay in L2, and then over the rows of no group.
    """
    last = row_tiles(ends, groups, GROUPS, M)
    total = tl.max(last, 0)
    for tile in tl.range(tl.program_id(0), total * tl.cdiv(Q, N), tl.num_programs(0), flatten=True):
        p, q = tile_index(tile, total * M, Q, M, N, GROUP)
        group, begin, end, row = find_rows(p // M, last, ends, M)
        accumulator = tl.zeros((M, N), tl.float32)
        for step in range(tl.cdiv(R, K)):
            x = load_rows(a, begin, end, row, step * K, R, a_stride, M, K, DESCRIPTORS)
            y = matrix_of(b, group, step * K, q, R, Q, b_group, b_stride, B_T, DESCRIPTORS, K, N)
            accumulator = dot(x, y, accumulator, PRECISION)
        parts = pieces(accumulator, M, N, PARTS)
        for i in tl.static_range(PARTS):
            value, column = parts[i], q + i * (N // PARTS)
            if bias is not None:
                j = column + tl.arange(0, N // PARTS)
                value += widen(tl.load(bias + (offset(group, Q) + j), j < Q, 0.0))[None, :]
            store_rows(out, value, begin, end, row, column, Q, o_stride, M, N // PARTS, O_DESCRIPTOR)
    begin = group_end(ends, groups - 1)
    nothing = tl.zeros((M, N // PARTS), tl.float32)
    count = tl.cdiv(rows - begin, M) * tl.cdiv(Q, N // PARTS)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        p, q = tile_index(tile, rows - begin, Q, M, N // PARTS, GROUP)
        store_rows(out, nothing, begin, rows, p, q, Q, o_stride, M, N // PARTS, O_DESCRIPTOR)


@Kernel
@triton.jit
def _grouped_sums(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, e0, e1, e2, e3, e4, e5, e6, e7,
    out, groups, P, Q, a_stride, b_stride, o_group, o_stride,
    SEGMENTS: tl.constexpr, DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr, ACCUMULATE: tl.constexpr,
    REDUCE: tl.constexpr, PRECISION: tl.constexpr,
    GROUPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [groups, P, Q] (+)= per group, the sum over segments s and the group's rows r of A_s[r, p] B_s[r, q].

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
        steps += tl.cdiv(row_counts(ends[s], groups, GROUPS), K)
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
            start = tl.where(last, 0, segment + 1)
            tile += tl.where(last, tl.num_programs(0), 0)
            e = tile // per_group
            p, q = tile_index(tile - e * per_group, P, Q, M, N, GROUP)
            begin, end, segment, last = 0, 0, 0, True
            for back in tl.static_range(SEGMENTS):
                s: tl.constexpr = SEGMENTS - 1 - back
                low, high = group_end(ends[s], e - 1), group_end(ends[s], e)
                has = (high > low) & (s >= start)
                last = tl.where(has, end == begin, last)
                begin, end, segment = tl.where(has, low, begin), tl.where(has, high, end), tl.where(has, s, segment)
            length = tl.maximum(tl.cdiv(end - begin, K), 1)
        a, b = a0, b0
        for i in tl.static_range(1, SEGMENTS):
            if segment == i:
                a, b = a_s[i], b_s[i]
        x = load_rows(a, begin, end, turn * K, p, P, a_stride, K, M, DESCRIPTORS)
        y = load_rows(b, begin, end, turn * K, q, Q, b_stride, K, N, DESCRIPTORS)
        accumulator = dot(x.T, y, accumulator, PRECISION)
        if (turn == length - 1) & last:
            if (not ACCUMULATE) | (end > begin):
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
    dy, ends, dbias, N, outer, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dbias [groups, N] (+)= sum over the rows of every group of dy. One program: COLUMNS columns of one group."""
    group = tl.program_id(1)
    begin, end = group_end(ends, group - 1), group_end(ends, group)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
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


class Stack:
    """A matrix per group as it lies in memory: whether transposed, its strides, how tiles are copied."""

    __slots__ = ("describable", "group_stride", "stride", "tensor", "transposed")

    def __init__(self, tensor: Tensor) -> None:
        one = Matrix(tensor[0])
        self.tensor, self.transposed, self.stride = tensor, one.transposed, one.stride
        self.group_stride = tensor.stride(0)
        self.describable = one.describable and self.group_stride * tensor.element_size() % 16 == 0

    @property
    def strides(self) -> tuple[int, int]:
        return self.group_stride, self.stride

    def descriptor(self, rows: int, columns: int) -> TensorDescriptor:
        """For tiles of [rows, columns] of one matrix, which are [columns, rows] in memory if it is transposed."""
        tensor = self.tensor.mT if self.transposed else self.tensor
        block = [1, columns, rows] if self.transposed else [1, rows, columns]
        return TensorDescriptor(tensor, list(tensor.shape), [*self.strides, 1], block)


def _as_stack(weight: Tensor) -> Stack:
    """The weight, or a copy of which GPUs copy 16 bytes at a time (see `as_operand`)."""
    stack = Stack(weight)
    regular = stack.stride % 16 == stack.group_stride % 16 == 0
    if stack.describable and (has_bulk_copies(weight.device) or regular):
        return stack
    matrices = weight.mT if stack.transposed else weight
    columns = matrices.shape[2]
    room = matrices.new_empty(*matrices.shape[:2], triton.cdiv(columns, 16) * 16)[:, :, :columns].copy_(matrices)
    return Stack(room.mT if stack.transposed else room)


def _as_rows(tensor: Tensor) -> Matrix:
    """The matrix, or a copy whose rows are contiguous and regular."""
    return as_operand(rows_dense(tensor))


def _ragged(matrix: Matrix, rows: int, columns: int) -> TensorDescriptor:
    """For tiles of [rows, columns] of a matrix of which some rows are cut out: see `ragged`.

    An address is (2^34 - s) x 2^30 + s x end + s x (2^30 - count + row) elements from the first, which is row
    end - count + row in the 64 bits that an address has; and the last of the three numbers is within 2^30 only for
    row < count. (The idea is Triton's: triton/tools/ragged_tma.py.)
    """
    stride, (_, width) = matrix.stride, matrix.tensor.shape
    strides = [(1 << 34) - stride, stride, stride, 1]
    return TensorDescriptor(matrix.tensor, [0x7FFF0000, 0x7FFF0000, _BILLION, width], strides, [1, 1, rows, columns])


@functools.lru_cache(maxsize=4096)
def _plan(op: str, groups: int, p: int, q: int, r: int, *options: Any) -> tuple[tiles.Tile, int]:
    """`plan` for as many matrices [p, q] as there are groups."""
    return plan(op, p, q, r, *options, others=((p, q),) * (groups - 1))


def _padded(groups: int) -> int:
    return 1 << (groups - 1).bit_length()


def grouped_linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, y: Tensor, num_sms: int | None = None
) -> None:
    """Rows of group e: y = x weight[e]^T + bias[e]; 0 in rows of no group."""
    _run_product("fwd", x, weight.mT, y, bias, ends, num_sms)


def grouped_linear_dgrad(dy: Tensor, weight: Tensor, ends: Tensor, dx: Tensor, num_sms: int | None = None) -> None:
    """Rows of group e: dx = dy weight[e]; 0 in rows of no group."""
    _run_product("dgrad", dy, weight, dx, None, ends, num_sms)


def _run_product(
    op: str, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, ends: Tensor, num_sms: int | None
) -> None:
    (rows, r), (groups, _, q) = a.shape, b.shape
    if out.numel() == 0:
        return
    if groups == 0:
        out.zero_()
        return
    left, right, target = _as_rows(a), _as_stack(b), Matrix(written := rows_dense(out, copy=False))
    bulk = has_bulk_copies(a.device)
    reads, writes = bulk and left.describable and right.describable, bulk and target.describable
    tile, programs = _plan(op, groups, -(-rows // groups), q, r, a.dtype, a.device, reads and writes, num_sms)
    parts = tile.parts(writes)
    factors: list[Any] = [left.tensor, right.tensor]
    strides = [left.stride, *right.strides, target.stride]
    if reads:
        factors, strides[:3] = [_ragged(left, tile.m, tile.k), right.descriptor(tile.k, tile.n)], [1, 1, 1]
    result: Any = written
    if writes:
        result, strides[3] = _ragged(target, tile.m, tile.n // parts), 1
    bias = None if bias is None else bias.contiguous()
    flags = (right.transposed, reads, writes, precision(a.dtype), _padded(groups))
    _grouped_product(
        programs,
        (*factors, result, bias, ends, rows, groups, q, r, *strides),
        (*flags, tile.m, tile.n, tile.k, tile.group, parts),
        tile.warps,
        tile.stages,
    )
    if written is not out:
        out.copy_(written)


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
            _add_rows(dy, ends, dbias, accumulate or index > 0)
    if dweight is None or dweight.numel() == 0:
        return
    if Stack(dweight).transposed:  # the same matmul with its operands exchanged
        dweight, pairs = dweight.mT, [(x, dy, ends) for x, dy, ends in segments]
    else:
        pairs = [(dy, x, ends) for x, dy, ends in segments]
    written = rows_dense(dweight, copy=accumulate)
    found = [(_as_rows(a), _as_rows(b), ends) for a, b, ends in pairs]
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
    (groups, p, q), count = out.shape, len(pairs)
    left, right, _ = pairs[0]
    dtype, device, target = left.tensor.dtype, out.device, Stack(out)
    bulk = has_bulk_copies(device)
    reads = bulk and all(a.describable and b.describable for a, b, _ in pairs)
    writes = bulk and target.describable
    most = -(-sum(a.tensor.shape[0] for a, _, _ in pairs) // groups)
    tile, programs = _plan("wgrad", groups, p, q, most, dtype, device, reads and writes, num_sms)
    parts = tile.parts(writes)
    factors = [
        (_ragged(a, tile.k, tile.m), _ragged(b, tile.k, tile.n)) if reads else (a.tensor, b.tensor) for a, b, _ in pairs
    ]
    none = (None,) * (SLOTS - count)
    slots = (*(a for a, _ in factors), *none, *(b for _, b in factors), *none, *(ends for *_, ends in pairs), *none)
    strides = [1, 1] if reads else [left.stride, right.stride]
    result, strides[2:] = (target.descriptor(tile.m, tile.n // parts), [1, 1]) if writes else (out, target.strides)
    reduces = writes and accumulate and out.dtype == torch.float32 and not INTERPRETED
    flags = (count, reads, writes, accumulate, reduces, precision(dtype), _padded(groups))
    _grouped_sums(
        programs,
        (*slots, result, groups, p, q, *strides),
        (*flags, tile.m, tile.n, tile.k, tile.group, parts),
        tile.warps,
        tile.stages,
    )


def _add_rows(dy: Tensor, ends: Tensor, dbias: Tensor, accumulate: bool) -> None:
    dy, written = rows_dense(dy), dbias if dbias.is_contiguous() else dbias.contiguous()
    groups, n = dbias.shape
    arguments = (dy, ends, written, n, dy.stride(0))
    _grouped_rows((triton.cdiv(n, 64), groups), arguments, (accumulate, 32, 64), warps=4, stages=3)
    if written is not dbias:
        dbias.copy_(written)
