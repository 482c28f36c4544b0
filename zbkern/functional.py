"""Public ops: they check their arguments, pick a backend, and call autograd.

Every op here behaves as its torch twin. Inside `WGradQueue.defer`, its backward computes input gradients only and the
weight gradients wait in the queue. `impl` is "auto", "cuda", "triton" or "torch": a named backend that cannot
run raises UnavailableError. `name` is what errors and the queue call the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.kernels import dispatch, spec
from zbkern.ops import autograd, checks, compiled
from zbkern.ops.functions import attention as attention_functions
from zbkern.ops.functions import attention_backends, collectives, sharded, sharded_norm
from zbkern.ops.functions import embedding as embedding_functions
from zbkern.ops.functions import grouped as grouped_functions
from zbkern.ops.functions import linear as linear_functions
from zbkern.ops.functions import loss as loss_functions
from zbkern.ops.functions import norm as norm_functions
from zbkern.ops.functions import rotary as rotary_functions


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    impl: str = "auto",
    *,
    transposed: bool = False,
    recipe: str | None = None,
    name: str = "",
) -> Tensor:
    """activation(x weight^T + bias) with separate B and W.

    x: [..., K]; weight: [N, K], or [K, N] when transposed; bias: [N] or None; returns [..., N], all of one dtype and
    device (under autocast, x and the result take autocast's dtype and the gradients stay the weight's). activation:
    None, "gelu", "gelu_tanh", "relu" or "silu". recipe: "fp8_blockwise" multiplies 8-bit numbers in forward and B, with
    a scale for each 1 x 128 of x and dy and 128 x 128 of the weight, and leaves W as it is (DeepSeek-V3, arXiv
    2412.19437); without activation, and not inside torch.compile, function transforms or on DTensors. On GPUs of
    compute capability 9.0 and later; "torch" computes the same values slowly, on any device.
    Raises TypeError or ValueError for arguments that do not fit, UnavailableError for an impl that cannot run.
    """
    if activation is not None or not checks.fits_linear(x, weight, bias, transposed):
        checks.check_linear("linear", x, weight, bias, transposed)
        checks.check_activation("linear", activation)
    if recipe is not None:
        return _linear_by_recipe(x, weight, bias, activation, impl, transposed, recipe, name)
    if torch.compiler.is_compiling() and compiled.can_defer(x, weight, bias):
        return compiled.linear(_autocast("linear", x, weight, bias), weight, bias, activation, transposed)
    if not _plain(x, weight):
        if _in_flight(x):
            x = collectives.Arrived.apply(x)
            return linear(x, weight, bias, activation, impl, transposed=transposed, name=name)
        if activation is not None or transposed:
            return linear_functions.linear_with_torch(weight, bias, x, activation, transposed)
        if torch.compiler.is_compiling() and compiled.can_defer_sharded(x, weight, bias):
            return compiled.sharded_linear(_autocast("linear", x, weight, bias), weight, bias)
        if _defers_sharded(x, weight, bias):
            call = autograd.OpCall((weight, bias), dispatch.resolve("linear", impl, x.device, x.dtype), name)
            return autograd.apply(sharded.ShardedLinear, call, x)
        return linear_functions.linear_with_torch(weight, bias, x, activation, transposed)
    x = _autocast("linear", x, weight, bias)
    call = autograd.OpCall((weight, bias), dispatch.resolve("linear", impl, x.device, x.dtype), name)
    return autograd.apply(linear_functions.Linear, call, x, activation, transposed)


def _linear_by_recipe(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    impl: str,
    transposed: bool,
    recipe: str,
    name: str,
) -> Tensor:
    check_recipe("linear", recipe)
    if activation is not None or transposed:
        raise ValueError(
            f"linear: recipe={recipe!r} needs activation=None and transposed=False; "
            f"got activation={activation!r}, transposed={transposed}"
        )
    if not _plain(x, weight):
        raise ValueError(
            f"linear: recipe={recipe!r} needs plain tensors outside of torch.compile and of function transforms; got "
            f"{type(x).__name__} and {type(weight).__name__}; use torch.compiler.disable on the module, or recipe=None"
        )
    x = _autocast("linear", x, weight, bias)
    call = autograd.OpCall((weight, bias), dispatch.resolve("fp8_linear", impl, x.device, x.dtype), name)
    return autograd.apply(linear_functions.FP8Linear, call, x)


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
    checks.check_gated_mlp(x, gate, up, down, gate_bias, up_bias, down_bias, activation)
    params = (gate, up, down, gate_bias, up_bias, down_bias)
    if torch.compiler.is_compiling() and compiled.can_defer(x, *params):
        return compiled.gated_mlp(_autocast("gated_mlp", x, *params), params, activation)
    if not _plain(x, gate):
        if _in_flight(x):
            x = collectives.Arrived.apply(x)
            return gated_mlp(x, *params, activation, impl, name=name)
        return linear_functions.gated_mlp_with_torch(*params, x, activation)
    x = _autocast("gated_mlp", x, *params)
    call = autograd.OpCall(params, dispatch.resolve("gated_mlp", impl, x.device, x.dtype), name)
    return autograd.apply(linear_functions.GatedMLP, call, x, activation)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, impl: str = "auto", *, name: str = "") -> Tensor:
    """`gated_mlp` with silu and no biases: (silu(x gate^T) * (x up^T)) down^T."""
    return gated_mlp(x, gate, up, down, impl=impl, name=name)


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
    params = weight, bias
    own_weight, own_bias = _parts("grouped_linear", params)
    checks.check_grouped_linear("grouped_linear", x, own_weight, own_bias, transposed)
    ends = checks.group_ends("grouped_linear", x, own_weight.shape[0], counts, offsets)
    if torch.compiler.is_compiling() and compiled.can_defer(x, *params):
        x = _autocast("grouped_linear", x, weight, bias)
        return compiled.grouped_linear(x, weight, bias, ends, transposed, offsets is None)
    if not _plain(x, own_weight):
        return grouped_functions.grouped_linear_with_torch(*params, x, ends, transposed)
    x = _autocast("grouped_linear", x, own_weight, own_bias)
    call = autograd.OpCall(params, dispatch.resolve("grouped_linear", impl, x.device, x.dtype), name)
    return autograd.apply(grouped_functions.GroupedLinear, call, x, ends, transposed)


def grouped_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Sequence[int] | Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    impl: str = "auto",
    *,
    offsets: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    name: str = "",
) -> Tensor:
    """`gated_mlp` per group of rows, for experts: (activation(gate) * up) down[e]^T, (gate, up) = x gate_up[e]^T.

    x: [M, K], rows sorted by group; gate_up: [E, 2 H, K], down: [E, N, H], or [E, K, 2 H] and [E, H, N] when
    transposed; biases [E, 2 H], [E, N] or None; returns [M, N]. counts, offsets: as in `grouped_linear`. Of gate_up's
    outputs the first half are gate, or, interleaved, every second one from the first on. gpt-oss's experts have limit=7
    (gate is cut off above it, up above it and below -limit), alpha=1.702 (activation(alpha gate) / alpha) and
    up_offset=1 (added to up). Raises as `linear` does.
    """
    op, params = "grouped_mlp", (gate_up, down, gate_up_bias, down_bias)
    parts = _parts(op, params)
    checks.check_grouped_mlp(x, parts[0], parts[1], parts[2], parts[3], transposed)
    options = checks.gate_options(activation, interleaved, limit, alpha, up_offset)
    ends = checks.group_ends(op, x, parts[0].shape[0], counts, offsets)
    if torch.compiler.is_compiling() and compiled.can_defer(x, *params):
        x = _autocast(op, x, *params)
        return compiled.grouped_mlp(x, params, ends, options, transposed, offsets is None)
    if not _plain(x, parts[0]):
        return grouped_functions.grouped_mlp_with_torch(*params, x, ends, options, transposed)
    x = _autocast(op, x, *parts)
    call = autograd.OpCall(params, dispatch.resolve(op, impl, x.device, x.dtype), name)
    return autograd.apply(grouped_functions.GroupedMLP, call, x, ends, options, transposed)


def embedding(
    indices: Tensor, weight: Tensor, padding_idx: int | None = None, impl: str = "auto", *, name: str = ""
) -> Tensor:
    """weight[indices]; its whole backward is W.

    indices: int64 or int32 of any shape, in 0..V-1; weight: [V, K]; returns [*indices.shape, K]. padding_idx: a row
    that gets no gradient (may be negative, from the end). Raises TypeError or ValueError for arguments that do not fit.
    """
    padding_idx = checks.check_embedding(indices, weight, padding_idx)
    if torch.compiler.is_compiling() and compiled.can_defer(indices, weight):
        return compiled.embedding(indices, weight, padding_idx)
    if not _plain(indices, weight):
        if _defers_sharded(indices, weight):
            call = autograd.OpCall((weight,), dispatch.resolve("embedding", impl, weight.device, weight.dtype), name)
            return autograd.apply(sharded.ShardedEmbedding, call, indices, padding_idx)
        return embedding_functions.embedding_with_torch(weight, indices, padding_idx)
    call = autograd.OpCall((weight,), dispatch.resolve("embedding", impl, weight.device, weight.dtype), name)
    return autograd.apply(embedding_functions.Embedding, call, indices, padding_idx)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    impl: str = "auto",
    *,
    residual: None = None,
    name: str = "",
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    impl: str = "auto",
    *,
    residual: Tensor,
    name: str = "",
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    impl: str = "auto",
    *,
    residual: Tensor | None = None,
    name: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., K]; weight: [K] or None; eps: None for the smallest step of x's dtype, as in torch. Row pass in B; what
    waits for W is partial sums of dweight, not x. Source: Zhang and Sennrich (arXiv 1910.07467).
    residual: of x's shape; then returns (norm of summed, summed), summed = x + residual, in one pass each way.
    """
    checks.check_norm("rms_norm", x, weight, None, residual)
    if eps is not None:
        checks.check_number("rms_norm", "eps", eps)
    x, residual = _one_dtype(x, residual)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if not _plain(x, x if weight is None else weight) or not _plain(x, x if residual is None else residual):
        if _in_flight(x):
            x = collectives.Arrived.apply(x)
            return rms_norm(x, weight, eps, impl, residual=residual, name=name)
        if weight is not None and _defers_sharded(x, weight, residual) and sharded_norm.has_local_rows(x, weight):
            return _norm_of_local_rows(norm_functions.RMSNorm, "rms_norm", (weight,), x, eps, residual, impl, name)
        return norm_functions.rms_norm_with_torch(weight, x, eps, residual)
    x, residual = _norm_autocast(x), None if residual is None else _norm_autocast(residual)
    call = autograd.OpCall((weight,), dispatch.resolve("rms_norm", impl, x.device, x.dtype), name)
    return autograd.apply(norm_functions.RMSNorm, call, x, eps, residual)


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    impl: str = "auto",
    *,
    residual: None = None,
    name: str = "",
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    impl: str = "auto",
    *,
    residual: Tensor,
    name: str = "",
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    impl: str = "auto",
    *,
    residual: Tensor | None = None,
    name: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    x: [..., K]; weight, bias: [K] or None. Row pass in B; what waits for W is partial sums of dweight and dbias.
    residual: as in `rms_norm`.
    """
    checks.check_norm("layer_norm", x, weight, bias, residual)
    checks.check_number("layer_norm", "eps", eps)
    x, residual = _one_dtype(x, residual)
    if not _plain(x, x if weight is None else weight) or not _plain(x, x if residual is None else residual):
        if _in_flight(x):
            x = collectives.Arrived.apply(x)
            return layer_norm(x, weight, bias, eps, impl, residual=residual, name=name)
        deferred = weight is not None and _defers_sharded(x, weight, bias, residual)
        if deferred and sharded_norm.has_local_rows(x, weight, bias):
            params = weight, bias
            return _norm_of_local_rows(norm_functions.LayerNorm, "layer_norm", params, x, eps, residual, impl, name)
        return norm_functions.layer_norm_with_torch(weight, bias, x, eps, residual)
    x, residual = _norm_autocast(x), None if residual is None else _norm_autocast(residual)
    call = autograd.OpCall((weight, bias), dispatch.resolve("layer_norm", impl, x.device, x.dtype), name)
    return autograd.apply(norm_functions.LayerNorm, call, x, eps, residual)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    impl: str = "auto",
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    name: str = "",
) -> Tensor:
    """softmax(scale q k^T + mask) v. Only `sinks` is a parameter: the rest of the backward is B.

    q: [batch, queries, heads, D]; k: [batch, keys, kv_heads, D]; v: [batch, keys, kv_heads, Dv], where heads is a
    multiple of kv_heads (grouped-query attention); returns [batch, queries, heads, Dv].
    cu_seqlens: for packed sequences of different lengths, [0, end of the first, ..., T]; q is then [T, heads, D], k and
    v likewise. cu_seqlens_k: the same for the keys, where their lengths differ from those of the queries. Both are
    lists, or int32 or int64 tensors. Tensors on q's device are read there, and the host does not wait for them (except
    with impl="torch"); on a GPU their values are not checked, and where they end before T the rest of the result is 0.
    causal: a query sees keys up to its own place; the last query and the last key have the same place. window: with
    causal, how many keys a query sees, its own included. scale: 1/sqrt(D) when None. softcap: scores become
    softcap tanh(score / softcap), as in Gemma 2. sinks: [heads], the score of one more key per head, which every query
    sees and whose value is 0, as in gpt-oss; their gradient is W. impl: on a GPU "auto" chooses among zbkern's core,
    torch's and an installed FlashAttention; `zbkern info` says which.
    Raises TypeError or ValueError for arguments that do not fit, UnavailableError for an impl that cannot run.
    """
    checks.check_attention(q, k, v, causal, window, cu_seqlens, cu_seqlens_k, softcap, sinks)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    checks.check_number("attention", "scale", scale)
    q, k, v = (_autocast("attention", t, t) for t in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(f"attention: q, k and v must have one floating dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    ends: tuple[int, ...] | Tensor
    key_ends: tuple[int, ...] | Tensor
    if cu_seqlens is None:
        ends, key_ends = _even_ends(q.shape[0], q.shape[1]), _even_ends(k.shape[0], k.shape[1])
    else:
        ends, key_ends = checks.sequence_ends(q, k, cu_seqlens, cu_seqlens_k)
    cap = None if softcap is None else float(softcap)
    options = spec.AttentionOptions(float(scale), causal, window, ends, key_ends, cap)
    if not _plain(q, k if sinks is None else sinks):
        return attention_functions.attention_with_torch(q, k, v, options, sinks)
    if impl == "auto" and q.is_cuda:
        reason = dispatch.why_not("attention", "triton", q.device, q.dtype)
        ours = None if reason else dispatch.resolve("attention", "triton", q.device, q.dtype)
        return attention_backends.fastest(q, k, v, options, ours, reason, sinks, name)
    backend = dispatch.resolve("attention", impl, q.device, q.dtype)
    return attention_functions.attention(backend, q, k, v, options, sinks, name)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, impl: str = "auto") -> Tensor:
    """Rotary position embedding of queries or keys; its backward, the rotation back, is B.

    x: [..., T, H, D] as `attention` takes it, T tokens, H heads; cos, sin: [T, R/2] of any floating dtype, of the
    angles by which the pairs of each token turn, R <= D; further columns pass through. Pairs are columns (c, c + R/2)
    as in Llama, interleaved (2c, 2c + 1) as in GPT-J. Computed in float32 or wider; returns x's shape and dtype.
    cos and sin get no gradient. Source: Su et al., RoFormer (arXiv 2104.09864). Raises TypeError or ValueError for
    arguments that do not fit.
    """
    checks.check_rotary(x, cos, sin)
    if not _plain(x, cos):
        return rotary_functions.rotary_with_torch(x, cos, sin, interleaved)
    backend = dispatch.resolve("rotary", impl, x.device, x.dtype)
    return rotary_functions.Rotary.apply(backend, x, cos, sin, interleaved, False)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
    impl: str = "auto",
    *,
    name: str = "",
) -> Tensor:
    """cross_entropy(x weight^T + bias, target) without ever holding all logits.

    x: [..., K]; weight: [V, K]; bias: [V] or None; target: [...] integers in 0..V-1 or ignore_index. reduction: "mean"
    over the targets that count, "sum", or "none" for [...]. z_loss: factor of the squared log-sum-exp, added to every
    row's loss (PaLM, arXiv 2204.02311). chunk: rows whose logits exist at one time; None for 1024, in fp32 on a CPU
    128, of which the caches hold more, or K / 4, which large matmuls need. The loss is float32 (float64 for float64
    x). With every `impl`, "auto" too: where a WGradQueue exists, W computes the logits a second time; where W cannot
    wait (no queue exists, or inside `no_defer`), forward computes the gradients of a summed loss, of weights in fp32 at
    least, with the logits that it has: three matmuls instead of four (docs/layers.md says which one to choose).
    """
    if chunk is None:
        on_cpu = isinstance(x, Tensor) and x.device.type == "cpu" and x.dtype.itemsize >= 4
        chunk = max(128, x.shape[-1] // 4) if on_cpu and x.dim() else 1024
    checks.check_linear_cross_entropy(x, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction, chunk)
    options = spec.CrossEntropyOptions(ignore_index, float(label_smoothing), float(z_loss), chunk)
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    compiling = torch.compiler.is_compiling()
    cut = compiled.can_defer_sharded(rows, weight, bias) if compiling else _defers_sharded(rows, weight, bias)
    if cut:  # torch's loss, within loss_parallel() without gathering the logits
        logits = linear(rows, weight, bias, impl=impl, name=name)
        loss = loss_functions.cross_entropy_with_torch(logits, targets, options)
    elif compiling and compiled.can_defer_head(rows, weight, bias):
        rows = _autocast("linear_cross_entropy", rows, weight, bias)
        loss = compiled.linear_cross_entropy(rows, weight, bias, targets, options)
    elif not _plain(x, weight):
        loss = loss_functions.linear_cross_entropy_with_torch(weight, bias, rows, targets, options)
    else:
        rows = _autocast("linear_cross_entropy", rows, weight, bias)
        backend = dispatch.resolve("linear_cross_entropy", impl, x.device, rows.dtype)
        call = loss_functions.HeadCall((weight, bias), backend, name, reduction != "none" and rows.shape[0] > 0)
        loss = autograd.apply(loss_functions.LinearCrossEntropy, call, rows, targets, options)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (targets != ignore_index).sum()


def check_impl(caller: str, impl: str) -> str:
    """impl. Raises ValueError where no backend has this name; whether it can run shows at its first call."""
    if impl != "auto" and impl not in spec.IMPLEMENTATIONS:
        raise ValueError(f'{caller}: impl must be "auto" or one of {spec.IMPLEMENTATIONS}; got {impl!r}')
    return impl


def check_recipe(caller: str, recipe: str | None) -> str | None:
    """recipe. Raises ValueError where there is none of this name."""
    if recipe is not None and recipe not in spec.RECIPES:
        raise ValueError(f"{caller}: recipe must be None or one of {spec.RECIPES}; got {recipe!r}")
    return recipe


def _plain(x: Tensor, weight: Tensor) -> bool:
    """False for tensor subclasses, sparse tensors, under function transforms and inside torch.compile: these need
    operations that torch can see through. There the whole backward is one piece, and its W does not wait."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _TENSORS
        and type(weight) in _TENSORS
        and x.layout is torch.strided
        and not compiled.within_transform()
    )


