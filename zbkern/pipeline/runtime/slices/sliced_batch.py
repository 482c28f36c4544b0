"""A batch in slices: what is cut along its sequences, and what the loss of a slice counts for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.transport.tensors import tensors_in

_CHECKED_TOKENS = 16  # of a slice, on which a loss shows whether slices of it add up
_TOLERANCE = 1e-2  # relative, for losses in bfloat16
_WHOLE = (  # these mix the tokens of what they are given, and take nothing from slices before
    *(torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer),
    *(torch.nn.RNNBase, torch.nn.modules.batchnorm._BatchNorm),
)

LossFn = Callable[[Any, Any], Tensor]  # of one microbatch: loss_fn(output, target)


class Target(NamedTuple):
    """Of one microbatch: the loss of the step is the sum of its loss_fn(output, value) times weight over all."""

    value: Any
    weight: float | Tensor


def check_sliceable(modules: Iterable[torch.nn.Module], slices: Sequence[int]) -> None:
    """Raises TypeError where a module cannot take its sequences in slices, as far as its classes tell."""
    for module in modules if len(slices) > 1 else ():
        whole: Any = getattr(module, "_orig_mod", getattr(module, "module", module))  # compiled, or in data parallelism
        if hasattr(whole, "check_sliceable"):  # a chunk of `cut`
            whole.check_sliceable()
        parameters = inspect.signature(whole.forward).parameters
        if "carry" not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            raise TypeError(
                f"Pipeline: {type(whole).__name__} must take the keyword argument carry to run sequences in slices, "
                "and hand it to its attention (zbkern.nn.Attention takes it); or use a schedule without slices"
            )
        for name, part in whole.named_modules():
            if isinstance(part, _WHOLE) and not (isinstance(part, _WHOLE[-1]) and not part.training):
                raise TypeError(
                    f"Pipeline: {name or type(part).__name__} is a {type(part).__name__}, which needs whole sequences: "
                    "replace it (zbkern.nn.Attention takes slices), or use a schedule without slices"
                )


def edges(call: str, tokens: int, slices: Sequence[int]) -> list[tuple[int, int]]:
    """The first token of every slice and the one after its last. Raises ValueError where a slice would have none."""
    ends = [tokens * end // sum(slices) for end in accumulate(slices, initial=0)]
    if any(first == last for first, last in pairwise(ends)):
        raise ValueError(
            f"{call}: sequences must be long enough for {len(slices)} slices of lengths {list(slices)}; got "
            f"{tokens} tokens along dimension 1"
        )
    return [*pairwise(ends)]


def length_of(*values: Any) -> int | None:
    """The size of dimension 1, the sequence's, of the first tensor that has one; None where there is no such."""
    return next((tensor.shape[1] for tensor in tensors_in(values) if tensor.dim() > 1), None)


def cut(value: Any, tokens: int, place: tuple[int, int]) -> Any:
    """One slice of tensors that have so many tokens along dimension 1; others are every slice's."""

    def part(leaf: Tensor) -> Tensor:
        return leaf[:, place[0] : place[1]] if leaf.dim() > 1 and leaf.shape[1] == tokens else leaf

    return pytree.tree_map_only(Tensor, part, value)


def weigh(
    call: str, value: Any, tokens: int, places: Sequence[tuple[int, int]], loss_fn: Any, sequences: int
) -> list[Target]:
    """The targets of a sequence's slices. A loss that is a mean over tokens counts by the tokens that have a label."""
    labels = [leaf for leaf in tensors_in(value) if leaf.dim() > 1 and leaf.shape[1] == tokens]
    if not labels:
        raise ValueError(
            f"Pipeline.{call}: targets must have the {tokens} tokens of a sequence as dimension 1 to be cut into "
            "slices: a loss of the whole sequence needs a schedule without slices"
        )
    parts = [cut(value, tokens, place) for place in places]
    if getattr(loss_fn, "reduction", "mean") == "sum":  # as those of torch say of themselves
        return [Target(part, 1 / sequences) for part in parts]
    shares: list[float | Tensor] = [(last - first) / tokens for first, last in places]
    if not labels[0].is_floating_point():
        counted = labels[0] != getattr(loss_fn, "ignore_index", -100)
        total = counted.sum().clamp(min=1).double()
        shares = [counted[:, first:last].sum() / total for first, last in places]
    return [Target(part, share / sequences) for part, share in zip(parts, shares, strict=True)]


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The share of the step's loss; 0 of a slice without any label, whose mean is not a number."""
    if isinstance(weight, Tensor):
        loss = torch.where(weight > 0, loss, loss.nan_to_num())
    return loss * weight


def check_loss(loss_fn: LossFn, outputs: Any, target: Any) -> bool:
    """Whether the loss of some tokens could be compared with those of two parts of them.

    Raises ValueError where it is neither their mean, weighted by tokens, nor, where it says so, their sum.
    """
    length = length_of(outputs)
    if length is None or length < 2:
        return False
    few = min(length, _CHECKED_TOKENS)

    def loss(first: int, last: int) -> Tensor:
        values = pytree.tree_map_only(Tensor, Tensor.detach, cut((outputs, target), length, (first, last)))
        return loss_fn(*values)

    with torch.no_grad():
        whole = float(loss(0, few))
        if not whole or not math.isfinite(whole):
            return False
        for middle in {1, few // 2, few - 1}:
            places = [(0, middle), (middle, few)]
            parts = weigh("step", cut(target, length, (0, few)), few, places, loss_fn, 1)
            losses = [loss(*place) for place in places]
            both = float(sum(weighted(each, part.weight) for each, part in zip(losses, parts, strict=True)))
            if not math.isclose(both, whole, rel_tol=_TOLERANCE):
                raise _not_a_sum(few, whole, both, float(sum(losses)))
    return True


def _not_a_sum(tokens: int, whole: float, both: float, added: float) -> ValueError:
    remedy = "zbkern.pipeline.token_loss is one; labels are to be shifted before they are cut, not in the loss"
    if math.isclose(added, whole, rel_tol=_TOLERANCE):
        remedy = "it looks like a sum: say so by loss_fn.reduction = 'sum'"
    return ValueError(
        "Pipeline: loss_fn must be a mean over the tokens of its targets, or a sum, to take sequences in slices; of "
        f"{tokens} tokens it gives {whole:.6g}, and {both:.6g} in two parts; {remedy}"
    )
