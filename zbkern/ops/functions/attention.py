"""The attention core: its backward is B, except the gradient of sinks, a number per head, which is W."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern.kernels import reference
from zbkern.kernels.reference import cpu_attention
from zbkern.kernels.reference.attention import attention_mask, ends_on_host, sink_gradient
from zbkern.kernels.spec import AttentionOptions
from zbkern.ops import autograd
from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients
from zbkern.ops.functions._shapes import statistics_dtype
from zbkern.ops.functions.norm import norm_wgrad


class AttentionFunction(torch.autograd.Function):
    """Packed sequences: q [T, Hq, D], k [T', Hk, D], v [T', Hk, Dv]. The call's parameter is sinks [Hq], or None."""

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *edges: Tensor | None
    ) -> Tensor:
        sinks = None if call.params[0] is None else call.params[0].detach().to(statistics_dtype(q.dtype))
        y = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=statistics_dtype(q.dtype))
        with _without_autocast(q.device.type):
            call.backend.attention_fwd(q, k, v, options, y, lse, sinks)
        ends = [e for e in (options.queries, options.keys) if isinstance(e, Tensor)]  # autograd sees if they change
        ctx.save_for_backward(q, k, v, y, lse, sinks, *ends)
        ctx.call, ctx.options = call, options
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, options = ctx.call, ctx.options
        q, k, v, y, lse, sinks, *_ = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, attention_with_torch, (q, k, v, options), dy)
        dq, dk, dv = (torch.empty_like(t, requires_grad=False) for t in (q, k, v))
        delta = None if sinks is None else torch.empty_like(lse)
        call.backend.attention_dgrad(dy, q, k, v, y, lse, options, dq, dk, dv, delta)
        if delta is None:
            return None, dq, dk, dv, None, None
        partial = sink_gradient(sinks, lse, delta).view(1, 1, -1)
        weights = weight_gradients(call, norm_wgrad(call.backend), (partial,), ctx.needs_input_grad, partial.numel())
        return None, dq, dk, dv, None, *weights


def attention(
    backend: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    sinks: Tensor | None = None,
    name: str = "",
) -> Tensor:
    """Batched q [batch, tokens, heads, D] or packed q [T, heads, D]; options describe the packed form of either."""
    if backend is reference and sinks is None and not _joins_products(q, k, v, options):
        return attention_with_torch(None, q, k, v, options)  # which does not hold all scores
    call = OpCall((sinks,), backend, name)
    if q.dim() == 4:
        packed = autograd.apply(AttentionFunction, call, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), options)
        return packed.view(*q.shape[:3], v.shape[3])
    return autograd.apply(AttentionFunction, call, q, k, v, options)


def attention_with_torch(sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """The core in torch's own operations, of batched or packed tensors."""
    if q.dim() == 4:
        return _one_shape(sinks, q, k, v, options)
    parts = [_by_sequence(t, ends) for t, ends in ((q, options.queries), (k, options.keys), (v, options.keys))]
    sequences = [_one_shape(sinks, a, b, c, options)[0] for a, b, c in zip(*parts, strict=True)]
    beyond = q.new_zeros(q.shape[0] - sum(map(len, sequences)), q.shape[1], v.shape[2])
    return torch.cat([*sequences, beyond]) if len(beyond) or not sequences else torch.cat(sequences)


def _by_sequence(tokens: Tensor, ends: tuple[int, ...] | Tensor) -> list[Tensor]:
    """[T, heads, D] as [1, tokens, heads, D] of every sequence. In one operation: the backward of a slice of its own
    writes, for each, zeros for all tokens (64 sequences of 32 tokens: 3 times as long)."""
    ends = ends_on_host(ends)
    *sequences, _ = tokens.split([b - a for a, b in pairwise((*ends, len(tokens)))])
    return [sequence[None] for sequence in sequences]


def _joins_products(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Whether torch would read a mask from memory or copy keys for every head, and our reference would not."""
    lengths = (options.queries, options.keys)
    masked = options.causal and not any(isinstance(ends, Tensor) for ends in lengths) and lengths[0] != lengths[1]
    grouped = q.shape[-2] != k.shape[-2]
    q, k, v = (t.flatten(0, -3) for t in (q, k, v))
    return (masked or grouped) and cpu_attention.takes(q, k, v, options)


def _one_shape(sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    if sinks is not None or options.softcap is not None:
        with _without_autocast(q.device.type):
            return _written_out(sinks, q, k, v, options)
    same = options.causal and options.window is None and q.shape[1] == k.shape[1]
    same = same and options.scale > 0  # else torch's kernel for CPUs multiplies the -inf of its mask: nan
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


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, products are of the dtypes that they are given."""
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)  # which torch 2.8 does not compile
    if known and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _written_out(sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """With all scores in memory, for what torch's own attention does not know; in float32 or wider."""
    wide = statistics_dtype(q.dtype)
    by_group = q.transpose(1, 2).unflatten(1, (k.shape[2], -1)).to(wide)  # [batch, Hk, Hq / Hk, queries, D]
    keys, values = (t.transpose(1, 2).unsqueeze(2).to(wide) for t in (k, v))
    scores = by_group @ keys.mT * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    mask = attention_mask(q.shape[1], k.shape[1], options, q.device)
    if mask is not None:  # not -inf: a query that sees no key would have gradients of nan
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    if sinks is not None:
        column = sinks.to(wide).view(*by_group.shape[1:3], 1, 1)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    return (weights @ values).flatten(1, 2).transpose(1, 2).to(q.dtype)
