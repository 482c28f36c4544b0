"""Matmuls with weights: linear, and the gated MLP as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.kernels import reference
from zbkern.kernels.reference import linear as reference_linear
from zbkern.kernels.reference import matmul as reference_matmul
from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients
from zbkern.ops.functions._shapes import as_rows


class LinearFunction(torch.autograd.Function):
    """y = activation(x weight^T + bias), x [..., K]. B: dz and dx. W: dweight, dbias.

    transposed: the weight is stored [K, N], as in the Conv1D of the transformers library.
    """

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, x: Tensor, activation: str | None, transposed: bool, *edges: Tensor | None
    ) -> Tensor:
        weight, bias = call.params
        if weight.dtype != x.dtype:  # autocast
            weight = weight.to(x.dtype)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if transposed:
            weight = weight.t()
        z = None
        if activation is None and call.backend is reference:
            y = reference_matmul.linear(x, weight, bias)  # allocates what it returns: 2 us less of 11
            if y._is_view():  # autograd lets nobody modify a view from a function in place
                y = torch.ops.aten._unsafe_view(y, y.shape)
        else:
            y = x.new_empty((*x.shape[:-1], weight.shape[0]))
            if activation is not None and any(ctx.needs_input_grad):
                z = torch.empty_like(y)
            call.backend.linear_fwd(as_rows(x), weight, bias, as_rows(y), activation, None if z is None else as_rows(z))
        ctx.save_for_backward(x, weight, z)
        ctx.call, ctx.activation, ctx.transposed = call, activation, transposed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call = ctx.call
        x, weight, z = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, linear_with_torch, (x, ctx.activation, ctx.transposed), dy)
        if z is not None:
            dz = torch.empty_like(z)
            call.backend.activation_bwd(as_rows(dy), as_rows(z), ctx.activation, as_rows(dz))
            dy = dz
        dx = None
        if needs[1]:
            dx = input_gradient(call.backend, dy, weight)
            x = x.detach()
        if x.dim() != 2:
            x, dy = as_rows(x), as_rows(dy)
        kernel = (transposed_wgrad if ctx.transposed else linear_wgrad)(call.backend)
        weights = weight_gradients(call, kernel, (x, dy), needs, linear_flops)
        return None, dx, None, None, *weights


class GatedMLPFunction(torch.autograd.Function):
    """y = h down^T, h = activation(x gate^T) * (x up^T), x [..., K]. B: dgate, dup, dx. W: three matmuls.

    h is computed again in B instead of being kept from F: it costs one pass over the two halves.
    """

    @staticmethod
    def forward(ctx: Any, call: OpCall, x: Tensor, activation: str, *edges: Tensor | None) -> Tensor:
        backend = call.backend
        gate, up, down, *biases = (p if p is None or p.dtype == x.dtype else p.to(x.dtype) for p in call.params)
        rows = as_rows(x)
        a, b, h = (rows.new_empty(rows.shape[0], gate.shape[0]) for _ in range(3))
        backend.gated_linear_fwd(rows, gate, up, biases[0], biases[1], activation, a, b, h)
        y = x.new_empty((*x.shape[:-1], down.shape[0]))
        backend.linear_fwd(h, down, biases[2], as_rows(y))
        ctx.save_for_backward(x, gate, up, down, a, b)
        ctx.call, ctx.activation = call, activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, backend, needs = ctx.call, ctx.call.backend, ctx.needs_input_grad
        x, gate, up, down, a, b = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, gated_mlp_with_torch, (x, ctx.activation), dy)
        dy = as_rows(dy)
        da, db, h = (torch.empty_like(a) for _ in range(3))
        backend.gated_linear_dgrad(dy, down, a, b, ctx.activation, da, db, h)
        dx = None
        if needs[1]:
            dx = x.new_empty(x.shape)
            backend.linear_dgrad_sum([(da, gate), (db, up)], as_rows(dx))
        rows, kernel = as_rows(x.detach()), linear_wgrad(backend)
        # params: gate, up, down, then their biases; each task takes a weight with its bias
        dgate, dgate_bias = weight_gradients(call, kernel, (rows, da), needs, linear_flops, slice(0, None, 3))
        dup, dup_bias = weight_gradients(call, kernel, (rows, db), needs, linear_flops, slice(1, None, 3))
        ddown, ddown_bias = weight_gradients(call, kernel, (h, dy), needs, linear_flops, slice(2, None, 3))
        return None, dx, None, dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias


def input_gradient(backend: ModuleType, dy: Tensor, weight: Tensor) -> Tensor:
    """dx = dy weight, dy [..., N]."""
    if backend is reference:  # a matmul that allocates takes 1.2 us less than one into a given tensor
        if dy.numel() < reference_matmul.SMALL:
            return dy.mm(weight) if dy.dim() == 2 else torch.matmul(dy, weight)
        return reference_matmul.linear(dy, weight.t(), None)
    dx = dy.new_empty((*dy.shape[:-1], weight.shape[1]))
    backend.linear_dgrad(as_rows(dy), weight, as_rows(dx))
    return dx


@functools.cache
def linear_wgrad(backend: ModuleType) -> wgrad.WGradKernel:
    """W of a linear layer in all forms that the backend has. Several weights at once gain nothing in the reference."""
    if backend is reference:
        return wgrad.WGradKernel(reference.linear_wgrad, allocate=reference_linear.linear_gradients)
    return wgrad.WGradKernel(backend.linear_wgrad, backend.linear_wgrads)


@functools.cache
def transposed_wgrad(backend: ModuleType) -> wgrad.WGradKernel:
    """linear_wgrad for a weight stored [K, N]: dweight = sum x^T dy, the same matmul with its operands exchanged."""

    def run(segments: Any, outputs: Any, accumulate: bool) -> None:
        dweight, dbias = outputs
        if dweight is not None:
            backend.linear_wgrad([(dy, x) for x, dy in segments], (dweight, None), accumulate)
        if dbias is not None:
            backend.linear_wgrad(segments, (None, dbias), accumulate)

    return wgrad.WGradKernel(run)


def linear_flops(tensors: wgrad.Segment) -> int:
    """Arithmetic of dy^T x."""
    x, dy = tensors[0], tensors[1]
    return 2 * x.numel() * dy.shape[1]


def is_small(x: Tensor, weight: Tensor) -> bool:
    """Whether a call in Python takes longer than what a linear computes: 12 of 20 us in F, 9 of 15 in B and W."""
    return x.numel() < reference_matmul.SMALL and weight.numel() <= reference_matmul.SMALL


def linear_with_torch(
    weight: Tensor, bias: Tensor | None, x: Tensor, activation: str | None = None, transposed: bool = False
) -> Tensor:
    """Linear in torch's own operations, differentiable any number of times."""
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    y = torch.nn.functional.linear(x, weight.t() if transposed else weight, bias)
    return y if activation is None else reference.activation_function(activation)(y)


def gated_mlp_with_torch(
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    x: Tensor,
    activation: str,
    linear: Callable[..., Tensor] = linear_with_torch,
) -> Tensor:
    """GatedMLP in torch's own operations, or in linears of another kind."""
    h = linear(gate, gate_bias, x, activation, False) * linear(up, up_bias, x, None, False)
    return linear(down, down_bias, h, None, False)
