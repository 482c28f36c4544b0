"""Activations, alone and gated, in plain torch. Contract: spec.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_FORWARD: dict[str, Callable[..., Tensor]] = {
    "gelu": torch.ops.aten.gelu,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu, approximate="tanh"),
    "relu": torch.ops.aten.relu,
    "silu": torch.ops.aten.silu,
}

_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": lambda dy, z, **out: torch.ops.aten.threshold_backward(dy, z, 0, **out),
    "silu": torch.ops.aten.silu_backward,
}


def activation_function(activation: str) -> Callable[[Tensor], Tensor]:
    """torch's own function of that name (spec.ACTIVATIONS)."""
    return _FORWARD[activation]


def activation_fwd(z: Tensor, activation: str, y: Tensor) -> None:
    _FORWARD[activation](z, out=y)


def activation_bwd(dy: Tensor, z: Tensor, activation: str, dz: Tensor) -> None:
    _BACKWARD[activation](dy, z, grad_input=dz)


def gated_fwd(gate: Tensor, up: Tensor, activation: str, h: Tensor) -> None:
    _FORWARD[activation](gate, out=h).mul_(up)


def gated_bwd(dh: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor, h: Tensor) -> None:
    _FORWARD[activation](gate, out=h)
    torch.mul(dh, h, out=dup)
    h.mul_(up)
    _BACKWARD[activation](dh * up, gate, grad_input=dgate)
