"""How far two tensors are from each other, as a comparison of gradients or values takes it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_ROUNDINGS = 16  # of a gradient of the usual size: what of it may be left where a gradient is zero


def sizes_of(tensor: Tensor) -> Tensor:
    """The largest absolute value of each row and token."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.abs().unsqueeze(-1).flatten(2).amax(2)


def largest(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    if tensor.is_complex():
        return tensor.detach().abs().max()
    low, high = tensor.detach().aminmax()  # which makes no copy of a gradient
    return torch.maximum(-low, high)


def median(sizes: Iterable[float]) -> float:
    ordered = sorted(sizes)
    return ordered[len(ordered) // 2] if ordered else 0.0


def relative_error(off: Tensor, size: float, usual: float) -> float:
    """What a largest difference is to a size, or to the rounding of a usual one."""
    limits = torch.finfo(off.dtype)
    difference = float(off)
    return 0.0 if difference <= _ROUNDINGS * limits.eps * usual else difference / max(size, limits.tiny)


def error_of(actual: Tensor, expected: Tensor, usual: float, size: float | None = None) -> float:
    """NaN for NaN, and infinity for infinity, are right: a gradient that has them has them in slices, too. size: the
    largest expected number, where it is known."""
    off = largest(actual - expected)
    if not bool(torch.isfinite(off)):
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        off, expected, size = largest((actual - expected).masked_fill(same, 0)), expected.nan_to_num(0, 0, 0), None
    return relative_error(off, float(largest(expected)) if size is None else size, usual)


def are_close(one: Tensor, other: Tensor, exact: float = 1e-6) -> bool:
    return one.shape == other.shape and error_of(one, other, 0.0) <= exact


def by_how_much(error: float) -> str:
    return "NaN" if math.isnan(error) else f"by {error:.1%}"
