"""The W of modules that zbkern does not know: torch functions that take a parameter become ops whose W can wait.

`Interception` is a torch function mode around the forward of one module. It follows views and casts of parameters (an
expert's matrix, a transposed one, a chunk), turns products and convolutions with them into ops whose weight gradient
waits in the queue (ops/functions/products.py), and lets every other function have the parameter as a value whose
gradient waits to be accumulated. What it does not see, such as a parameter handed to an autograd function, has the
gradient that torch gives it, at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from zbkern import nn, wgrad
from zbkern.conversion.intercepted_functions import HANDLERS, KEYWORDS
from zbkern.kernels import dispatch
from zbkern.ops import autograd
from zbkern.ops.functions import sharded
from zbkern.ops.functions.products import Kind, ParameterView, ProductFunction, ViewValue
from zbkern.ops.route import within_transform
from zbkern.ops.table import cast_product
from zbkern.wgrad.storages import storage_key

# Functions of a tensor whose result is a part of it, or all of it in another shape or order
VIEWS = {
    *("__getitem__", "select", "narrow", "transpose", "swapaxes", "t", "permute", "movedim", "unsqueeze", "squeeze"),
    *("view", "reshape", "flatten", "unflatten", "chunk", "split", "tensor_split", "unbind", "view_as"),
    *("index_select", "T", "mT", "H", "mH"),
}
# Functions whose result is all of a tensor in another dtype, or a copy of it
CASTS = {"to", "type", "float", "double", "half", "bfloat16", "type_as", "contiguous"}
# Functions whose result has no gradient
WITHOUT_GRADIENT = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr"),
    *("is_floating_point", "is_complex", "is_contiguous", "get_device", "is_pinned", "is_inference", "has_names"),
    *("__len__", "__repr__", "__format__", "__hash__", "__bool__", "__reduce_ex__", "item", "tolist", "numpy"),
    *("detach", "untyped_storage", "requires_grad_", "is_tensor", "is_nonzero"),
    *("is_same_size", "equal", "allclose", "isnan", "isinf", "isfinite", "broadcast_tensors"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros"),
    *("new_ones", "new_full", "new_tensor"),
}
# Functions that ask for the gradient of this very tensor, which W computes for none but parameters
HOOKS = {"register_hook", "retain_grad"}
# By which functions of torch.nn.functional see whether a tensor or a mode has a version of its own
OVERRIDE_CHECKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


class Intercepted(nn.Layer):
    """Behaviour of a module with parameters that has no twin: its forward as it is, intercepted. See `convert`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Intercepted where W may be deferred and no module around it is intercepted already; never in torch.compile,
        where it is any other code, with its W in B."""
        forward = super().forward
        if torch.compiler.is_compiling() or wgrad.current() is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        around = _get_current_function_mode()
        if isinstance(around, Interception) and around.reaches():
            return forward(*args, **kwargs)
        with Interception(self.zbkern_name, self.zbkern_impl) as mode:
            output = forward(*args, **kwargs)
        return mode.results(output)


class Interception(TorchFunctionMode):
    """Around one forward within `WGradQueue.defer`; name: what errors and the queue call the module."""

    def __init__(self, name: str = "", impl: str = "auto") -> None:
        super().__init__()
        self.name = name
        self.impl = impl
        self._sharded = "torch.distributed.tensor" in sys.modules
        self._saving = _saved_tensors_hooks()
        # By id of a tensor, which is kept, so that no other gets that id meanwhile: its version and what it stands for.
        # Written into, it stands for nothing.
        self._views: dict[int, tuple[Tensor, int | None, ParameterView]] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")  # first: half of all calls ask for a shape or a dtype
        if name == "__get__":
            name = function.__self__.__name__  # type: ignore[attr-defined]
            if name not in VIEWS:
                return function(*args, **kwargs)
        if name in WITHOUT_GRADIENT or not self._takes_parameter(args, kwargs) or not self.reaches():
            return function(*args, **kwargs)
        if kwargs.get("out") is not None:
            return function(*args, **kwargs)
        if name in HOOKS:
            if not args[0].is_leaf:
                self._views.pop(id(args[0]), None)  # from now on a tensor of autograd's like any other
            return function(*args, **kwargs)
        if args and (view := self.view(args[0])) is not None:
            if name in CASTS:
                return self._cast(view, function, args, kwargs)
            if name in VIEWS:
                return self._select(view, function, args, kwargs)
        handler = HANDLERS.get(name)
        if handler is not None and kwargs.keys() <= KEYWORDS[name]:
            result = handler(self, *args, **kwargs)
            if result is not None:
                return result
        if isinstance(function, FunctionType) and function.__module__ == F.__name__ and function.__closure__ is None:
            with self:
                return _without_override_checks(function)(*args, **kwargs)
        return self._call_on_values(function, args, kwargs)

    def reaches(self) -> bool:
        """False within a checkpoint that this forward has begun: it is computed again outside of this forward, and must
        save the same tensors then. False within torch.vmap and its like, too, which see through torch's functions only.
        """
        return _saved_tensors_hooks() == self._saving and not within_transform()

    def results(self, output: Any) -> Any:
        """The module's output, in which parameters and views of them are values whose gradient waits."""
        return self.value(output) if isinstance(output, Tensor) else pytree.tree_map_only(Tensor, self.value, output)

    # ---- parameters and their views

    def _takes_parameter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        for argument in args:
            if isinstance(argument, Tensor):
                if argument.requires_grad and (self.view(argument) is not None or self.is_sharded(argument)):
                    return True
            elif type(argument) in (list, tuple) and self._takes_parameter(tuple(argument), {}):
                return True
        return bool(kwargs) and self._takes_parameter(tuple(kwargs.values()), {})

    def is_sharded(self, tensor: Any) -> bool:
        """Whether this is a parameter that is a DTensor. As operands of `linear` and `embedding` these have a W."""
        return self._sharded and tensor.requires_grad and tensor.is_leaf and sharded.is_sharded(tensor)

    def view(self, tensor: Any) -> ParameterView | None:
        """The view that a tensor stands for, if it is a parameter that takes a gradient or a view of one."""
        known = self._views.get(id(tensor))
        if known is not None:
            _, version, view = known
            return view if version is None or version == tensor._version else None
        parameter = None
        if type(tensor) is torch.nn.Parameter and tensor.requires_grad:
            parameter = tensor
        elif self._sharded and type(tensor) is Tensor and tensor.grad_fn is not None:
            parameter = sharded.parameter_of(tensor)
        if parameter is None:
            return None
        view = ParameterView.of(parameter, tensor.detach())
        self._views[id(tensor)] = (tensor, None if parameter is tensor else tensor._version, view)
        return view

    def _remember(self, tensor: Tensor, view: ParameterView) -> None:
        if tensor.requires_grad:
            self._views[id(tensor)] = (tensor, tensor._version, view)

    def _cast(
        self, view: ParameterView, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The function's own result, with its graph: the mode does not see every use of it."""
        result = function(*args, **kwargs)
        followed = isinstance(result, Tensor) and result is not args[0]
        if followed and result.device == args[0].device and result.is_floating_point():
            self._remember(result, replace(view, value=result.detach()))
        return result

    def _select(
        self, view: ParameterView, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The same of a function that selects a part, or several parts."""
        try:
            parts = function(view.memory, *args[1:], **kwargs)
        except RuntimeError:  # of a contiguous copy torch makes views that the parameter's memory does not have
            return self._call_on_values(function, args, kwargs)
        if isinstance(parts, Tensor):
            parts = (parts,)
        storage, is_cast = storage_key(view.memory), view.value is not view.memory
        if all(storage_key(part) == storage for part in parts):
            result = function(*args, **kwargs)
            for tensor, part in zip((result,) if isinstance(result, Tensor) else result, parts, strict=True):
                value = tensor.detach() if is_cast else part
                self._remember(tensor, ParameterView(view.parameter, view.whole, part, value, view.rows))
            return result
        rows = _rows_chosen(function.__name__, args)
        if rows is None or view.rows or view.memory is not view.whole:
            return self._call_on_values(function, args, kwargs)
        result = function(*args, **kwargs)
        self._remember(result, replace(ParameterView.of(view.parameter, result.detach()), rows=(rows,)))
        return result

    def value(self, argument: Any) -> Any:
        """A parameter or a view as a value whose gradient waits; also those in a list or a tuple."""
        if type(argument) in (list, tuple):
            return type(argument)(map(self.value, argument))
        view = self.view(argument) if isinstance(argument, Tensor) else None
        return argument if view is None else autograd.apply(ViewValue, self._call(view, view.value), view.value, view)

    def _call(self, view: ParameterView, x: Tensor) -> autograd.OpCall:
        return autograd.OpCall((view.parameter,), dispatch.resolve("linear", self.impl, x.device, x.dtype), self.name)

    def _call_on_values(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result for the values of parameters and views."""
        name = function.__name__
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        written = args[:1] if writes else ()  # what is written into has to be this tensor
        args = (*written, *self.value(args[len(written) :]))
        return function(*args, **{key: self.value(value) for key, value in kwargs.items()})

    def product(self, kind: Kind, x: Tensor, view: ParameterView, *options: Any) -> Tensor:
        """kind.forward(x, weight, *options), in autocast's dtype where that is on."""
        x = cast_product(kind.name, x, ())
        if torch.is_autocast_enabled(x.device.type):
            view = view.to(x.dtype)
        return autograd.apply(ProductFunction, self._call(view, x), x, kind, view, options)


def _saved_tensors_hooks() -> Any:
    """The hooks that pack and unpack the tensors which autograd saves, a checkpoint's for example; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@functools.cache
def _without_override_checks(function: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that is written in Python, which does not look for other versions of itself:
    what it calls in turn is intercepted."""
    names = {**function.__globals__, **dict.fromkeys(OVERRIDE_CHECKS, lambda *_: False)}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _rows_chosen(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """The index of tensor[index] or tensor.index_select(0, index), where it is a tensor of numbers."""
    if name == "__getitem__":
        index = args[1]
    else:
        index = args[2] if name == "index_select" and args[1:2] == (0,) and len(args) > 2 else None
    return index if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) else None
