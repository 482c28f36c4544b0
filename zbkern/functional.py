"""Public ops: they check their arguments, pick a backend, and call autograd.

Every op here behaves as its torch twin. Inside `WGradQueue.defer`, its backward computes input gradients only and the
weight gradients wait in the queue. `impl` is "auto", "cuda", "triton" or "torch": a named backend that cannot
run raises UnavailableError. `name` is what errors and the queue call the layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbkern.kernels import dispatch, reference, spec
from zbkern.kernels.spec import CrossEntropyOptions, GateOptions
from zbkern.ops import checks, table
from zbkern.ops.functions import attention as attention_functions
from zbkern.ops.functions import attention_backends, sharded
from zbkern.ops.functions import rotary as rotary_functions
from zbkern.ops.route import ARRIVING, PLAIN, route

__all__ = [
    "AttentionOptions",
    "CrossEntropyOptions",
    "GateOptions",
    "attention",
    "embedding",
    "gated_mlp",
    "grouped_linear",
    "grouped_mlp",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "rms_norm",
    "rotary",
]


@dataclass(frozen=True)
class AttentionOptions:
    """window: with causal, how many keys a query sees, its own included; None for all. scale: of the scores; None for
    1/sqrt(D). softcap: scores become softcap tanh(score / softcap), as in Gemma 2; None for no cap.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    impl: str = "auto",
    *,
    transposed: bool = False,
    name: str = "",
) -> Tensor:
    """activation(x weight^T + bias) with separate B and W: [..., N].

    Args:
        x: [..., K]; all tensors are of one dtype and device (under autocast, x and the result take autocast's dtype and
            the gradients stay the weight's).
        weight: [N, K], or [K, N] when transposed.
        bias: [N] or None.
        activation: None, "gelu", "gelu_tanh", "relu" or "silu".

    Raises TypeError or ValueError for arguments that do not fit, UnavailableError for an impl that cannot run.
    """
    if not checks.fits_linear(x, weight, bias, transposed):
        checks.check("linear", checks.LINEAR_TRANSPOSED if transposed else checks.LINEAR, x, weight, bias)
    if activation is not None:
        checks.check_choice("linear", "activation", activation, (None, *spec.ACTIVATIONS))
    return table.run(table.LINEAR, x, (weight, bias), activation, transposed, impl=impl, name=name)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    impl: str = "auto",
    *,
    name: str = "",
) -> Tensor:
    """(activation(x gate^T) * (x up^T)) down^T as one op: SwiGLU with "silu", GeGLU with "gelu" or "gelu_tanh".

    x: [..., K]; gate, up: [H, K]; down: [N, H]; biases [H], [H], [N] or None; returns [..., N]. Source: Shazeer, GLU
    Variants Improve Transformer (arXiv 2002.05202). Raises as `linear` does.
    """
    params = (gate, up, down, gate_bias, up_bias, down_bias)
    checks.check("gated_mlp", checks.GATED_MLP, x, *params)
    checks.check_choice("gated_mlp", "activation", activation, spec.ACTIVATIONS)
    return table.run(table.GATED_MLP, x, params, activation, impl=impl, name=name)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int] | Tensor | None = None,
    bias: Tensor | None = None,
    impl: str = "auto",
    *,
    offsets: Tensor | None = None,
    transposed: bool = False,
    name: str = "",
) -> Tensor:
    """A linear per group of rows, for mixture-of-experts: the first counts[0] rows use weight[0], and so on.

    x: [M, K], rows sorted by group; weight: [E, N, K], or [E, K, N] when transposed; bias: [E, N] or None; returns
    [M, N]. counts: E numbers of rows, possibly 0, M in all. offsets: instead of counts, the row at which every group
    ends, as torch's grouped_mm takes it; rows from the last end on belong to no group: they come out as zeros and get
    no gradient. Tensors on x's device are used there: the host never waits for them, so what they hold is not checked.
    Weights that are DTensors are cut by groups, Shard(0); x and counts are then this rank's. Raises as `linear` does.
    """
    wanted = checks.GROUPED_LINEAR_TRANSPOSED if transposed else checks.GROUPED_LINEAR
    return _grouped(table.GROUPED_LINEAR, wanted, x, (weight, bias), counts, offsets, transposed, impl=impl, name=name)


