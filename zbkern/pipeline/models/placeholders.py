"""Placeholders for tensors that layers of other chunks compute: what depends on their values is one, too.

They have shapes, dtypes and devices, so that a model's forward can compute its positions and masks; nothing else about
them is known. Whatever is computed from one is a placeholder. To read a value, to give one to a layer of this chunk, or
to return one is an error that names the layer which would have computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Functions whose result is no tensor, but depends on values.
_READING = frozenset(("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__"))
_READING |= frozenset(("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"))

# Functions that take nothing but a shape, a dtype or a device: of all tensors, or of those after the first.
LIKE = frozenset(("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"))
LIKE |= frozenset(("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"))
_TO_THE_LIKE = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))


class PlaceholderUsed(Exception):
    """A value was asked for that is not here. user: the layer that asked, None for the model's forward."""

    def __init__(self, origins: frozenset[str], user: str | None = None) -> None:
        super().__init__(origins, user)
        self.origins, self.user = origins, user


class Placeholder(Tensor):
    """origins: the layers, and what stands beside them, of which the values would be."""

    origins: frozenset[str]
    may_be_tuple = False  # where no other layer shows whether the model has a tensor here or a tuple

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, function.__name__
        origins = frozenset().union(*(each.origins for each in placeholders_in((args, kwargs))))
        if name in _READING:
            raise PlaceholderUsed(origins)
        with torch._C.DisableTorchFunctionSubclass():
            if name in LIKE or (name in _TO_THE_LIKE and not isinstance(args[0], Placeholder)):
                return function(*args, **kwargs)
            first = next(iter((*args, *kwargs.values())), None)  # torch.nn.init passes it by its name
            if isinstance(first, Placeholder) and name.endswith("_") and not name.startswith("__"):
                return first  # in place: a value that is not there stays so
            try:
                with torch.no_grad():
                    result = function(*args, **kwargs)
            except (IndexError, RuntimeError):  # its shape is no more than likely: nor is that of the result
                result = placeholder(placeholders_in((args, kwargs))[0], origins)
                result.may_be_tuple = True
                return result
        return pytree.tree_map_only(Tensor, lambda tensor: placeholder(tensor, origins), result)

    def __iter__(self) -> Iterator[Any]:
        if self.dim() == 0 or self.may_be_tuple:
            raise PlaceholderUsed(self.origins)
        return super().__iter__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return memo.setdefault(id(self), self)  # there is nothing in it that could change


def placeholder(like: Tensor, origins: frozenset[str] | str) -> Placeholder:
    """In the place of a tensor of that shape, dtype and device; NaN, or 0, where no torch function can tell."""
    if type(like) is not Placeholder:
        with torch._C.DisableTorchFunctionSubclass():
            value = torch.nan if like.is_floating_point() else 0
            like = torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)
    found = like.as_subclass(Placeholder)
    found.origins = frozenset((origins,)) if isinstance(origins, str) else origins
    return found


def placeholders_in(values: Any) -> list[Placeholder]:
    """Those among nested values."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Placeholder)]


def refuse_placeholders(values: Any, user: str | None = None) -> None:
    """Raises PlaceholderUsed where there is one among nested values."""
    if found := placeholders_in(values):
        raise PlaceholderUsed(frozenset().union(*(each.origins for each in found)), user)
