"""Mixed precision: fp32 master weights in a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.params import copy_

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
