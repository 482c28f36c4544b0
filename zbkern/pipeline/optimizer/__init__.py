"""The optimizer step without a barrier, and gradient norms over all stages."""

from __future__ import annotations

from zbkern.pipeline.optimizer.clipping import clip_grad_norm_ as clip_grad_norm_
from zbkern.pipeline.optimizer.clipping import grad_norm as grad_norm
from zbkern.pipeline.optimizer.post_validation import Optimizer as Optimizer

__all__ = ["Optimizer", "clip_grad_norm_", "grad_norm"]
