"""Losses of a step that do not depend on how it is divided into microbatches: means over tokens, and over sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

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
    weight = microbatches / torch.where(total > 0, total, 1)  # the Pipeline takes the mean over microbatches
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


Loss = TypeVar("Loss", bound=Callable[..., Any])


def loss_traits(*, takes_deferred_logits: bool = False, reduction: str | None = None) -> Callable[[Loss], Loss]:
    """Decorates a `loss_fn`: sets attributes of these names, which a Pipeline reads.

    takes_deferred_logits: it gets `DeferredLogits` of a linear head. reduction: "sum" where the loss is a sum over
    tokens, which slices and packs have their own of.
    """
    if reduction not in (None, "sum"):
        raise ValueError(f"loss_traits: reduction must be 'sum', or None; got {reduction!r}")

    def decorate(loss_fn: Loss) -> Loss:
        vars(loss_fn).update(takes_deferred_logits=takes_deferred_logits, reduction=reduction)
        return loss_fn

    return decorate


@loss_traits(takes_deferred_logits=True, reduction="sum")  # over the tokens of a slice, where sequences are in slices
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


# ---- losses of whole sequences, such as GRPO's mean of their means or GSPO's ratio of each, where rows are packs


class SequenceTargets(NamedTuple):
    """One microbatch's: what the loss takes of each sequence, where these end, 0 first, what each loss counts, and the
    place of each in the caller's values."""

    values: tuple[Any, ...]
    ends: tuple[int, ...]
    weight: float
    numbers: tuple[int, ...]


def sequence_targets(values: Sequence[Any], plan: Any, *, sequences: float | None = None) -> list[SequenceTargets]:
    """`targets` of `Pipeline.step` for a loss of `per_sequence`: the loss of the step is the mean over its sequences.

    values: what the loss takes of each sequence of the batch. plan: what `plan_batch` gave for their lengths.
    sequences: what to divide by instead of their number; with data-parallel replicas their mean over the replicas.
    Raises ValueError for another number of values.
    """
    count = sum(map(len, plan.rows))
    if len(values) != count:
        raise ValueError(f"sequence_targets: values must be one for each of the {count} sequences; got {len(values)}")
    # the Pipeline takes the mean over microbatches
    weight = len(plan.rows) / (count if sequences is None else sequences)
    return [
        SequenceTargets(tuple(values[number] for number in row), ends, weight, tuple(row))
        for row, ends in zip(plan.rows, plan.ends, strict=True)
    ]


class per_sequence:
    """`loss_fn` of a Pipeline that takes packs of sequences: loss_fn(output, value) of each, with `sequence_targets`.

    loss_fn gets what the last chunk gives for one sequence, [1, tokens, ...], and its value. A sequence in slices is
    whole for it, and rows may be padded behind their last one. Where it takes `DeferredLogits`, it gets these (with
    slices not of a chunk under `fully_shard`). `Pipeline.forward` returns what loss_fn does for each sequence, in the
    order of the values. Raises ValueError for outputs of which none is of the tokens of a pack.
    """

    _takes_packs = True

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self.loss_fn = loss_fn
        self.takes_deferred_logits = getattr(loss_fn, "takes_deferred_logits", False)

    def __call__(self, output: Any, targets: SequenceTargets) -> Tensor:
        return torch.stack([loss for _, loss in self._of_each(output, targets)]).sum() * targets.weight

    def _of_each(self, output: Any, targets: SequenceTargets) -> list[tuple[int, Any]]:
        """(number, what loss_fn returns) of each sequence of a row."""
        if not isinstance(targets, SequenceTargets):
            raise TypeError(
                f"per_sequence: targets must be what sequence_targets(values, plan) gives; got {type(targets).__name__}"
            )
        length = _row_length(output, targets)

        def part(first: int, last: int) -> Any:
            return pytree.tree_map_only(
                Tensor, lambda leaf: leaf[:, first:last] if leaf.dim() > 1 and leaf.shape[1] == length else leaf, output
            )

        each = zip(targets.numbers, pairwise(targets.ends), targets.values, strict=True)
        return [(number, self.loss_fn(part(*place), value)) for number, place, value in each]


def _row_length(output: Any, targets: SequenceTargets) -> int | None:
    """Of dimension 1 where it is of tokens: those of the sequences, or more where the row is padded behind them."""
    tokens = targets.ends[-1]
    shapes = [leaf.shape for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if any(shape[1] == tokens for shape in shapes):
        return tokens
    padded = {shape[1] for shape in shapes if len(shape) > 2 and shape[1] > tokens}
    if len(padded) != 1 and len(targets.values) > 1:
        raise ValueError(
            f"per_sequence: the last chunk must give the {tokens} tokens of the pack's {len(targets.values)} sequences "
            f"as dimension 1, padded only behind them; got {[list(shape) for shape in shapes]}: leave padding out"
        )
    return padded.pop() if len(padded) == 1 else None
