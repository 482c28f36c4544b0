"""Rolls back a step of a torch optimizer: exactly, from copies, or by inverting its arithmetic, without memory.

Both are used alike: `save(optimizer)` before its step, `restore(optimizer)` afterwards, with the same
gradients and settings in place.
The arithmetic is that of Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 4 and appendix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.master_weights import MASTERS
from zbkern.pipeline.optimizer.params import copied, copy_, equal, hyperparameters, parameters
from zbkern.pipeline.transport.tensors import local_part
from zbkern.wgrad.accumulation import gradient_of
from zbkern.wgrad.checksums import are_same, sums_of


class Snapshot:
    """Exact, for any optimizer: copies of its parameters, state and other attributes, in buffers that are reused.

    Costs the memory of the parameters and of their state once more (AdamW in fp32: 12 bytes a parameter), and the
    time to copy it. Raises ValueError for an attribute that cannot be copied.
    """

    needs_gradients = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._copies: list[Tensor] = []
        _copied_attributes(optimizer)

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        originals = [p for p in parameters(optimizer) if gradient_of(p) is not None]
        self._entries: dict[Any, dict[Any, Any]] = {}  # of each parameter's state: the tensor itself, or a copy
        for key, state in optimizer.state.items():
            entries = self._entries[key] = {}
            for name, value in state.items():
                entries[name] = value if isinstance(value, Tensor) else copy.deepcopy(value)
            originals += [value for value in entries.values() if isinstance(value, Tensor)]
        self._attributes, self._originals = _copied_attributes(optimizer), originals
        if list(map(_kind, self._copies)) != list(map(_kind, originals)):
            self._copies = [torch.empty_like(original, requires_grad=False) for original in originals]
        copy_(self._copies, originals)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        copy_(self._originals, self._copies)
        for key in [key for key in optimizer.state if key not in self._entries]:
            del optimizer.state[key]  # created by the step
        for key, entries in self._entries.items():
            state = optimizer.state[key]
            state.clear()
            state.update(entries)
        for name in _attributes(optimizer).keys() - self._attributes.keys():
            delattr(optimizer, name)
        vars(optimizer).update(self._attributes)


# What every torch optimizer has and no step changes, or what others keep.
_OTHERS = {"step", "_opt_called", MASTERS}
_OF_TORCH = frozenset(vars(torch.optim.SGD([torch.empty(0)]))) | _OTHERS


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps besides `state` and `param_groups`, by name.

    Attributes that it lists in `transient_attributes` are left out: no step depends on what they hold.
    """
    left_out = getattr(optimizer, "transient_attributes", ())
    found = vars(optimizer).items()
    return {name: value for name, value in found if name not in _OF_TORCH and name not in left_out}


def _copied_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Deep copies in which the parameters and the optimizer's state and groups are themselves, not copies."""
    attributes = _attributes(optimizer)
    if not attributes:
        return {}
    groups = [*optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)]
    states = [*optimizer.state.values(), *(value for state in optimizer.state.values() for value in state.values())]
    kept = [optimizer, optimizer.state, optimizer.param_groups, optimizer.defaults, *groups, *states]
    memo = {id(value): value for value in (*kept, *parameters(optimizer))}
    copies = {}
    for name, value in attributes.items():
        try:
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                raise TypeError("it may have state of its own")
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise ValueError(
                f"Optimizer: undo='snapshot' cannot copy {type(optimizer).__name__}.{name}, which is a "
                f"{type(value).__name__} ({error}); use undo=None, or name it in a class attribute "
                "transient_attributes if no step depends on what it holds"
            ) from error
    return copies


class Inverse:
    """Solves the update for what was there before, for AdamW and SGD: no memory, equal up to rounding.

    Raises ValueError for others, for parameters below fp32 without masters in the optimizer (rounding would not be
    small), and for settings that lose information (a beta or 1 - lr x weight_decay of zero, amsgrad).
    """

    needs_gradients = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, (torch.optim.AdamW, torch.optim.SGD)):
            raise ValueError(
                f"Optimizer: undo='inverse' knows AdamW and SGD; got {type(optimizer).__name__}; use undo='snapshot'"
            )
        small = next((p for p in parameters(optimizer) if p.dtype not in (torch.float32, torch.float64)), None)
        if small is not None:
            raise ValueError(
                f"Optimizer: undo='inverse' needs parameters in fp32; got {small.dtype}; "
                "use master_weights=True or undo='snapshot'"
            )
        self._invert = _invert_adamw if isinstance(optimizer, torch.optim.AdamW) else _invert_sgd

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        self._had_state = {id(p) for p in parameters(optimizer) if optimizer.state.get(p)}
        for group in optimizer.param_groups:
            _check_invertible(group)

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = -parameter.grad if group.get("maximize") else parameter.grad
                    self._invert(parameter, gradient, optimizer.state.get(parameter, {}), group)
                    if id(parameter) not in self._had_state:
                        optimizer.state.pop(parameter, None)


