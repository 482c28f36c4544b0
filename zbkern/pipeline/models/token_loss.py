"""The loss of a language model as a mean over the tokens of a step, however they are spread over its microbatches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the label of a token that does not count, torch's and the transformers library's


class TokenTargets(NamedTuple):
    """One microbatch's: labels [rows, length], and the weight of each that counts."""

    labels: Tensor
    weight: Tensor


def token_targets(
    labels: Tensor, microbatches: int, *, shift: bool = True, tokens: float | Tensor | None = None
) -> list[TokenTargets]:
    """`targets` of `Pipeline.step` for `token_loss`: the loss of the step is then the mean over its labelled tokens.

    labels: [rows, length], -100 where a token does not count (padding, prompts). shift: as the transformers library
    has labels, each position's own token, which the position before it is to predict; False where labels are shifted
    already. tokens: what to divide by instead of the number of tokens that count; with data-parallel replicas their
    mean over the replicas. Raises TypeError or ValueError for labels that cannot be split.
    """
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
        got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else repr(labels)
        raise TypeError(f"token_targets: labels must be integers [rows, length]; got {got}")
    if labels.shape[0] % microbatches:
        raise ValueError(
            f"token_targets: labels must have a multiple of {microbatches} rows, the microbatches; got "
            f"{labels.shape[0]}"
        )
    if shift:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    total = torch.as_tensor((labels != IGNORED).sum() if tokens is None else tokens, device=labels.device)
    weight = microbatches / total.clamp(min=1).float()  # the Pipeline takes the mean over microbatches
    return [TokenTargets(part, weight) for part in labels.chunk(microbatches)]


def token_loss(logits: Tensor, targets: TokenTargets) -> Tensor:
    """`loss_fn` of a Pipeline: cross-entropy of logits [rows, length, vocabulary], weighted as `token_targets` says."""
    labels, weight = targets
    summed = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return summed * weight
