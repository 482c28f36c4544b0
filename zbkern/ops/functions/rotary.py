"""Rotary position embedding. It has no weights: its backward, the rotation back, is B."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class RotaryFunction(torch.autograd.Function):
    """x [..., T, H, D] rotated by cos, sin [T, R/2], or back. The gradient of one is the other, any number of times."""

    @staticmethod
    def forward(
        ctx: Any, backend: ModuleType, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.backend, ctx.interleaved, ctx.back = backend, interleaved, back
        y = x.new_empty(x.shape)
        kernel = backend.rotary_dgrad if back else backend.rotary_fwd
        kernel(_batched(x), cos, sin, interleaved, _batched(y))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        dx = RotaryFunction.apply(ctx.backend, dy, cos, sin, ctx.interleaved, not ctx.back)
        return None, dx, None, None, None, None


def _batched(x: Tensor) -> Tensor:
    """[..., T, H, D] as [batch, T, H, D]."""
    return x if x.dim() == 4 else x.unsqueeze(0).flatten(0, -4)
