"""RMSNorm and LayerNorm in plain torch. Contract: spec.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_partials(rows: int, features: int, device: torch.device) -> int:
    """One: here the whole sum over rows is taken with the rows."""
    return 1


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
    wide = _summed(x, residual, summed).to(rstd.dtype)
    torch.rsqrt(wide.square().mean(1).add_(eps), out=rstd)
    normal = wide * rstd.unsqueeze(1)
    y.copy_(normal if weight is None else normal.mul_(weight))


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
    scale = rstd.unsqueeze(1)
    normal = x * scale
    g = dy.to(rstd.dtype)
    if partials is not None:
        torch.sum(g * normal, 0, keepdim=True, out=partials[0])
    if weight is not None:
        g = g * weight
    mean = (g * normal).mean(1, keepdim=True)
    found = (g - normal * mean) * scale
    dx.copy_(found if dsummed is None else found.add_(dsummed))


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
    wide = _summed(x, residual, summed).to(rstd.dtype)
    out, found, scale = torch.native_layer_norm(wide, x.shape[1:], _wide(weight, rstd), _wide(bias, rstd), eps)
    y.copy_(out)
    mean.copy_(found.view(-1))
    rstd.copy_(scale.view(-1))


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
    """dx [+ dsummed], and partials = sums over rows of dy normal and of dy."""
    found, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(rstd.dtype),
        x.to(rstd.dtype),
        list(x.shape[1:]),
        mean.unsqueeze(1),
        rstd.unsqueeze(1),
        _wide(weight, rstd),
        None if weight is None else torch.zeros_like(weight, dtype=rstd.dtype),
        [True, partials is not None, partials is not None],
    )
    dx.copy_(found if dsummed is None else found.add_(dsummed))
    if partials is not None:
        partials[0].copy_(dweight)
        partials[1].copy_(dbias)


def norm_wgrad(segments: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
    """outputs[i] (+)= sum over segments and over P of partials [len(outputs) or more, P, K] [i]."""
    for (partials,) in segments:
        for output, partial in zip(outputs, partials, strict=True):
            if output is not None:
                total = partial.sum(0)
                output.add_(total) if accumulate else output.copy_(total)
        accumulate = True


def _summed(x: Tensor, residual: Tensor | None, summed: Tensor | None) -> Tensor:
    """What is normed: the sum as it is kept, rounded, because that is what dgrad will read."""
    return x if residual is None else torch.add(x, residual, out=summed)


def _wide(weight: Tensor | None, rstd: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(rstd.dtype)
