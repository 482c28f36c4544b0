"""The gradients of linear layers that are sums of matmuls: W of one weight or several, and dx of several layers."""

from collections.abc import Iterable, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments
from zbkern.kernels.triton.common import Kernel, offset, widen
from zbkern.kernels.triton.grouped_tile import group_end
from zbkern.kernels.triton.matmul_tile import Matrix, precision
from zbkern.kernels.triton.multi_matmul import Product, run
from zbkern.kernels.triton.replay import replay


@Kernel
@triton.jit(do_not_specialize=["M"])
def _sum_rows(
    dy, ends, dbias, M, N, outer, inner, group_step, step,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dbias [groups, N] (+)= sum over the rows of every group of dy [M, N]; without `ends` all are of one group.

    One program: COLUMNS columns of one group, its rows in order.
    """
    group, begin, end = tl.program_id(1), 0, M
    if ends is not None:
        begin, end = group_end(ends, group - 1), group_end(ends, group)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        i = first + tl.arange(0, ROWS)
        place = dy + (offset(i[:, None], outer) + offset(j[None, :], inner))
        total += widen(tl.load(place, (i < end)[:, None] & (j < N)[None, :], 0.0))
    value = tl.sum(total, 0)
    sums = dbias + (offset(group, group_step) + offset(j, step))
    if ADD:
        value += widen(tl.load(sums, j < N, 0.0))
    tl.store(sums, value.to(dbias.dtype.element_ty), j < N)


def linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    """dweight (+)= sum of dy^T x and dbias (+)= sum over rows of dy, over segments (x [M_i, K], dy [M_i, N]).

    Allocates a copy of every x and dy whose rows do not begin at multiples of 16 bytes.
    """
    linear_wgrads(((segments, outputs),), accumulate)


def linear_wgrads(layers: Iterable[tuple[Segments, Outputs]], accumulate: bool, max_tiles: int = 0) -> None:
    """linear_wgrad of every (segments, outputs), in as few launches as their layouts and dtypes allow."""
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
        exchanged = dweight is not None and Matrix(dweight).transposed  # stored [K, N]
        if dbias is not None and (exchanged or dweight is None or dweight.numel() == 0 or not dbias.is_contiguous()):
            sum_rows([(dy, None) for _, dy in segments], dbias, accumulate)
            dbias = None
        if dweight is not None and dweight.numel():
            if exchanged:  # the same matmul with its operands exchanged
                dweight, pairs = dweight.t(), [(x.t(), dy.t()) for dy, x in pairs]
            products.append(Product(pairs, dweight, dbias))
    run("wgrad", products, accumulate, max_tiles)


def _write_nothing(outputs: Outputs, accumulate: bool) -> None:
    """The sum over no rows."""
    for output in outputs:
        if output is not None and not accumulate:
            output.zero_()


def linear_dgrad_sum(segments: Sequence[tuple[Tensor, Tensor]], dx: Tensor) -> None:
    """dx = sum of dy weight over (dy [M, N_i], weight [N_i, K]): the input of several layers, written once."""
    operands = [dx, *[tensor for segment in segments for tensor in segment]]
    options = ("dgrad sum", precision(dx.dtype))
    if not segments:
        dx.zero_()
    elif dx.numel():
        replay.run(lambda: run("dgrad", [Product(segments, dx)], False), operands, options)


def sum_rows(gradients: Sequence[tuple[Tensor, Tensor | None]], dbias: Tensor, accumulate: bool) -> None:
    """dbias [N] (+)= sum over rows of every dy [M_i, N]: the bias gradient where no matmul computes it, too; or with
    the ends of groups of rows [E], dbias [E, N]."""
    sums = dbias if dbias.dim() == 2 else dbias[None]
    groups, n = sums.shape
    for dy, ends in gradients:
        arguments = (dy, ends, sums, dy.shape[0], n, *dy.stride(), *sums.stride())
        _sum_rows((triton.cdiv(n, 64), groups), arguments, (accumulate, 32, 64), warps=4, stages=3)
        accumulate = True
