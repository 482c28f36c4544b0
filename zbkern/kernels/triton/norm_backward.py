"""The backward of RMSNorm and LayerNorm in Triton: dx and partial sums in B, their sums in W. Contract: spec.py.

The sums over rows that the weights need ride along with dx: every program adds up its own rows and leaves one row of
partial sums.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, offset
from zbkern.kernels.triton.norm_forward import PIECE, dense, norm_tile, strides_of

HELD = 8192
"""Features up to which dgrad holds a row in registers, beside dy and its sums: 32 elements of each per thread spill."""

_STAGES = 3  # blocks of rows in flight in the loop of one program
_MERGED = 4  # segments that one launch of norm_wgrad sums; more take several launches


def norm_partials(rows: int, features: int, device: torch.device) -> int:
    """One partial sum per program: two on each SM, so that one loads while the other sums a row, where both have room:
    with 8 warps of at most 128 registers (compiled for 9.0). With 16 warps one fills it."""
    if features > HELD:
        return max(1, min(16, triton.cdiv(rows, 64)))
    tile = norm_tile(features)
    programs = _processors(device) * (2 if tile.warps <= 8 else 1)
    return max(1, min(programs, triton.cdiv(rows, tile.rows)))


def rms_norm_dgrad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    partials: Tensor | None,
    dsummed: Tensor | None = None,
) -> None:
    """dx = rstd (g - normal mean(g normal)) [+ dsummed], g = dy weight, normal = x rstd; partials: sum of dy normal."""
    _dgrad(dy, x, weight, None, rstd, dx, partials, dsummed)


def layer_norm_dgrad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    partials: Tensor | None,
    dsummed: Tensor | None = None,
) -> None:
    """dx = rstd (g - mean(g) - normal mean(g normal)) [+ dsummed]; partials = sums over rows of dy normal and of dy."""
    _dgrad(dy, x, weight, mean, rstd, dx, partials, dsummed)


def norm_wgrad(segments: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
    """outputs[i] (+)= sum over segments and over P of partials [len(outputs), P, K] [i]."""
    features = segments[0][0].shape[-1]
    if features == 0:
        return
    for start in range(0, len(segments), _MERGED):
        some = [partials for (partials,) in segments[start : start + _MERGED]]
        for index, output in enumerate(outputs):
            if output is None:
                continue
            parts = [partials[index] for partials in some]
            counts = [part.shape[0] for part in parts]
            parts += parts[:1] * (_MERGED - len(parts))
            counts += [0] * (_MERGED - len(counts))
            arguments = (*parts, *counts, parts[0].stride(0), output, features, output.stride(0))
            _sum_partials(triton.cdiv(features, 32), arguments, (accumulate, 32, 32), warps=4, stages=1)
        accumulate = True


@functools.cache
def _processors(device: torch.device) -> int:
    """SMs of the device; in the interpreter 3, so that programs loop over rows there, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _dgrad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    partials: Tensor | None,
    dsummed: Tensor | None,
) -> None:
    rows, features = x.shape
    if rows == 0 or features == 0:
        if partials is not None:
            partials.zero_()
        return
    tile, centered = norm_tile(features), mean is not None
    strides = (*dy.stride(), *x.stride(), *strides_of(dsummed), *dx.stride())
    arguments = (dy, x, dsummed, dense(weight), mean, rstd, dx)
    if features <= HELD:
        programs = norm_partials(rows, features, x.device) if partials is None else partials.shape[1]
        constants = (centered, tile.rows, tile.columns, _STAGES)
        _dgrad_rows(programs, (*arguments, partials, rows, features, *strides), constants, warps=tile.warps, stages=1)
        return
    _dgrad_pieces(rows, (*arguments, features, *strides), (centered, PIECE), warps=8, stages=1)
    if partials is not None:
        grid = (triton.cdiv(features, 256), partials.shape[1])
        summed = (dy, x, mean, rstd, partials, rows, features, *strides[:4])
        _sum_columns(grid, summed, (centered, 8, 256), warps=4, stages=1)


