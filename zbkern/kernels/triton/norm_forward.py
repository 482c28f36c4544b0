"""The forward of RMSNorm and LayerNorm in Triton, and what both directions share. Contract: spec.py.

One set of kernels: RMSNorm is LayerNorm without the mean. They move memory and do little else, so a row is read once
and held in registers where it fits.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, offset
from zbkern.kernels.triton.replay import replayed

HELD = 16384
"""Features up to which a row is held in registers; longer ones are read in pieces, once per pass."""

PIECE = 4096
"""Features of a longer row that one program reads at a time."""


class NormTile(NamedTuple):
    """rows x columns elements are held by one program of so many warps."""

    rows: int
    columns: int
    warps: int


def norm_tile(features: int, held: bool = True) -> NormTile:
    """16 elements per thread, 32 for the longest rows; several rows at a time where one would leave threads idle. A
    piece of a row that is not held."""
    if not held:
        return NormTile(1, PIECE, 8)
    columns = min(triton.next_power_of_2(features), HELD)
    rows = max(1, 2048 // columns)
    return NormTile(rows, columns, min(max(rows * columns // 512, 4), 16))


@replayed
def norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> None:
    rows, features = x.shape
    if rows == 0 or features == 0:
        rstd.fill_(float("nan"))  # the mean of nothing, as in torch
        return
    tensors = (x, residual, dense(weight), dense(bias), y, summed, mean, rstd)
    strides = (*x.stride(), *strides_of(residual), *y.stride(), *strides_of(summed))
    tile = norm_tile(features, held := features <= HELD)
    constants = (mean is not None, held, tile.rows, tile.columns)
    _normalise(triton.cdiv(rows, tile.rows), (*tensors, eps, rows, features, *strides), constants, tile.warps, 1)


def dense(weight: Tensor | None) -> Tensor | None:
    """The weight in one piece, as the kernels read it."""
    return None if weight is None else weight.contiguous()


def strides_of(matrix: Tensor | None) -> tuple[int | None, int | None]:
    """The strides of a matrix; None for one that is missing."""
    return (None, None) if matrix is None else (matrix.stride(0), matrix.stride(1))


@triton.jit
def at(matrix, row, column, row_stride, column_stride):
    """Pointers to [ROWS, COLUMNS] of a matrix; row in 64 bits."""
    return matrix + row[:, None] * row_stride + offset(column[None, :], column_stride)


@triton.jit
def _load(x, residual, row, column, x_row, x_column, residual_row, residual_column, mask, wide: tl.constexpr):
    """x, or x + residual rounded to x's dtype: what is kept of the sum is what dgrad will read."""
    value = tl.load(at(x, row, column, x_row, x_column), mask, other=0).to(wide)
    if residual is not None:
        value += tl.load(at(residual, row, column, residual_row, residual_column), mask, other=0).to(wide)
        value = value.to(x.dtype.element_ty).to(wide)
    return value


@Kernel
@triton.jit
def _normalise(
    x, residual, weight, bias, y, summed, mean, rstd, eps, rows, features,
    x_row, x_column, residual_row, residual_column, y_row, y_column, summed_row, summed_column,
    CENTERED: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) rstd weight + bias; x, y [rows, features]. One program: ROWS rows.

    With a residual [rows, features], of summed = x + residual instead of x, which is written beside y. HELD: rows are
    read once, and loops have one turn, of which nothing is left in the code; else COLUMNS at a time, and passes after
    the first find them in the L2 cache. Every pass adds the residual anew: what one thread writes of the sum, another
    of the block might read too early. No loop over rows: programs that wait for memory are hidden by others on the SM.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    wide = rstd.dtype.element_ty
    strides = (x_row, x_column, residual_row, residual_column)
    stop = COLUMNS if HELD else features
    column = tl.arange(0, COLUMNS)
    if HELD:
        mask = exists[:, None] & (column < features)[None, :]
        value = _load(x, residual, row, column, *strides, mask, wide)
        if residual is not None:
            tl.store(at(summed, row, column, summed_row, summed_column), value.to(summed.dtype.element_ty), mask)
    level = tl.zeros([ROWS], wide)
    if CENTERED:
        sums = tl.zeros([ROWS, COLUMNS], wide)
        for start in range(0, stop, COLUMNS):
            if not HELD:
                mask = exists[:, None] & (start + column < features)[None, :]
                value = _load(x, residual, row, start + column, *strides, mask, wide)
            sums += value
        level = tl.sum(sums, 1) / features
        tl.store(mean + row, level, exists)
    sums = tl.zeros([ROWS, COLUMNS], wide)
    for start in range(0, stop, COLUMNS):
        inside = (start + column < features)[None, :]
        if not HELD:
            value = _load(x, residual, row, start + column, *strides, exists[:, None] & inside, wide)
        difference = tl.where(inside, value - level[:, None], 0)
        sums += difference * difference
    factor = 1 / tl.sqrt(tl.sum(sums, 1) / features + eps)
    tl.store(rstd + row, factor, exists)
    for start in range(0, stop, COLUMNS):
        inside = start + column < features
        mask = exists[:, None] & inside[None, :]
        if not HELD:
            value = _load(x, residual, row, start + column, *strides, mask, wide)
            if residual is not None:
                place = at(summed, row, start + column, summed_row, summed_column)
                tl.store(place, value.to(summed.dtype.element_ty), mask)
        result = (value - level[:, None]) * factor[:, None]
        if weight is not None:
            result *= tl.load(weight + start + column, inside, other=0).to(wide)[None, :]
        if bias is not None:
            result += tl.load(bias + start + column, inside, other=0).to(wide)[None, :]
        tl.store(at(y, row, start + column, y_row, y_column), result.to(y.dtype.element_ty), mask)