def grouped_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Sequence[int] | Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    gate: GateOptions = GateOptions(),  # noqa: B008 (it cannot change)
    impl: str = "auto",
    *,
    offsets: Tensor | None = None,
    transposed: bool = False,
    name: str = "",
) -> Tensor:
    """`gated_mlp` per group of rows, for experts: (activation(gate) * up) down[e]^T, (gate, up) = x gate_up[e]^T.

    x: [M, K], rows sorted by group; gate_up: [E, 2H, K], down: [E, N, H], or [E, K, 2H] and [E, H, N] when transposed;
    biases: of gate_up [E, 2H] and of down [E, N]; returns [M, N]. counts, offsets: as in `grouped_linear`. gate: what
    becomes of gate and up, and which of gate_up's outputs are which; gpt-oss's experts have
    GateOptions(interleaved=True, limit=7, alpha=1.702, offset=1). Raises as `linear` does.
    """
    checks.check_choice("grouped_mlp", "activation", gate.activation, spec.ACTIVATIONS)
    if not gate.alpha > 0 or (gate.limit is not None and not gate.limit > 0):
        raise ValueError(f"grouped_mlp: alpha and limit must be above 0; got {gate.alpha} and {gate.limit}")
    params = (gate_up, down, *biases)
    wanted = checks.GROUPED_MLP_TRANSPOSED if transposed else checks.GROUPED_MLP
    return _grouped(table.GROUPED_MLP, wanted, x, params, counts, offsets, gate, transposed, impl=impl, name=name)


def _grouped(
    op: table.Op,
    wanted: Sequence[checks.Argument],
    x: Tensor,
    params: tuple[Any, ...],
    counts: Sequence[int] | Tensor | None,
    offsets: Tensor | None,
    *options: Any,
    impl: str,
    name: str,
) -> Tensor:
    local = sharded.parts_by_group(op.name, params)
    checks.check(op.name, wanted, x, *local)
    ends = checks.group_ends(op.name, x, local[0].shape[0], counts, offsets)
    return table.run(op, x, params, ends, *options, impl=impl, name=name, local=local[0])


def embedding(
    indices: Tensor, weight: Tensor, padding_idx: int | None = None, impl: str = "auto", *, name: str = ""
) -> Tensor:
    """weight[indices]; its whole backward is W.

    indices: int64 or int32 of any shape, in 0..V-1; weight: [V, K]; returns [*indices.shape, K]. padding_idx: a row
    that gets no gradient (may be negative, from the end). Raises TypeError or ValueError for arguments that do not fit.
    """
    checks.check("embedding", checks.EMBEDDING, indices, weight)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx must be within the {rows} rows; got {padding_idx}")
    row = None if padding_idx is None else padding_idx % rows
    return table.run(table.EMBEDDING, indices, (weight,), row, impl=impl, name=name)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    impl: str = "auto",
    *,
    residual: Tensor | None = None,
    name: str = "",
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., K]; weight: [K] or None; eps: None for the smallest step of float32, of float64 for such x, as in torch.
    Row pass in B; what waits for W is partial sums of dweight, not x. Source: Zhang and Sennrich (arXiv 1910.07467).
    residual: of x's shape; then returns (norm of summed, summed), summed = x + residual, in one pass each way.
    """
    checks.check("rms_norm", checks.NORM, x, weight, None, residual)
    if eps is None:
        dtypes = torch.float32, x.dtype, x.dtype if residual is None else residual.dtype
        eps = torch.finfo(functools.reduce(torch.promote_types, dtypes)).eps
    return _norm(table.RMS_NORM, x, (weight,), eps, residual, impl, name)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    impl: str = "auto",
    *,
    residual: Tensor | None = None,
    name: str = "",
) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    x: [..., K]; weight, bias: [K] or None. Row pass in B; what waits for W is partial sums of dweight and dbias.
    residual: as in `rms_norm`.
    """
    checks.check("layer_norm", checks.NORM, x, weight, bias, residual)
    if weight is None and bias is not None:
        raise ValueError("layer_norm: bias without weight is not supported; pass weight, too")
    return _norm(table.LAYER_NORM, x, (weight, bias), eps, residual, impl, name)


