"""A linear layer per group of rows (mixture of experts) as Triton kernels: forward and dgrad.

One launch computes all groups. Where the rows of each group end is read on the device: the host never waits.
"""

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, dot, offset, rows_dense, widen
from zbkern.kernels.triton.grouped_tile import (
    as_rows,
    find_rows,
    group_end,
    load_rows,
    matrix_of,
    padded,
    ragged_argument,
    row_tiles,
    store_rows,
)
from zbkern.kernels.triton.matmul_tile import Matrix, as_operand, has_bulk_copies, pieces, plan, precision, tile_index


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
            x = load_rows(a, begin, end, row, step * K, R, a_stride, False, M, K, DESCRIPTORS)
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


def grouped_linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, y: Tensor) -> None:
    _run_product("fwd", x, weight.mT, y, bias, ends)


def grouped_linear_dgrad(dy: Tensor, weight: Tensor, ends: Tensor, dx: Tensor) -> None:
    _run_product("dgrad", dy, weight, dx, None, ends)


def _run_product(op: str, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, ends: Tensor) -> None:
    (rows, r), (groups, _, q) = a.shape, b.shape
    if out.numel() == 0:
        return
    if groups == 0:
        out.zero_()
        return
    left, right, target = as_rows(a), as_operand(b), Matrix(written := rows_dense(out, copy=False))
    bulk = has_bulk_copies(a.device)
    reads, writes = bulk and left.describable and right.describable, bulk and target.describable
    tile, programs = plan(op, -(-rows // groups), q, r, a.dtype, a.device, reads and writes, groups=groups)
    parts = tile.epilogue_parts(writes)
    x, x_stride = ragged_argument(left, tile.m, tile.k, reads)
    matrices, w_stride = right.argument(tile.k, tile.n, reads)
    result, o_stride = ragged_argument(target, tile.m, tile.n // parts, writes)
    bias = None if bias is None else bias.contiguous()
    strides = (x_stride, right.group_stride, w_stride, o_stride)
    flags = (right.transposed, reads, writes, precision(a.dtype), padded(groups))
    arguments = (x, matrices, result, bias, ends, rows, groups, q, r, *strides)
    constants = (*flags, tile.m, tile.n, tile.k, tile.group, parts)
    _grouped_product(programs, arguments, constants, tile.warps, tile.stages)
    if written is not out:
        out.copy_(written)
