"""The W of modules that zbkern does not know: torch functions that take a parameter become ops whose W can wait.

`Interception` is a torch function mode around the forward of one module. It follows views of parameters (an expert's
matrix, a transposed one, a chunk) and what is computed from parameters alone (a normalised weight), turns products and
convolutions with them into ops whose weight gradient waits in the queue (functions/products.py), and lets every other
function have the parameter as a value whose gradient waits to be accumulated. What it does not see, such as a parameter
handed to an autograd function, has the gradient that torch gives it, at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from zbkern import functional, wgrad
from zbkern.conversion.compiled_interception import (
    CompiledInterception,
    InOnePiece,
    allow_within_checkpoints,
    begin_tracing,
    traced,
)
from zbkern.conversion.intercepted_functions import HANDLERS, KEYWORDS, InterceptedFunctions, last_exchanged
from zbkern.kernels import dispatch
from zbkern.ops import autograd, compiled
from zbkern.ops.functions import products, sharded
from zbkern.ops.functions.grouped import GroupedLinear
from zbkern.ops.functions.products import ComputedWeight, Kind, ParameterView, Product, Recipe, Source, Use

# Functions of a tensor whose result is a part of it, or all of it in another shape, order or dtype
VIEWS = {
    *("__getitem__", "select", "narrow", "transpose", "swapaxes", "t", "permute", "movedim", "unsqueeze", "squeeze"),
    *("view", "reshape", "flatten", "unflatten", "chunk", "split", "tensor_split", "unbind", "view_as"),
    *("to", "type", "float", "double", "half", "bfloat16", "type_as", "contiguous", "index_select"),
}
# Functions that only look at a tensor, or whose result has no gradient
QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr"),
    *("is_floating_point", "is_complex", "is_contiguous", "get_device", "is_pinned", "is_inference", "has_names"),
    *("__len__", "__repr__", "__format__", "__hash__", "__bool__", "__reduce_ex__", "item", "tolist", "numpy"),
    *("detach", "untyped_storage", "requires_grad_", "is_tensor", "is_nonzero"),
    *("is_same_size", "equal", "allclose", "isnan", "isinf", "isfinite", "broadcast_tensors"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros"),
    *("new_ones", "new_full", "new_tensor"),
}
# Functions that ask for the gradient of this very tensor, which W computes for none but parameters
GRADIENT_OF = {"register_hook", "retain_grad"}
# Functions whose gradient of a matrix is a product, which B computes: they have no W here
PRODUCTS = {
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("bilinear", "tensordot", "inner", "mv", "embedding_bag", "scaled_dot_product_attention", "cdist"),
}
# Functions that make another tensor when W calls them again
RANDOM = {
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout", "rrelu"),
    *("bernoulli", "scaled_dot_product_attention"),
}
# By which functions of torch.nn.functional see whether a tensor or a mode has a version of its own
LOOKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def intercepted(
    forward: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """forward(*args, **kwargs), intercepted where W may be deferred and no module around it is intercepted already.

    A compiled forward that breaks the graph, of a module without parameters inside modules of its own, runs as if it
    were not compiled.
    """
    if torch.compiler.is_compiling():
        if not compiled.may_defer():
            return forward(*args, **kwargs)
        begin_tracing()
        allow_within_checkpoints()
        if _has_all_parameters(module):
            with InOnePiece(), CompiledInterception():
                return forward(*args, **kwargs)
        with CompiledInterception():
            return forward(*args, **kwargs)
    if (
        wgrad.current() is None
        or not torch.is_grad_enabled()
        or (isinstance(around := _get_current_function_mode(), Interception) and around.reaches())
    ):
        return forward(*args, **kwargs)
    if traced() and _has_all_parameters(module):
        return _without_compiler(forward, module, args, kwargs)
    return _run(forward, module, args, kwargs)


def _has_all_parameters(module: torch.nn.Module) -> bool:
    """Whether the modules inside it have none."""
    return all(next(child.parameters(), None) is None for child in module.children())


def _run(forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with Interception(module.zbkern_name, module.zbkern_impl) as mode:
        output = forward(*args, **kwargs)
    return mode.results(output)


# For a forward that the compiler has given up: else it would compile every function that the mode sees
_without_compiler = torch.compiler.disable(_run)


class Interception(InterceptedFunctions, TorchFunctionMode):
    """Around one forward within `WGradQueue.defer`; name: what errors and the queue call the module."""

    def __init__(self, name: str = "", impl: str = "auto") -> None:
        super().__init__()
        self._name = name
        self._impl = impl
        self._sharded = "torch.distributed.tensor" in sys.modules
        self._saving = _saved_tensors_hooks()
        self._views: dict[int, ParameterView] = {}  # by id of the tensor that stands for it
        self._versions: dict[int, int] = {}  # of those that are no parameters: written into, they stand for nothing
        self._computed: dict[int, _Computed] = {}  # by id, too: tensors made of parameters alone
        self._kept: list[Tensor] = []  # so that no other tensor gets that id meanwhile

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not self._takes_parameter(args, kwargs) or not self.reaches():
            return function(*args, **kwargs)
        name = function.__name__
        if name == "__get__":
            return self._attribute(function, args)
        if name in QUESTIONS or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        if name in GRADIENT_OF:
            self._forget(args[0])
            return function(*args, **kwargs)
        if name in VIEWS and (view := self._view(args[0])) is not None:
            return self._follow(view, function, args, kwargs)
        handler = HANDLERS.get(name)
        if handler is not None and (not kwargs or kwargs.keys() <= KEYWORDS[name]):
            result = handler(self, *args, **kwargs)
            if result is not None:
                return result
        if isinstance(function, FunctionType) and function.__module__ == F.__name__ and function.__closure__ is None:
            with self:
                return _opened(function)(*args, **kwargs)
        return self._call_on_values(function, args, kwargs)

    def reaches(self) -> bool:
        """False within a checkpoint that this forward has begun: it is computed again outside of this forward, and must
        save the same tensors then. False within torch.vmap and its like, too, which see through torch's functions only.
        """
        return _saved_tensors_hooks() == self._saving and not compiled.within_transform()

    def results(self, output: Any) -> Any:
        """What the module returns, with parameters and views of them as values whose gradient waits."""
        return (
            self._values(output) if isinstance(output, Tensor) else pytree.tree_map_only(Tensor, self._values, output)
        )

    # ---- parameters and their views

    def _takes_parameter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        for argument in args:
            if isinstance(argument, Tensor):
                if self._view(argument) is not None or (self._sharded and self._is_sharded(argument)):
                    return True
                if id(argument) in self._computed:
                    return True
            elif type(argument) in (list, tuple) and self._takes_parameter(tuple(argument), {}):
                return True
        return bool(kwargs) and self._takes_parameter(tuple(kwargs.values()), {})

    def _is_sharded(self, tensor: Tensor) -> bool:
        """Whether this is a parameter that is a DTensor. As operands of `linear` and `embedding` these have a W."""
        return self._sharded and tensor.requires_grad and tensor.is_leaf and sharded.is_sharded(tensor)

    def _view(self, tensor: Any) -> ParameterView | None:
        """The view that a tensor stands for, if it is a parameter that takes a gradient or a view of one."""
        view = self._views.get(id(tensor))
        if view is not None:
            version = self._versions.get(id(tensor))
            return view if version is None or version == products.version_of(tensor) else None
        if type(tensor) is torch.nn.Parameter and tensor.requires_grad:
            view = ParameterView(tensor, (), tensor.detach())
            self._views[id(tensor)] = view
            self._kept.append(tensor)
        elif self._sharded and type(tensor) is Tensor and tensor.grad_fn is not None:
            parameter = sharded.parameter_of(tensor)
            if parameter is not None:
                view = ParameterView(parameter, ((products.to_local, (), ()),), tensor.detach())
                self._remember(tensor, view)
        return view

    def _remember(self, tensor: Tensor, view: ParameterView) -> None:
        self._views[id(tensor)], self._versions[id(tensor)] = view, products.version_of(tensor)
        self._kept.append(tensor)

    def _forget(self, tensor: Tensor) -> None:
        """From now on a view, or what was computed, is a tensor of autograd's like any other."""
        if not tensor.is_leaf:
            self._is_multiplied(tensor)
            self._views.pop(id(tensor), None)
            self._computed.pop(id(tensor), None)

    def _attribute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        view = self._view(args[0])
        steps = {"T": Tensor.t, "mT": last_exchanged, "H": Tensor.t, "mH": last_exchanged}
        step = steps.get(function.__self__.__name__)  # type: ignore[attr-defined]
        if view is None or step is None:
            return function(*args)
        return self._follow(view, step, args[:1], {})

    def _follow(
        self, view: ParameterView, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the function returns, remembered as views. It carries the graph, for whoever uses it unseen."""
        found = function(*args, **kwargs)
        if isinstance(found, str) or (isinstance(found, Tensor) and id(found) in self._views):
            return found  # the name of a type, or a cast to the dtype that it has
        method = getattr(Tensor, function.__name__, function)
        step = (method, _plain_indices(args[1:]), tuple(sorted(kwargs.items())))
        if isinstance(found, Tensor):
            self._remember(found, ParameterView(view.parameter, (*view.steps, step), found.detach()))
            return found
        for index, part in enumerate(found):
            pick = (products.pick, (index,), ())
            self._remember(part, ParameterView(view.parameter, (*view.steps, step, pick), part.detach()))
        return found

    def _values(self, argument: Any, product: bool = False, uses: list[Use] | None = None) -> Any:
        """The argument with parameters and views as values whose gradient waits. product: for `Use`, which `uses`
        takes up."""
        if type(argument) in (list, tuple):
            return type(argument)(self._values(value, product, uses) for value in argument)
        view = self._view(argument) if isinstance(argument, Tensor) else None
        if view is None:
            return argument
        use = Use(product and view.value.dim() > 1)
        if uses is not None:
            uses.append(use)
        return autograd.apply(Source, self._call(view, view.value), view.value, view, use)

    def _call(self, view: ParameterView | ComputedWeight, x: Tensor) -> autograd.OpCall:
        return autograd.OpCall(view.parameters, dispatch.resolve("linear", self._impl, x.device, x.dtype), self._name)

    # ---- what is computed from parameters alone

    def _call_on_values(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function returns for the values of parameters and views, remembered if it has seen nothing else."""
        name = function.__name__
        operands = products.tensors_in((args, kwargs))
        multiplies = name in HANDLERS or name in PRODUCTS
        alone = self._parameters_alone(operands, multiplies)
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        computes = alone and not writes
        product = not computes and (alone or multiplies)
        uses: list[Use] = []
        written = args[:1] if writes else ()  # what is written into has to be this tensor
        found = function(
            *written,
            *self._values(args[len(written) :], product, uses),
            **{key: self._values(value, product, uses) for key, value in kwargs.items()},
        )
        if computes:
            self._remember_computed(found, (function, args, kwargs, None), operands, uses)
        elif product:
            for tensor in operands:
                self._is_multiplied(tensor)
        return found

    def _parameters_alone(self, operands: list[Tensor], multiplies: bool) -> bool:
        """Whether every operand is a parameter, a view, computed from such, or a constant that is no larger: a mask of
        a weight, not the input of a model. In products a constant is a vector, as of a spectral norm."""
        largest, constant = 0, 0
        for tensor in operands:
            if id(tensor) in self._computed or self._view(tensor) is not None:
                largest = max(largest, tensor.numel())
            elif tensor.requires_grad or (multiplies and (tensor.dim() > 1 or not tensor.is_floating_point())):
                return False
            else:
                constant = max(constant, tensor.numel())
        return constant <= largest

    def _remember_computed(self, found: Any, call: _Call, operands: list[Tensor], uses: list[Use]) -> None:
        for tensor in operands:
            if (earlier := self._computed.get(id(tensor))) is not None:
                uses.extend(earlier.uses)
        versions = [products.version_of(tensor) for tensor in operands]
        if isinstance(found, Tensor):
            self._computed[id(found)] = _Computed(found, found._version, call, operands, versions, uses)
            return
        for index, part in enumerate(found if isinstance(found, tuple | list) else ()):
            if isinstance(part, Tensor):
                part_of = (*call[:3], index)
                self._computed[id(part)] = _Computed(part, part._version, part_of, operands, versions, uses)

    def _recipe(self, computed: _Computed, parameters: dict[int, Tensor]) -> Recipe | None:
        """How W makes it again, and of which parameters; None where it cannot, or something was modified in place."""
        function, args, kwargs, index = computed.call
        versions = [products.version_of(tensor) for tensor in computed.operands]
        changed = versions != computed.versions or computed.tensor._version != computed.version
        if changed or function.__name__ in RANDOM:
            return None
        possible = True

        def ingredient(tensor: Any) -> Any:
            nonlocal possible
            if not isinstance(tensor, Tensor):
                return tensor
            if (view := self._view(tensor)) is not None:
                parameters[id(view.parameter)] = view.parameter
                return view
            if (earlier := self._computed.get(id(tensor))) is None:
                return tensor
            recipe = self._recipe(earlier, parameters)
            possible = possible and recipe is not None
            return recipe

        args, kwargs = products.replaced((args, kwargs), ingredient)
        return Recipe(function, args, kwargs, index) if possible else None

    def _is_multiplied(self, tensor: Tensor) -> None:
        """A computed matrix is an operand of a product whose gradient B computes."""
        computed = self._computed.get(id(tensor))
        if computed is not None and tensor.dim() > 1:
            for use in computed.uses:
                use.product = True

    def _weight(self, tensor: Any) -> ParameterView | ComputedWeight | None:
        """What can be the weight of a product whose W waits."""
        view = self._view(tensor)
        if view is not None or (computed := self._computed.get(id(tensor))) is None:
            return view
        parameters: dict[int, Tensor] = {}
        recipe = self._recipe(computed, parameters)
        return None if recipe is None else ComputedWeight(recipe, tuple(parameters.values()), tensor.detach())

    def _is_parameter(self, input: Tensor, weight: ParameterView | ComputedWeight) -> bool:
        """Whether the other operand of a product is a weight, too."""
        if self._view(input) is not None:
            return True
        return isinstance(weight, ComputedWeight) and id(input) in self._computed

    # ---- what the handlers call

    def product(self, kind: Kind, x: Tensor, view: ParameterView | ComputedWeight, *options: Any) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, view = x.to(dtype), view if view.value.dtype == dtype else view.then(Tensor.to, dtype)
        return autograd.apply(Product, self._call(view, x), x, kind, view, options)

    def whole_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias, impl=self._impl, name=self._name)

    def whole_grouped_linear(self, x: Tensor, view: ParameterView, ends: Tensor, transposed: bool) -> Tensor:
        backend = dispatch.resolve("grouped_linear", self._impl, x.device, x.dtype)
        call = autograd.OpCall((view.parameter, None), backend, self._name)
        return autograd.apply(GroupedLinear, call, x, ends, transposed)

    def whole_embedding(self, indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        return functional.embedding(indices, weight, padding_idx, impl=self._impl, name=self._name)


_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], "int | None"]


class _Computed(NamedTuple):
    """A tensor made of parameters alone.

    call: the function, its arguments, and which of its results this is, None for its only one. operands: the tensors
    among them. Versions are from then, before anything modified them in place. uses: of the parameters' values in it.
    """

    tensor: Tensor
    version: int
    call: _Call
    operands: list[Tensor]
    versions: list[int]
    uses: list[Use]


def _saved_tensors_hooks() -> Any:
    """What packs and unpacks the tensors that autograd saves, such as a checkpoint's; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@functools.cache
def _opened(function: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that is written in Python, without its first look for somebody else to call:
    what it calls in turn is intercepted."""
    names = {**function.__globals__, **dict.fromkeys(LOOKS, _nobody)}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _nobody(*_: Any) -> bool:
    return False


def _plain_indices(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Indices that are tensors of one number as that number, as torch takes them."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(plain(part) for part in value)
        one = isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (torch.int64, torch.int32)
        return int(value) if one else value

    return tuple(plain(value) for value in args)
