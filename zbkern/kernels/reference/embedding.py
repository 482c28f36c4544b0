"""Embeddings in plain torch. Contract: spec.py."""

from __future__ import annotations

import torch
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments


def embedding_fwd(indices: Tensor, weight: Tensor, y: Tensor) -> None:
    torch.index_select(weight, 0, indices, out=y)


def embedding_wgrad(segments: Segments, outputs: Outputs, accumulate: bool, padding_idx: int | None = None) -> None:
    (dweight,) = outputs
    if dweight is None:
        return
    if not accumulate:
        dweight.zero_()
    for indices, dy in segments:
        if padding_idx is not None:
            kept = (indices != padding_idx).unsqueeze(1)
            dy = dy * kept
        dweight.index_add_(0, indices, dy.to(dweight.dtype))
