"""Casts to 8 bits as Triton kernels: the scale, the cast and the transposition in one launch. Contract: spec.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import SMALLEST_AMAX
from zbkern.kernels.triton.common import Kernel, widen
from zbkern.kernels.triton.norm_forward import HELD, NormTile, at, norm_tile
from zbkern.kernels.triton.replay import replayed

_ACROSS = NormTile(32, 512, 16)
"""Of rows whose neighbours in memory are elements of other rows: two sectors of 32 bytes of each column in half
precision, and 32 KB on their way to an SM."""


@replayed
def float8_amax(x: Tensor, amax: Tensor) -> None:
    if x.stride(0) < x.stride(1):
        x = x.t()
    rows, columns = x.shape
    width = min(triton.next_power_of_2(max(columns, 1)), 1024)
    constants = (8192 // width, width)
    _largest_of_parts(amax.numel(), (x, amax, rows, columns, *x.stride()), constants, 8, 1)


@replayed
def float8_cast(x: Tensor, amax: Tensor | None, power_of_2: bool, y: Tensor, scale: Tensor) -> None:
    rows, columns = x.shape
    if rows == 0:
        return
    tile, whole = norm_tile(columns), amax is None
    if x.stride(0) < x.stride(1) and rows > 1:
        tile = NormTile(_ACROSS.rows, min(_ACROSS.columns, triton.next_power_of_2(columns)), _ACROSS.warps)
    elif not whole or columns > HELD:
        tile = norm_tile(min(columns, 4096))
    parts = 0 if amax is None else triton.next_power_of_2(amax.numel())
    blocks = triton.cdiv(rows, tile.rows) * (1 if whole else triton.cdiv(columns, tile.columns))
    arguments = (x, amax, y, scale, rows, columns, 0 if amax is None else amax.numel(), *x.stride(), *y.stride())
    held = not whole or columns <= tile.columns
    constants = (torch.finfo(y.dtype).max, SMALLEST_AMAX, power_of_2, held, parts, tile.rows, tile.columns)
    _scale_and_cast(blocks, arguments, constants, tile.warps, 1)


@triton.jit
def _magnitude(x, row, column, x_row, x_column, mask):
    """(x, the bits of |x|), both in 32 bits: among these integers nan is the largest."""
    value = widen(tl.load(at(x, row, column, x_row, x_column), mask, other=0))
    return value, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@Kernel
@triton.jit
def _largest_of_parts(
    x, amax, rows, columns, x_row, x_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """amax [P] = max |x| of parts of x [rows, columns]. One program: a part, every P-th tile of ROWS x COLUMNS."""
    part, across = tl.program_id(0), tl.cdiv(columns, COLUMNS)
    most = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tile in range(part, tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        most = tl.maximum(most, _magnitude(x, row, column, x_row, x_column, mask)[1])
    largest = tl.max(tl.max(most, 1), 0).to(tl.float32, bitcast=True)
    tl.store(amax + part, largest)


@Kernel
@triton.jit
def _scale_and_cast(
    x, amax, y, scale, rows, columns, count, x_row, x_column, y_row, y_column,
    LIMIT: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr,
    HELD: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = x scale, x, y [rows, columns]; scale = LIMIT / max |x| of each row or, where there is amax [count], of that.

    One program: ROWS rows, with amax COLUMNS columns of them. HELD: they are read once; else COLUMNS at a time and
    twice, the second time from the L2 cache. LIMIT is y's largest finite number, which the cast stays within.
    """
    block, first = tl.program_id(0), 0
    if amax is not None:
        across = tl.cdiv(columns, COLUMNS)
        block, first = block // across, (block % across) * COLUMNS
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists, column = row < rows, first + tl.arange(0, COLUMNS)
    stop = COLUMNS if HELD else columns
    if HELD:
        mask = exists[:, None] & (column < columns)[None, :]
        value, bits = _magnitude(x, row, column, x_row, x_column, mask)
    if amax is None:
        most = tl.zeros([ROWS, COLUMNS], tl.int32)
        for start in range(0, stop, COLUMNS):
            if not HELD:
                mask = exists[:, None] & (start + column < columns)[None, :]
                value, bits = _magnitude(x, row, start + column, x_row, x_column, mask)
            most = tl.maximum(most, bits)
        factor = _scale(tl.max(most, 1), LIMIT, SMALLEST, POWER_OF_2)
        tl.store(scale + row, factor, exists)
    else:
        part = tl.arange(0, PARTS)
        most = tl.load(amax + part, part < count, other=0).to(tl.int32, bitcast=True)
        whole = _scale(tl.max(most, 0), LIMIT, SMALLEST, POWER_OF_2)
        tl.store(scale, whole, tl.program_id(0) == 0)
        factor = tl.zeros([ROWS], tl.float32) + whole
    for start in range(0, stop, COLUMNS):
        if not HELD:
            mask = exists[:, None] & (start + column < columns)[None, :]
            value, bits = _magnitude(x, row, start + column, x_row, x_column, mask)
        result = (value * factor[:, None]).to(y.dtype.element_ty)
        tl.store(at(y, row, start + column, y_row, y_column), result, mask)


@triton.jit
def _scale(bits, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    """LIMIT / max(amax, SMALLEST) in float64 as torchao has it, to float32; nan stays. bits: of amax."""
    amax = bits.to(tl.float32, bitcast=True).to(tl.float64)
    factor = (LIMIT / tl.where(amax < SMALLEST, SMALLEST, amax)).to(tl.float32)
    if POWER_OF_2:
        factor = tl.exp2(tl.floor(tl.log2(factor)))
    return factor
