"""Losses in pairs, of logits that are not computed and of logits: the loss per token, and one of a policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline import token_log_probs, token_loss
from zbkern.pipeline.models.deferred_logits import DeferredLogits


def without_logits(logits: Any, targets: Any) -> Tensor:
    assert type(logits) is DeferredLogits
    return token_loss(logits, targets)


without_logits.takes_deferred_logits, without_logits.reduction = True, "sum"  # type: ignore[attr-defined]


def of_logits(logits: Tensor, targets: Any) -> Tensor:
    assert type(logits) is Tensor
    return token_loss(logits, targets)


of_logits.reduction = "sum"  # type: ignore[attr-defined]


def of_policy(log_probs: Tensor, entropy: Tensor, targets: Any) -> Tensor:
    """PPO's, of probabilities that were a quarter more, with a bonus for entropy."""
    labels, weight = targets
    ratio = (log_probs - log_probs.detach() - 0.2231).exp()
    advantages = labels.sin()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages) - 0.05 * entropy
    return torch.where(labels == -100, 0, loss).sum() * weight


def policy_loss(logits: Any, targets: Any) -> Tensor:
    assert type(logits) is DeferredLogits
    return of_policy(*token_log_probs(logits, targets.labels), targets)


def policy_loss_of_logits(logits: Tensor, targets: Any) -> Tensor:
    log_p, labels = logits.log_softmax(-1), targets.labels
    chosen = log_p.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    return of_policy(chosen, -(log_p.exp() * log_p).sum(-1), targets)


policy_loss.takes_deferred_logits = True  # type: ignore[attr-defined]
policy_loss.reduction = policy_loss_of_logits.reduction = "sum"  # type: ignore[attr-defined]
