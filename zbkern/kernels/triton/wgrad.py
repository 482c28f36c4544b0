"""The gradients of linear layers that are sums of matmuls: W of one weight or several, and dx of several layers."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments
from zbkern.kernels.triton.common import Kernel, offset, widen
from zbkern.kernels.triton.grouped_tile import group_end
from zbkern.kernels.triton.matmul_tile import Matrix, precision
from zbkern.kernels.triton.multi_matmul import SumOfProducts, run
from zbkern.kernels.triton.replay import replay

_MERGED = 4  # gradients that one launch of `sum_rows` takes; more take several


@Kernel
@triton.jit(do_not_specialize=["M0", "M1", "M2", "M3"])
def _sum_rows(
    dy0, dy1, dy2, dy3, ends0, ends1, ends2, ends3, M0, M1, M2, M3, sums, N, outer, inner, group_step, step,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """sums [groups, N] (+)= sum over the rows of every group of dy_i [M_i, N]; without `ends` all are of one group.

    One program: COLUMNS columns of one group, its rows in order.
    """
    gradients, ends, rows = (dy0, dy1, dy2, dy3), (ends0, ends1, ends2, ends3), (M0, M1, M2, M3)
    group = tl.program_id(1)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for s in tl.static_range(4):
        begin, end = 0, rows[s]
        if ends[s] is not None:
            begin, end = group_end(ends[s], group - 1), group_end(ends[s], group)
        for first in range(begin, end, ROWS):
            i = first + tl.arange(0, ROWS)
            place = gradients[s] + (offset(i[:, None], outer) + offset(j[None, :], inner))
            total += widen(tl.load(place, (i < end)[:, None] & (j < N)[None, :], 0.0))
    value = tl.sum(total, 0)
    place = sums + (offset(group, group_step) + offset(j, step))
    if ADD:
        value += widen(tl.load(place, j < N, 0.0))
    tl.store(place, value.to(sums.dtype.element_ty), j < N)


def linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    """Allocates a copy of every x and dy whose rows do not begin at multiples of 16 bytes."""
    linear_wgrads(((segments, outputs),), accumulate)


def linear_wgrads(layers: Iterable[tuple[Segments, Outputs]], accumulate: bool, max_tiles: int = 0) -> None:
    """In as few launches as layouts and dtypes allow."""
    layers, lengths = list(layers), []
    operands: list[Any] = []
    for segments, outputs in layers:  # as one comprehension this takes half as much again, of what is the host's time
        lengths.append(len(segments))
        if not segments:  # which is no launch that would be made again
            _write_nothing(outputs, accumulate)
        for segment in segments:
            operands += segment
        operands += outputs
    if not operands or operands[0] is None:
        _wgrads(layers, accumulate, max_tiles)
    else:
        options = ("wgrad", *lengths, accumulate, max_tiles, precision(operands[0].dtype))
        replay.run(lambda: _wgrads(layers, accumulate, max_tiles), operands, options)


def _wgrads(layers: Iterable[tuple[Segments, Outputs]], accumulate: bool, max_tiles: int) -> None:
    products = []
    for segments, (dweight, dbias) in layers:
        pairs = [(dy.t(), x) for x, dy in segments if x.shape[0]]
        if not pairs:
            _write_nothing((dweight, dbias), accumulate)
            continue
        if dbias is not None:
            sum_rows([(dy, None) for _, dy in segments], dbias, accumulate)
        if dweight is not None and dweight.numel():
            if Matrix(dweight).transposed:  # stored [K, N]: the same matmul with its operands exchanged
                dweight, pairs = dweight.t(), [(x.t(), dy.t()) for dy, x in pairs]
            products.append(SumOfProducts(pairs, dweight))
    run("wgrad", products, accumulate, max_tiles)


def _write_nothing(outputs: Outputs, accumulate: bool) -> None:
    """The sum over no rows."""
    for output in outputs:
        if output is not None and not accumulate:
            output.zero_()


def linear_dgrad_sum(segments: Sequence[tuple[Tensor, Tensor]], dx: Tensor) -> None:
    operands = [dx, *[tensor for segment in segments for tensor in segment]]
    options = ("dgrad sum", precision(dx.dtype))
    if not segments:
        dx.zero_()
    elif dx.numel():
        replay.run(lambda: run("dgrad", [SumOfProducts(segments, dx)], False), operands, options)


def sum_rows(gradients: Sequence[tuple[Tensor, Tensor | None]], sums: Tensor, accumulate: bool) -> None:
    """sums [N] (+)= sum over rows of every dy [M_i, N], the gradient of a bias; or with the ends of groups of rows [E],
    sums [E, N]."""
    operands = [sums, *[operand for pair in gradients for operand in pair]]
    replay.run(lambda: _sum(gradients, sums, accumulate), operands, ("sum rows", len(gradients), accumulate))


def _sum(gradients: Sequence[tuple[Tensor, Tensor | None]], sums: Tensor, accumulate: bool) -> None:
    groups, n = sums.shape if sums.dim() == 2 else (1, *sums.shape)
    steps = sums.stride() if sums.dim() == 2 else (0, *sums.stride())
    for strides, alike in itertools.groupby(gradients, lambda pair: pair[0].stride()):
        slots = [(dy, ends, dy.shape[0]) for dy, ends in alike]
        slots += [(slots[0][0], None, 0)] * (-len(slots) % _MERGED)
        for first in range(0, len(slots), _MERGED):
            parts = itertools.chain(*zip(*slots[first : first + _MERGED], strict=True))
            arguments = (*parts, sums, n, *strides, *steps)
            _sum_rows((triton.cdiv(n, 32), groups), arguments, (accumulate, 32, 32), warps=4, stages=3)
            accumulate = True
