"""The attention core in plain torch, one sequence at a time: with all its scores in memory, or by torch's flash kernel
where that can run it. Contract: spec.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from zbkern.kernels.reference import cpu_attention
from zbkern.kernels.spec import AttentionOptions


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    y: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
) -> None:
    for queries, keys in _sequences(options, q.shape[0]):
        if cpu_attention.takes(q[queries], k[keys], v[keys], options):
            y[queries] = 0
            lse[:, queries] = float("-inf") if sinks is None else sinks.unsqueeze(1)
            cpu_attention.attention_fwd(q[queries], k[keys], v[keys], options, y[queries], lse[:, queries])
            continue
        scores, _ = _scores(q[queries], k[keys], options, lse.dtype)
        log_sums = torch.logsumexp(scores, -1)
        if sinks is not None:
            log_sums = torch.logaddexp(log_sums, sinks.view(*scores.shape[:2], 1))
        lse[:, queries] = log_sums.flatten(0, 1)
        weights = _weights(scores, log_sums)
        out = weights @ _by_group(v[keys], 1).to(lse.dtype)
        y[queries] = _as_tokens(out).to(y.dtype)


def attention_dgrad(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    delta: Tensor | None = None,
) -> None:
    groups = q.shape[1] // k.shape[1]
    for gradient in (dq, dk, dv):
        gradient.zero_()
    if delta is not None:
        delta.copy_((dy.to(lse.dtype) * y).sum(-1).T)
    for queries, keys in _sequences(options, q.shape[0]):
        if cpu_attention.takes(q[queries], k[keys], v[keys], options):
            asked, seen = [t[queries] for t in (dy, q, y, dq)], [t[keys] for t in (k, v, dk, dv)]
            cpu_attention.attention_dgrad(asked, lse[:, queries], seen, options)
            continue
        scores, slope = _scores(q[queries], k[keys], options, lse.dtype)
        p = _weights(scores, lse[:, queries].view(scores.shape[:-1]))
        above = _by_group(dy[queries], groups).to(lse.dtype)
        values, wide_keys = _by_group(v[keys], 1).to(lse.dtype), _by_group(k[keys], 1).to(lse.dtype)
        sums = (above * _by_group(y[queries], groups).to(lse.dtype)).sum(-1, keepdim=True)
        ds = p * (above @ values.mT - sums) * slope * options.scale
        dq[queries] = _as_tokens(ds @ wide_keys).to(dq.dtype)
        dk[keys] = (ds.mT @ _by_group(q[queries], groups).to(lse.dtype)).sum(1).transpose(0, 1).to(dk.dtype)
        dv[keys] = (p.mT @ above).sum(1).transpose(0, 1).to(dv.dtype)


def attention_mask(queries: int, keys: int, options: AttentionOptions, device: torch.device) -> Tensor | None:
    """[queries, keys], True where the query sees the key; None when it sees all."""
    if not options.causal:
        return None
    last = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    key = torch.arange(keys, device=device)
    seen = key <= last
    return seen if options.window is None else seen & (key > last - options.window)


def ends_on_host(ends: tuple[int, ...] | Tensor) -> tuple[int, ...]:
    """Where sequences end. Waits for the device where a tensor there says so."""
    return tuple(ends.tolist()) if isinstance(ends, Tensor) else ends


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[Hq]: a sink only takes weight, exp(sink - lse), from keys."""
    weights = _weights(sinks.view(-1, 1, 1).to(lse.dtype), lse).squeeze(-1)
    return -(weights * delta).sum(-1)


def _sequences(options: AttentionOptions, tokens: int) -> Iterator[tuple[slice, slice]]:
    """The queries and keys of every sequence that has queries; queries beyond the last see no keys."""
    queries, keys = ends_on_host(options.queries), ends_on_host(options.keys)
    for (q0, q1), (k0, k1) in zip(pairwise((*queries, tokens)), pairwise((*keys, keys[-1])), strict=True):
        if q1 > q0:
            yield slice(q0, q1), slice(k0, k1)


def _by_group(tokens: Tensor, groups: int) -> Tensor:
    """[S, H, D] as [H / groups, groups, S, D]: the query heads that share a key head, together."""
    return tokens.transpose(0, 1).unflatten(0, (-1, groups))


def _as_tokens(heads: Tensor) -> Tensor:
    """[H / groups, groups, S, D] as [S, H, D]."""
    return heads.flatten(0, 1).transpose(0, 1)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """The scores [Hk, Hq / Hk, queries, keys], -inf where a key is not seen, and the derivative of their cap."""
    groups = q.shape[1] // k.shape[1]
    scores = (_by_group(q, groups).to(dtype) @ _by_group(k, 1).to(dtype).mT) * options.scale
    slope: Tensor | float = 1.0
    if options.softcap is not None:
        bent = torch.tanh(scores / options.softcap)
        scores, slope = options.softcap * bent, 1 - bent * bent
    mask = attention_mask(q.shape[0], k.shape[0], options, q.device)
    return (scores if mask is None else scores.masked_fill_(~mask, float("-inf"))), slope


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 for a query that sees nothing (lse is -inf there)."""
    return torch.where(torch.isinf(lse), 0, lse).unsqueeze(-1).neg().add(scores).exp()
