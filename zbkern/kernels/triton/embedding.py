"""Embedding in Triton: the gradient without atomics, so that every run gives the same bits. Contract: spec.py."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments
from zbkern.kernels.triton.common import Kernel, offset, widen

_MERGED = 4  # segments that one launch takes; more take several launches
_RARE = (4, 512)  # rows x columns at a time: most tokens of a text are rare
_FREQUENT = (32, 64)  # where there are more than 8 of each: runs are long, and walked from one end to the other


def embedding_fwd(indices: Tensor, weight: Tensor, y: Tensor) -> None:
    """torch's own gather: it moves memory and nothing else, and finds indices that are out of range."""
    torch.index_select(weight, 0, indices, out=y)


def embedding_wgrad(segments: Segments, outputs: Outputs, accumulate: bool, padding_idx: int | None = None) -> None:
    """Allocates 32 bytes per index, to sort them: those of a row are added in their order."""
    (dweight,) = outputs
    if dweight is None:
        return
    if not accumulate:
        dweight.zero_()
    rest = [(indices, dy) for indices, dy in segments if indices.numel() and dy.shape[1]]
    while rest:
        strides = rest[0][1].stride()
        alike = [segment for segment in rest if segment[1].stride() == strides][:_MERGED]
        rest = [segment for segment in rest if all(segment is not one for one in alike)]
        _add_rows(alike, dweight, accumulate, padding_idx)
        accumulate = True


def _add_rows(
    segments: Sequence[tuple[Tensor, Tensor]], dweight: Tensor, accumulate: bool, padding_idx: int | None
) -> None:
    tokens, order = torch.cat([indices for indices, _ in segments]).sort(stable=True)
    parts = [dy for _, dy in segments]
    ends = [sum(dy.shape[0] for dy in parts[: i + 1]) for i in range(len(parts))]
    spare = _MERGED - len(parts)
    count, features = ends[-1], dweight.shape[1]
    arguments = (*parts, *parts[:1] * spare, *ends[:-1], *[count] * spare, tokens, order, dweight)
    padding = -1 if padding_idx is None else padding_idx
    arguments = (*arguments, padding, count, features, *parts[0].stride(), *dweight.stride())
    rows, columns = _RARE if count <= 8 * dweight.shape[0] else _FREQUENT
    grid = (count, triton.cdiv(features, columns))
    _sum_runs(grid, arguments, (accumulate, len(parts), rows, columns), warps=4, stages=1)


@triton.jit
def _rows(part, place, first, in_run, row, columns, inside):
    """Rows place - first of a part, where they are mine; else 0."""
    base = part + (place - first) * row
    return widen(tl.load(base[:, None] + columns, in_run[:, None] & inside, other=0))


@Kernel
@triton.jit(do_not_specialize=["end0", "end1", "end2", "padding", "count"])
def _sum_runs(
    part0, part1, part2, part3, end0, end1, end2, tokens, order, dweight, padding, count, features,
    row, column, out_row, out_column,
    ACCUMULATE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dweight[v] (+)= sum of dy[order[i]] over the run of i with tokens[i] = v; tokens, order [count], sorted by token.

    dy lies in up to four parts, rows of the first before end0; ends of parts that are not there are count. One program:
    COLUMNS columns of the run that begins at its own i, ROWS rows at a time, from the first to the last; where no run
    begins there is nothing to do.
    """
    parts, ends = (part0, part1, part2, part3), (0, end0, end1, end2, count)
    first = tl.program_id(0)
    token = tl.load(tokens + first)
    before = tl.load(tokens + first - 1, first > 0, other=-1)
    if (token != before) & (token != padding):
        j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (j < features)[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        going = True
        while going:
            i = first + tl.arange(0, ROWS)
            in_run = (tl.load(tokens + i, i < count, other=-1) == token) & (i < count)
            place = tl.load(order + i, in_run, other=0)
            columns = offset(j, column)[None, :]
            # a part at a time: of pointers that are chosen by row Triton 3.9 does not see that they are aligned
            for s in tl.static_range(PARTS):
                here = in_run & (place >= ends[s]) & (place < ends[s + 1])
                total += _rows(parts[s], place, ends[s], here, row, columns, inside)
            first += ROWS
            going = tl.sum(in_run.to(tl.int32), 0) == ROWS
        value = tl.sum(total, 0)
        out = dweight + (offset(token, out_row) + offset(j, out_column))
        if ACCUMULATE:
            value += widen(tl.load(out, j < features, other=0))
        tl.store(out, value.to(dweight.dtype.element_ty), j < features)
