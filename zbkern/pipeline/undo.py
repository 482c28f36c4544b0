"""Takes back a step of a torch optimizer: exactly, from copies, or in arithmetic, without memory; does it again.

Both ways back are used alike: `save(optimizer)` before its step, `restore(optimizer)` afterwards, with the same
gradients and settings in place.
The arithmetic is that of Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 4 and appendix.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Snapshot:
    """Exact, for any optimizer: copies of its parameters and state, in buffers that are kept from step to step.

    Costs the memory of the parameters and of their state once more (AdamW in fp32: 12 bytes a parameter), and the
    time to copy it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._copies: list[Tensor] = []

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        self._originals = [p for p in parameters(optimizer) if gradient_of(p) is not None]
        self._entries: dict[Any, dict[Any, Any]] = {}  # of each parameter's state: the tensor itself, or a copy
        for key, state in optimizer.state.items():
            entries = self._entries[key] = {}
            for name, value in state.items():
                entries[name] = value if isinstance(value, Tensor) else copy.deepcopy(value)
            self._originals += [value for value in entries.values() if isinstance(value, Tensor)]
        same = len(self._copies) == len(self._originals) and all(
            _like(kept, original) for kept, original in zip(self._copies, self._originals, strict=True)
        )
        if not same:
            self._copies = [torch.empty_like(original, requires_grad=False) for original in self._originals]
        copy_(self._copies, self._originals)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        copy_(self._originals, self._copies)
        for key in [key for key in optimizer.state if key not in self._entries]:
            del optimizer.state[key]  # came into being with the step
        for key, entries in self._entries.items():
            state = optimizer.state[key]
            state.clear()
            state.update(entries)


class Inverse:
    """Solves the update for what was there before, for AdamW and SGD: no memory, equal up to rounding.

    Also for an optimizer that does so itself (`undo_step`), zbkern.optim.AdamW for one. Raises ValueError for others,
    for parameters below fp32 without masters in the optimizer (rounding would not be small), and for settings that lose
    information (a beta or 1 - lr x weight_decay of zero, amsgrad).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._itself = hasattr(optimizer, "undo_step")
        if not self._itself and not isinstance(optimizer, (torch.optim.AdamW, torch.optim.SGD)):
            raise ValueError(
                f"Optimizer: undo='inverse' knows AdamW and SGD; got {type(optimizer).__name__}; use undo='snapshot'"
            )
        bare = (p for group in optimizer.param_groups if not group.get("master_weights") for p in group["params"])
        small = next((p for p in bare if p.dtype not in (torch.float32, torch.float64)), None)
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

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        if self._itself:
            optimizer.undo_step()  # type: ignore[attr-defined]
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in (p for p in group["params"] if gradient_of(p) is not None):
                    if not self._itself:
                        gradient = -parameter.grad if group.get("maximize") else parameter.grad
                        self._invert(parameter, gradient, optimizer.state.get(parameter, {}), group)
                    if id(parameter) not in self._had_state:
                        optimizer.state.pop(parameter, None)


class Call:
    """What a step was called with, so that it can be done later, or again.

    gradients: (parameter, its gradient). before, after: hyperparameters of every group when the step was called, and
    when it returned. stepped: whether the optimizer has.
    """

    def __init__(
        self,
        gradients: list[tuple[Tensor, Tensor]],
        before: list[dict[str, Any]],
        after: list[dict[str, Any]],
        stepped: bool,
    ) -> None:
        self.gradients, self.before, self.after, self.stepped = gradients, before, after, stepped
        self._versions = [gradient._version for _, gradient in gradients]

    @contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Gradients and hyperparameters as they were when the step was called; afterwards as they are now."""
        for (_, gradient), version in zip(self.gradients, self._versions, strict=True):
            if gradient._version != version:
                raise RuntimeError(
                    f"Optimizer.validate: the gradient of a parameter of shape {list(gradient.shape)} was changed in "
                    "place after step(), which now has to be redone with it; clear gradients by Optimizer.zero_grad(), "
                    "or call Optimizer.validate() first"
                )
        main = getattr(optimizer, "reads_main_grad", False)
        places = [
            (parameter, "main_grad" if main and getattr(parameter, "main_grad", None) is not None else "grad")
            for parameter, _ in self.gradients
        ]
        gradients = [getattr(parameter, place) for parameter, place in places]
        now = [dict(group) for group in optimizer.param_groups]
        for (parameter, place), (_, gradient) in zip(places, self.gradients, strict=True):
            setattr(parameter, place, gradient)
        for group, before in zip(optimizer.param_groups, self.before, strict=True):
            group.update(before)
        yield
        for (parameter, place), gradient in zip(places, gradients, strict=True):
            setattr(parameter, place, gradient)
        for group, current, after in zip(optimizer.param_groups, now, self.after, strict=True):
            changed = {k: v for k, v in current.items() if isinstance(v, Tensor) or v != after.get(k)}
            group.update(changed)


UNDO: dict[str, Callable[[torch.optim.Optimizer], Any]] = {"snapshot": Snapshot, "inverse": Inverse}


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All parameters of an optimizer, in its order."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Where frameworks and zbkern's W leave it: `main_grad` if the parameter has one, else `.grad`."""
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each parameter group says besides its parameters, as it is now."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _check_invertible(settings: dict[str, Any]) -> None:
    losing = (
        "amsgrad"
        if settings.get("amsgrad")
        else "a beta of 0"
        if 0 in settings.get("betas", ())
        else "lr x weight_decay of 1"
        if settings["lr"] * settings["weight_decay"] == 1
        else None
    )
    if losing is not None:
        raise ValueError(f"Optimizer: {losing} cannot be inverted; use undo='snapshot'")


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


def _like(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


@torch.no_grad()
def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, of any dtype; of shards (DTensor) the part that is here.

    One launch per device and dtype: a counter on the CPU would put the whole list on the slow path.
    """
    kinds: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        lists = kinds.setdefault((target.device, target.dtype), ([], []))
        lists[0].append(local_part(target))
        lists[1].append(local_part(source))
    for target_list, source_list in kinds.values():
        torch._foreach_copy_(target_list, source_list)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; of other tensors all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ForwardState:
    """What forwards change besides activations: buffers, written in place or replaced, and random numbers."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._entries = [(part._buffers, dict(part._buffers)) for module in modules for part in module.modules()]
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._random = torch.get_rng_state(), random.getstate()
        self._cuda = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None

    def restore(self) -> None:
        for present, entries in self._entries:
            present.update(entries)
        copy_(self._buffers, self._copies)
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        if self._cuda is not None:
            device, state = self._cuda
            torch.cuda.set_rng_state(state, device)
