"""The torch functions with a parameter that become ops whose W can wait: products, convolutions, embeddings.

`InterceptedFunctions` has a handler for each; whoever intercepts says what a parameter or a view of one is
(interception.py).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zbkern.ops.functions import products
from zbkern.ops.functions.products import ComputedWeight, Kind, ParameterView, Step


class InterceptedFunctions(ABC):
    """Handlers: each computes a torch function with a W of its own, or returns None for a case it does not know."""

    @abstractmethod
    def _view(self, tensor: Any) -> ParameterView | None:
        """The view that a tensor stands for, if it is a parameter that takes a gradient or a view of one."""

    @abstractmethod
    def _weight(self, tensor: Any) -> ParameterView | ComputedWeight | None:
        """What can be the weight of a product whose W waits."""

    @abstractmethod
    def _is_parameter(self, input: Tensor, weight: ParameterView | ComputedWeight) -> bool:
        """Whether the other operand of a product is a weight, too."""

    @abstractmethod
    def _is_sharded(self, tensor: Any) -> bool:
        """Whether this is a parameter that is a DTensor. As operands of `linear` and `embedding` these have a W."""

    @abstractmethod
    def _values(self, argument: Any) -> Any:
        """A parameter or a view as an operand whose gradient is no product."""

    @abstractmethod
    def product(self, kind: Kind, x: Tensor, view: ParameterView | ComputedWeight, *options: Any) -> Tensor:
        """kind.forward(x, weight, *options), in autocast's dtype where that is on."""

    @abstractmethod
    def whole_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear of parameters."""

    @abstractmethod
    def whole_grouped_linear(self, x: Tensor, view: ParameterView, ends: Tensor, transposed: bool) -> Tensor:
        """F.grouped_mm with a parameter: its weight.mT, or as it is where transposed."""

    @abstractmethod
    def whole_embedding(self, indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        """F.embedding of a parameter."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if self._is_sharded(weight):
            return self.whole_linear(input, weight, bias)
        view = self._weight(weight)
        if view is None or self._is_parameter(input, view) or view.value.dim() != 2 or input.layout != torch.strided:
            return None
        if _is_whole(view) and (bias is None or _is_whole(self._view(bias))):
            return self.whole_linear(input, weight, bias)
        y = self.product(products.LINEAR, input, view)
        return y if bias is None else y + self._values(bias)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor | None:
        views = self._weight(left), self._weight(right)
        if (views[0] is None) == (views[1] is None) or left.dim() < 2 or right.dim() < 2:
            return None
        if not left.layout == right.layout == torch.strided:
            return None
        if views[1] is None:
            assert views[0] is not None
            return self.product(products.MATMUL_LEFT, right, views[0])
        if right.dim() == 2:
            return self.product(products.LINEAR, left, views[1].then(Tensor.t))
        return self.product(products.MATMUL, left, views[1])

    def addmm(self, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
        y = self.matmul(left, right) if beta == 1 and alpha == 1 else None
        return None if y is None else y + self._values(bias)

    def einsum(self, equation: Any, *operands: Any) -> Tensor | None:
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return None
        x, weight = operands
        if self._weight(x) is not None:
            operands_of, _, y = equation.replace(" ", "").partition("->")
            equation, x, weight = f"{','.join(reversed(operands_of.split(',')))}->{y}", weight, x
        view, kind = self._weight(weight), products.einsum(equation)
        return None if view is None or kind is None or self._weight(x) is not None else self.product(kind, x, view)

    def grouped_mm(
        self, x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor | None:
        if offs is None or bias is not None or out_dtype is not None:
            return None
        view = self._view(weight)
        if view is None or self._view(x) is not None or x.dim() != 2 or weight.dim() != 3:
            return None
        steps = [step for step in view.steps if step[0] not in products.CASTS]
        if view.value.dtype != x.dtype or (steps and not _exchanges_last(steps)):
            return self.product(products.GROUPED, x, view, offs)
        return self.whole_grouped_linear(x, view, offs.to(torch.int32), not steps)

    def embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: Any = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor | None:
        view = self._view(weight)
        whole = self._is_sharded(weight) if view is None else not view.steps
        if not whole or max_norm is not None or scale_grad_by_freq or sparse:
            return None
        return self.whole_embedding(input, weight, padding_idx)

    def convolution(
        self,
        dimensions: int,
        transposed: bool,
        input: Tensor,
        weight: Tensor,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        output_padding: Any,
        groups: int,
    ) -> Tensor | None:
        view = self._weight(weight)
        if view is None or self._is_parameter(input, view) or input.dim() != dimensions + 2:
            return None
        if isinstance(padding, str):
            if padding == "same" and any(step != 1 for step in _numbers(stride, dimensions)):
                return None  # an error, and torch names it
            input, padding = _padded(input, padding, weight.shape[2:], _numbers(dilation, dimensions))
        lists = [_numbers(value, dimensions) for value in (stride, padding, dilation, output_padding)]
        kind = products.TRANSPOSED_CONVOLUTION if transposed else products.CONVOLUTION
        y = self.product(kind, input, view, *lists, groups)
        return y if bias is None else y + self._values(bias).to(y.dtype).view(-1, *[1] * dimensions)


def _is_whole(view: ParameterView | ComputedWeight | None) -> bool:
    return isinstance(view, ParameterView) and not view.steps


def _padded(
    input: Tensor, padding: str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, int | list[int]]:
    """An input and numbers with which a convolution does what it does with this word as its padding."""
    if padding == "valid":
        return input, 0
    total = [steps * (size - 1) for steps, size in zip(dilation, kernel, strict=True)]
    if any(count % 2 for count in total):  # more on the right
        input = F.pad(input, [side for count in reversed(total) for side in (0, count % 2)])
    return input, [count // 2 for count in total]


def last_exchanged(tensor: Tensor) -> Tensor:
    return tensor.mT


def _exchanges_last(steps: Sequence[Step]) -> bool:
    """Whether a view of [E, N, K] is [E, K, N] of the same."""
    if len(steps) != 1:
        return False
    function, args, kwargs = steps[0]
    if function is last_exchanged:
        return True
    names = (Tensor.transpose, Tensor.swapaxes)
    return function in names and not kwargs and {axis % 3 for axis in args} == {1, 2}


def _numbers(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def _convolution(dimensions: int, transposed: bool) -> Callable[..., Tensor | None]:
    order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    names = ("bias", "stride", "padding", *order)
    defaults = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}

    def handler(self: InterceptedFunctions, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        given = dict(zip(names, args, strict=False))
        return self.convolution(dimensions, transposed, input, weight, **{**defaults, **given, **kwargs})

    return handler


HANDLERS: dict[str, Callable[..., Tensor | None]] = {
    "linear": InterceptedFunctions.linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__"), InterceptedFunctions.matmul),
    "__rmatmul__": lambda self, right, left: self.matmul(left, right),
    **dict.fromkeys(("addmm", "baddbmm"), InterceptedFunctions.addmm),
    "einsum": InterceptedFunctions.einsum,
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), InterceptedFunctions.grouped_mm),
    "embedding": InterceptedFunctions.embedding,
    **{f"conv{n}d": _convolution(n, False) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolution(n, True) for n in (1, 2, 3)},
}
"""By a torch function's name: computes it with a W of its own, or returns None for a case that it does not know."""

KEYWORDS = {
    **{name: frozenset(inspect.signature(handler).parameters) for name, handler in HANDLERS.items()},
    **dict.fromkeys(
        (name for name in HANDLERS if name.startswith("conv")),
        frozenset(("input", "weight", "bias", "stride", "padding", "output_padding", "dilation", "groups")),
    ),
}
