"""A batch in slices: what is cut along its sequences, and what the loss of a slice counts for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.transport.tensors import tensors_in

OWN_ENDS = "cu_seqlens"  # the name by which zbkern.nn.Attention takes the ends of packed sequences
ENDS = {OWN_ENDS, "cu_seq_lens_q", "cu_seq_lens_k"}  # and models of the transformers library
LossFn = Callable[[Any, Any], Tensor]  # of one microbatch: loss_fn(output, target)


class Target(NamedTuple):
    """Of one microbatch: the loss of the step is the sum of its loss_fn(output, value) times weight over all."""

    value: Any
    weight: float


def check_sliceable(modules: Iterable[torch.nn.Module]) -> None:
    """Raises TypeError where a module cannot take its sequences in slices, as far as its classes tell."""
    for module in modules:
        whole: Any = getattr(module, "_orig_mod", getattr(module, "module", module))  # compiled, or in data parallelism
        if hasattr(whole, "check_sliceable"):  # a chunk of `cut`
            whole.check_sliceable()
        parameters = inspect.signature(whole.forward).parameters
        if "carry" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise TypeError(
                f"Pipeline: {type(whole).__name__} must take the keyword argument carry to run sequences in slices, "
                "and hand it to its attention (zbkern.nn.Attention takes it); or use a schedule without slices"
            )
        for name, part in whole.named_modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training:
                raise TypeError(
                    f"Pipeline: {name or 'it'} is a {type(part).__name__}, which needs whole sequences: replace it, or "
                    "use a schedule without slices"
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


def lengths_of_pack(side: Any) -> list[int]:
    """Of the sequences of a row, by its side inputs; none where they have no ends."""
    ends = next((side[name] for name in sorted(ENDS) if name in side), None) if isinstance(side, Mapping) else None
    return [] if ends is None else torch.as_tensor(ends).flatten().diff().tolist()


def length_of(*values: Any) -> int | None:
    """The size of dimension 1, the sequence's, of the first tensor that has one; None where there is no such."""
    return next((tensor.shape[1] for tensor in tensors_in(values) if tensor.dim() > 1), None)


def cut(value: Any, tokens: int, place: tuple[int, int]) -> Any:
    """One slice of tensors that have so many tokens along dimension 1; others are every slice's."""

    def part(leaf: Tensor) -> Tensor:
        return leaf[:, place[0] : place[1]] if leaf.dim() > 1 and leaf.shape[1] == tokens else leaf

    return pytree.tree_map_only(Tensor, part, value)


def tells_ends(side: Mapping[str, Any]) -> bool:
    """Whether side inputs have the ends of a pack's sequences."""
    return not ENDS.isdisjoint(side)


def check_takes_packs(call: str, loss_fn: Any) -> None:
    """Raises ValueError for a loss to which packed sequences would be one."""
    if not adds_up(loss_fn) and not getattr(loss_fn, "_takes_packs", False):
        raise ValueError(
            f"Pipeline.{call}: loss_fn must say that it takes packs of sequences, which a loss of whole rows takes for "
            "one: give per_sequence(loss_fn) with sequence_targets, or set loss_fn.reduction to 'sum' where the loss "
            "is a sum over tokens, as token_loss is"
        )


def adds_up(loss_fn: Any) -> bool:
    """Whether the loss of a sequence is the sum of those of its slices: as losses of torch say so of themselves."""
    return getattr(loss_fn, "reduction", None) == "sum"


def cut_target(call: str, value: Any, tokens: int, places: Sequence[tuple[int, int]]) -> list[Any]:
    """The targets of a sequence's slices. Raises ValueError where they have no tokens."""
    if all(leaf.dim() < 2 or leaf.shape[1] != tokens for leaf in tensors_in(value)):
        raise ValueError(
            f"Pipeline.{call}: targets must have the {tokens} tokens of a sequence as dimension 1 to be cut into "
            "slices, as a loss that is a sum over tokens (loss_fn.reduction) takes them"
        )
    return [cut(value, tokens, place) for place in places]
