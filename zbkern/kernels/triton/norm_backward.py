"""The backward of RMSNorm and LayerNorm in Triton: dx and partial sums in B, their sums in W. Contract: spec.py.

The sums over rows that the weights need ride along with dx: every program adds up its own rows and leaves one row of
partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments
from zbkern.kernels.triton.common import Kernel
from zbkern.kernels.triton.matmul_tile import processors
from zbkern.kernels.triton.norm_forward import at, dense, norm_tile, strides_of
from zbkern.kernels.triton.replay import replayed
from zbkern.kernels.triton.wgrad import sum_rows

HELD = 8192
"""Features up to which dgrad holds a row in registers, beside dy and its sums: 32 elements of each per thread spill."""

_STAGES = 3  # blocks of rows in flight in the loop of one program


def norm_partials(rows: int, features: int, device: torch.device) -> int:
    """One partial sum per program: two on each SM, so that one loads while the other sums a row, where both have room:
    with 8 warps of at most 128 registers (compiled for 9.0). With 16 warps one fills it."""
    if features > HELD:
        return max(1, min(16, triton.cdiv(rows, 64)))
    tile = norm_tile(features)
    programs = processors(device) * (2 if tile.warps <= 8 else 1)
    return max(1, min(programs, triton.cdiv(rows, tile.rows)))


@replayed
def norm_dgrad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    partials: Tensor | None,
    dsummed: Tensor | None = None,
) -> None:
    rows, features = x.shape
    if rows == 0 or features == 0:
        if partials is not None:
            partials.zero_()
        return
    strides = (*dy.stride(), *x.stride(), *strides_of(dsummed), *dx.stride())
    tile, centered = norm_tile(features, held := features <= HELD), mean is not None
    programs = rows
    if held:
        programs = norm_partials(rows, features, x.device) if partials is None else partials.shape[1]
    arguments = (dy, x, dsummed, dense(weight), mean, rstd, dx, partials if held else None, rows, features)
    constants = (centered, held, tile.rows, tile.columns, _STAGES if held else 1)
    _dgrads(programs, (*arguments, *strides), constants, tile.warps, 1)
    if partials is not None and not held:
        grid = (triton.cdiv(features, 256), partials.shape[1])
        summed = (dy, x, mean, rstd, partials, rows, features, *strides[:4])
        _sum_columns(grid, summed, (centered, 8, 256), 4, 1)


def norm_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    for index, output in enumerate(outputs):
        if output is not None and output.numel():
            sum_rows([(partials[index], None) for (partials,) in segments], output, accumulate)


@triton.jit
def _load_pair(
    dy, x, mean, rstd, row, column, rows, features, dy_row, dy_column, x_row, x_column,
    CENTERED: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """(dy, the normal that was multiplied by the weight), [ROWS, COLUMNS]; 0 where they do not exist."""
    inside = (column < features)[None, :]
    mask = (row < rows)[:, None] & inside
    normal = tl.load(at(x, row, column, x_row, x_column), mask, other=0).to(wide)
    g = tl.load(at(dy, row, column, dy_row, dy_column), mask, other=0).to(wide)
    if CENTERED:
        normal -= tl.load(mean + row, row < rows, other=0)[:, None]
        normal = tl.where(inside, normal, 0)
    return g, normal * tl.load(rstd + row, row < rows, other=0)[:, None]


@Kernel
@triton.jit
def _dgrads(
    dy, x, dsummed, weight, mean, rstd, dx, partials, rows, features,
    dy_row, dy_column, x_row, x_column, dsummed_row, dsummed_column, dx_row, dx_column,
    CENTERED: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = rstd (g - normal mean(g normal) [- mean(g)]), g = dy weight, [+ dsummed]; partials = sums of dy normal
    [, dy].

    dy, x, dsummed, dx [rows, features], partials [1 or 2, programs, features] or None. One program: every P-th block of
    ROWS rows, so that all programs read neighbouring memory at one time; the next are fetched while this one is summed.
    HELD: rows are read once; else COLUMNS at a time, in a pass for the means and one for dx.
    """
    wide = rstd.dtype.element_ty
    strides = (dy_row, dy_column, x_row, x_column)
    column = tl.arange(0, COLUMNS)
    stop = COLUMNS if HELD else features
    if HELD and weight is not None:
        factor = tl.load(weight + column, column < features, other=0).to(wide)[None, :]
    if partials is not None:
        along = tl.zeros([ROWS, COLUMNS], wide)
        total = tl.zeros([ROWS, COLUMNS], wide)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        slope = tl.zeros([ROWS, COLUMNS], wide)
        level = tl.zeros([ROWS, COLUMNS], wide)
        if HELD:
            g, normal = _load_pair(dy, x, mean, rstd, row, column, rows, features, *strides, CENTERED, wide)
        for start in range(0, stop, COLUMNS):
            if not HELD:
                g, normal = _load_pair(dy, x, mean, rstd, row, start + column, rows, features, *strides, CENTERED, wide)
            if partials is not None:
                along += g * normal
                if CENTERED:
                    total += g
            if weight is not None:
                if not HELD:
                    inside = start + column < features
                    factor = tl.load(weight + start + column, inside, other=0).to(wide)[None, :]
                g *= factor
            slope += g * normal
            level += g
        slopes = (tl.sum(slope, 1) / features)[:, None]
        levels = (tl.sum(level, 1) / features)[:, None]
        for start in range(0, stop, COLUMNS):
            if not HELD:
                g, normal = _load_pair(dy, x, mean, rstd, row, start + column, rows, features, *strides, CENTERED, wide)
                if weight is not None:
                    inside = start + column < features
                    g *= tl.load(weight + start + column, inside, other=0).to(wide)[None, :]
            result = g - normal * slopes
            if CENTERED:
                result -= levels
            result *= tl.load(rstd + row, row < rows, other=0)[:, None]
            mask = (row < rows)[:, None] & (start + column < features)[None, :]
            if dsummed is not None:
                place = at(dsummed, row, start + column, dsummed_row, dsummed_column)
                result += tl.load(place, mask, other=0).to(wide)
            tl.store(at(dx, row, start + column, dx_row, dx_column), result.to(dx.dtype.element_ty), mask)
    if partials is not None:
        target = partials + tl.program_id(0).to(tl.int64) * features + column
        tl.store(target, tl.sum(along, 0), column < features)
        if CENTERED:
            tl.store(target + tl.num_programs(0).to(tl.int64) * features, tl.sum(total, 0), column < features)


@Kernel
@triton.jit
def _sum_columns(
    dy, x, mean, rstd, partials, rows, features, dy_row, dy_column, x_row, x_column,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """partials = sums over rows of dy normal [, dy], for long rows; one program: COLUMNS columns, every P-th block."""
    wide = rstd.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    along = tl.zeros([ROWS, COLUMNS], wide)
    total = tl.zeros([ROWS, COLUMNS], wide)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        g, normal = _load_pair(
            dy, x, mean, rstd, row, column, rows, features, dy_row, dy_column, x_row, x_column, CENTERED, wide
        )
        along += g * normal
        total += g
    target = partials + tl.program_id(1).to(tl.int64) * features + column
    tl.store(target, tl.sum(along, 0), inside)
    if CENTERED:
        tl.store(target + tl.num_programs(1).to(tl.int64) * features, tl.sum(total, 0), inside)
