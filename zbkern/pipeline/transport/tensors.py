"""The tensors in messages, batches and outputs, which are trees of them; and of a tensor what this rank holds."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of nested tuples, lists and dicts, in their order."""
    if isinstance(tree, Tensor):  # as most are: a walk takes microseconds
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def kinds(tree: Any) -> str:
    """What errors say of the tensors in it: their dtypes and shapes; else its class."""
    found = [f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for leaf in tensors_in(tree)]
    return ", ".join(found) or type(tree).__name__


def remedy_of_dataclass(value: Any) -> str:
    """What errors advise where a leaf is a dataclass, into which torch's trees do not look; else nothing."""
    kind = type(value).__name__
    return f"register its class, torch.export.register_dataclass({kind})" if is_dataclass(value) else ""


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def arrived(tensor: Any) -> Tensor:
    """The tensor itself, whose memory can be read: a collective's AsyncCollectiveTensor has none of its own."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor
