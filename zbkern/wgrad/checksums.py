"""Sums by which tensors are compared with what they were, also where torch counts no write: `.data`, NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def sums_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The sums over rows and over columns of every tensor, which differ where values or their order do."""
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        rows = real.reshape(-1, real.shape[-1] if real.dim() and real.numel() else 1)
        sums += [rows.sum(0, dtype=torch.float64), rows.sum(1, dtype=torch.float64)]
    return sums


def are_same(first: Sequence[Tensor], second: Sequence[Tensor], rounding: float = 0.0) -> bool:
    """To the bit; on a GPU, unless torch's deterministic algorithms are on, to `rounding` of the mean of the sums."""
    if [each.shape for each in first] != [each.shape for each in second]:
        return False
    for a, b in zip(first, second, strict=True):
        exact = a.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        margin = 0.0 if exact or not a.numel() else rounding * a.abs().nanmean().item()
        if not torch.allclose(a, b, rtol=0.0, atol=margin, equal_nan=True):
            return False
    return True
