"""Shapes and dtypes that several functions agree on."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(tensor: Tensor) -> Tensor:
    """[..., N] as [M, N]."""
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(0).flatten(0, -2)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions keep their statistics and partial sums in float32."""
    return torch.promote_types(dtype, torch.float32)
