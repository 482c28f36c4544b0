"""What a block does outside of its parts: adding what they give to the residual, or the block stays whole.

Both halves of a block run all of its forward. So what stands outside of the parts runs twice in a pipeline: a sum adds
zeros once, but dropout on the sum, a clamp, a loss that is added or a gradient that is scaled would count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zbkern.pipeline.models.placeholders import LIKE

# What is known of a tensor without its values
_KNOWN = frozenset(("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_meta", "names"))
_KNOWN |= frozenset(("size", "dim", "numel", "stride", "__len__", "get_device", "is_contiguous", "is_floating_point"))
# The same values in another shape
_VIEWS = frozenset(("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"))
_VIEWS |= frozenset(("contiguous", "expand", "expand_as"))
_SUMS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
# Zeros stay zeros; a factor may be any number, and any tensor that is neither the residual nor made of it
_SCALES = frozenset(("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_", "neg", "__neg__"))
_QUOTIENTS = frozenset(("div", "div_", "__truediv__", "__itruediv__", "divide", "divide_", "true_divide"))
_CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16"))
_LINEAR = (
    _VIEWS
    | _SCALES
    | _SUMS
    | _CASTS
    | frozenset(("sub", "__sub__", "dropout", "dropout_", "__getitem__", "chunk", "split", "unbind", "clone"))
)
_LINEAR |= frozenset(("transpose", "permute", "narrow", "select", "masked_fill"))


class WholeBlock(Exception):
    """Why a block cannot be cut in two."""


class Residual(TorchFunctionMode):
    """Follows the residual through a block's forward, from the block's input on. Raises WholeBlock where anything else
    is done than adding to it what the parts give."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        # by id, and kept, so that each has its own
        self._sums: dict[int, Tensor] = {id(hidden): hidden}
        self._added: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def add_part(self, output: Tensor) -> None:
        """What a part gives."""
        self._added[id(output)] = output

    def check_output(self, output: Tensor) -> None:
        if id(output) not in self._sums:
            raise WholeBlock("its forward returns something else than the sum of its input and what its parts give")
        if kind := next((node for node in _nodes(output) if isinstance(node, BackwardCFunction)), None):
            name = type(kind).__name__.removesuffix("Backward")
            raise WholeBlock(f"its forward has an autograd function, {name}, outside of its parts")

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        if name in ("__get__", "__set__"):
            name = function.__self__.__name__ if name == "__get__" else f"{function.__self__.__name__} ="  # type: ignore[attr-defined]
        if name in _KNOWN:
            return function(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sums = [tensor for tensor in given if id(tensor) in self._sums]
        added = [tensor for tensor in given if id(tensor) in self._added]
        writes = "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and not (sums or added) and not (given and id(given[0]) in self._made):
            raise WholeBlock(f"its forward writes ({name}) into a tensor that it is given")
        if (sums or added) and not torch.is_grad_enabled():
            raise WholeBlock("its forward has an autograd function, or torch.no_grad(), outside of its parts")
        dtypes = [tensor.dtype for tensor in sums]
        result = function(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not results:
            raise WholeBlock(f"its forward calls {name} of a tensor outside of its parts")
        if (not sums and not added) or name in LIKE:
            self._made.update({id(each): each for each in results})
        elif not sums and self._is_linear(name, args, given):
            self._added.update({id(each): each for each in results})
        elif len(sums) == 1 and self._is_sum(name, given, added, sums[0], result, dtypes[0]):
            self._added.pop(id(result), None)  # the residual may be added in place
            self._sums[id(result)] = result
        else:
            raise WholeBlock(f"its forward calls {name} outside of its parts, where the residual may only be added to")
        return result

    def _is_linear(self, name: str, args: Sequence[Any], given: Sequence[Tensor]) -> bool:
        """Whether it makes zeros of zeros from a part."""
        if name in _SUMS or name in ("sub", "__sub__"):
            return all(id(tensor) in self._added for tensor in given) and len(given) == 2
        if name == "masked_fill":
            return args[2:] == (0,)
        if name in _QUOTIENTS:
            return not any(isinstance(each, Tensor) and id(each) in self._added for each in args[1:])
        return name in _LINEAR

    @staticmethod
    def _is_sum(
        name: str, given: Sequence[Tensor], added: Sequence[Tensor], old: Tensor, new: Any, dtype: torch.dtype
    ) -> bool:
        """Whether it is the residual with more added, or the same in another shape."""
        if not isinstance(new, Tensor) or new.dtype != dtype or new.numel() != old.numel():
            return False
        return name in _SUMS and len(given) == 2 if added else name in _VIEWS or (name in _CASTS and new is old)


def _nodes(output: Tensor) -> Iterable[Any]:
    """The graph of a tensor."""
    found, open_ = set(), [output.grad_fn]
    while open_:
        node = open_.pop()
        if node is None or node in found:
            continue
        found.add(node)
        yield node
        open_ += [each for each, _ in node.next_functions]
