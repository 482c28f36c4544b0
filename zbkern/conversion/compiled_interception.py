"""Interception inside torch.compile: products with a parameter, or with a view of one, whose W waits.

The compiler traces a torch function mode like any other Python code. The mode here only looks for parameters, and hands
functions that may take one to `_call`, which the compiler keeps as one node until it traces autograd. There, `_call` is
ordinary Python: it uses the handlers of eager execution (intercepted_functions.py) with operations that the compiler
sees through, and a tap behind each for W (compiled.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zbkern.conversion.intercepted_functions import HANDLERS, KEYWORDS
from zbkern.ops import compiled
from zbkern.ops.functions.products import Kind, ParameterView
from zbkern.ops.table import cast_product

CASTS = ("to", "type", "float", "double", "half", "bfloat16")


class CompiledInterception(TorchFunctionMode):
    """Around one forward that the compiler traces. It keeps nothing, because nothing may change within a checkpoint."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():  # between two graphs
            return function(*args, **kwargs)
        name = function.__name__
        if name in HANDLERS and not (name == "embedding" and function is not F.embedding):
            found = [_origin(argument) for argument in (*args, *kwargs.values())]
            origins = tuple([origin for origin in found if origin is not None])
            if origins:
                return _call(name, origins, args, kwargs)
        elif name in CASTS and _is_parameter(args[0]):
            cast = function(*args, **kwargs)
            same = cast.dtype == args[0].dtype or cast.device != args[0].device
            return cast if same else _cast(args[0], cast.dtype)
        return function(*args, **kwargs)


class InOnePiece:
    """Around a forward that the compiler traces as a whole or not at all: where a graph breaks within a context manager
    that it does not know, it leaves the function that entered it to Python."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_traced = False


def traced() -> bool:
    """Whether a compiler has traced an intercepted forward in this process."""
    return _traced


@torch.compiler.assume_constant_result
def begin_tracing() -> None:
    """Called by the compiler, once for every trace. Lets modes see torch._grouped_mm, as they do in eager execution.

    The compiler has a list of functions that it shows to modes. As of torch 2.13 this one, which F.grouped_mm calls, is
    missing there.
    """
    global _traced
    _traced = True
    listed = getattr(torch._dynamo.variables.torch, "get_overridable_functions", None)
    if listed is not None and hasattr(torch, "_grouped_mm"):
        listed().add(torch._grouped_mm)


def allow_within_checkpoints() -> None:
    """The compiler refuses to change the stack of modes within a checkpoint, although the mode ends there, unless it
    has seen such a change before. Where a torch has no such call, a checkpoint breaks the graph."""
    allow = getattr(torch._dynamo.utils, "_disable_side_effect_safety_checks_for_current_subtracer", None)
    if allow is not None:
        allow(_enter_and_leave)


def _enter_and_leave() -> None:
    with CompiledInterception():
        pass


def _is_parameter(tensor: Any) -> bool:
    return type(tensor) is torch.nn.Parameter and tensor.requires_grad


def _origin(operand: Any) -> tuple[Tensor, Tensor, bool] | None:
    """An operand with what it is a view of, or itself; and whether that is a parameter."""
    if type(operand) not in (Tensor, torch.nn.Parameter) or not operand.requires_grad:
        return None
    base = operand._base
    whole = operand if base is None else base
    return operand, whole, _is_parameter(whole)


@torch.compiler.allow_in_graph
def _call(name: str, origins: tuple[tuple[Tensor, Tensor, bool], ...], args: Any, kwargs: Any) -> Any:
    """The function of this name, with a W of its own where an operand is a parameter."""
    seen = () if compiled.within_transform() else origins
    views = [(operand, view) for operand, whole, known in seen if (view := _view(operand, whole, known)) is not None]
    if views and kwargs.keys() <= KEYWORDS[name]:
        result = HANDLERS[name](_Traced(views), *args, **kwargs)
        if result is not None:
            return result
    return _original(name)(*args, **kwargs)


@functools.cache
def _original(name: str) -> Callable[..., Any]:
    if name == "grouped_mm_fallback":
        return torch.ops.transformers.grouped_mm_fallback
    return next(getattr(place, name) for place in (F, torch, Tensor) if hasattr(place, name))


def _view(operand: Tensor, whole: Tensor, known: bool) -> ParameterView | None:
    """Which part of which parameter an operand is. known: `whole` is the parameter; else it may be a cast of one."""
    parameter = whole if known else getattr(whole.grad_fn, "zbkern_parameter", None)
    if parameter is None or not parameter.is_contiguous() or operand.dtype != whole.dtype or _overlaps(operand):
        return None
    values = whole.detach()
    memory = values if operand is whole else operand.detach()
    return ParameterView(parameter, values, memory, memory)


def _overlaps(view: Tensor) -> bool:
    """Whether elements may share memory, as an expanded tensor's do: their gradients could not be added in one go."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


class _Traced:
    """What handlers ask for operands that are views of parameters, in operations that a compiler traces."""

    def __init__(self, views: list[tuple[Tensor, ParameterView]]) -> None:
        self._views = views

    def view(self, tensor: Any) -> ParameterView | None:
        return next((view for operand, view in self._views if operand is tensor), None)

    def is_sharded(self, tensor: Any) -> bool:
        return False

    def value(self, argument: Any) -> Any:
        return argument  # its gradient is B's

    def product(self, kind: Kind, x: Tensor, view: ParameterView, *options: Any) -> Tensor:
        return compiled.product(kind, cast_product(kind.name, x, ()), view, options)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return compiled.linear(weight, bias, cast_product("linear", x, (weight, bias)), None, False)

    def grouped_linear(self, x: Tensor, parameter: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        return compiled.grouped_linear(parameter, None, x, ends, transposed)

    def embedding(self, indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        return compiled.embedding(weight, indices, padding_idx)


@torch.compiler.allow_in_graph
def _cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """parameter.to(dtype), known by its node in the graph of autograd."""
    return _Cast.apply(parameter, dtype)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.zbkern_parameter = parameter
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.to(ctx.zbkern_parameter.dtype), None