@Kernel
@triton.jit
def _dgrad_rows(
    dy_ptr,
    x_ptr,
    dsummed_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partials_ptr,
    rows,
    features,
    dy_row,
    dy_column,
    x_row,
    x_column,
    dsummed_row,
    dsummed_column,
    dx_row,
    dx_column,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = rstd (g - normal mean(g normal) [- mean(g)]), g = dy weight, [+ dsummed]; partials = sums of dy
    normal [, dy].

    dy, x, dsummed, dx [rows, features], partials [1 or 2, programs, features] or None. One program: every P-th block of
    ROWS rows, so that all programs read neighbouring memory at one time; the next are fetched while this one is summed.
    """
    wide = rstd_ptr.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    inside = column < features
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, inside, other=0).to(wide)[None, :]
    if partials_ptr is not None:
        along = tl.zeros([ROWS, COLUMNS], wide)
        total = tl.zeros([ROWS, COLUMNS], wide)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        normal = tl.load(x_ptr + row[:, None] * x_row + offset(column[None, :], x_column), mask, other=0).to(wide)
        g = tl.load(dy_ptr + row[:, None] * dy_row + offset(column[None, :], dy_column), mask, other=0).to(wide)
        rstd = tl.load(rstd_ptr + row, row < rows, other=0)[:, None]
        if CENTERED:
            normal -= tl.load(mean_ptr + row, row < rows, other=0)[:, None]
            normal = tl.where(inside[None, :], normal, 0)
        normal *= rstd
        if partials_ptr is not None:
            along += g * normal
            if CENTERED:
                total += g
        if weight_ptr is not None:
            g *= weight
        dx = g - normal * (tl.sum(g * normal, 1) / features)[:, None]
        if CENTERED:
            dx -= (tl.sum(g, 1) / features)[:, None]
        dx *= rstd
        if dsummed_ptr is not None:
            dsummed = dsummed_ptr + row[:, None] * dsummed_row + offset(column[None, :], dsummed_column)
            dx += tl.load(dsummed, mask, other=0).to(wide)
        tl.store(
            dx_ptr + row[:, None] * dx_row + offset(column[None, :], dx_column), dx.to(dx_ptr.dtype.element_ty), mask
        )
    if partials_ptr is not None:
        mine = partials_ptr + tl.program_id(0).to(tl.int64) * features + column
        tl.store(mine, tl.sum(along, 0), inside)
        if CENTERED:
            tl.store(mine + tl.num_programs(0).to(tl.int64) * features, tl.sum(total, 0), inside)


@Kernel
@triton.jit
def _dgrad_pieces(
    dy_ptr,
    x_ptr,
    dsummed_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    features,
    dy_row,
    dy_column,
    x_row,
    x_column,
    dsummed_row,
    dsummed_column,
    dx_row,
    dx_column,
    CENTERED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx as in _dgrad_rows for one long row per program, in pieces: a pass for the means, one for dx."""
    row = tl.program_id(0).to(tl.int64)
    wide = rstd_ptr.dtype.element_ty
    rstd = tl.load(rstd_ptr + row)
    mean = tl.load(mean_ptr + row) if CENTERED else 0.0
    along = tl.zeros([COLUMNS], wide)
    total = tl.zeros([COLUMNS], wide)
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < features
        g = tl.load(dy_ptr + row * dy_row + offset(column, dy_column), inside, other=0).to(wide)
        normal = (tl.load(x_ptr + row * x_row + offset(column, x_column), inside, other=0).to(wide) - mean) * rstd
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + column, inside, other=0).to(wide)
        along += tl.where(inside, g * normal, 0)
        total += g
    slope = tl.sum(along, 0) / features
    level = tl.sum(total, 0) / features if CENTERED else 0.0
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < features
        g = tl.load(dy_ptr + row * dy_row + offset(column, dy_column), inside, other=0).to(wide)
        normal = (tl.load(x_ptr + row * x_row + offset(column, x_column), inside, other=0).to(wide) - mean) * rstd
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + column, inside, other=0).to(wide)
        dx = (g - normal * slope - level) * rstd
        if dsummed_ptr is not None:
            dx += tl.load(dsummed_ptr + row * dsummed_row + offset(column, dsummed_column), inside, other=0).to(wide)
        tl.store(dx_ptr + row * dx_row + offset(column, dx_column), dx.to(dx_ptr.dtype.element_ty), inside)


@Kernel
@triton.jit
def _sum_columns(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    partials_ptr,
    rows,
    features,
    dy_row,
    dy_column,
    x_row,
    x_column,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """partials = sums over rows of dy normal [, dy], for long rows; one program: COLUMNS columns, every P-th block."""
    wide = rstd_ptr.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    along = tl.zeros([ROWS, COLUMNS], wide)
    total = tl.zeros([ROWS, COLUMNS], wide)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        normal = tl.load(x_ptr + row[:, None] * x_row + offset(column[None, :], x_column), mask, other=0).to(wide)
        g = tl.load(dy_ptr + row[:, None] * dy_row + offset(column[None, :], dy_column), mask, other=0).to(wide)
        if CENTERED:
            normal -= tl.load(mean_ptr + row, row < rows, other=0)[:, None]
            total += g
        along += g * normal * tl.load(rstd_ptr + row, row < rows, other=0)[:, None]
    mine = partials_ptr + tl.program_id(1).to(tl.int64) * features + column
    tl.store(mine, tl.sum(along, 0), inside)
    if CENTERED:
        tl.store(mine + tl.num_programs(1).to(tl.int64) * features, tl.sum(total, 0), inside)


@Kernel
@triton.jit
def _sum_partials(
    part0,
    part1,
    part2,
    part3,
    count0,
    count1,
    count2,
    count3,
    stride,
    out_ptr,
    features,
    out_stride,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out (+)= sums over rows of part0 [count0, features] to part3; one program: COLUMNS columns, in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    parts, counts = (part0, part1, part2, part3), (count0, count1, count2, count3)
    sums = tl.zeros([ROWS, COLUMNS], part0.dtype.element_ty)
    for s in tl.static_range(4):
        for start in range(0, counts[s], ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < counts[s])[:, None] & inside[None, :]
            sums += tl.load(parts[s] + row[:, None] * stride + column[None, :], mask, other=0)
    total = tl.sum(sums, 0)
    out = out_ptr + column * out_stride
    if ACCUMULATE:
        total += tl.load(out, inside, other=0).to(total.dtype)
    tl.store(out, total.to(out_ptr.dtype.element_ty), inside)
