"""Rotary position embedding in plain torch. Contract: spec.py."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, y: Tensor) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(wide).unsqueeze(-2) for t in (cos, sin))  # the same for every head
    size = 2 * cos.shape[-1]
    a, b = (t.to(wide) for t in _pairs(x[..., :size], interleaved))
    first, second = _pairs(y[..., :size], interleaved)
    torch.addcmul(a * cos, b, sin, value=-1, out=first)
    torch.addcmul(b * cos, a, sin, out=second)
    if size < x.shape[-1]:
        y[..., size:] = x[..., size:]


def rotary_dgrad(dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dx: Tensor) -> None:
    rotary_fwd(dy, cos, -sin, interleaved, dx)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """rotary_fwd as differentiable operations: x [..., T, H, D] rotated, in x's dtype, computed in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(wide).unsqueeze(-2) for t in (cos, sin))
    size = 2 * cos.shape[-1]
    a, b = _pairs(x[..., :size].to(wide), interleaved)
    turned = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([pairs.to(x.dtype), x[..., size:]], -1)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Both members of every pair, as views."""
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
