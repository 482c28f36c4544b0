"""RMSNorm and LayerNorm in plain torch. Contract: spec.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_partials(rows: int, features: int, device: torch.device) -> int:
    """One: here the whole sum over rows is taken with the rows."""
    return 1


def rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float, y: Tensor, rstd: Tensor) -> None:
    """y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps)."""
    wide = x.to(rstd.dtype)
    torch.rsqrt(wide.square().mean(1).add_(eps), out=rstd)
    normal = wide * rstd.unsqueeze(1)
    y.copy_(normal if weight is None else normal.mul_(weight))


def rms_norm_dgrad(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dx: Tensor, partials: Tensor | None
) -> None:
    """dx = rstd (g - normal mean(g normal)), g = dy weight, normal = x rstd; partials = sum over rows of dy normal."""
    scale = rstd.unsqueeze(1)
    normal = x * scale
    g = dy.to(rstd.dtype)
    if partials is not None:
        torch.sum(g * normal, 0, keepdim=True, out=partials[0])
    if weight is not None:
        g = g * weight
    mean = (g * normal).mean(1, keepdim=True)
    dx.copy_((g - normal * mean) * scale)


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, y: Tensor, mean: Tensor, rstd: Tensor
) -> None:
    """y = (x - mean) rstd weight + bias."""
    out, found, scale = torch.native_layer_norm(
        x.to(rstd.dtype), x.shape[1:], _wide(weight, rstd), _wide(bias, rstd), eps
    )
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
) -> None:
    """dx, and partials = sums over rows of dy normal and of dy."""
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
    dx.copy_(found)
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


def _wide(weight: Tensor | None, rstd: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(rstd.dtype)
