"""The table's columns for torch.compile: the same deferral, from within a traced graph and without breaking it.

The compiler sees torch's own operations on detached weights, so it traces and fuses F and B as it likes; behind each
matmul stands a `_Tap`, an identity whose backward calls one opaque operator, `zbkern::weight_gradient`. At run time
that operator (`compiled_operators.py`) makes the `WGradTask`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zbkern.kernels import reference
from zbkern.ops import compiled_operators  # noqa: F401 (registers the operators)
from zbkern.ops.functions import linear as linear_functions
from zbkern.ops.functions import loss as loss_functions
from zbkern.ops.functions import sharded


def linear(weight: Tensor, bias: Tensor | None, x: Tensor, activation: str | None, transposed: bool) -> Tensor:
    """functional.linear: the matmul, its tap, then the activation."""
    detached = weight.detach().to(x.dtype)
    y = F.linear(x, detached.t() if transposed else detached, None if bias is None else bias.detach().to(x.dtype))
    y = _Tap.apply(y, "transposed" if transposed else "linear", weight, bias, [], None, x.detach())
    return y if activation is None else reference.activation_function(activation)(y)


@torch.compiler.allow_in_graph
def sharded_linear(weight: Any, bias: Any, x: Any, activation: str | None, transposed: bool) -> Any:
    """functional.linear of DTensors: torch's F and B, and a tap for W of this rank's part, where that is a product of
    local parts. One node until the compiler traces autograd, because the placements are known only there."""
    placements = sharded.placements_for_w(x, weight, bias)
    if placements is None or activation is not None or transposed:
        return linear_functions.linear_with_torch(weight, bias, x, activation, transposed)
    y = F.linear(x, weight.detach().to(x.dtype), None if bias is None else bias.detach().to(x.dtype))
    parts = weight.to_local(), None if bias is None else bias.to_local()
    pairs = zip(placements, weight.placements, strict=True)
    sums = [cut.is_shard() and whole.is_replicate() for cut, whole in pairs]
    return _Tap.apply(y, "linear", *parts, sums, placements, x.detach().to_local())


def sharded_head(weight: Any, bias: Any, x: Any, target: Tensor, options: Any, sums: bool) -> Tensor:
    """functional.linear_cross_entropy of DTensors, as sharded.linear_cross_entropy."""
    return loss_functions.cross_entropy_with_torch(sharded_linear(weight, bias, x, None, False), target, options)


def embedding(weight: Tensor, indices: Tensor, padding_idx: int | None) -> Tensor:
    """functional.embedding; rows of padding_idx get no gradient, so their dy becomes zero before W takes it."""
    y = F.embedding(indices, weight.detach(), padding_idx)
    y = _Tap.apply(y, "embedding", weight, None, [], None, indices)
    if padding_idx is None:
        return y
    padding = (indices == padding_idx).unsqueeze(-1)
    return torch.where(padding, y.detach(), y)


def grouped_linear(weight: Tensor, bias: Tensor | None, x: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """functional.grouped_linear; ends: the row at which every group ends."""
    detached, kind = weight.detach().to(x.dtype), "grouped_linear transposed" if transposed else "grouped_linear"
    matrices, biases = detached.mT if transposed else detached, None if bias is None else bias.detach().to(x.dtype)
    y = torch.ops.zbkern.grouped_linear(x, matrices, biases, ends)
    return _Tap.apply(y, kind, weight, bias, [], None, x.detach(), ends)


class _Tap(torch.autograd.Function):
    """y, whose gradient is also W's: weight and bias (or None) are what W is for, segment what it takes beside dy.

    sums: as of `weight_gradient`. placements: of a DTensor y, whose gradient, cut like this,
    goes to W and to B, so that W needs no communication of its own; segment, weight and bias are then this rank's part.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Any, kind: str, weight: Any, bias: Any, sums: Any, placements: Any, *segment: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weight, bias, *segment)
        ctx.kind, ctx.sums, ctx.placements = kind, sums, placements
        return torch.ops.aten._unsafe_view(y, y.shape)  # autograd lets nobody modify a view from here in place

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        weight, bias, *segment = ctx.saved_tensors
        wanted = weight if ctx.needs_input_grad[2] else None, bias if ctx.needs_input_grad[3] else None
        local = dy
        if ctx.placements is not None:
            dy = dy.redistribute(placements=ctx.placements)
            local = dy.to_local()
        torch.ops.zbkern.weight_gradient(ctx.kind, [*segment, local], *wanted, ctx.sums, True)
        return dy, *[None] * (5 + len(segment))
