"""How far two tensors are from each other, as a comparison of gradients or values takes it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

EXACT = 1e-3  # relative: what rounding may leave in a part
_EXACT_64_BITS, _EXACT_TF32, _EXACT_16_BITS, _EXACT_8_BITS = 1e-5, 5e-3, 3e-2, 0.25
_OF_8_BITS = {"torchao", "transformer_engine"}
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


class Rounding:
    """How much rounding may leave in what a module computes: by its parameters, its layers, and what was seen."""

    def __init__(self, module: nn.Module) -> None:
        self._bytes = min((each.element_size() for each in module.parameters() if each.is_floating_point()), default=8)
        kinds = {kind.__module__.partition(".")[0] for part in module.modules() for kind in type(part).__mro__}
        self._of_8_bits = bool(kinds & _OF_8_BITS)

    def note(self, tensor: Tensor) -> None:
        self._bytes = min(self._bytes, tensor.element_size())

    @property
    def limit(self) -> float:
        if self._of_8_bits:
            return _EXACT_8_BITS
        if self._bytes <= 2:
            return _EXACT_16_BITS
        if self._bytes > 4:
            return _EXACT_64_BITS
        return EXACT if torch.get_float32_matmul_precision() == "highest" else _EXACT_TF32