class PendingStep:
    """What a step was called with, kept until it is validated, so that it can be done later, or again.

    gradients: (parameter, its gradient) of all that have one, as the torch optimizer is to see them. before, after:
    hyperparameters of every group when the step was called, and when it returned. has_stepped: whether it has
    been done already.
    """

    def __init__(self, gradients: list[tuple[Tensor, Tensor]], before: list[dict[str, Any]]) -> None:
        self.before = self.after = before
        self.has_stepped = False
        self._weights: list[tuple[Tensor, int]] = []
        self._values: list[tuple[Tensor, int, list[Tensor]]] = []
        self.set_gradients(gradients)

    def set_gradients(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """These from now on; none of a step that will not be done again."""
        self.gradients = gradients
        self._versions = [gradient._version for _, gradient in gradients]

    def copy_gradients(self, which: Iterable[Tensor]) -> None:
        """Keeps copies in the place of those gradients that are among these tensors, which others will write into."""
        shared = {id(tensor) for tensor in which}
        self._check_unchanged()
        self.set_gradients(
            [(p, gradient.clone() if id(gradient) in shared else gradient) for p, gradient in self.gradients]
        )

    def record_weights(self, weights: Iterable[Tensor], values: bool) -> None:
        """For `check_weights`: what they are now, when the step is left to be validated. values: for `check_values`,
        too, with a copy of no tensor."""
        self._weights = [(weight, weight._version) for weight in weights]
        tensors = [weight for weight, _ in self._weights] + [gradient for _, gradient in self.gradients]
        self._values = [(each, each._version, sums_of([local_part(each.detach())])) for each in tensors if values]

    def check_values(self) -> None:
        """Raises RuntimeError where a weight or gradient was written in a way that torch does not count."""
        for tensor, version, sums in self._values:
            if tensor._version == version and not are_same(sums, sums_of([local_part(tensor.detach())])):
                raise RuntimeError(
                    f"Optimizer.validate: a weight or gradient of shape {list(tensor.shape)} was changed after step() "
                    "through .data or NumPy, and would be lost where the step is clipped or skipped; call "
                    "Optimizer.validate() first"
                )

    def check_weights(self) -> None:
        """Raises RuntimeError where a weight is another one than the step has left."""
        for weight, version in self._weights:
            if weight._version != version:
                raise RuntimeError(
                    f"Optimizer.validate: a weight of shape {list(weight.shape)} was changed after step(), which only "
                    "now is done, or taken back: the change would come before it, or be lost; call "
                    "Optimizer.validate() first"
                )

    def _check_unchanged(self) -> None:
        for (_, gradient), version in zip(self.gradients, self._versions, strict=True):
            if gradient._version != version:
                raise RuntimeError(
                    f"Optimizer.validate: the gradient of a parameter of shape {list(gradient.shape)} was changed in "
                    "place after step(), which now has to be redone with it; clear gradients by Optimizer.zero_grad(), "
                    "or call Optimizer.validate() first"
                )

    @contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> Iterator[None]:
        """With the gradients of the step and these hyperparameters; afterwards everything is as it was.

        But for hyperparameters that the step itself has changed inside, and that nobody has set since it was called.
        """
        self._check_unchanged()
        wanted = {id(parameter): gradient for parameter, gradient in self.gradients}
        replaced = []
        for parameter in parameters(optimizer):
            present, gradient = parameter.grad, wanted.get(id(parameter))
            if present is not gradient:
                replaced.append((parameter, present))
                parameter.grad = gradient
        objects, values = [dict(group) for group in optimizer.param_groups], hyperparameters(optimizer)
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            _assign(group, setting)
        try:
            yield
        finally:
            for parameter, present in replaced:
                parameter.grad = present
            for group, now, value, after in zip(optimizer.param_groups, objects, values, self.after, strict=True):
                changed = {name: v for name, v in value.items() if name not in after or not equal(v, after[name])}
                group.update({name: now[name] for name in changed})
                _assign(group, changed)


def _assign(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Sets hyperparameters; those that are tensors in place, where a schedule or a CUDA graph may have them."""
    for name, value in settings.items():
        present = group.get(name)
        if isinstance(value, Tensor) and isinstance(present, Tensor):
            with torch.no_grad():
                present.copy_(value)
        else:
            group[name] = copied(value)


UNDO: dict[str, Callable[[torch.optim.Optimizer], Any]] = {"snapshot": Snapshot, "inverse": Inverse}


def _check_invertible(settings: dict[str, Any]) -> None:
    losing = {
        "amsgrad": settings.get("amsgrad"),
        "a beta of 0": 0 in settings.get("betas", ()),
        "lr x weight_decay of 1": settings["lr"] * settings["weight_decay"] == 1,
    }
    for setting, is_lost in losing.items():
        if is_lost:
            raise ValueError(f"Optimizer: {setting} cannot be inverted; use undo='snapshot'")


def _invert_adamw(parameter: Tensor, gradient: Tensor, state: dict[str, Any], settings: dict[str, Any]) -> None:
    """theta = (theta' + lr m^ / (sqrt(v^) + eps)) / (1 - lr wd), then m and v from m', v' and the gradient."""
    first, second, step = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    lr, (beta1, beta2) = float(settings["lr"]), (float(beta) for beta in settings["betas"])
    denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(settings["eps"])
    parameter.addcdiv_(first, denominator, value=lr / (1 - beta1**step)).div_(1 - lr * settings["weight_decay"])
    first.add_(gradient, alpha=beta1 - 1).div_(beta1)
    second.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2).clamp_(min=0)
    state["step"] -= 1


def _invert_sgd(parameter: Tensor, gradient: Tensor, state: dict[str, Any], settings: dict[str, Any]) -> None:
    """theta' = theta - lr d, where d is the momentum, or (nesterov, or without momentum) has theta in it, too."""
    lr, decay, momentum = float(settings["lr"]), settings["weight_decay"], settings["momentum"]
    buffer = state.get("momentum_buffer") if momentum else None  # one of earlier steps takes no part
    if buffer is not None and not settings["nesterov"]:
        parameter.add_(buffer, alpha=lr)
    else:
        parameter.add_(gradient, alpha=lr)
        if buffer is not None:
            parameter.add_(buffer, alpha=lr * momentum)
        parameter.div_(1 - lr * decay)
    if buffer is not None:
        decayed = gradient.add(parameter, alpha=decay)
        buffer.add_(decayed, alpha=settings["dampening"] - 1).div_(momentum)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
