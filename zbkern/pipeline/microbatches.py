"""A batch as the microbatches of a schedule."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def split(name: str, value: Any, count: int) -> list[Any]:
    """A pytree of tensors in `count` equal parts along dimension 0; a list must have the parts already.

    name: what the value is called in errors. Raises ValueError or TypeError for what cannot be split.
    """
    if value is None:
        raise ValueError(f"Pipeline.step: {name} must be given on this rank; got None")
    if isinstance(value, list):
        if len(value) != count:
            raise ValueError(
                f"Pipeline.step: {name} is a list of {len(value)} microbatches and the schedule has {count}; "
                "pass one entry per microbatch, or one tensor to be split"
            )
        return value
    leaves, spec = pytree.tree_flatten(value)
    parts: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            raise TypeError(f"Pipeline.step: {name} must hold tensors with a batch dimension; got {leaf!r}")
        if leaf.shape[0] % count:
            raise ValueError(
                f"Pipeline.step: dimension 0 of {name} must be a multiple of the {count} microbatches; got "
                f"{list(leaf.shape)}; change the batch size or pass a list of microbatches"
            )
        parts.append(list(leaf.split(leaf.shape[0] // count)) if leaf.shape[0] else [leaf] * count)
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)]
