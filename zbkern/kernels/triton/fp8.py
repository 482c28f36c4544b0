"""Linear layers in blockwise-scaled FP8: operands are quantised by a pass of their own, then multiplied.

Tensor cores read 8-bit operands only along the dimension that is summed over, so dgrad quantises the weight once more,
transposed: the same values, because its blocks are squares. W quantises both operands along their tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels import tiles
from zbkern.kernels.spec import Outputs, Segments
from zbkern.kernels.triton.common import Kernel, dot, offset, rows_dense, widen
from zbkern.kernels.triton.matmul_tile import Matrix, capability_of, processors, tile_index
from zbkern.kernels.triton.multi_matmul import store_tile
from zbkern.kernels.triton.wgrad import sum_rows

_BLOCK = tl.constexpr(128)
_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-30)

_N, _GROUP = 128, 8


def fp8_linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, kept: dict[Any, Any] | None = None
) -> None:
    """y = quantised(x) quantised(weight)^T + bias."""
    if not x.numel():
        y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    elif y.numel():
        _multiply(_quantised(x), _quantise_weight(weight, False, kept), bias, y)


def fp8_linear_dgrad(dy: Tensor, weight: Tensor, dx: Tensor, kept: dict[Any, Any] | None = None) -> None:
    """dx = quantised(dy) quantised(weight)."""
    if not dy.numel():
        dx.zero_()
    elif dx.numel():
        _multiply(_quantised(dy), _quantise_weight(weight, True, kept), None, dx)


def fp8_linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    """dweight (+)= sum of quantised(dy^T) quantised(x^T)^T and dbias (+)= sum over rows of dy, over (x, dy).

    Allocates the operands in 8 bits, a byte for each of their elements, of one segment at a time.
    """
    dweight, dbias = outputs
    for x, dy in segments:
        if dbias is not None:
            sum_rows([(dy, None)], dbias, accumulate)
        if dweight is not None and x.shape[0] and dweight.numel():
            _multiply(_quantised(dy.t()), _quantised(x.t()), None, dweight, accumulate)
        elif dweight is not None and not accumulate:
            dweight.zero_()
        accumulate = True


def _quantise_weight(weight: Tensor, transpose: bool, kept: dict[Any, Any] | None) -> tuple[Tensor, Tensor]:
    """`_quantised`, with a scale for each 128 x 128; from `kept` where it is there, else left there."""
    kept = {} if kept is None else kept
    if transpose not in kept:
        kept[transpose] = _quantised(weight, True, transpose)
    return kept[transpose]


def _quantised(tensor: Tensor, whole: bool = False, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """(values [M, K], scales [K / 128, M]) with a scale for each 128 columns of a row, or if whole (values, scales
    [K / 128, M / 128]) for each 128 x 128; M and K are those of the tensor, or if transpose of its transpose."""
    rows, columns = tensor.shape
    m, k = (columns, rows) if transpose else (rows, columns)
    # rows of values are multiples of 16 bytes apart, so that bulk copies take tiles of them
    values = tensor.new_empty(m, triton.cdiv(k, 16) * 16, dtype=torch.float8_e4m3fn)[:, :k]
    scales = tensor.new_empty(triton.cdiv(k, 128), triton.cdiv(m, 128) if whole else m, dtype=torch.float32)
    band, warps = (128, 8) if whole else (32, 4)
    arguments = (tensor, values, scales, rows, columns, *tensor.stride(), values.stride(0))
    programs = triton.cdiv(rows, band) * triton.cdiv(columns, 128)
    _quantise(programs, arguments, (band, whole, transpose), warps, stages=1)
    return values, scales


@Kernel
@triton.jit
def _quantise(
    x, values, scales, M, K, row, column, values_row,
    ROWS: tl.constexpr, WHOLE: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """values = x / scale in e4m3, scale = max|x| / 448 of each [1, 128] of x [M, K], or if WHOLE of each [128, 128].

    values [M, K], scales [K / 128, M (/ 128)]; if TRANSPOSE values [K, M], scales [M / 128, K / 128]. One program: ROWS
    x 128. Divisions are exact, as the reference has them: one rounding apart, a value could be the next of only 256.
    Rows of values are written to their end, a multiple of 16: a mask that ends within 16 bytes would have all of them
    written one by one.
    """
    bands, blocks = tl.cdiv(M, ROWS), tl.cdiv(K, _BLOCK)
    band, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i = band * ROWS + tl.arange(0, ROWS)
    j = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = (i < M)[:, None] & (j < K)[None, :]
    value = widen(tl.load(x + (offset(i, row)[:, None] + offset(j, column)[None, :]), inside, other=0.0))
    largest = tl.max(tl.abs(value), 1)
    if WHOLE:
        largest = tl.max(largest, 0)
    some = largest > _SMALLEST
    factor = tl.where(some, tl.div_rn(_LARGEST, tl.where(some, largest, 1.0)), 0.0)
    scale = tl.where(some, tl.div_rn(largest, _LARGEST), 0.0)
    if WHOLE:
        tl.store(scales + (band * blocks + block if TRANSPOSE else block * bands + band), scale)
        value = value * factor
    else:
        tl.store(scales + (block.to(tl.int64) * M + i), scale, i < M)
        value = value * factor[:, None]
    result = value.to(values.dtype.element_ty)
    if TRANSPOSE:
        there = (j < K)[:, None] & (i < values_row)[None, :]
        tl.store(values + (offset(j, values_row)[:, None] + i[None, :]), result.T, there)
    else:
        there = (i < M)[:, None] & (j < values_row)[None, :]
        tl.store(values + (offset(i, values_row)[:, None] + j[None, :]), result, there)


def _multiply(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None, out: Tensor, add: bool = False
) -> None:
    """out [P, Q] = A B^T + bias of quantised A [P, R] (rows) and B [Q, R] (rows, or a weight), or added to out."""
    (left, left_scales), (right, right_scales) = a, b
    (p, r), q = left.shape, right.shape[0]
    rows = rows_dense(out, copy=add)
    target = Matrix(rows)
    writes = target.describable and not target.transposed
    # with less shared memory and one buffer fewer than stages, half of the rows leave room for two
    height, warps, stages = (64, 4, 3) if tiles.unit(capability_of(out.device)) == "mma" else (128, 8, 4)
    result = target.descriptor(height, _N) if writes else rows
    operands = Matrix(left).descriptor(height, 128), Matrix(right).descriptor(_N, 128)
    bias = None if bias is None else bias.contiguous()
    programs = min(triton.cdiv(p, height) * triton.cdiv(q, _N), processors(out.device))
    arguments = (*operands, left_scales, right_scales, result, bias, p, q, r, 1 if writes else rows.stride(0))
    reduces = add and writes and out.dtype == torch.float32
    constants = (right_scales.shape[1] == q, add, reduces, writes, height, _N, _GROUP)
    _product(programs, arguments, constants, warps, stages)
    if rows is not out:
        out.copy_(rows)


@Kernel
@triton.jit
def _product(
    a, b, a_scales, b_scales, out, bias, P, Q, R, o_stride,
    B_ROWS: tl.constexpr, ADD: tl.constexpr, REDUCE: tl.constexpr, O_DESCRIPTOR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [P, Q] (+)= sum over blocks of 128 of a_scale b_scale (A B^T) + bias; A [P, R] and B [Q, R] in e4m3.

    a_scales [R / 128, P], b_scales [R / 128, Q / 128] or, if B_ROWS, [R / 128, Q]. One program computes every
    num_programs-th tile [M, N], N = 128. A block's sum leaves the tensor cores before the next: they accumulate 8-bit
    products with some 14 bits.
    """
    count = tl.cdiv(P, M) * tl.cdiv(Q, N)
    steps = max(tl.cdiv(R, _BLOCK), 1)  # known not to be 0: the compiler then writes the epilogue once
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        p, q = tile_index(tile, P, Q, M, N, GROUP)
        i = p + tl.arange(0, M)
        total = tl.zeros((M, N), tl.float32)
        for step in range(steps):
            left, right = a.load([p, step * _BLOCK]), b.load([q, step * _BLOCK])
            scale = tl.load(a_scales + (tl.cast(step, tl.int64) * P + i), i < P, other=0.0)
            part = dot(left, right.T, tl.zeros((M, N), tl.float32), "ieee")
            if B_ROWS:
                j = q + tl.arange(0, N)
                part *= tl.load(b_scales + (tl.cast(step, tl.int64) * Q + j), j < Q, other=0.0)[None, :]
            else:
                scale *= tl.load(b_scales + step * tl.cdiv(Q, N) + q // N)
            total += part * scale[:, None]
        if bias is not None:
            j = q + tl.arange(0, N)
            total += widen(tl.load(bias + j, j < Q, 0.0))[None, :]
        store_tile(total, p, q, out, P, Q, o_stride, ADD, REDUCE, O_DESCRIPTOR, M, N)
