"""The torch functions with a parameter that become ops whose W can wait: products, convolutions, embeddings.

Each has a handler, which computes it with a W of its own, or returns None for a case that it does not know. `mode` is
the `Interception` (interception.py), which says what a parameter or a view of one is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zbkern import functional
from zbkern.kernels import dispatch
from zbkern.ops import autograd
from zbkern.ops.functions import products
from zbkern.ops.functions.grouped import GroupedLinearFunction


def _linear(mode: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if mode.is_sharded(weight):
        return functional.linear(input, weight, bias, impl=mode.impl, name=mode.name)
    view = mode.view(weight)
    if view is None or mode.view(input) is not None or view.value.dim() != 2 or input.layout != torch.strided:
        return None
    bias_view = None if bias is None else mode.view(bias)
    if view.is_parameter and (bias is None or (bias_view is not None and bias_view.is_parameter)):
        return functional.linear(input, weight, bias, impl=mode.impl, name=mode.name)
    y = mode.product(products.LINEAR, input, view)
    return y if bias is None else y + mode.value(bias).to(y.dtype)


def _matmul(mode: Any, left: Tensor, right: Tensor) -> Tensor | None:
    views = mode.view(left), mode.view(right)
    if (views[0] is None) == (views[1] is None) or left.dim() < 2 or right.dim() < 2:
        return None
    if not left.layout == right.layout == torch.strided:
        return None
    if views[1] is None:
        assert views[0] is not None
        return mode.product(products.MATMUL_LEFT, right, views[0])
    if right.dim() == 2:
        return mode.product(products.LINEAR, left, views[1].t())
    return mode.product(products.MATMUL, left, views[1])


def _addmm(mode: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    y = _matmul(mode, left, right) if beta == 1 and alpha == 1 else None
    return None if y is None else y + mode.value(bias).to(y.dtype)


def _einsum(mode: Any, equation: Any, *operands: Any) -> Tensor | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    x, weight = operands
    if mode.view(x) is not None:
        operands_of, _, y = equation.replace(" ", "").partition("->")
        equation, x, weight = f"{','.join(reversed(operands_of.split(',')))}->{y}", weight, x
    view, kind = mode.view(weight), products.einsum(equation)
    return None if view is None or kind is None or mode.view(x) is not None else mode.product(kind, x, view)


def _grouped_mm(
    mode: Any, x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    if offs is None or bias is not None or out_dtype is not None:
        return None
    view = mode.view(weight)
    if view is None or mode.view(x) is not None or x.dim() != 2 or weight.dim() != 3:
        return None
    part, exchanged = view.part, view.whole.mT  # a view of [E, N, K] may be [E, K, N] of the same
    transposed = (part.size, part.stride, part.offset) == (exchanged.shape, exchanged.stride(), 0)
    if view.value.dtype != x.dtype or view.rows or not (part.is_whole or transposed):
        return mode.product(products.GROUPED, x, view, offs)
    backend = dispatch.resolve("grouped_linear", mode.impl, x.device, x.dtype)
    call = autograd.OpCall((view.parameter, None), backend, mode.name)
    return autograd.apply(GroupedLinearFunction, call, x, offs.to(torch.int32), not transposed)


def _embedding(
    mode: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    view = mode.view(weight)
    is_parameter = mode.is_sharded(weight) if view is None else view.is_parameter
    if not is_parameter or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    return functional.embedding(input, weight, padding_idx, impl=mode.impl, name=mode.name)


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


def _numbers(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


def _convolution(dimensions: int, transposed: bool) -> Callable[..., Tensor | None]:
    kind = products.TRANSPOSED_CONVOLUTION if transposed else products.CONVOLUTION
    order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    names = ("bias", "stride", "padding", *order)
    defaults = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}

    def handler(mode: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        view, stride = mode.view(weight), _numbers(arguments["stride"], dimensions)
        if view is None or mode.view(input) is not None or input.dim() != dimensions + 2:
            return None
        padding, dilation = arguments["padding"], _numbers(arguments["dilation"], dimensions)
        if isinstance(padding, str):
            if padding == "same" and any(step != 1 for step in stride):
                return None  # an error, and torch names it
            input, padding = _padded(input, padding, weight.shape[2:], dilation)
        others = _numbers(padding, dimensions), dilation, _numbers(arguments["output_padding"], dimensions)
        y = mode.product(kind, input, view, stride, *others, arguments["groups"])
        bias = arguments["bias"]
        return y if bias is None else y + mode.value(bias).to(y.dtype).view(-1, *[1] * dimensions)

    return handler


HANDLERS: dict[str, Callable[..., Tensor | None]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__"), _matmul),
    "__rmatmul__": lambda mode, right, left: _matmul(mode, left, right),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped_mm),
    "embedding": _embedding,
    **{f"conv{n}d": _convolution(n, False) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolution(n, True) for n in (1, 2, 3)},
}
"""By a torch function's name: handler(interceptor, *args, **kwargs)."""

KEYWORDS = {
    **{name: frozenset(inspect.signature(handler).parameters) for name, handler in HANDLERS.items()},
    **dict.fromkeys(
        (name for name in HANDLERS if name.startswith("conv")),
        frozenset(("input", "weight", "bias", "stride", "padding", "output_padding", "dilation", "groups")),
    ),
}