def _norm(
    op: table.Op,
    x: Tensor,
    params: tuple[Tensor | None, ...],
    eps: float,
    residual: Tensor | None,
    impl: str,
    name: str,
) -> Any:
    if residual is not None:
        if x.dtype != residual.dtype:  # under autocast a residual stream is often the wider one
            dtype = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(dtype), residual.to(dtype)
        way = route(residual, x)
        if way is PLAIN:
            residual = table.cast_norm(op.name, residual, params)
        elif way is ARRIVING:
            summed = x + residual
            return table.run(op, summed, params, eps, None, impl=impl, name=name), summed
    return table.run(op, x, params, eps, residual, impl=impl, name=name)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    options: AttentionOptions = AttentionOptions(),
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    impl: str = "auto",
    *,
    sinks: Tensor | None = None,
    name: str = "",
) -> Tensor:
    """softmax(scale q k^T + mask) v: [batch, tokens, heads, Dv]; only `sinks` is a parameter, the rest of it is B.

    Args:
        q: [batch, tokens, heads, D].
        k: [batch, keys, kv_heads, D], where heads is a multiple of kv_heads (grouped-query attention).
        v: [batch, keys, kv_heads, Dv].
        causal: a query sees keys up to its own place; the last query and the last key have the same place.
        options: window, scale and cap.
        cu_seqlens: for packed sequences of different lengths, [0, end of the first, ..., T]; q is then [T, heads, D], k
            and v likewise.
        cu_seqlens_k: the same for the keys, where their lengths differ from those of the queries. Both are lists, or
            int32 or int64 tensors. Tensors on q's device are read there, and the host does not wait for them (except
            with impl="torch"); on a GPU their values are not checked, and where they end before T the rest of the
            result is 0. In a CUDA graph Triton's core takes these alone.
        sinks: [heads], the score of one more key per head, which every query sees and whose value is 0, as in gpt-oss;
            their gradient is W.
        impl: on a GPU "auto" chooses among zbkern's core, torch's and an installed FlashAttention; `zbkern info` says
            which.

    Raises TypeError or ValueError for arguments that do not fit, UnavailableError for an impl that cannot run.
    """
    if not isinstance(options, AttentionOptions):
        raise TypeError(f"attention: options must be a zbkern.functional.AttentionOptions; got {options!r}")
    checks.check_attention(q, k, v, sinks, cu_seqlens is not None, causal, options)
    q, k, v = (table.cast_product("attention", t, (t,)) for t in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(f"attention: q, k and v must have one floating dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    ends = checks.sequence_ends(q, k, cu_seqlens, cu_seqlens_k)
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    cap = None if options.softcap is None else float(options.softcap)
    packed = spec.AttentionOptions(float(scale), causal, options.window, *ends, cap)
    if route(q, k if sinks is None else sinks) is not PLAIN:
        return attention_functions.attention_with_torch(sinks, q, k, v, packed)
    if impl == "auto" and q.is_cuda:
        runs = dispatch.why_not("attention", "triton", q.device, q.dtype) is None
        ours = dispatch.resolve("attention", "triton", q.device, q.dtype) if runs else None
        return attention_backends.fastest(attention_backends.Case(q, k, v, packed, sinks, ours), name)
    backend = dispatch.resolve("attention", impl, q.device, q.dtype)
    return attention_functions.attention(backend, q, k, v, packed, sinks, name)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, impl: str = "auto") -> Tensor:
    """Rotary position embedding of queries or keys; its backward, the rotation back, is B.

    x: [..., T, H, D] as `attention` takes it, T tokens, H heads; cos, sin: [T, R/2] of any floating dtype, of the
    angles by which the pairs of each token turn, R <= D; further columns pass through. Pairs are columns (c, c + R/2)
    as in Llama, interleaved (2c, 2c + 1) as in GPT-J. Computed in float32 or wider; returns x's shape and dtype.
    cos and sin get no gradient. Source: Su et al., RoFormer (arXiv 2104.09864). Raises TypeError or ValueError for
    arguments that do not fit.
    """
    checks.check("rotary", checks.ROTARY, x, cos, sin)
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"rotary: cos must be [T, R/2] with R <= {x.shape[-1]} like x; got {list(cos.shape)}")
    if cos.requires_grad or sin.requires_grad:
        raise TypeError("rotary: cos and sin must be numbers without a gradient; detach them")
    if route(x, cos) is not PLAIN:
        return reference.rotated(x, cos, sin, interleaved)
    backend = dispatch.resolve("rotary", impl, x.device, x.dtype)
    return rotary_functions.RotaryFunction.apply(backend, x, cos, sin, interleaved, False)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    reduction: str = "mean",
    options: CrossEntropyOptions = CrossEntropyOptions(),  # noqa: B008 (it cannot change)
    impl: str = "auto",
    *,
    name: str = "",
) -> Tensor:
    """cross_entropy(x weight^T + bias, target) without ever holding all logits.

    Args:
        x: [..., K].
        weight: [V, K].
        target: [...] integers in 0..V-1 or options.ignore_index.
        bias: [V] or None.
        reduction: "mean" over the targets that count, "sum", or "none" for [...].
        options: of its chunk, fp32 on a CPU takes at most 128 rows, of which the caches hold more, or K / 4, which
            large matmuls need.

    The loss is float32 (float64 for float64 x). With every `impl`, "auto" too: where a WGradQueue exists, W computes
    the logits a second time; where W cannot wait (no queue exists, or inside `no_defer`), forward computes the
    gradients of a summed loss, of weights in fp32 at least, with the logits that it has: three matmuls instead of four
    (docs/layers.md says which one to choose).
    """
    checks.check("linear_cross_entropy", checks.LINEAR_CROSS_ENTROPY, x, weight, target, bias)
    checks.check_cross_entropy(options, reduction)
    options = _chunk_for(x, options)
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1).long()  # torch's loss takes no others
    op, sums = table.LINEAR_CROSS_ENTROPY, reduction != "none"
    loss = table.run(op, rows, (weight, bias), targets, options, sums, impl=impl, name=name)
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    count = (targets != options.ignore_index).sum()
    return loss.sum() / count.clamp(min=1) + 0 / count  # of no labels: nan, whose gradients are zeros, as torch's


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    options: CrossEntropyOptions = CrossEntropyOptions(),  # noqa: B008 (it cannot change)
    *,
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy) of softmax(x weight^T + bias) without ever holding all logits, as policies are trained by.

    Arguments as in `linear_cross_entropy`; label_smoothing and z_loss must be 0. log_probs [...] are the logarithms of
    the probabilities of the targets, entropy [...] is -sum(p log p), both 0 where ignored, in float32 (float64 for
    float64 x), and both have a gradient. B and W compute the logits again: five matmuls, where log_probs alone,
    -linear_cross_entropy(reduction="none"), take four. Plain torch on every device. Raises TypeError or ValueError for
    arguments that do not fit.
    """
    checks.check("linear_log_probs", checks.LINEAR_CROSS_ENTROPY, x, weight, target, bias)
    checks.check_cross_entropy(options, "none", "linear_log_probs")
    if options.label_smoothing or options.z_loss:
        raise ValueError(
            "linear_log_probs: label_smoothing and z_loss must be 0; got "
            f"{options.label_smoothing} and {options.z_loss}"
        )
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1).long()
    op, options = table.LINEAR_LOG_PROBS, _chunk_for(x, options)
    log_probs, entropy = table.run(op, rows, (weight, bias), targets, options, impl="torch", name=name)
    return log_probs.view(target.shape), entropy.view(target.shape)


def _chunk_for(x: Tensor, options: CrossEntropyOptions) -> CrossEntropyOptions:
    if x.device.type != "cpu" or x.dtype.itemsize < 4:
        return options
    chunk = min(options.chunk, max(128, x.shape[-1] // 4))
    kept = options.ignore_index, options.label_smoothing, options.z_loss
    return CrossEntropyOptions(*kept, chunk, options.softcap)
