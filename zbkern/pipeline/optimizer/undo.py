"""Rolls back a step of a torch optimizer: exactly, from copies, or by inverting its arithmetic, without memory.

Both are used alike: `save(optimizer)` before its step, `restore(optimizer)` afterwards, with the same
gradients and settings in place.
The arithmetic is that of Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 4 and appendix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.params import MASTERS, copy_, parameters, plain_parts
from zbkern.wgrad.accumulation import gradient_of


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
        originals = [part for original in originals for part in plain_parts(original)]
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
            if isinstance(value, torch.nn.Module):
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