def _defers_sharded(*tensors: Tensor | None) -> bool:
    """True for DTensors in a forward whose W may wait: elsewhere torch's own operations do the whole backward."""
    return not torch.compiler.is_compiling() and wgrad.current() is not None and sharded.is_sharded(*tensors)


def _norm_of_local_rows(
    norm: type[torch.autograd.Function],
    op: str,
    params: tuple[Tensor | None, ...],
    x: Tensor,
    eps: float,
    residual: Tensor | None,
    impl: str,
    name: str,
) -> Tensor | tuple[Tensor, Tensor]:
    summed = x if residual is None else x + residual
    backend = dispatch.resolve(op, impl, x.device, x.dtype)
    y = sharded_norm.on_local_rows(norm, params, backend, name, summed, eps)
    return y if residual is None else (y, summed)


def _parts(op: str, params: tuple[Any, ...]) -> tuple[Any, ...]:
    """What this rank has of weights per group, DTensors or not."""
    if torch.compiler.is_compiling() or not any(sharded.is_sharded(p) for p in params if p is not None):
        return params
    return sharded.parts_by_group(op, params)


def _in_flight(x: Tensor) -> bool:
    """True for what a collective has returned without waiting, as tensor-parallel layers do."""
    return not torch.compiler.is_compiling() and collectives.is_wrapped(x)


_TENSORS = (Tensor, torch.nn.Parameter)


def _autocast(op: str, x: Tensor, *weights: Tensor | None) -> Tensor:
    dtype = x.dtype
    if torch._C._is_any_autocast_enabled():
        device = x.device.type
        enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # not on meta, say
        if enabled and x.is_floating_point() and dtype != torch.float64:
            return x.to(torch.get_autocast_dtype(device))
    for weight in weights:
        if weight is not None and weight.dtype != dtype:
            raise TypeError(
                f"{op}: x is {x.dtype} and a weight or bias {weight.dtype}; convert one, or use torch.autocast"
            )
    return x


def _even_ends(sequences: int, tokens: int) -> tuple[int, ...]:
    """The ends of so many sequences of so many tokens each, beginning with 0."""
    return tuple(range(0, (sequences + 1) * tokens, tokens)) if tokens else (0,) * (sequences + 1)


def _norm_autocast(x: Tensor) -> Tensor:
    """On CUDA, autocast runs norms in float32; on the CPU it leaves them alone."""
    return x.float() if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64 else x


def _one_dtype(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both in the dtype that x + residual has: under autocast a residual stream is often the wider one."""
    if residual is None or x.dtype == residual.dtype:
        return x, residual
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)
