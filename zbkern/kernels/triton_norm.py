"""RMSNorm and LayerNorm in Triton: one set of kernels, RMSNorm being LayerNorm without the mean. Contract: spec.py.

These kernels move memory and do little else, so a row is read once and held in registers where it fits. The sums over
rows that the weights need ride along with dx: every program adds up its own rows and leaves one row of partial sums.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton_common import Kernel, Variant

HELD = 16384
"""Features up to which a row is held in registers; longer ones are read in pieces, once per pass."""

HELD_BACKWARD = 8192
"""The same for dgrad, which holds dy and its sums over rows as well: 32 elements of each per thread spill."""

_PIECE = 4096  # of a longer row
_MERGED = 4  # segments that one launch of norm_wgrad sums; more take several launches


class Tile(NamedTuple):
    """rows x columns elements are held by one program of so many warps, `stages` of them in flight in its loop."""

    rows: int
    columns: int
    warps: int
    stages: int


def norm_tile(features: int) -> Tile:
    """16 elements per thread, 32 for the longest rows; several rows at a time where one would leave threads idle."""
    columns = min(triton.next_power_of_2(features), HELD)
    rows = max(1, 2048 // columns)
    warps = min(max(rows * columns // 512, 4), 16)
    return Tile(rows, columns, warps, 3 if columns <= HELD_BACKWARD else 1)


def norm_partials(rows: int, features: int, device: torch.device) -> int:
    """One partial sum per program: one program per SM keeps the memory busy and leaves the fewest."""
    if features > HELD_BACKWARD:
        return max(1, min(16, triton.cdiv(rows, 64)))
    return max(1, min(_processors(device), triton.cdiv(rows, norm_tile(features).rows)))


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
    tensors = (x, residual, _dense(weight), _dense(bias), y, summed, mean, rstd)
    strides = (*x.stride(), *_strides(residual), *y.stride(), *_strides(summed))
    arguments = (*tensors, eps, rows, features, *strides)
    if features > HELD:
        _forward_pieces(rows, arguments, (centered, _PIECE), warps=8, stages=1)
    else:
        blocks = triton.cdiv(rows, tile.rows)
        _forward_rows(blocks, arguments, (centered, tile.rows, tile.columns), warps=tile.warps, stages=1)


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
    strides = (*dy.stride(), *x.stride(), *_strides(dsummed), *dx.stride())
    arguments = (dy, x, dsummed, _dense(weight), mean, rstd, dx)
    if features <= HELD_BACKWARD:
        programs = norm_partials(rows, features, x.device) if partials is None else partials.shape[1]
        constants = (centered, tile.rows, tile.columns, tile.stages)
        _dgrad_rows(programs, (*arguments, partials, rows, features, *strides), constants, warps=tile.warps, stages=1)
        return
    _dgrad_pieces(rows, (*arguments, features, *strides), (centered, _PIECE), warps=8, stages=1)
    if partials is not None:
        grid = (triton.cdiv(features, 256), partials.shape[1])
        arguments = (dy, x, mean, rstd, partials, rows, features, *strides[:4])
        _sum_columns(grid, arguments, (centered, 8, 256), warps=4, stages=1)


def _dense(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _strides(matrix: Tensor | None) -> tuple[int | None, int | None]:
    return (None, None) if matrix is None else (matrix.stride(0), matrix.stride(1))


@triton.jit
def _load(x_ptr, residual_ptr, row, column, x_row, x_column, residual_row, residual_column, mask, wide: tl.constexpr):
    """x, or x + residual rounded to x's dtype: what is kept of the sum is what dgrad will read."""
    value = tl.load(x_ptr + row * x_row + column * x_column, mask, other=0).to(wide)
    if residual_ptr is not None:
        value += tl.load(residual_ptr + row * residual_row + column * residual_column, mask, other=0).to(wide)
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
        summed = summed_ptr + row[:, None] * summed_row + column[None, :] * summed_column
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
    tl.store(y_ptr + row[:, None] * y_row + column[None, :] * y_column, y.to(y_ptr.dtype.element_ty), mask)


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
        normal = tl.load(x_ptr + row[:, None] * x_row + column[None, :] * x_column, mask, other=0).to(wide)
        g = tl.load(dy_ptr + row[:, None] * dy_row + column[None, :] * dy_column, mask, other=0).to(wide)
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
            dsummed = dsummed_ptr + row[:, None] * dsummed_row + column[None, :] * dsummed_column
            dx += tl.load(dsummed, mask, other=0).to(wide)
        tl.store(dx_ptr + row[:, None] * dx_row + column[None, :] * dx_column, dx.to(dx_ptr.dtype.element_ty), mask)
    if partials_ptr is not None:
        mine = partials_ptr + tl.program_id(0).to(tl.int64) * features + column
        tl.store(mine, tl.sum(along, 0), inside)
        if CENTERED:
            tl.store(mine + tl.num_programs(0).to(tl.int64) * features, tl.sum(total, 0), inside)


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
            summed = summed_ptr + row * summed_row + column * summed_column
            tl.store(summed, x.to(summed_ptr.dtype.element_ty), inside)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + column, inside, other=0).to(wide)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, inside, other=0).to(wide)
        tl.store(y_ptr + row * y_row + column * y_column, y.to(y_ptr.dtype.element_ty), inside)


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
        g = tl.load(dy_ptr + row * dy_row + column * dy_column, inside, other=0).to(wide)
        normal = (tl.load(x_ptr + row * x_row + column * x_column, inside, other=0).to(wide) - mean) * rstd
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + column, inside, other=0).to(wide)
        along += tl.where(inside, g * normal, 0)
        total += g
    slope = tl.sum(along, 0) / features
    level = tl.sum(total, 0) / features if CENTERED else 0.0
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < features
        g = tl.load(dy_ptr + row * dy_row + column * dy_column, inside, other=0).to(wide)
        normal = (tl.load(x_ptr + row * x_row + column * x_column, inside, other=0).to(wide) - mean) * rstd
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + column, inside, other=0).to(wide)
        dx = (g - normal * slope - level) * rstd
        if dsummed_ptr is not None:
            dx += tl.load(dsummed_ptr + row * dsummed_row + column * dsummed_column, inside, other=0).to(wide)
        tl.store(dx_ptr + row * dx_row + column * dx_column, dx.to(dx_ptr.dtype.element_ty), inside)


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
        normal = tl.load(x_ptr + row[:, None] * x_row + column[None, :] * x_column, mask, other=0).to(wide)
        g = tl.load(dy_ptr + row[:, None] * dy_row + column[None, :] * dy_column, mask, other=0).to(wide)
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


