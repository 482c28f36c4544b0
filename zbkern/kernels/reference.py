"""Every raw launch in plain torch: the specification, for any device and dtype including float64. Contract: spec.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda dy, z: torch.ops.aten.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: torch.ops.aten.gelu_backward(dy, z, approximate="tanh"),
    "relu": lambda dy, z: torch.ops.aten.threshold_backward(dy, z, 0),
    "silu": lambda dy, z: torch.ops.aten.silu_backward(dy, z),
}


def activation_function(activation: str) -> Callable[[Tensor], Tensor]:
    """torch's own function of that name (spec.ACTIVATIONS)."""
    return _FORWARD[activation]


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = x weight^T + bias."""
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def linear_dgrad(dy: Tensor, weight: Tensor, dx: Tensor) -> None:
    """dx = dy weight."""
    torch.mm(dy, weight, out=dx)


def linear_wgrad(segments: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
    """dweight (+)= sum of dy^T x and dbias (+)= sum over rows of dy, over segments (x [M_i, K], dy [M_i, N])."""
    dweight, dbias = outputs
    for x, dy in segments if len(segments) == 1 else _join_small(segments):
        columns = dy.t()
        if dweight is not None:
            add_product(dweight, columns, x, accumulate)
        if dbias is not None:
            add_sum(dbias, columns, accumulate)
        accumulate = True


def activation_fwd(z: Tensor, activation: str, y: Tensor) -> None:
    """y = activation(z)."""
    y.copy_(_FORWARD[activation](z))


def activation_bwd(dy: Tensor, z: Tensor, activation: str, dz: Tensor) -> None:
    """dz = dy activation'(z)."""
    dz.copy_(_BACKWARD[activation](dy, z))


def add_product(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """out (+)= a b, in place; a product of narrower inputs is accumulated in the dtype of `out`."""
    if out.dtype == a.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, beta=float(accumulate), out_dtype=torch.float32, out=out)
    else:
        wide = torch.promote_types(out.dtype, a.dtype)
        product = torch.mm(a.to(wide), b.to(wide))
        out.add_(product) if accumulate else out.copy_(product)


def add_sum(out: Tensor, columns: Tensor, accumulate: bool) -> None:
    """out [N] (+)= sum of columns [N, M] over dimension 1, in the wider of both dtypes."""
    if out.dtype != columns.dtype:
        total = torch.sum(columns, 1, dtype=torch.promote_types(out.dtype, columns.dtype))
        out.add_(total) if accumulate else out.copy_(total)
    elif not accumulate:
        torch.sum(columns, 1, out=out)
    elif 0 < (count := columns.shape[1]) <= 256 and columns.is_cpu and out.dtype in _WIDE and type(columns) is Tensor:
        # One call instead of two, and half the time; beyond a few hundred rows its plain order of summation would
        # show in the last digits.
        out.addmv_(columns, _ones(count, out.dtype))
    else:
        out.add_(columns.sum(1))


_WIDE = (torch.float32, torch.float64)


@functools.lru_cache(maxsize=16)
def _ones(count: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(count, dtype=dtype)


def _join_small(segments: Sequence[tuple[Tensor, ...]]) -> Sequence[tuple[Tensor, ...]]:
    """Joins segments into one where copying their rows moves fewer bytes than one more pass over the gradient."""
    x, dy = segments[0]
    rows = sum(segment[0].shape[0] for segment in segments)
    copied = 2 * rows * (x.shape[1] + dy.shape[1])
    saved = 2 * (len(segments) - 1) * x.shape[1] * dy.shape[1]
    if copied > saved:
        return segments
    return [(torch.cat([x for x, _ in segments]), torch.cat([dy for _, dy in segments]))]
