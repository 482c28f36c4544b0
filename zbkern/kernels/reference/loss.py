"""The head with its cross-entropy in plain torch, a chunk of rows at a time. Contract: spec.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zbkern.kernels.reference.matmul import addmm_into, linear, linear_again
from zbkern.kernels.spec import CrossEntropyOptions, Outputs, Segments

LEAST_LOG = -1e4
"""In the place of logarithms of probabilities below it, -inf too: such a probability is 0 in every dtype."""


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
    dweight, dbias = gradients or (None, None)
    z = None
    for rows in _chunks(x.shape[0], options.chunk):
        z = _logits(x[rows], weight, bias, loss.dtype, z)
        slope = _cap(z, options.softcap)
        counts = target[rows] != options.ignore_index
        chosen = z.gather(1, _valid(target[rows], counts)).squeeze(1)
        smoothing = options.label_smoothing
        mean = z.mean(1) if smoothing else None
        highest = z.amax(1)
        total = z.sub_(highest.unsqueeze(1)).exp_().sum(1)
        torch.add(highest, total.log(), out=lse[rows])
        value = lse[rows] - (1 - smoothing) * chosen
        if mean is not None:
            value = value - smoothing * mean
        if options.z_loss:
            value = value + options.z_loss * lse[rows].square()
        loss[rows] = torch.where(counts, value, 0)
        if dx is None and gradients is None:
            continue
        dz = _logit_gradient(z, total, target[rows], lse[rows], counts.to(z.dtype), options)
        dz = dz if slope is None else dz.mul_(slope)
        narrow = dz.to(x.dtype)
        if dx is not None:
            addmm_into(dx[rows], narrow, weight, False)
        if dweight is not None:
            addmm_into(dweight, narrow.t(), x[rows], rows.start > 0)
        if dbias is not None:
            dbias.add_(dz.sum(0)) if rows.start else dbias.copy_(dz.sum(0))


def cross_entropy_wgrad(
    segments: Segments,
    outputs: Outputs,
    accumulate: bool,
    weight: Tensor,
    bias: Tensor | None,
    options: CrossEntropyOptions,
) -> None:
    dweight, dbias = _begun(outputs, accumulate)
    z = None
    for x, target, lse, dloss in segments:
        for rows in _chunks(x.shape[0], options.chunk):
            z = _logits(x[rows], weight, bias, lse.dtype, z)
            slope = _cap(z, options.softcap)
            factor = torch.where(target[rows] != options.ignore_index, dloss[rows], 0)
            z.sub_(lse[rows].unsqueeze(1)).exp_()
            dz = _logit_gradient(z, None, target[rows], lse[rows], factor, options)
            dz = dz if slope is None else dz.mul_(slope)
            if dweight is not None:
                addmm_into(dweight, dz.to(x.dtype).t(), x[rows], True)
            if dbias is not None:
                dbias.add_(dz.sum(0))


def log_probs_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: CrossEntropyOptions,
    log_probs: Tensor,
    entropy: Tensor,
    lse: Tensor,
) -> None:
    """log_probs = z[target] - lse and entropy = lse - sum(softmax(z) z) of every row, 0 where it is ignored."""
    z = None
    for rows in _chunks(x.shape[0], options.chunk):
        z = _logits(x[rows], weight, bias, lse.dtype, z)
        _cap(z, options.softcap)
        torch.logsumexp(z, 1, out=lse[rows])
        counts = target[rows] != options.ignore_index
        z.sub_(lse[rows].unsqueeze(1))
        log_probs[rows] = torch.where(counts, z.gather(1, _valid(target[rows], counts)).squeeze(1), 0)
        z.clamp_(min=LEAST_LOG)
        entropy[rows] = torch.where(counts, z.exp().mul_(z).sum(1).neg_(), 0)


def log_probs_dgrad(
    segment: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, options: CrossEntropyOptions, dx: Tensor
) -> None:
    """dx = dz weight; the segment is one of `log_probs_wgrad`."""
    for rows, dz in _log_probs_gradients(segment, weight, bias, options):
        addmm_into(dx[rows], dz.to(dx.dtype), weight, False)


def log_probs_wgrad(
    segments: Segments,
    outputs: Outputs,
    accumulate: bool,
    weight: Tensor,
    bias: Tensor | None,
    options: CrossEntropyOptions,
) -> None:
    """dweight (+)= sum dz^T x and dbias (+)= sum of dz; segments (x, target, lse, entropy, dlog_probs, dentropy)."""
    dweight, dbias = _begun(outputs, accumulate)
    for segment in segments:
        for rows, dz in _log_probs_gradients(segment, weight, bias, options):
            if dweight is not None:
                addmm_into(dweight, dz.to(weight.dtype).t(), segment[0][rows], True)
            if dbias is not None:
                dbias.add_(dz.sum(0))


def _log_probs_gradients(
    segment: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, options: CrossEntropyOptions
) -> Iterator[tuple[slice, Tensor]]:
    """dz = dlog_probs (onehot(target) - p) - dentropy p (log p + entropy), chunk by chunk, of logits computed again."""
    x, target, lse, entropy, dlog_probs, dentropy = segment
    z = None
    for rows in _chunks(x.shape[0], options.chunk):
        z = _logits(x[rows], weight, bias, lse.dtype, z)
        slope = _cap(z, options.softcap)
        counts = target[rows] != options.ignore_index
        of_target, of_entropy = (torch.where(counts, d[rows], 0).unsqueeze(1) for d in (dlog_probs, dentropy))
        p = z.sub_(lse[rows].unsqueeze(1)).exp()
        dz = z.clamp_(min=LEAST_LOG).add_(entropy[rows].unsqueeze(1)).mul_(of_entropy).add_(of_target).mul_(p).neg_()
        dz.scatter_add_(1, _valid(target[rows], counts), of_target)
        yield rows, dz if slope is None else dz.mul_(slope)


def _begun(outputs: Outputs, accumulate: bool) -> Outputs:
    """The gradients, zeros where nothing is added to what is there."""
    for output in () if accumulate else outputs:
        if output is not None:
            output.zero_()
    return outputs


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, previous: Tensor | None) -> Tensor:
    """x weight^T + bias; in the memory of the previous chunk's where that is possible: new pages cost more than exp."""
    if previous is None or x.dtype != dtype or previous.shape[0] < x.shape[0]:
        return linear(x, weight, bias).to(dtype)
    return linear_again(previous[: x.shape[0]], x, weight, bias)


