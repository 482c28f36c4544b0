"""The attention core. It has no weights, so all of its backward is B."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern.functions._shapes import statistics_dtype
from zbkern.kernels import reference
from zbkern.kernels.reference.attention import attention_mask
from zbkern.kernels.spec import AttentionOptions


class Attention(torch.autograd.Function):
    """Packed sequences: q [T, Hq, D], k and v [T', Hk, D]."""

    @staticmethod
    def forward(ctx: Any, backend: ModuleType, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        y = torch.empty_like(q, requires_grad=False)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=statistics_dtype(q.dtype))
        backend.attention_fwd(q, k, v, options, y, lse)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.backend, ctx.options = backend, options
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t, requires_grad=False) for t in (q, k, v))
        ctx.backend.attention_dgrad(dy, q, k, v, y, lse, ctx.options, dq, dk, dv)
        return None, dq, dk, dv, None


def attention(backend: ModuleType, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Batched q [batch, tokens, heads, D] or packed q [T, heads, D]; options describe the packed form of either."""
    if backend is reference:  # torch's own attention does not hold all scores, and can be differentiated twice
        return attention_with_torch(q, k, v, options)
    if q.dim() == 4:
        packed = Attention.apply(backend, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), options)
        return packed.view(q.shape)
    return Attention.apply(backend, q, k, v, options)


def attention_with_torch(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """The core in torch's own operations."""
    if q.dim() == 4:
        return _one_shape(q, k, v, options)
    sequences = zip(
        q.split(_lengths(options.queries)),
        k.split(_lengths(options.keys)),
        v.split(_lengths(options.keys)),
        strict=True,
    )
    return torch.cat([_one_shape(a[None], b[None], c[None], options)[0] for a, b, c in sequences])


def _one_shape(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    same = options.causal and options.window is None and q.shape[1] == k.shape[1]
    mask = None if same else attention_mask(q.shape[1], k.shape[1], options, q.device)
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=same,
        scale=options.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


def _lengths(ends: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in pairwise(ends)]
