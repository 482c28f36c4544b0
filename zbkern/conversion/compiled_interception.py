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

from zbkern.conversion.intercepted_functions import HANDLERS, KEYWORDS, InterceptedFunctions, last_exchanged
from zbkern.ops import compiled
from zbkern.ops.functions.products import ComputedWeight, Kind, ParameterView

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
        elif name == "__getitem__" and _is_parameter(args[0]) and args[0].dim() > 2 and _are_rows(args[1]):
            return _values(args[0], args[1], args[0].dtype)
        elif name in CASTS and _is_parameter(args[0]):
            cast = function(*args, **kwargs)
            same = cast.dtype == args[0].dtype or cast.device != args[0].device
            return cast if same else _values(args[0], None, cast.dtype)
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


def _are_rows(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() < 2 and index.dtype in (torch.int32, torch.int64)


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


def _view(operand: Tensor, whole: Any, known: bool) -> ParameterView | None:
    """Which part of which parameter an operand is."""
    made: Any = getattr(whole, "grad_fn", None)
    parameter = whole if known else getattr(made, "zbkern_parameter", None)
    if parameter is None or not parameter.is_contiguous():
        return None
    steps: tuple[Any, ...] = ()
    if not known:
        index, dtype = made.zbkern_index, whole.dtype
        if index is not None:
            steps = ((Tensor.__getitem__, (index,), ()),)
        if dtype != parameter.dtype:
            steps = (*steps, (Tensor.to, (dtype,), ()))
    if operand.dtype != whole.dtype or _overlaps(operand):
        return None
    if operand.shape != whole.shape or operand.stride() != whole.stride():
        if not known and made.zbkern_index is not None:
            return None  # outside of defer W runs within B's operator, where the gradient of such a view has no graph
        transposed = whole.dim() == 3 and operand.shape == whole.mT.shape and operand.stride() == whole.mT.stride()
        steps = (*steps, (last_exchanged if transposed else Tensor.as_strided, (), ()))
    return ParameterView(parameter, steps, operand.detach())


def _overlaps(view: Tensor) -> bool:
    """Whether elements may share memory, as an expanded tensor's do: their gradients could not be added in one go."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


class _Traced(InterceptedFunctions):
    """Handlers for operands that are views of parameters, in operations that a compiler traces."""

    def __init__(self, views: list[tuple[Tensor, ParameterView]]) -> None:
        self._views = views

    def _view(self, tensor: Any) -> ParameterView | None:
        return next((view for operand, view in self._views if operand is tensor), None)

    def _weight(self, tensor: Any) -> ParameterView | None:
        return self._view(tensor)

    def _is_parameter(self, input: Tensor, weight: ParameterView | ComputedWeight) -> bool:
        return self._view(input) is not None

    def _is_sharded(self, tensor: Any) -> bool:
        return False

    def _values(self, argument: Any) -> Any:
        return argument  # its gradient is B's

    def product(self, kind: Kind, x: Tensor, view: ParameterView | ComputedWeight, *options: Any) -> Tensor:
        assert isinstance(view, ParameterView)
        x = _in_autocasts_dtype(x)
        return compiled.product(kind, x, view, options)

    def whole_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return compiled.linear(_in_autocasts_dtype(x), weight, bias, None, False)

    def whole_grouped_linear(self, x: Tensor, view: ParameterView, ends: Tensor, transposed: bool) -> Tensor:
        return compiled.grouped_linear(x, view.parameter, None, ends, transposed)

    def whole_embedding(self, indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        return compiled.embedding(indices, weight, padding_idx)


def _in_autocasts_dtype(x: Tensor) -> Tensor:
    device = x.device.type
    wanted = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if wanted else x


@torch.compiler.allow_in_graph
def _values(parameter: Tensor, index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """parameter[index].to(dtype), known by its node in the graph of autograd."""
    return _Values.apply(parameter, index, dtype)


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, index: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.zbkern_parameter, ctx.zbkern_index = parameter, index
        # As an operator: Python's brackets would read the number that a tensor without dimensions holds
        chosen = parameter.clone() if index is None else torch.ops.aten.index(parameter, [index])
        return chosen.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        parameter, index = ctx.zbkern_parameter, ctx.zbkern_index
        gradient = gradient.to(parameter.dtype)
        if index is not None:
            zeros = torch.zeros_like(parameter)
            gradient = zeros.index_put((index,), gradient, accumulate=True)
        return gradient, None, None
