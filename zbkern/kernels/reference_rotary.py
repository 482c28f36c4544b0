"""Rotary position embedding in plain torch. Contract: spec.py."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, y: Tensor) -> None:
    """Pair c of every head of token t turned by the angle of cos[t, c], sin[t, c]; what is not in a pair is copied."""
    y.copy_(rotated(x, cos, sin, interleaved))


def rotary_dgrad(dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dx: Tensor) -> None:
    """The gradients turned back."""
    dx.copy_(rotated(dy, cos, -sin, interleaved))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., T, H, D] rotated, in x's dtype, computed in float32 or wider; differentiable."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(wide).unsqueeze(-2) for t in (cos, sin))  # the same for every head
    size = 2 * cos.shape[-1]
    turning = x[..., :size].to(wide)
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([pairs.to(x.dtype), x[..., size:]], -1)
