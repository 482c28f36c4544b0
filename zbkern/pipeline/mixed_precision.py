"""Mixed precision over stages: fp32 master weights in a torch optimizer, and a loss scale that all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.undo import copy_

Pairs = list[tuple[Tensor, Tensor]]  # a parameter below fp32, its fp32 master


def install_masters(optimizer: torch.optim.Optimizer) -> Pairs:
    """Puts fp32 copies in the place of the optimizer's parameters below fp32, with the state that these have."""
    pairs = []
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if not parameter.is_floating_point() or parameter.dtype.itemsize >= 4:
                continue
            master = parameter.detach().float()
            group["params"][index] = master
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)
            pairs.append((parameter, master))
    return pairs


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Where frameworks and zbkern's W leave it: `main_grad` if the parameter has one, else `.grad`."""
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def load_gradients(pairs: Pairs) -> None:
    """Gives every master the gradient of its parameter, in fp32."""
    for parameter, master in pairs:
        gradient = gradient_of(parameter)
        master.grad = None if gradient is None else gradient.to(master.dtype)


def publish(pairs: Pairs) -> None:
    """Rounds the masters into the model's parameters."""
    copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Takes the loss scale out of the gradients, also on ranks whose scaler has never scaled a loss."""
    scaler.scale(torch.ones((), device=device))  # makes the scale, where that has not happened
    scaler.unscale_(optimizer)


def update_scale(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: bool, device: torch.device
) -> None:
    """The scaler's `update` with what all ranks have found in the place of what this rank has."""
    # By device; where torch's sharded scaler writes what its ranks have found, too.
    mine: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    if not mine:  # no gradients on this rank
        mine[device] = torch.zeros((), device=device)
    for index, value in enumerate(mine.values()):
        value.fill_(float(found and index == 0))
    scaler.update()
