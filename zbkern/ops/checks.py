"""What users hand to the public ops, checked: errors name the op, the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zbkern.kernels import spec


def fits_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> bool:
    """True when `check_linear` would find nothing; what finds out what is wrong takes ten times as long."""
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[not transposed]
        and x.device == weight.device
        and not (x.is_complex() or weight.is_complex())
        and (
            bias is None
            or (
                isinstance(bias, Tensor)
                and bias.numel() == weight.shape[transposed]
                and bias.dim() == 1
                and not bias.is_complex()
            )
        )
    )


def check_linear(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool = False,
    names: tuple[str, str] = ("weight", "bias"),
) -> None:
    layout = "[K, N]" if transposed else "[N, K]"
    _check_tensors(op, **{"x": x, names[0]: weight})
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[not transposed] != x.shape[-1]:
        wanted = f" with K={x.shape[-1]} like x" if x.dim() else " and x [..., K]"
        raise ValueError(f"{op}: {names[0]} must be {layout}{wanted}; got {list(weight.shape)}, x {list(x.shape)}")
    if bias is not None:
        _check_tensors(op, **{"x": x, names[1]: bias})
    if bias is not None and list(bias.shape) != [weight.shape[transposed]]:
        raise ValueError(
            f"{op}: {names[1]} must be [N] with N={weight.shape[transposed]} like {names[0]}; got {list(bias.shape)}"
        )


def check_activation(op: str, activation: str | None) -> None:
    if activation is not None and activation not in spec.ACTIVATIONS:
        raise ValueError(f"{op}: activation must be None or one of {spec.ACTIVATIONS}; got {activation!r}")


def check_gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> None:
    check_linear("gated_mlp", x, gate, gate_bias, names=("gate", "gate_bias"))
    check_linear("gated_mlp", x, up, up_bias, names=("up", "up_bias"))
    _check_tensors("gated_mlp", x=x, down=down)
    if up.shape != gate.shape:
        raise ValueError(f"gated_mlp: up must have gate's shape {list(gate.shape)}; got {list(up.shape)}")
    if down.dim() != 2 or down.shape[1] != gate.shape[0]:
        raise ValueError(f"gated_mlp: down must be [N, H] with H={gate.shape[0]} like gate; got {list(down.shape)}")
    if down_bias is not None:
        _check_tensors("gated_mlp", x=x, down_bias=down_bias)
        if down_bias.shape != down.shape[:1]:
            raise ValueError(f"gated_mlp: down_bias must be [N] with N={down.shape[0]}; got {list(down_bias.shape)}")
    if activation is None:
        raise ValueError(f"gated_mlp: activation must be one of {spec.ACTIVATIONS}; got None")
    check_activation("gated_mlp", activation)


def check_grouped_linear(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool = False,
    names: tuple[str, str] = ("weight", "bias"),
) -> None:
    layout = "[E, K, N]" if transposed else "[E, N, K]"
    _check_tensors(op, **{"x": x, names[0]: weight})
    if x.dim() != 2 or weight.dim() != 3 or weight.shape[1 if transposed else 2] != x.shape[1]:
        raise ValueError(
            f"{op}: x must be [M, K] and {names[0]} {layout}; got {list(x.shape)} and {list(weight.shape)}"
        )
    if bias is not None:
        _check_tensors(op, **{"x": x, names[1]: bias})
        wanted = [weight.shape[0], weight.shape[2 if transposed else 1]]
        if list(bias.shape) != wanted:
            raise ValueError(f"{op}: {names[1]} must be [E, N] = {wanted}; got {list(bias.shape)}")


def check_grouped_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, transposed: bool
) -> None:
    op, names = "grouped_mlp", ("gate_up", "gate_up_bias")
    check_grouped_linear(op, x, gate_up, gate_up_bias, transposed, names)
    columns, rows = (2, 1) if transposed else (1, 2)
    hidden, odd = divmod(gate_up.shape[columns], 2)
    if odd:
        raise ValueError(f"{op}: gate_up must have an even number of outputs, gate and up; got {2 * hidden + 1}")
    _check_tensors(op, x=x, down=down)
    if down.dim() != 3 or down.shape[0] != gate_up.shape[0] or down.shape[rows] != hidden:
        layout = "[E, H, N]" if transposed else "[E, N, H]"
        raise ValueError(
            f"{op}: down must be {layout} with E={gate_up.shape[0]} and H={hidden} like gate_up; got {list(down.shape)}"
        )
    if down_bias is not None:
        _check_tensors(op, x=x, down_bias=down_bias)
        if list(down_bias.shape) != [down.shape[0], down.shape[columns]]:
            wanted = [down.shape[0], down.shape[columns]]
            raise ValueError(f"{op}: down_bias must be [E, N] = {wanted}; got {list(down_bias.shape)}")


def gate_options(
    activation: str, interleaved: bool, limit: float | None, alpha: float, up_offset: float
) -> spec.GateOptions:
    op = "grouped_mlp"
    if activation is None:
        raise ValueError(f"{op}: activation must be one of {spec.ACTIVATIONS}; got None")
    check_activation(op, activation)
    check_number(op, "alpha", alpha)
    check_number(op, "up_offset", up_offset)
    if limit is not None:
        check_number(op, "limit", limit)
    if not alpha > 0 or (limit is not None and not limit > 0):
        raise ValueError(f"{op}: alpha and limit must be above 0; got {alpha} and {limit}")
    wanted = None if limit is None else float(limit)
    return spec.GateOptions(activation, bool(interleaved), wanted, float(alpha), float(up_offset))


def group_ends(
    op: str, x: Tensor, groups: int, counts: Sequence[int] | Tensor | None, offsets: Tensor | None
) -> Tensor:
    """Where the rows of every group end, int32 on x's device. Numbers that are on a GPU already are not read, nor those
    that a compiler traces."""
    compiling = torch.compiler.is_compiling()
    if offsets is None:
        given = _integers(op, "counts", counts)
        known = given.is_cpu and not compiling
        wanted = f"{groups} numbers >= 0 that add up to {x.shape[0]} rows"
        fits = known and bool((given >= 0).all()) and int(given.sum()) == x.shape[0]
    else:
        if counts is not None:
            raise ValueError(f"{op}: counts and offsets say the same; pass one of them")
        given = _integers(op, "offsets", offsets)
        known = given.is_cpu and not compiling
        wanted = f"{groups} numbers that rise from 0 or more to {x.shape[0]} rows or less"
        fits = known and given.tolist() == sorted(given.clamp(0, x.shape[0]).tolist())
    if list(given.shape) != [groups] or (known and not fits):
        found = given.tolist() if known else f"{list(given.shape)} of them"
        raise ValueError(f"{op}: {'counts' if offsets is None else 'offsets'} must be {wanted}; got {found}")
    ends = given.cumsum(0) if offsets is None else given
    return ends.to(device=x.device, dtype=torch.int32, non_blocking=True)


def _integers(op: str, argument: str, values: Sequence[int] | Tensor | None) -> Tensor:
    sized = isinstance(values, torch.Tensor) or hasattr(values, "__len__")  # torch 2.8's compiler sees none of a tensor
    if isinstance(values, str) or not sized:
        raise TypeError(f"{op}: {argument} must be a list or a tensor of integers; got {values!r}")
    tensor = torch.as_tensor(values)
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        found = tensor.tolist() if tensor.is_cpu else tensor.dtype
        raise TypeError(f"{op}: {argument} must be integers; got {found}")
    return tensor.detach()


def check_embedding(indices: Tensor, weight: Tensor, padding_idx: int | None) -> int | None:
    """padding_idx, counted from the start."""
    _check_tensors("embedding", indices=indices, weight=weight)
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: indices must be integers, int64 or int32; got {indices.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"embedding: weight must be [V, K]; got {list(weight.shape)}")
    if padding_idx is None:
        return None
    check_integer("embedding", "padding_idx", padding_idx)
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise ValueError(f"embedding: padding_idx must be within the {weight.shape[0]} rows; got {padding_idx}")
    return padding_idx % weight.shape[0]


def check_norm(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    _check_tensors(op, x=x)
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"{op}: x must be [..., K] of a floating dtype; got {x.dtype} {list(x.shape)}")
    for argument, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        _check_tensors(op, **{"x": x, argument: value})
        if value.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {argument} must be [K] with K={x.shape[-1]} like x; got {list(value.shape)}")
    if residual is not None:
        _check_tensors(op, x=x, residual=residual)
        if residual.shape != x.shape or not residual.is_floating_point():
            raise ValueError(
                f"{op}: residual must be {list(x.shape)} like x, of a floating dtype; "
                f"got {residual.dtype} {list(residual.shape)}"
            )
    if weight is None and bias is not None:
        raise ValueError(f"{op}: bias without weight is not supported; pass weight, too")


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    cu_seqlens: Sequence[int] | Tensor | None,
    cu_seqlens_k: Sequence[int] | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """All but the dtypes, which autocast may change, and where sequences end: see `sequence_ends`."""
    batched = cu_seqlens is None
    _check_tensors("attention", q=q, k=k, v=v)
    for argument, value in (("q", q), ("k", k), ("v", v)):
        if value.dim() != (4 if batched else 3):
            shape = "[batch, tokens, heads, D]" if batched else "[tokens, heads, D] with cu_seqlens"
            raise ValueError(f"attention: {argument} must be {shape}; got {list(value.shape)}")
    heads, key_heads = q.shape[-2], k.shape[-2]
    divides = heads % key_heads == 0 if key_heads else heads == 0
    alike = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] and (not batched or q.shape[0] == k.shape[0])
    if not alike or not divides:
        raise ValueError(
            "attention: k and v must have one shape (but for the last, the head size of v), q's batch and D, and a "
            "number of heads that divides q's; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if window is not None:
        check_integer("attention", "window", window)
    if window is not None and (not causal or window < 1):
        raise ValueError(f"attention: window must be at least 1 and needs causal=True; got {window}, causal={causal}")
    if batched and cu_seqlens_k is not None:
        raise ValueError("attention: cu_seqlens_k needs cu_seqlens, the ends of the queries' sequences; got None")
    if softcap is not None:
        check_number("attention", "softcap", softcap)
        if not 0 < float(softcap) < float("inf"):
            raise ValueError(f"attention: softcap must be a number above 0, or None for no cap; got {softcap}")
    if sinks is not None:
        _check_tensors("attention", q=q, sinks=sinks)
        if sinks.shape != (heads,) or not sinks.is_floating_point():
            raise ValueError(
                f"attention: sinks must be [heads] = [{heads}] of a floating dtype; "
                f"got {sinks.dtype} {list(sinks.shape)}"
            )


def sequence_ends(
    q: Tensor, k: Tensor, cu_seqlens: Sequence[int] | Tensor, cu_seqlens_k: Sequence[int] | Tensor | None
) -> tuple[tuple[int, ...] | Tensor, tuple[int, ...] | Tensor]:
    """Where the sequences of q [T, ...] and k [T', ...] end, each beginning with 0: tensors where they are on q's
    device, and what is on a GPU is not looked at."""
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device == q.device:
        ends_there = _check_tensor_of_ends("cu_seqlens", cu_seqlens, q)
        name, given = ("cu_seqlens", cu_seqlens) if cu_seqlens_k is None else ("cu_seqlens_k", cu_seqlens_k)
        keys_there = _check_tensor_of_ends(name, given, k)
        if len(ends_there) != len(keys_there):
            raise ValueError(
                "attention: cu_seqlens_k must have as many ends as cu_seqlens; "
                f"got {len(keys_there)} and {len(ends_there)}"
            )
        return ends_there, keys_there
    queries, keys = q.shape[0], k.shape[0]
    ends = _check_ends("cu_seqlens", cu_seqlens, queries)
    key_ends = ends if cu_seqlens_k is None else _check_ends("cu_seqlens_k", cu_seqlens_k, keys)
    if len(ends) != len(key_ends) or key_ends[-1] != keys:
        raise ValueError(f"attention: keys must have as many sequences as queries, to the end; got {key_ends}")
    return ends, key_ends


def _check_tensor_of_ends(argument: str, ends: Sequence[int] | Tensor | None, tokens: Tensor) -> Tensor:
    if not isinstance(ends, Tensor) or ends.device != tokens.device:
        raise TypeError(f"attention: {argument} must be a tensor on {tokens.device}, as cu_seqlens is; got {ends!r}")
    if ends.dim() != 1 or not len(ends) or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"attention: {argument} must be [sequences + 1] int32 or int64; got {ends.dtype} {list(ends.shape)}"
        )
    if ends.device.type == "cpu":
        found = ends.tolist()
        if found[0] != 0 or found != sorted(found) or found[-1] > tokens.shape[0]:
            raise ValueError(f"attention: {argument} must rise from 0 to at most {tokens.shape[0]} tokens; got {found}")
    return ends.contiguous()


def _check_ends(argument: str, ends: Sequence[int] | Tensor, tokens: int) -> tuple[int, ...]:
    if isinstance(ends, str) or not hasattr(ends, "__len__"):
        raise TypeError(f"attention: {argument} must be a list of the ends of the sequences; got {ends!r}")
    for end in ends:
        check_integer("attention", argument, end)
    found = tuple(int(end) for end in ends)
    if len(found) < 1 or found[0] != 0 or list(found) != sorted(found) or found[-1] != tokens:
        raise ValueError(f"attention: {argument} must rise from 0 to the {tokens} tokens; got {list(found)}")
    return found


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _check_tensors("rotary", x=x, cos=cos, sin=sin)
    if x.dim() < 3 or not x.is_floating_point():
        raise ValueError(f"rotary: x must be [..., T, H, D] of a floating dtype; got {x.dtype} {list(x.shape)}")
    for argument, value in (("cos", cos), ("sin", sin)):
        if value.dim() != 2 or value.shape[0] != x.shape[-3] or 2 * value.shape[1] > x.shape[-1]:
            raise ValueError(
                f"rotary: {argument} must be [T, R/2] with T={x.shape[-3]} and R <= {x.shape[-1]} like x; "
                f"got {list(value.shape)}"
            )
        if not value.is_floating_point() or value.requires_grad:
            found = "one that requires a gradient" if value.requires_grad else value.dtype
            raise TypeError(f"rotary: {argument} must be floating numbers without a gradient; got {found}")
    if cos.shape != sin.shape:
        raise ValueError(f"rotary: sin must have cos's shape {list(cos.shape)}; got {list(sin.shape)}")


def check_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    chunk: int,
) -> None:
    check_linear("linear_cross_entropy", x, weight, bias)
    _check_tensors("linear_cross_entropy", x=x, target=target)
    if target.shape != x.shape[:-1] or target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(
            f"linear_cross_entropy: target must be integers of shape {list(x.shape[:-1])} like x; "
            f"got {target.dtype} {list(target.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'linear_cross_entropy: reduction must be "mean", "sum" or "none"; got {reduction!r}')
    check_number("linear_cross_entropy", "label_smoothing", label_smoothing)
    check_number("linear_cross_entropy", "z_loss", z_loss)
    check_integer("linear_cross_entropy", "ignore_index", ignore_index)
    check_integer("linear_cross_entropy", "chunk", chunk)
    if not 0 <= label_smoothing <= 1 or chunk < 1:
        raise ValueError(
            "linear_cross_entropy: label_smoothing must be within 0..1 and chunk at least 1; "
            f"got {label_smoothing} and {chunk}"
        )


def check_number(op: str, argument: str, value: float) -> None:
    # What numpy and torch call a number has __float__. A compiler asked for dynamic numbers does not know hasattr, and
    # that of torch 2.8 no union of types.
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"{op}: {argument} must be a number; got {value!r}")


def check_integer(op: str, argument: str, value: int) -> None:
    if not hasattr(value, "__index__"):
        raise TypeError(f"{op}: {argument} must be an integer; got {value!r}")


def _check_tensors(op: str, **arguments: Tensor) -> None:
    """All are tensors of real numbers, on the device of the first."""
    first, leader = next(iter(arguments.items()))
    for argument, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {argument} must be a torch.Tensor; got {type(value).__name__}")
        if value.device != leader.device:
            raise ValueError(
                f"{op}: {argument} is on {value.device} and {first} on {leader.device}; move one with .to(device)"
            )
        if value.is_complex():
            raise TypeError(
                f"{op}: {argument} must be real numbers; got {value.dtype}; use torch's own operation for complex ones"
            )
