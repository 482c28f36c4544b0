"""Autograd functions: forward saves; backward runs the input gradient now and hands the weight gradient on as a W."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.kernels import reference

Owners = tuple["Tensor | None", ...]


def has_listeners(parameters: Sequence[Tensor | None]) -> bool:
    """True when something must hear of these gradients exactly when they are there: tensor hooks, or DDP's reducer.

    Autograd visits a parameter's accumulation in B even when the function returns no gradient for it, and would fire
    those hooks too early. Functions therefore take such parameters detached and hand their gradients over with W.
    """
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None and ddp.DistributedDataParallel._active_ddp_module is not None:
        return True
    return any(p is not None and p.is_leaf and p._backward_hooks for p in parameters)


def weight_gradients(
    ctx: Any, launch: wgrad.Launch, tensors: wgrad.Segment, *, needed: Sequence[bool], flops: int
) -> list[Tensor | None]:
    """The gradients of `ctx.owners`: computed and returned, or all None once a queue (or a listener) has them."""
    owners: Owners = tuple(
        p if need and p is not None and p.requires_grad else None for p, need in zip(ctx.owners, needed, strict=True)
    )
    if not any(p is not None for p in owners):
        return [None] * len(owners)
    scope = wgrad.current()
    if scope is not None and all(p is None or p.is_leaf for p in owners):
        queue, key = scope
        task = wgrad.WGradTask(launch, tensors, owners, flops=flops, name=ctx.name, listened=ctx.detached)
        queue.add(task, key)
        return [None] * len(owners)
    gradients = [None if p is None else torch.empty_like(p, requires_grad=False) for p in owners]
    launch([tensors], gradients, False)
    if ctx.detached:
        found = [(p, gradient) for p, gradient in zip(owners, gradients, strict=True) if p is not None]
        wgrad.hand_over([p for p, _ in found], [gradient for _, gradient in found])
        return [None] * len(owners)
    return gradients


def differentiable_backward(
    forward: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor
) -> list[Tensor | None]:
    """Gradients with a graph of their own, for create_graph=True: recomputes the op with torch's operations."""
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    with torch.enable_grad():
        y = forward(*inputs)
        found = iter(torch.autograd.grad(y, needed, dy, create_graph=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]


class Linear(torch.autograd.Function):
    """y = activation(x weight^T + bias), x [..., K]. B: dz and dx. W: dweight, dbias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        owners: Owners,
        activation: str | None,
        launches: ModuleType,
        name: str,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        compute_weight = weight if weight.dtype == x.dtype else weight.to(x.dtype)  # autocast
        compute_bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        z = y if activation is None else torch.empty_like(y)
        launches.linear_fwd(rows, compute_weight, compute_bias, z.view(-1, weight.shape[0]))
        if activation is not None:
            launches.activation_fwd(z, activation, y)
        ctx.save_for_backward(x, compute_weight, None if activation is None else z)
        ctx.owners, ctx.activation, ctx.launches, ctx.name = owners, activation, launches, name
        ctx.detached = anchor is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, z = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            gradients = differentiable_backward(
                lambda x, w, b: linear_with_torch(x, w, b, ctx.activation), (x, *ctx.owners), dy
            )
            return (*gradients, None, None, None, None, None)
        if ctx.activation is not None:
            dz = torch.empty_like(z)
            ctx.launches.activation_bwd(dy, z, ctx.activation, dz)
            dy = dz
        dy = dy.reshape(-1, weight.shape[0])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = x.new_empty(x.shape)
            ctx.launches.linear_dgrad(dy, weight, dx.view(-1, weight.shape[1]))
        rows = x.detach().reshape(-1, weight.shape[1])
        needed = (True, True) if ctx.detached else ctx.needs_input_grad[1:3]
        dweight, dbias = weight_gradients(
            ctx, ctx.launches.linear_wgrad, (rows, dy), needed=needed, flops=2 * rows.shape[0] * weight.numel()
        )
        return dx, dweight, dbias, None, None, None, None, None


def linear_with_torch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The same op in torch's own operations, differentiable any number of times."""
    y = torch.nn.functional.linear(x, weight, bias)
    return y if activation is None else reference.activation_function(activation)(y)
