"""The head and its cross-entropy in Triton: products by linear.py, and one pass over the logits between them.

The forward goes through the rows in chunks, since a row's gradient needs all its logits. W knows the log-sum-exp and
goes through the vocabulary instead: all rows of all microbatches at a time, so that every gradient is read and written
once, where chunks of rows would add to all of dweight again and again. Contract: spec.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import CrossEntropyOptions, Outputs, Segments
from zbkern.kernels.triton.common import Kernel, capped, widen
from zbkern.kernels.triton.linear import linear_dgrad, linear_fwd
from zbkern.kernels.triton.wgrad import linear_wgrad

_PIECE = 4096  # logits of a row that a program holds at a time: 16 per thread of 8 warps
_BLOCK = 1024  # logits per program where rows do not depend on each other


def cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: CrossEntropyOptions,
    loss: Tensor,
    lse: Tensor,
    dx: Tensor | None,
    gradients: Outputs | None = None,
) -> None:
    """Allocates one chunk of logits."""
    rows, vocabulary = x.shape[0], weight.shape[0]
    if rows == 0:
        return
    buffer = _logits(x, min(options.chunk, rows), vocabulary)
    for start in range(0, rows, options.chunk):
        stop = min(start + options.chunk, rows)
        z = buffer[: stop - start]
        linear_fwd(x[start:stop], weight, bias, z)
        arguments = (z, target[start:stop], loss[start:stop], lse[start:stop], *_numbers(options), vocabulary)
        strides = (z.stride(0), target.stride(0), loss.stride(0), lse.stride(0))
        constants = (options.label_smoothing != 0, dx is not None or gradients is not None, _PIECE)
        _loss(stop - start, (*arguments, *strides), constants, warps=8, stages=1)
        if dx is not None:
            linear_dgrad(z, weight, dx[start:stop])
        if gradients is not None:
            linear_wgrad([(x[start:stop], z)], gradients, start > 0)


def cross_entropy_wgrad(
    segments: Segments,
    outputs: Outputs,
    accumulate: bool,
    weight: Tensor,
    bias: Tensor | None,
    options: CrossEntropyOptions,
) -> None:
    """Allocates as many logits as the forward with the same chunk."""
    segments = [segment for segment in segments if segment[0].shape[0]]
    if not segments:
        linear_wgrad((), outputs, accumulate)
        return
    counts = [x.shape[0] for x, *_ in segments]
    vocabulary, rows = weight.shape[0], sum(counts)
    width = min(vocabulary, max(1, options.chunk * vocabulary // rows // _BLOCK) * _BLOCK)
    buffer = _logits(segments[0][0], rows, width)
    for start in range(0, vocabulary, width):
        stop = min(start + width, vocabulary)
        products = []
        for (x, target, lse, dloss), z in zip(segments, buffer.split(counts), strict=True):
            z = z[:, : stop - start]
            linear_fwd(x, weight[start:stop], None if bias is None else bias[start:stop], z)
            arguments = (z, target, lse, dloss, *_numbers(options), vocabulary, start, stop - start)
            strides = (z.stride(0), target.stride(0), lse.stride(0), dloss.stride(0))
            grid = (x.shape[0], triton.cdiv(stop - start, _BLOCK))
            _gradient(grid, (*arguments, *strides), (_BLOCK,), warps=4, stages=1)
            products.append((x, z))
        linear_wgrad(products, [None if out is None else out[start:stop] for out in outputs], accumulate)


def _logits(x: Tensor, rows: int, columns: int) -> Tensor:
    """Room for them in x's dtype, rows at multiples of 16 bytes so that they go by bulk copies."""
    return x.new_empty(rows, triton.cdiv(columns, 8) * 8)[:, :columns]


def _numbers(options: CrossEntropyOptions) -> tuple[int, float, float, float | None]:
    return options.ignore_index, options.label_smoothing, options.z_loss, options.softcap


@triton.jit
def _cap(z, softcap):
    """softcap tanh(z / softcap), or without a softcap the logits."""
    if softcap is None:
        return z
    else:
        return softcap * capped(z, 1.0 / softcap)


