"""Activations, alone and gated, in plain torch. Contract: spec.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

_BACKWARD: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "gelu": lambda dy, z: torch.ops.aten.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: torch.ops.aten.gelu_backward(dy, z, approximate="tanh"),
    "relu": lambda dy, z: torch.ops.aten.threshold_backward(dy, z, 0),
    "silu": lambda dy, z: torch.ops.aten.silu_backward(dy, z),
}


def activation_function(activation: str) -> Callable[[Tensor], Tensor]:
    """torch's own function of that name (spec.ACTIVATIONS)."""
    return _FORWARD[activation]


def activation_gradient(activation: str, dy: Tensor, z: Tensor | None) -> Tensor:
    """dy activation'(z) in new memory."""
    return _BACKWARD[activation](dy, z)


def activation_fwd(z: Tensor, activation: str, y: Tensor) -> None:
    """y = activation(z)."""
    y.copy_(_FORWARD[activation](z))


def activation_bwd(dy: Tensor, z: Tensor, activation: str, dz: Tensor) -> None:
    """dz = dy activation'(z)."""
    dz.copy_(_BACKWARD[activation](dy, z))


def gated_fwd(gate: Tensor, up: Tensor, activation: str, h: Tensor) -> None:
    """h = activation(gate) * up."""
    torch.mul(_FORWARD[activation](gate), up, out=h)


def gated_bwd(dh: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor, h: Tensor) -> None:
    """dgate = dh up activation'(gate), dup = dh activation(gate), and h = activation(gate) * up once more."""
    value = _FORWARD[activation](gate)
    torch.mul(value, up, out=h)
    torch.mul(dh, value, out=dup)
    dgate.copy_(_BACKWARD[activation](dh * up, gate))