_SHAPES = ((128, False), (4096, False), (4096, True), (8192, True), (16384, True), (65536, True))
_ADDED = ((4096, False), (8192, True), (16384, True), (65536, True))


def variants(capability: int) -> list[Variant]:
    """bf16 rows of usual lengths, the same on every GPU; layer is LayerNorm, which holds more than RMSNorm.

    "added": with a residual, and in dgrad with the gradient of the sum.
    """
    found = []
    for features, centered, added in (*((*s, False) for s in _SHAPES), *((*s, True) for s in _ADDED)):
        name = f"{'added ' if added else ''}{'layer' if centered else 'rms'} {features}"
        tile, mean, more = norm_tile(features), "*fp32" if centered else None, "*bf16" if added else None
        bias, sizes, strides = "*bf16" if centered else None, ("i32", "i32:16"), ("i32:16", 1)
        others = strides if added else (None, None)
        tensors = ("*bf16", more, "*bf16", bias, "*bf16", more, mean, "*fp32")
        forward = (*tensors, "fp32", *sizes, *(strides + others) * 2)
        dgrad = ("*bf16", "*bf16", more, "*bf16", mean, "*fp32", "*bf16")
        between = (*strides * 2, *others, *strides)
        constants = (centered, tile.rows, tile.columns)
        if features <= HELD:
            found.append(Variant(f"forward {name}", _forward_rows, forward, constants, tile.warps, 1))
        else:
            found.append(Variant(f"forward {name}", _forward_pieces, forward, (centered, _PIECE), 8, 1))
        if features <= HELD_BACKWARD:
            types = (*dgrad, "*fp32", *sizes, *between)
            found.append(Variant(f"dgrad {name}", _dgrad_rows, types, (*constants, tile.stages), tile.warps, 1))
        else:
            types = (*dgrad, "i32:16", *between)
            found.append(Variant(f"dgrad {name}", _dgrad_pieces, types, (centered, _PIECE), 8, 1))
            if not added:
                types = ("*bf16", "*bf16", mean, "*fp32", "*fp32", *sizes, *strides * 2)
                found.append(Variant(f"sums {name}", _sum_columns, types, (centered, 8, 256), 4, 1))
    types = ("*fp32",) * 4 + ("i32",) * 4 + ("i32:16", "*fp32", "i32:16", 1)
    return [*found, Variant("wgrad", _sum_partials, types, (True, 32, 32), 4, 1)]
