"""Losses of whole sequences, such as GRPO's mean of their means or GSPO's ratio of each, where rows are packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class SequenceTargets(NamedTuple):
    """One microbatch's: what the loss takes of each sequence, where these end, 0 first, and what each loss counts."""

    values: tuple[Any, ...]
    ends: tuple[int, ...]
    weight: float


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
        SequenceTargets(tuple(values[number] for number in row), ends, weight)
        for row, ends in zip(plan.rows, plan.ends, strict=True)
    ]


class per_sequence:
    """`loss_fn` of a Pipeline that takes packs of sequences: loss_fn(output, value) of each, with `sequence_targets`.

    loss_fn gets what the last chunk gives for one sequence, [1, tokens, ...], and its value. A sequence in slices is
    whole for it. Where it takes `DeferredLogits`, it gets these (with slices not of a chunk under `fully_shard`).
    """

    takes_packs = True

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self.loss_fn = loss_fn
        self.takes_deferred_logits = getattr(loss_fn, "takes_deferred_logits", False)

    def __call__(self, output: Any, targets: SequenceTargets) -> Tensor:
        if not isinstance(targets, SequenceTargets):
            raise TypeError(
                f"per_sequence: targets must be what sequence_targets(values, plan) gives; got {type(targets).__name__}"
            )
        tokens = targets.ends[-1]

        def part(first: int, last: int) -> Any:
            return pytree.tree_map_only(
                Tensor, lambda leaf: leaf[:, first:last] if leaf.dim() > 1 and leaf.shape[1] == tokens else leaf, output
            )

        places = pairwise(targets.ends)
        losses = [self.loss_fn(part(*place), value) for place, value in zip(places, targets.values, strict=True)]
        return torch.stack(losses).sum() * targets.weight
