"""Casts to 8 bits in plain torch, with the scales of torchao's float8 training. Contract: spec.py."""

from __future__ import annotations

import torch
from torch import Tensor

from zbkern.kernels.spec import SMALLEST_AMAX


def float8_amax(x: Tensor, amax: Tensor) -> None:
    amax.zero_()
    amax[0] = x.abs().max()


def float8_cast(x: Tensor, amax: Tensor | None, power_of_2: bool, y: Tensor, scale: Tensor) -> None:
    largest = x.abs().amax(1) if amax is None else amax.max()
    limit = torch.finfo(y.dtype).max
    factor = (limit / largest.double().clamp(min=SMALLEST_AMAX)).float()
    scale.copy_(factor.log2().floor().exp2() if power_of_2 else factor)
    y.copy_((x.float() * (scale[:, None] if amax is None else scale)).clamp(-limit, limit))
