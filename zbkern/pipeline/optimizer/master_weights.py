"""Mixed precision over stages: fp32 master weights in a torch optimizer, and a loss scale that all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.params import copy_, local_part

MASTERS = "masters_of_pipeline"  # an attribute of the torch optimizer

Pairs = list[tuple[Tensor, Tensor]]  # a parameter below fp32, its fp32 master


def masters_of(optimizer: torch.optim.Optimizer) -> Pairs:
    """Those in this optimizer, which keeps the list itself: whoever drives it next has to know whose they are."""
    return vars(optimizer).setdefault(MASTERS, [])


def install_masters(optimizer: torch.optim.Optimizer) -> None:
    """Puts fp32 copies in the place of the optimizer's parameters below fp32, with their state, in fp32."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if not parameter.is_floating_point() or parameter.dtype.itemsize >= 4:
                continue
            master = parameter.detach().float()
            group["params"][index] = master
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[master] = {name: _widened(value, parameter) for name, value in state.items()}
            masters_of(optimizer).append((parameter, master))


def _widened(value: Any, parameter: Tensor) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == parameter.dtype else value


def copy_masters_to_params(pairs: Pairs) -> None:
    """Rounds the masters into the model's parameters."""
    copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])
    for parameter, master in pairs:
        master.rounded_into = parameter._version  # type: ignore[attr-defined]


@torch.no_grad()
def take_changes_(parameter: Tensor, master: Tensor) -> None:
    """A master takes what somebody else has written into its parameter; elsewhere it keeps what rounding hides."""
    if getattr(master, "rounded_into", None) != parameter._version:
        master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter.to(master.dtype)))


class Gradients:
    """What a GradScaler takes for an optimizer: gradients of any dtype above fp16, wherever a parameter keeps them."""

    def __init__(self, gradients: list[Tensor]) -> None:
        parts = [local_part(gradient) for gradient in gradients]  # a scaler takes no mix of DTensor and plain tensors
        holders = [part.detach() for part in parts]
        for holder, part in zip(holders, parts, strict=True):
            holder.grad = part
        self.param_groups = [{"params": holders}]


def unscale(scaler: torch.amp.GradScaler, gradients: list[Tensor], device: torch.device) -> Gradients:
    """Takes the loss scale out of the gradients, also on ranks whose scaler has never scaled a loss.

    Returns what `update_scale` needs. Raises ValueError for fp16, in which the result would be rounded away.
    """
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError(
            "Optimizer: a scaler needs gradients above fp16; give master_weights=True, or have the gradients in a "
            "main_grad of fp32"
        )
    found = Gradients(gradients)
    scaler.scale(torch.ones((), device=device))  # makes the scale, where that has not happened
    scaler.unscale_(found)  # type: ignore[arg-type]  # reads param_groups alone
    return found


def forget(scaler: torch.amp.GradScaler, unscaled: Gradients) -> None:
    """For a step that is given up: the next `update_scale` would count what this rank alone had found."""
    scaler._per_optimizer_states.pop(id(unscaled), None)


def update_scale(scaler: torch.amp.GradScaler, unscaled: Gradients, found: bool, device: torch.device) -> None:
    """The scaler's `update` with what all ranks have found in the place of what this rank has."""
    # By device; where torch's sharded scaler writes what its ranks have found, too.
    mine: dict[Any, Tensor] = scaler._found_inf_per_device(unscaled)  # type: ignore[arg-type]
    if not mine:  # no gradients on this rank
        mine[device] = torch.zeros((), device=device)
    for value in mine.values():
        value.fill_(float(found))
    scaler.update()
