"""Embedding: nothing to do in B, the whole backward is W."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients


class EmbeddingFunction(torch.autograd.Function):
    """y[i] = weight[indices[i]]. W: dweight[v] = sum of dy over the places of v; the row padding_idx gets none."""

    @staticmethod
    def forward(ctx: Any, call: OpCall, indices: Tensor, padding_idx: int | None, *edges: Tensor | None) -> Tensor:
        (weight,) = call.params
        y = weight.new_empty((*indices.shape, weight.shape[1]))
        call.backend.embedding_fwd(indices.reshape(-1), weight, y.view(-1, weight.shape[1]))
        ctx.save_for_backward(indices)
        ctx.call, ctx.padding_idx = call, padding_idx
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call = ctx.call
        (indices,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, embedding_with_torch, (indices, ctx.padding_idx), dy)
        kernel = embedding_wgrad(call.backend, ctx.padding_idx)
        segment = (indices.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        return None, None, None, *weight_gradients(call, kernel, segment, ctx.needs_input_grad, dy.numel())


@functools.cache
def embedding_wgrad(backend: ModuleType, padding_idx: int | None) -> wgrad.WGradKernel:
    """The kernel with its padding index fixed; the same object each time, so that tasks of one weight merge."""
    return wgrad.WGradKernel(functools.partial(backend.embedding_wgrad, padding_idx=padding_idx))


def embedding_with_torch(weight: Tensor, indices: Tensor, padding_idx: int | None) -> Tensor:
    """Embedding in torch's own operations."""
    return torch.nn.functional.embedding(indices, weight, padding_idx)
