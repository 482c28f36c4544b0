"""The optimizer step without a barrier, with gradient norms over all stages."""

from __future__ import annotations

from zbkern.pipeline.optimizer.post_validation import Optimizer as Optimizer

__all__ = ["Optimizer"]
