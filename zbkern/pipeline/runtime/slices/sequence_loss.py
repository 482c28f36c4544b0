"""The loss of whole sequences whose outputs come in slices: computed behind the last slice, begun in B with the last.

Whatever a loss is of the tokens of a sequence, it is as without slices. A loss that is a sum over tokens and says so
(`adds_up`) is not here: that of a slice is computed with it, and no outputs wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.slices.sliced_batch import LossFn, Target
from zbkern.pipeline.transport.tensors import kinds, tensors_in
from zbkern.schedules.slices import Unit


def loss_of(loss_fn: LossFn, outputs: Any, target: Target) -> Tensor:
    """The loss of a microbatch. Raises TypeError for what is not one of these outputs."""
    try:
        loss = loss_fn(outputs, target.value)
    except Exception as error:
        said = f"in loss_fn(output, target): output was {kinds(outputs)}, and target {kinds(target.value)}"
        vars(error).setdefault("__notes__", []).append(said)  # which the message of the step has
        raise
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            f"Pipeline: loss_fn must return the loss alone, a tensor of one number without .item(); got {got}"
        )
    if not loss.requires_grad and any(output.requires_grad for output in tensors_in(outputs)):
        raise TypeError(
            "Pipeline: loss_fn must return a loss that depends on the output's graph; got one that is detached; "
            "leave out .item(), .detach() and torch.no_grad()"
        )
    return loss


class _Begun(NamedTuple):
    """A sequence between the F and the B of its last slice, and then until the B of its first."""

    loss: Tensor
    leaves: list[tuple[Tensor | None, bool]]  # of the outputs, put together; whether by tokens
    places: list[tuple[int, int]]  # of the slices
    structure: Any


class SequenceLosses:
    """The losses of a step's sequences on the rank of the last chunk. units: those of the schedule."""

    def __init__(self, loss_fn: LossFn, units: Sequence[Unit]) -> None:
        self._loss_fn, self._units = loss_fn, units
        self._waiting: dict[int, list[tuple[int, Any]]] = {}  # outputs, with their tokens, of sequences not through
        self._begun: dict[int, _Begun] = {}

    def forward(self, unit: int, outputs: Any, carry: Any, target: Target) -> Tensor | None:
        """Takes the outputs of a slice, which had this `Carry`, None for a whole sequence. Returns the loss of the
        sequence behind its last slice; None before.

        Raises TypeError for outputs that cannot be put together."""
        number = self._units[unit].microbatch
        self._waiting.setdefault(number, []).append((carry.end - carry.start if carry else 0, outputs))
        if not self._units[unit].is_last:
            return None
        parts = self._waiting.pop(number)
        leaves, structure = put_together(parts)
        loss = loss_of(self._loss_fn, pytree.tree_unflatten([leaf for leaf, _ in leaves], structure), target)
        loss = loss * target.weight
        if torch.is_grad_enabled():
            places = [*pairwise(accumulate((length for length, _ in parts), initial=0))]
            self._begun[number] = _Begun(loss, leaves, places, structure)
        return loss.detach()

    def gradients(self, unit: int) -> Any:
        """The gradients of a slice's outputs, in their tree. The last slice, which comes first, runs the backward."""
        number, index, count = self._units[unit]
        loss, leaves, places, structure = self._begun[number]
        if index + 1 == count:
            if loss.requires_grad:  # no weight where it does not: all are frozen, or there is none
                loss.backward()
            self._begun[number] = _Begun(loss.detach(), leaves, places, structure)
        if index == 0:
            del self._begun[number]
        parts: list[Tensor | None] = []
        for leaf, by_token in leaves:
            whole = None if leaf is None else leaf.grad
            once = whole if index + 1 == count else None  # of what each slice has, with that of the last
            parts.append(whole[:, slice(*places[index])] if by_token and whole is not None else once)
        return pytree.tree_unflatten(parts, structure)

    def reset(self) -> None:
        self._waiting.clear()
        self._begun.clear()


def put_together(slices: Sequence[tuple[int, Any]]) -> tuple[list[tuple[Tensor | None, bool]], Any]:
    """The leaves of a sequence's outputs, each with whether it is by tokens, and their tree. slices: tokens and outputs
    of each.

    Raises TypeError for outputs that cannot be put together."""
    lengths, trees = zip(*slices, strict=True)
    leaves = [_together(parts, lengths) for parts in zip(*map(pytree.tree_leaves, trees), strict=True)]
    return leaves, pytree.tree_structure(trees[0])


def _together(parts: Sequence[Any], lengths: Sequence[int]) -> tuple[Tensor | None, bool]:
    """One tensor of the sequence from a leaf of each slice's outputs; and whether the leaves were of tokens."""
    last = parts[-1]
    if all(part is None for part in parts):
        return None, False
    if all(isinstance(part, Tensor) for part in parts):
        if all(part.dim() > 1 and part.shape[1] == length for part, length in zip(parts, lengths, strict=True)):
            requires_grad = any(part.requires_grad for part in parts)
            return torch.cat([part.detach() for part in parts], 1).requires_grad_(requires_grad), True
        if all(torch.equal(part, last) for part in parts):
            return last.detach().requires_grad_(last.requires_grad), False
    raise TypeError(
        "Pipeline: the last chunk must return tensors with the tokens of a slice as dimension 1 for a loss of whole "
        f"sequences; got {list(getattr(last, 'shape', ()))} for a slice of {lengths[-1]} tokens: return what is of "
        "each token, or use a schedule without slices"
    )