def _cap(z: Tensor, softcap: float | None) -> Tensor | None:
    """softcap tanh(z / softcap) in place of z, and its derivative."""
    if softcap is None:
        return None
    slope = 1 - z.div_(softcap).tanh_().square()
    z.mul_(softcap)
    return slope


def _logit_gradient(
    exponentials: Tensor,
    total: Tensor | None,
    target: Tensor,
    lse: Tensor,
    factor: Tensor,
    options: CrossEntropyOptions,
) -> Tensor:
    """dz = factor (softmax(z) (1 + 2 z_loss lse) - (1 - s) onehot(target) - s / V), in place of the exponentials.

    softmax(z) = exponentials / total; a total of None is 1. Each row is scaled once.
    """
    smoothing = options.label_smoothing
    scale = factor if total is None else factor / total
    if options.z_loss:
        scale = scale * (1 + 2 * options.z_loss * lse)
    dz = exponentials.mul_(scale.unsqueeze(1))
    if smoothing:
        dz.sub_((factor * (smoothing / dz.shape[1])).unsqueeze(1))
    places = _valid(target, target != options.ignore_index)
    return dz.scatter_add_(1, places, (factor * (smoothing - 1)).unsqueeze(1))


def _valid(target: Tensor, counts: Tensor) -> Tensor:
    """Targets as a column of legal indices; ignored ones point at 0 and are masked by the caller."""
    return torch.where(counts, target, 0).unsqueeze(1)


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
