"""What forwards and backwards of a probe change, and must leave as it was: random numbers, buffers, gradients, plain
attributes of modules, and what their hooks count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from zbkern.data_parallel import is_sharded, state_of
from zbkern.pipeline.runtime.forward_state import ForwardState, random_state
from zbkern.pipeline.transport.tensors import local_part
from zbkern.wgrad.fsdp import groups_of

_OF_FRAMEWORKS = {"main_grad", "grad_added_to_main_grad", "overwrite_main_grad"}
OF_MODULES = {*vars(nn.Module())}
_COUNTS = (int, float, complex, str, bytes, tuple, type(None))  # what a closure may count in


class Traces:
    """Of a module, as this was made. `restore` puts all but gradients back, `aside` gradients."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self.device, self._state = module, device, ForwardState([module], device)
        self._random = random_state(device)
        self._numpy = _numpy_state()
        # of embeddings that scale down what is looked up, in place
        limited = [part for part in module.modules() if getattr(part, "max_norm", None) is not None]
        self._weights = [(weight, weight.detach().clone()) for part in limited for weight in part.parameters()]
        self._attributes = [
            (entries, dict(entries)) for entries in map(vars, _with_attributes(module)) if entries.keys() - OF_MODULES
        ]
        self._cells = [(cell, cell.cell_contents) for cell in _cells(module) if _is_kept(cell)]
        values = [value for _, before in self._attributes for name, value in before.items() if name not in OF_MODULES]
        self._containers = _copies([*values, *(content for _, content in self._cells)])

    def restore(self) -> None:
        self._state.restore()
        for weight, before in self._weights:
            weight.data.copy_(before)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        self.restore_attributes()

    def restore_attributes(self) -> None:
        for entries, before in self._attributes:
            for name in entries.keys() - before.keys() - OF_MODULES:
                del entries[name]
            entries.update({name: value for name, value in before.items() if name not in OF_MODULES})
        for cell, content in self._cells:
            cell.cell_contents = content
        for container, content in self._containers:
            _refill(container, content)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, parameters have no gradients, none of a framework's, and no hooks that take what has accumulated."""
        kept: list[tuple[Any, Tensor | None, dict[str, Any], Any, dict[int, Any]]] = []
        for parameter in self._module.parameters():
            entries = vars(parameter)
            own = {name: entries.pop(name) for name in _OF_FRAMEWORKS & entries.keys()}
            hooks: Any = parameter._post_accumulate_grad_hooks
            kept.append((parameter, parameter.grad, own, hooks, dict(hooks or {})))
            if hooks:
                hooks.clear()
            parameter.grad = None
        gathered = [(part, getattr(part, "unsharded_accumulated_grad", None)) for part in _sharded_parts(self._module)]
        of_gathered = [(part._unsharded_param, part._unsharded_param.grad) for part, _ in gathered if _is_there(part)]
        take_gradients(self._module)
        try:
            yield
        finally:
            take_gradients(self._module)
            for part, gradient in gathered:
                part.unsharded_accumulated_grad = gradient
            for parameter, gradient in of_gathered:
                parameter.grad = gradient
            for parameter, gradient, own, hooks, called in kept:
                parameter.grad = gradient
                vars(parameter).update(own)
                if hooks is not None:
                    hooks.update(called)

    def drawn(self) -> dict[str, Any]:
        """The random numbers that come next, by who draws them, where some have been drawn since this was made, or
        restored, by this thread or another."""
        before = {**self._random, "numpy": self._numpy}
        now = {**random_state(self.device), "numpy": _numpy_state()}
        return {name: state for name, state in now.items() if not are_same(state, before[name])}

    def buffers(self) -> dict[str, Tensor]:
        """Those of floating-point numbers as they are now: what is a result, and no number of calls."""
        return {
            name: local_part(buffer).detach().clone()
            for name, buffer in self._module.named_buffers()
            if not nn.parameter.is_lazy(buffer) and buffer.is_floating_point() and buffer.layout is torch.strided
        }


def take_gradients(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of the gradients of parameters, also of those that FSDP2 has gathered, which then have none."""
    found: dict[str, Tensor] = {}
    parts = _sharded_parts(module)
    gathered = {id(part._unsharded_param) for part in parts if _is_there(part)}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and id(parameter) not in gathered:
            found[name], parameter.grad = _dense(local_part(parameter.grad)), None
    for number, part in enumerate(parts):
        own = part._unsharded_param if _is_there(part) else None
        gradients = [getattr(part, "unsharded_accumulated_grad", None), None if own is None else own.grad]
        there = [local_part(gradient) for gradient in gradients if gradient is not None]
        if there:
            found[getattr(part, "_param_fqn", None) or f"parameter {number}"] = sum(there[1:], there[0])
        part.unsharded_accumulated_grad = None
        if own is not None:
            own.grad = None
    return found


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def _sharded_parts(module: nn.Module) -> list[Any]:
    states = [state_of(part) for part in module.modules() if is_sharded(part)]
    return [part for state in states for group in groups_of(state) for part in group.fsdp_params]


def _is_there(part: Any) -> bool:
    return hasattr(part, "_unsharded_param")


def _with_attributes(module: nn.Module) -> Iterable[nn.Module]:
    return (part for part in module.modules() if not isinstance(part, LazyModuleMixin))


def hooks_of(part: nn.Module) -> Iterator[Callable[..., Any]]:
    """Hooks of others than torch and this library, of a module's own forwards and backwards and of its weights."""
    hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    hooks += [*part._backward_hooks.values(), *part._backward_pre_hooks.values()]
    for parameter in part._parameters.values():
        hooks += (getattr(parameter, "_backward_hooks", None) or {}).values()
    for hook in hooks:
        if (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "zbkern"):
            yield hook


def _cells(module: nn.Module) -> Iterator[Any]:
    """The variables that hooks have around them."""
    for part in module.modules():
        for hook in hooks_of(part):
            function = hook.__func__ if isinstance(hook, MethodType) else hook
            if isinstance(function, FunctionType):
                yield from function.__closure__ or ()


def _is_kept(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, (*_COUNTS, MutableSequence, MutableMapping, MutableSet))
    except ValueError:  # it is empty
        return False


def _copies(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    found: dict[int, tuple[Any, Any]] = {}
    for value in values:
        if type(value) in (list, dict, set) or isinstance(value, (MutableMapping, MutableSequence, MutableSet)):
            content = dict(value) if isinstance(value, MutableMapping) else list(value)
            found[id(value)] = value, content
    return [*found.values()]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, MutableSequence):
        container.extend(content)
    else:
        container.update(content) if isinstance(container, MutableMapping) else container.__ior__(content)


def are_same(one: Any, other: Any) -> bool:
    """Whether states of random numbers are."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[name], other[name]) for name in one)
    return bool(one.tobytes() == other.tobytes()) if hasattr(one, "tobytes") else bool(one == other)


def _numpy_state() -> Any:
    """NumPy's global random numbers that come next, where it is in use."""
    library = sys.modules.get("numpy.random")
    return None if library is None else library.get_state(legacy=False)
