"""Attention of one sequence on a CPU by torch's flash kernel: no scores in memory, no copy of a key for every head.

That kernel has masks for as many keys as queries, and as many heads of keys as of queries. It is given the keys that
come before all queries in one product without a mask, a group's heads as more rows, and the queries' own keys in a
causal product for each head of a group. Outputs are put together by the sums of their weights (as in ring attention,
arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zbkern.kernels.spec import AttentionOptions


def takes(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Whether it can run a sequence of q [T, Hq, D], k [T', Hk, D] and v [T', Hk, Dv]."""
    queries, keys = q.shape[0], k.shape[0]
    return (
        q.is_cpu
        and q.dtype in (torch.float32, torch.float64)  # half precisions would be rounded before they are summed
        and options.window is None
        and options.softcap is None
        and options.scale > 0  # it multiplies the -inf of its mask
        and v.shape[2] == q.shape[2]
        and (0 < queries <= keys if options.causal else min(queries, keys) > 0)
    )


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, y: Tensor, lse: Tensor) -> None:
    """y and lse as in spec.py; before, they are 0 and -inf, or sinks."""
    for heads, seen, causal in _products(q, k, options):
        rows, keys, values = _rows(q, heads, k), _dense(_heads(k[seen])), _dense(_heads(v[seen]))
        part, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, 0.0, causal, scale=options.scale
        )
        sums, out = lse[heads], y.transpose(0, 1)[heads]
        before, weight = sums.clone(), weight.reshape(sums.shape)
        torch.logaddexp(before, weight, out=sums)
        out.mul_((before - sums).exp_().unsqueeze(-1))
        out.addcmul_(part.reshape(out.shape), (weight - sums).exp_().unsqueeze(-1))


def attention_dgrad(
    of_queries: Sequence[Tensor], lse: Tensor, of_keys: Sequence[Tensor], options: AttentionOptions
) -> None:
    """Adds to dq, dk and dv. of_queries: dy, q, y, dq; of_keys: k, v, dk, dv."""
    (dy, q, y, dq), (k, v, dk, dv) = of_queries, of_keys
    for heads, seen, causal in _products(q, k, options):
        above, asked, out = (_rows(t, heads, k) for t in (dy, q, y))
        sums = lse[heads].reshape(1, k.shape[1], -1)
        query_part, *key_parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(above, asked, _dense(_heads(k[seen])), _dense(_heads(v[seen])), out, sums, 0.0, causal),
            scale=options.scale,
        )
        gradient = dq.transpose(0, 1)[heads]
        gradient += query_part.reshape(gradient.shape)
        for total, part in zip((dk, dv), key_parts, strict=True):
            _heads(total[seen]).add_(part)


def _products(q: Tensor, k: Tensor, options: AttentionOptions) -> Iterator[tuple[slice, slice, bool]]:
    """Heads of q, keys that they see, and whether each query sees those up to its own."""
    earlier = k.shape[0] - q.shape[0] if options.causal else k.shape[0]
    if earlier:
        yield slice(None), slice(0, earlier), False
    if options.causal:
        groups = q.shape[1] // k.shape[1]
        for head in range(groups):
            yield slice(head, None, groups), slice(earlier, None), True


def _rows(t: Tensor, heads: slice, k: Tensor) -> Tensor:
    """[T, Hq, D] as [1, Hk, rows, D]: what these heads ask of each head of k, together."""
    return _dense(t.transpose(0, 1)[heads].reshape(1, k.shape[1], -1, t.shape[2]))


def _heads(t: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D]."""
    return t.transpose(0, 1).unsqueeze(0)


def _dense(t: Tensor) -> Tensor:
    """torch's kernel reads the last dimension as if its numbers lay side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()
