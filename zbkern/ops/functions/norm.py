"""RMSNorm and LayerNorm: the pass over rows is B and leaves partial sums of the weight gradients; their end is W.

What waits is a few rows of partial sums, not the input and the output gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern.kernels import reference
from zbkern.kernels.reference import norm as reference_norm
from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients
from zbkern.ops.functions._shapes import as_rows, statistics_dtype
from zbkern.wgrad import WGradKernel


class NormFunction(torch.autograd.Function):
    """y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps) over the last dimension, or with a bias among the parameters,
    which may be None, y = (x - mean) rstd weight + bias.

    With residual: (y of summed, summed), summed = x + residual; B takes both gradients in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, x: Tensor, eps: float, residual: Tensor | None, *edges: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.call, ctx.eps, ctx.added = call, eps, residual is not None
        if residual is None and _reference_allocates(call, x):
            y, *statistics = reference_norm.layer_norm(x, call.params[0], call.params[1], eps)
            ctx.save_for_backward(x, call.params[0], *statistics)
            return y
        rows = as_rows(x)
        y = x.new_empty(x.shape)
        weight, *biases = call.params
        wide = statistics_dtype(x.dtype)
        mean = rows.new_empty(rows.shape[0], dtype=wide) if biases else None
        rstd = rows.new_empty(rows.shape[0], dtype=wide)
        arguments = rows, weight, biases[0] if biases else None, eps, as_rows(y), mean, rstd
        if residual is None:
            call.backend.norm_fwd(*arguments)
            ctx.save_for_backward(x, weight, mean, rstd)
            return y
        ctx.set_materialize_grads(False)  # an unused output costs nothing in B
        summed = x.new_empty(x.shape)
        call.backend.norm_fwd(*arguments, as_rows(residual), as_rows(summed))
        ctx.save_for_backward(summed, weight, mean, rstd)
        return y, summed

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsummed: Tensor | None = None) -> tuple[Any, ...]:
        call = ctx.call
        x, weight, mean, rstd = ctx.saved_tensors
        if dy is None:
            return _gradients(ctx, dsummed, (None,) * len(call.params))
        if torch.is_grad_enabled():  # create_graph=True
            with_torch = rms_norm_with_torch if len(call.params) == 1 else layer_norm_with_torch
            _, dx, _, *second = differentiable_backward(call, with_torch, (x, ctx.eps), dy)
            return _gradients(ctx, _sum(dx, dsummed), second)
        rows = as_rows(x.detach())
        also = () if dsummed is None else (as_rows(dsummed),)
        if _reference_allocates(call, x):
            dx, partials = reference_norm.layer_norm_gradients(as_rows(dy), rows, weight, mean, rstd, *also)
        else:
            dx, partials = rows.new_empty(rows.shape), None
            if weight is not None:
                count = call.backend.norm_partials(*rows.shape, rows.device)
                partials = rstd.new_empty(len(call.params), count, rows.shape[1])
            call.backend.norm_dgrad(as_rows(dy), rows, weight, mean, rstd, dx, partials, *also)
        weights: Sequence[Tensor | None] = (None,) * len(call.params)
        if partials is not None:
            kernel = norm_wgrad(call.backend)
            weights = weight_gradients(call, kernel, (partials,), ctx.needs_input_grad, partials.numel())
        return _gradients(ctx, dx.view(x.shape), weights)


@functools.cache
def norm_wgrad(backend: ModuleType) -> WGradKernel:
    return WGradKernel(backend.norm_wgrad, allocate=reference_norm.norm_gradients if backend is reference else None)


def _reference_allocates(call: OpCall, x: Tensor) -> bool:
    """Whether torch's own layer norm computes this, which allocates what it returns, in the statistics' dtype."""
    return call.backend is reference and len(call.params) == 2 and x.dtype == statistics_dtype(x.dtype)


def _gradients(ctx: Any, dx: Tensor | None, weights: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The result of backward. x and residual get one tensor object, as from torch's add: autograd sees that it is
    shared, and does not accumulate into it in place."""
    return None, dx, None, dx if ctx.added else None, *weights


def _sum(dx: Tensor | None, dsummed: Tensor | None) -> Tensor | None:
    return dx if dsummed is None else dsummed if dx is None else dx + dsummed


def rms_norm_with_torch(
    weight: Tensor | None, x: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm in torch's own operations."""
    if residual is not None:
        x = x + residual
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    return y if residual is None else (y, x)


def layer_norm_with_torch(
    weight: Tensor | None, bias: Tensor | None, x: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm in torch's own operations."""
    if residual is not None:
        x = x + residual
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y if residual is None else (y, x)