@triton.jit
def _logit_gradient(z, column, target, lse, factor, smoothing, z_loss, softcap, vocabulary):
    """factor (softmax(z) (1 + 2 z_loss lse) - (1 - smoothing) [column = target] - smoothing / vocabulary) of capped
    logits, times the cap's derivative."""
    value = _cap(z, softcap)
    gradient = tl.exp(value - lse) * (1 + 2 * z_loss * lse) - smoothing / vocabulary
    gradient = factor * tl.where(column == target, gradient - (1 - smoothing), gradient)
    if softcap is None:
        return gradient
    else:
        bent = value / softcap
        return gradient * (1 - bent * bent)


@Kernel
@triton.jit(do_not_specialize=["ignored"])
def _loss(
    z, target, loss, lse, ignored, smoothing, z_loss, softcap, vocabulary,
    z_row, target_row, loss_row, lse_row,
    SMOOTHED: tl.constexpr, GRADIENT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """loss and lse of logits z [rows, vocabulary], and (GRADIENT) dz of each row's own loss in their place.

    One program: one row, twice through it in pieces; the second time it comes from the L2 cache.
    """
    row = tl.program_id(0).to(tl.int64)
    z += row * z_row
    largest = tl.full([PIECE], float("-inf"), tl.float32)
    sums = tl.zeros([PIECE], tl.float32)
    total = tl.zeros([PIECE], tl.float32)
    for start in range(0, vocabulary, PIECE):
        column = start + tl.arange(0, PIECE)
        value = widen(tl.load(z + column, column < vocabulary, other=float("-inf")))
        if softcap is not None:
            value = tl.where(column < vocabulary, _cap(value, softcap), float("-inf"))
        higher = tl.maximum(largest, value)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(largest - level) + tl.exp(value - level)
        largest = higher
        if SMOOTHED:
            total += tl.where(column < vocabulary, value, 0)
    top = tl.max(largest, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    log_sum = level + tl.log(tl.sum(sums * tl.exp(largest - level), 0))
    tl.store(lse + row * lse_row, log_sum)
    label = tl.load(target + row * target_row)
    counts = label != ignored
    legal = (label >= 0) & (label < vocabulary)
    chosen = tl.where(legal, _cap(widen(tl.load(z + label, legal, other=0)), softcap), float("nan"))  # not overlooked
    value = log_sum - (1 - smoothing) * chosen + z_loss * log_sum * log_sum
    if SMOOTHED:
        value -= smoothing * tl.sum(total, 0) / vocabulary
    tl.store(loss + row * loss_row, tl.where(counts, value, 0))
    if GRADIENT:
        tl.debug_barrier()  # no thread overwrites the target's logit before the others have read it
        for start in range(0, vocabulary, PIECE):
            column = start + tl.arange(0, PIECE)
            dz = widen(tl.load(z + column, column < vocabulary, other=0))
            dz = _logit_gradient(dz, column, label, log_sum, 1.0, smoothing, z_loss, softcap, vocabulary)
            tl.store(z + column, tl.where(counts, dz, 0).to(z.dtype.element_ty), column < vocabulary)


@Kernel
@triton.jit(do_not_specialize=["ignored", "first"])
def _gradient(
    z, target, lse, dloss, ignored, smoothing, z_loss, softcap, vocabulary, first, width,
    z_row, target_row, lse_row, dloss_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz in place of the logits z [rows, width], columns first.. of the vocabulary, from the loss's gradient [rows].

    One program: BLOCK logits of one row. Its places are counted from `first` on, and `width` is compiled in as a
    multiple of 16 where it is one: then a thread loads 8 logits at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(target + row * target_row)
    factor = widen(tl.load(dloss + row * dloss_row))
    place = z + row * z_row + inside
    value = widen(tl.load(place, inside < width, other=0))
    log_sum = tl.load(lse + row * lse_row)
    value = _logit_gradient(value, first + inside, label, log_sum, factor, smoothing, z_loss, softcap, vocabulary)
    tl.store(place, tl.where(label != ignored, value, 0).to(z.dtype.element_ty), inside < width)
