"""Matmuls with a weight per group of rows, for experts: a linear, and the gated MLP as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.kernels.reference import grouped as reference_grouped
from zbkern.kernels.spec import GateOptions
from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients
from zbkern.ops.functions.linear import linear_flops
from zbkern.ops.functions.sharded import is_sharded, local, own_part


class GroupedLinearFunction(torch.autograd.Function):
    """y = x weight[e]^T + bias[e] in rows of group e, x [M, K]. B: dx. W: dweight, dbias.

    transposed: the weight is stored [E, K, N]. Of weights that are DTensors, x has the rows of this rank's groups.
    """

    @staticmethod
    def forward(ctx: Any, call: OpCall, x: Tensor, ends: Tensor, transposed: bool, *edges: Tensor | None) -> Tensor:
        weight, bias = _as_input(call, x)
        if transposed:
            weight = weight.mT
        y = x.new_empty(x.shape[0], weight.shape[1])
        call.backend.grouped_linear_fwd(x, weight, bias, ends, y)
        ctx.save_for_backward(x, weight, ends)
        ctx.call, ctx.transposed = call, transposed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, needs = ctx.call, ctx.needs_input_grad
        x, weight, ends = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, grouped_linear_with_torch, (x, ends, ctx.transposed), dy)
        dx = None
        if needs[1]:
            dx = torch.empty_like(x, requires_grad=False)
            call.backend.grouped_linear_dgrad(dy, weight, ends, dx)
        kernel = grouped_wgrad(call.backend, ctx.transposed, is_sharded(call.params[0]))
        weights = weight_gradients(call, kernel, (x.detach(), dy, ends), needs, linear_flops)
        return None, dx, None, None, *weights


class GroupedMLPFunction(torch.autograd.Function):
    """y = h down[e]^T, h = gate(x gate_up[e]^T), in rows of group e, x [M, K]. B: dz and dx. W: two grouped matmuls.

    h is computed again in B instead of being kept from F: it costs one pass over z. transposed: both weights are stored
    with inputs before outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, x: Tensor, ends: Tensor, options: GateOptions, transposed: bool, *edges: Tensor | None
    ) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = _as_input(call, x)
        if transposed:
            gate_up, down = gate_up.mT, down.mT
        z, h = (x.new_empty(x.shape[0], columns) for columns in (gate_up.shape[1], down.shape[2]))
        call.backend.grouped_gated_fwd(x, gate_up, gate_up_bias, ends, options, z, h)
        y = x.new_empty(x.shape[0], down.shape[1])
        call.backend.grouped_linear_fwd(h, down, down_bias, ends, y)
        ctx.save_for_backward(x, gate_up, down, z, ends)
        ctx.call, ctx.options, ctx.transposed = call, options, transposed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, needs = ctx.call, ctx.needs_input_grad
        x, gate_up, down, z, ends = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, grouped_mlp_with_torch, (x, ends, ctx.options, ctx.transposed), dy)
        dz, h = torch.empty_like(z), z.new_empty(z.shape[0], down.shape[2])
        call.backend.grouped_gated_dgrad(dy, down, ends, z, ctx.options, dz, h)
        dx = None
        if needs[1]:
            dx = torch.empty_like(x, requires_grad=False)
            call.backend.grouped_linear_dgrad(dz, gate_up, ends, dx)
        kernel = grouped_wgrad(call.backend, ctx.transposed, is_sharded(call.params[0]))
        # params: gate_up and down, then their biases; each task takes a weight with its bias
        first, second = (x.detach(), dz, ends), (h, dy, ends)
        dgate_up, dgate_up_bias = weight_gradients(call, kernel, first, needs, linear_flops, slice(0, None, 2))
        ddown, ddown_bias = weight_gradients(call, kernel, second, needs, linear_flops, slice(1, None, 2))
        return None, dx, None, None, None, dgate_up, ddown, dgate_up_bias, ddown_bias


@functools.cache
def grouped_wgrad(backend: ModuleType, transposed: bool, sharded: bool) -> wgrad.WGradKernel:
    """W of a linear per group of rows; transposed: for a weight stored [E, K, N]; sharded: for DTensors."""

    def run_transposed(segments: Any, outputs: Any, accumulate: bool) -> None:
        dweight, dbias = outputs
        backend.grouped_linear_wgrad(segments, (None if dweight is None else dweight.mT, dbias), accumulate)

    run = run_transposed if transposed else backend.grouped_linear_wgrad
    return local(run) if sharded else wgrad.WGradKernel(run)


def grouped_linear_with_torch(
    weight: Tensor, bias: Tensor | None, x: Tensor, ends: Tensor, transposed: bool = False
) -> Tensor:
    """GroupedLinear in torch's own operations, differentiable any number of times."""
    weight, bias = own_part(weight), None if bias is None else own_part(bias).to(x.dtype)
    return reference_grouped.grouped_linear(x, (weight.mT if transposed else weight).to(x.dtype), bias, ends)


def grouped_mlp_with_torch(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    x: Tensor,
    ends: Tensor,
    options: GateOptions,
    transposed: bool = False,
    linear: Callable[..., Tensor] = grouped_linear_with_torch,
) -> Tensor:
    """GroupedMLP in torch's own operations, or in linears of another kind."""
    z = linear(gate_up, gate_up_bias, x, ends, transposed)
    return linear(down, down_bias, reference_grouped.gated(z, options), ends, transposed)


def _as_input(call: OpCall, x: Tensor) -> list[Any]:
    """The parameters, of DTensors this rank's part, in x's dtype, which under autocast is another one."""
    return [p if p is None else own_part(p).to(x.dtype) for p in call.params]
