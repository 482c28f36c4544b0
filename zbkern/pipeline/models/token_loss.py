"""The loss of a language model as a mean over the tokens of a step, however they are spread over its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zbkern.pipeline.models.deferred_logits import DeferredLogits

IGNORED = -100  # the label of a token that does not count, torch's and the transformers library's


class TokenTargets(NamedTuple):
    """One microbatch's: labels [rows, length], and the weight of each that counts."""

    labels: Tensor
    weight: Tensor


def token_targets(
    labels: Tensor | Sequence[Tensor], microbatches: int, *, shift: bool = True, tokens: float | Tensor | None = None
) -> list[TokenTargets]:
    """`targets` of `Pipeline.step` for `token_loss`: the loss of the step is then the mean over its labelled tokens.

    labels: [rows, length], -100 where a token does not count (padding, prompts), to be split into equally many rows; or
    a list with such a tensor per microbatch, whose numbers of rows and lengths may differ. shift: as the transformers
    library has labels, each position's own token, which the position before it is to predict; False where labels are
    shifted already. tokens: what to divide by instead of the number of tokens that count; with data-parallel replicas
    their mean over the replicas. Raises TypeError or ValueError for labels that cannot be split.
    """
    parts = _microbatches(labels, microbatches)
    if shift:
        parts = [F.pad(part[:, 1:], (0, 1), value=IGNORED) for part in parts]
    counted = sum((part != IGNORED).sum() for part in parts) if tokens is None else tokens
    total = torch.as_tensor(counted, device=parts[0].device, dtype=torch.float64)
    weight = microbatches / total.clamp(min=1)  # the Pipeline takes the mean over microbatches
    return [TokenTargets(part, weight) for part in parts]


def _microbatches(labels: Any, microbatches: int) -> list[Tensor]:
    parts = list(labels) if isinstance(labels, list | tuple) else [labels]
    for part in parts:
        if not isinstance(part, Tensor) or part.dim() != 2 or part.is_floating_point():
            got = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else repr(part)
            raise TypeError(f"token_targets: labels must be integers [rows, length], or a list of such; got {got}")
    if isinstance(labels, Tensor):
        if len(labels) % microbatches:
            raise ValueError(
                f"token_targets: labels must have a multiple of {microbatches} rows, the microbatches, or be a list of "
                f"microbatches, whose numbers of rows may differ; got {len(labels)}"
            )
        return list(labels.chunk(microbatches))
    if len(parts) != microbatches:
        raise ValueError(f"token_targets: labels must be a list of {microbatches} microbatches; got {len(parts)}")
    return parts


def token_loss(logits: Tensor | DeferredLogits, targets: TokenTargets) -> Tensor:
    """`loss_fn` of a Pipeline: cross-entropy of logits [rows, length, vocabulary], weighted as `token_targets` says.

    Of a chunk of `cut` that ends in a linear head, the logits are never whole (`linear_cross_entropy`).
    """
    if not isinstance(targets, TokenTargets):  # two rows of labels would pass for it
        raise TypeError(
            "token_loss: targets must be what token_targets(labels, microbatches) gives; got "
            f"{type(targets).__name__}; pass targets=token_targets(labels, microbatches) to Pipeline.step"
        )
    labels, weight = targets
    if isinstance(logits, DeferredLogits):
        loss = logits.cross_entropy(labels, "sum", IGNORED)
    else:
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss * weight.to(loss.dtype)


token_loss.reduction = "sum"  # type: ignore[attr-defined] # over the tokens of a slice, where sequences are in slices
token_loss.takes_deferred_logits = True  # type: ignore[attr-defined]
