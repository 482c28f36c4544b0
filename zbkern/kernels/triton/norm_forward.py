"""The forward of RMSNorm and LayerNorm in Triton, and what both directions share. Contract: spec.py.

One set of kernels: RMSNorm is LayerNorm without the mean. They move memory and do little else, so a row is read once
and held in registers where it fits.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, offset

HELD = 16384
"""Features up to which a row is held in registers; longer ones are read in pieces, once per pass."""

PIECE = 4096
"""Features of a longer row that one program reads at a time."""


class Tile(NamedTuple):
    """rows x columns elements are held by one program of so many warps."""

    rows: int
    columns: int
    warps: int


def norm_tile(features: int) -> Tile:
    """16 elements per thread, 32 for the longest rows; several rows at a time where one would leave threads idle."""
    columns = min(triton.next_power_of_2(features), HELD)
    rows = max(1, 2048 // columns)
    return Tile(rows, columns, min(max(rows * columns // 512, 4), 16))


def rms_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    y: Tensor,
    rstd: Tensor,
    residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> None:
    """y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps); with residual of summed = x + residual instead of x."""
    _forward(x, weight, None, eps, y, None, rstd, residual, summed)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> None:
    """y = (x - mean) rstd weight + bias; with residual of summed = x + residual instead of x."""
    _forward(x, weight, bias, eps, y, mean, rstd, residual, summed)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None:
    rows, features = x.shape
    if rows == 0 or features == 0:
        rstd.fill_(float("nan"))  # the mean of nothing, as in torch
        return
    tile, centered = norm_tile(features), mean is not None
    tensors = (x, residual, dense(weight), dense(bias), y, summed, mean, rstd)
    strides = (*x.stride(), *strides_of(residual), *y.stride(), *strides_of(summed))
    arguments = (*tensors, eps, rows, features, *strides)
    if features > HELD:
        _forward_pieces(rows, arguments, (centered, PIECE), warps=8, stages=1)
    else:
        blocks = triton.cdiv(rows, tile.rows)
        _forward_rows(blocks, arguments, (centered, tile.rows, tile.columns), warps=tile.warps, stages=1)


def dense(weight: Tensor | None) -> Tensor | None:
    """The weight in one piece, as the kernels read it."""
    return None if weight is None else weight.contiguous()


def strides_of(matrix: Tensor | None) -> tuple[int | None, int | None]:
    """Those of a matrix that may be missing."""
    return (None, None) if matrix is None else (matrix.stride(0), matrix.stride(1))


@triton.jit
def _load(x_ptr, residual_ptr, row, column, x_row, x_column, residual_row, residual_column, mask, wide: tl.constexpr):
    """x, or x + residual rounded to x's dtype: what is kept of the sum is what dgrad will read."""
    value = tl.load(x_ptr + row * x_row + offset(column, x_column), mask, other=0).to(wide)
    if residual_ptr is not None:
        value += tl.load(residual_ptr + row * residual_row + offset(column, residual_column), mask, other=0).to(wide)
        value = value.to(x_ptr.dtype.element_ty).to(wide)
    return value


@Kernel
@triton.jit
def _forward_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    rows,
    features,
    x_row,
    x_column,
    residual_row,
    residual_column,
    y_row,
    y_column,
    summed_row,
    summed_column,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = (x - mean) rstd weight + bias; x, y [rows, features]; one program: ROWS whole rows, read once.

    With a residual [rows, features], of summed = x + residual instead of x, which is written beside y.
    No loop: programs that wait for memory are hidden by others on the same SM.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = column < features
    mask = (row < rows)[:, None] & inside[None, :]
    wide = rstd_ptr.dtype.element_ty
    strides = (x_row, x_column, residual_row, residual_column)
    x = _load(x_ptr, residual_ptr, row[:, None], column[None, :], *strides, mask, wide)
    if residual_ptr is not None:
        summed = summed_ptr + row[:, None] * summed_row + offset(column[None, :], summed_column)
        tl.store(summed, x.to(summed_ptr.dtype.element_ty), mask)
    if CENTERED:
        mean = tl.sum(x, 1) / features
        tl.store(mean_ptr + row, mean, row < rows)
        x = tl.where(inside[None, :], x - mean[:, None], 0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / features + eps)
    tl.store(rstd_ptr + row, rstd, row < rows)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, inside, other=0).to(wide)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, inside, other=0).to(wide)[None, :]
    tl.store(y_ptr + row[:, None] * y_row + offset(column[None, :], y_column), y.to(y_ptr.dtype.element_ty), mask)


@Kernel
@triton.jit
def _forward_pieces(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    rows,
    features,
    x_row,
    x_column,
    residual_row,
    residual_column,
    y_row,
    y_column,
    summed_row,
    summed_column,
    CENTERED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """As _forward_rows for one long row per program, in pieces; passes after the first find the row in the L2 cache.

    Every pass adds the residual anew: what one thread writes of the sum, another of the block might read too early.
    """
    row = tl.program_id(0).to(tl.int64)
    wide = rstd_ptr.dtype.element_ty
    strides = (x_row, x_column, residual_row, residual_column)
    mean = 0.0
    if CENTERED:
        sums = tl.zeros([COLUMNS], wide)
        for start in range(0, features, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            sums += _load(x_ptr, residual_ptr, row, column, *strides, column < features, wide)
        mean = tl.sum(sums, 0) / features
        tl.store(mean_ptr + row, mean)
    sums = tl.zeros([COLUMNS], wide)
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = _load(x_ptr, residual_ptr, row, column, *strides, column < features, wide)
        x = tl.where(column < features, x - mean, 0)
        sums += x * x
    rstd = 1 / tl.sqrt(tl.sum(sums, 0) / features + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < features
        x = _load(x_ptr, residual_ptr, row, column, *strides, inside, wide)
        if residual_ptr is not None:
            summed = summed_ptr + row * summed_row + offset(column, summed_column)
            tl.store(summed, x.to(summed_ptr.dtype.element_ty), inside)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + column, inside, other=0).to(wide)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, inside, other=0).to(wide)
        tl.store(y_ptr + row * y_row + offset(column, y_column), y.to(y_ptr.dtype.element_ty), inside)
