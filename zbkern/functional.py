"""Public ops: they check their arguments, pick an implementation, and call autograd.

Every op here behaves as its torch twin. Inside `WGradQueue.defer`, its backward computes input gradients only and the
weight gradients wait in the queue.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbkern import autograd
from zbkern.kernels import dispatch, spec


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    impl: str = "auto",
    *,
    name: str = "",
) -> Tensor:
    """activation(x weight^T + bias) with separate B and W.

    x: [..., K]; weight: [N, K]; bias: [N] or None; returns [..., N], all of one dtype and device (under autocast, x
    and the product take autocast's dtype and the gradients stay the weight's). activation: None, "gelu", "gelu_tanh",
    "relu" or "silu". impl: "auto", "cuda", "triton" or "torch". name: what errors call this layer.
    Raises TypeError or ValueError for arguments that do not fit, UnavailableError for an impl that cannot run.
    """
    if not _fits_linear(x, weight, bias) or activation is not None:
        _check_linear(x, weight, bias, activation)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    elif x.dtype != weight.dtype:
        raise TypeError(f"linear: x is {x.dtype} and weight is {weight.dtype}; convert one, or use torch.autocast")
    launches = dispatch.resolve("linear", impl, device)
    call = autograd.Call((weight, bias), launches, name)
    return autograd.apply(autograd.Linear, call, x, activation)


def _fits_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True when nothing is wrong; the checks that find out what is wrong take ten times as long."""
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.device == weight.device
        and (bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1] and bias.device == x.device))
    )


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    for argument, value in (("x", x), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(f"linear: {argument} must be a torch.Tensor; got {type(value).__name__}")
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        wanted = f" with K={x.shape[-1]} like x" if x.dim() else " and x [..., K]"
        raise ValueError(f"linear: weight must be [N, K]{wanted}; got {list(weight.shape)}, x {list(x.shape)}")
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(f"linear: bias must be a torch.Tensor or None; got {type(bias).__name__}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias must be [N] with N={weight.shape[0]} like weight; got {list(bias.shape)}")
    if activation is not None and activation not in spec.ACTIVATIONS:
        raise ValueError(f"linear: activation must be None or one of {spec.ACTIVATIONS}; got {activation!r}")
    for argument, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.device != x.device:
            raise ValueError(f"linear: {argument} is on {value.device} and x on {x.device}; move one with .to(device)")
