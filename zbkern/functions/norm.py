"""RMSNorm and LayerNorm: the pass over rows is B and leaves partial sums of the weight gradients; their end is W.

What waits is a few rows of partial sums, not the input and the output gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zbkern.autograd import Call, differentiable_backward, weight_gradients
from zbkern.functions.linear import as_rows


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions keep their statistics and partial sums in float32."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(torch.autograd.Function):
    """y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, eps: float, *edges: Tensor | None) -> Tensor:
        (weight,) = call.owners
        rows = as_rows(x)
        y = x.new_empty(x.shape)
        rstd = rows.new_empty(rows.shape[0], dtype=statistics_dtype(x.dtype))
        call.launches.rms_norm_fwd(rows, weight, eps, as_rows(y), rstd)
        ctx.save_for_backward(x, weight, rstd)
        ctx.call, ctx.eps = call, eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, needs = ctx.call, ctx.needs_input_grad
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, rms_norm_with_torch, (x, ctx.eps), dy)
        rows = as_rows(x.detach())
        dx = rows.new_empty(rows.shape)
        partials = None
        if weight is not None:
            count = call.launches.norm_partials(*rows.shape, rows.device)
            partials = rstd.new_empty(1, count, rows.shape[1])
        call.launches.rms_norm_dgrad(as_rows(dy), rows, weight, rstd, dx, partials)
        weights: Any = (None,) * len(call.owners)
        if partials is not None:
            weights = weight_gradients(call, call.launches.norm_wgrad, (partials,), needs[3:], partials.numel())
        return None, dx.view(x.shape), None, *weights


class LayerNorm(torch.autograd.Function):
    """y = (x - mean) rstd weight + bias over the last dimension."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, eps: float, *edges: Tensor | None) -> Tensor:
        weight, bias = call.owners
        rows = as_rows(x)
        y = x.new_empty(x.shape)
        mean, rstd = (rows.new_empty(rows.shape[0], dtype=statistics_dtype(x.dtype)) for _ in range(2))
        call.launches.layer_norm_fwd(rows, weight, bias, eps, as_rows(y), mean, rstd)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.call, ctx.eps = call, eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, needs = ctx.call, ctx.needs_input_grad
        x, weight, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, layer_norm_with_torch, (x, ctx.eps), dy)
        rows = as_rows(x.detach())
        dx = rows.new_empty(rows.shape)
        partials = None
        if weight is not None:
            count = call.launches.norm_partials(*rows.shape, rows.device)
            partials = rstd.new_empty(2, count, rows.shape[1])
        call.launches.layer_norm_dgrad(as_rows(dy), rows, weight, mean, rstd, dx, partials)
        weights: Any = (None,) * len(call.owners)
        if partials is not None:
            weights = weight_gradients(call, call.launches.norm_wgrad, (partials,), needs[3:], partials.numel())
        return None, dx.view(x.shape), None, *weights


def rms_norm_with_torch(weight: Tensor | None, x: Tensor, eps: float) -> Tensor:
    """RMSNorm in torch's own operations."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def layer_norm_with_torch(weight: Tensor | None, bias: Tensor | None, x: Tensor, eps: float) -> Tensor:
    """LayerNorm in torch's own operations."""
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
