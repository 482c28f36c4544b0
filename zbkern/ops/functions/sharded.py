"""Linear and embedding on DTensors, as tensor and sequence parallelism make them: W works on this rank's part alone.

F and B are torch's own operations on DTensors, with their communication. W is a kernel on local tensors wherever the
gradient of the local part needs nothing of other ranks: a weight cut by rows of outputs (column-parallel), by inputs
(row-parallel) or not at all. Where tokens are cut and the weight is not, what a rank computes is its term of a sum over
ranks, as in torch: `.grad` is a DTensor with the placement Partial. Anything else is computed in B, with torch's
communication, and W adds it: ranks that run their W at different times must never communicate there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.ops.autograd import OpCall, Params, apply, differentiable_backward, weight_gradients
from zbkern.ops.functions import regather
from zbkern.ops.functions._shapes import ShardLayout, as_rows
from zbkern.ops.functions.collectives import arriving, cover_backward_of, local_of
from zbkern.ops.functions.embedding import embedding_with_torch
from zbkern.ops.functions.linear import linear_with_torch
from zbkern.ops.functions.loss import cross_entropy_with_torch
from zbkern.wgrad import Segment, WGradFunction, WGradKernel, accumulation

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Sums = tuple[bool, ...]  # for every dimension of the mesh: whether W computes a term of a sum over its ranks
NOT_CUT, SUM = -1, -2  # beside 0 and 1, the dimension of a product that is cut over ranks


def is_sharded(*tensors: Tensor | None) -> bool:
    """True when all of these, None aside, are DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and all(tensor is None or isinstance(tensor, module.DTensor) for tensor in tensors)


def own_part(parameter: Any) -> Tensor:
    """This rank's part of a parameter that is a DTensor, in its graph; any other as it is."""
    return parameter.to_local() if is_sharded(parameter) else parameter


class ShardedLinear(torch.autograd.Function):
    """y = x weight^T + bias, all of them DTensors, x [..., K]. B: dx. W: dweight and dbias of this rank's part."""

    @staticmethod
    def forward(ctx: Any, call: OpCall, x: DTensor, *edges: Tensor | None) -> Tensor:
        weight, bias = call.params
        scope = wgrad.current()
        part = regather.part_of(x) if scope is not None and scope[0].regather_inputs else None
        ctx.save_for_backward(x if part is None else part, weight)
        ctx.call, ctx.placements, ctx.gathers = call, x.placements, part is not None
        cover_backward_of(x)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: DTensor) -> tuple[Any, ...]:
        call: OpCall = ctx.call
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            if ctx.gathers:
                raise RuntimeError(
                    f"linear {call.name}: create_graph=True needs the gathered input, which was not kept; set "
                    "regather_inputs=False on the WGradQueue"
                )
            return differentiable_backward(call, linear_with_torch, (x,), dy)
        dy = arriving(dy)
        dx = torch.matmul(dy, weight) if ctx.needs_input_grad[1] else None
        places = [_of_product(*pair, dy.dim() - 1) for pair in zip(ctx.placements, dy.placements, strict=True)]
        sums = tuple([place == SUM for place in places])
        if all(_agrees(parameter, places) for parameter in call.params) and may_be_terms(call.params, sums):
            kernel, part, rows = local(call.backend.linear_wgrad, sums), local_of(x), as_rows(local_of(dy))
            if ctx.gathers:
                kernel = regather.gathering(kernel, ShardLayout.of(x), ctx.placements)
            else:
                part = as_rows(part)
            flops = 2 * rows.numel() * part.shape[-1]
            return None, dx, *weight_gradients(call, kernel, (part.detach(), rows), ctx.needs_input_grad, flops)
        x = x.redistribute(placements=ctx.placements)
        wanted = [parameter is not None for parameter in call.params]
        gradients = [_rows(dy).mT @ _rows(x) if wanted[0] else None, _rows(dy).sum(0) if wanted[1] else None]
        return None, dx, *as_computed(call, gradients, ctx.needs_input_grad)


def linear(call: OpCall, x: DTensor, activation: str | None, transposed: bool) -> Tensor:
    """functional.linear of DTensors."""
    if activation is None and not transposed:
        return apply(ShardedLinear, call, x)
    return linear_with_torch(call.params[0], call.params[1], x, activation, transposed)


def linear_cross_entropy(call: OpCall, x: DTensor, target: Tensor, options: Any, sums: bool) -> Tensor:
    """functional.linear_cross_entropy of DTensors: torch's loss; in loss_parallel() it does not gather the logits."""
    return cross_entropy_with_torch(apply(ShardedLinear, call, x), target, options)


class ShardedEmbedding(torch.autograd.Function):
    """y[i] = weight[indices[i]], both DTensors. W: dweight of this rank's part, rows of the vocabulary or columns."""

    @staticmethod
    def forward(ctx: Any, call: OpCall, indices: DTensor, padding_idx: int | None, *edges: Tensor | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.call, ctx.padding_idx = call, padding_idx
        return torch.nn.functional.embedding(indices, call.params[0], padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: DTensor) -> tuple[Any, ...]:
        call: OpCall = ctx.call
        (indices,) = ctx.saved_tensors
        (weight,) = call.params
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, embedding_with_torch, (indices, ctx.padding_idx), dy)
        places = zip(weight.placements, indices.placements, dy.placements, strict=True)
        if all(_splits_embedding(*place, dy.dim() - 1) for place in places):
            rows, first = weight.to_local().shape[0], _first_row(weight)
            kernel = _embedding_kernel(call.backend.embedding_wgrad, ctx.padding_idx, first, rows)
            segment = indices.to_local().reshape(-1), as_rows(local_of(dy))
            return None, None, None, *weight_gradients(call, kernel, segment, ctx.needs_input_grad, segment[1].numel())
        gradient = torch.ops.aten.embedding_dense_backward(
            dy, indices, weight.shape[0], -1 if ctx.padding_idx is None else ctx.padding_idx, False
        )
        return None, None, None, *as_computed(call, [gradient], ctx.needs_input_grad)


@functools.cache
def local(kernel: WGradFunction, sums: Sums = ()) -> WGradKernel:
    """The kernel on this rank's part of its outputs; the same object each time, so that tasks of one weight merge.

    sums: where any, the gradients are terms of a sum over ranks.
    """

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        kernel(segments, [local_part(output, sums) for output in outputs], accumulate)

    return WGradKernel(run, empty=functools.partial(empty_terms, sums) if any(sums) else None)


def linear_task(kernel: WGradFunction, segment: Segment, params: Params, sums: Sums, name: str) -> wgrad.WGradTask:
    """W of a linear for params, DTensors or None, by `kernel` from this rank's rows of x and dy."""
    if may_be_terms(params, sums):
        return wgrad.WGradTask(
            local(kernel, sums), segment, params, 2 * segment[1].numel() * segment[0].shape[-1], name
        )
    gradients: list[Any] = [None if p is None else empty_terms(sums, p) for p in params]
    local(kernel, sums).run([segment], gradients, False)
    return wgrad.WGradTask(_ADD, _whole_parts(params, gradients), params, 0, name)


def parameter_of(part: Tensor) -> Any:
    """The parameter of which `part` is what to_local() returned, with a gradient cut as the parameter is; else None."""
    node: Any = part.grad_fn
    if type(node).__name__ != "_ToTorchTensorBackward":
        return None
    if node.grad_placements is not None and tuple(node.grad_placements) != tuple(node.dtensor_spec.placements):
        return None
    return getattr(node.next_functions[0][0], "variable", None)  # of an AccumulateGrad


def parts_by_group(op: str, params: Sequence[Any]) -> tuple[Any, ...]:
    """This rank's groups of weights [E, ...] and biases [E, ...]: params, but of DTensors, cut along E, their parts.

    Raises ValueError for other placements: a rank computes with whole experts, and only with its own.
    """
    if torch.compiler.is_compiling() or not any(is_sharded(p) for p in params if p is not None):
        return tuple(params)
    for parameter in params:
        if parameter is None:
            continue
        placements = parameter.placements if is_sharded(parameter) else None
        if placements is None or not all(placement.is_shard(0) for placement in placements):
            raise ValueError(
                f"{op}: weights and biases must be all plain tensors, or all DTensors with the placement Shard(0), of "
                f"which each rank has its own experts; got {'a plain tensor' if placements is None else placements}"
            )
    return tuple([None if p is None else p.to_local().detach() for p in params])


def may_be_terms(params: Params, sums: Sums) -> bool:
    """False where W would add a term of a sum to a gradient that is no such sum: there B has to make it whole."""
    gradients = [None if p is None else accumulation.gradient_of(p) for p in params]
    return not any(sums) or all(
        gradient is None or (is_sharded(gradient) and _is_sum(gradient, sums)) for gradient in gradients
    )


def as_computed(call: OpCall, gradients: Sequence[Any], needs: Sequence[bool]) -> Sequence[Tensor | None]:
    """Gradients that B has computed, brought to their parameters' placements: W adds them."""
    return weight_gradients(call, _ADD, _whole_parts(call.params_requiring_grad, gradients), needs)


def _whole_parts(params: Params, gradients: Sequence[Any]) -> tuple[Tensor, ...]:
    """This rank's part of each gradient, an empty one where there is no parameter."""
    pairs: list[tuple[Any, Any]] = list(zip(params, gradients, strict=True))
    whole = [p if p is None else g.redistribute(p.device_mesh, p.placements).to_local() for p, g in pairs]
    empty = next(part for part in whole if part is not None).new_empty(0)
    return tuple([empty if part is None else part for part in whole])


@functools.cache
def _embedding_kernel(kernel: Callable[..., None], padding_idx: int | None, first: int, rows: int) -> WGradKernel:
    """kernel for rows first to first + rows of the vocabulary: tokens of other rows count nothing."""

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        local = []
        for indices, dy in segments:
            here = (indices >= first) & (indices < first + rows)
            if padding_idx is not None:
                here &= indices != padding_idx
            local.append((torch.where(here, indices - first, 0), dy * here.unsqueeze(-1)))
        kernel(local, [local_part(output) for output in outputs], accumulate, padding_idx=None)

    return WGradKernel(run)


_ADD = local(accumulation.add_gradients)._replace(adds=True)


def local_part(tensor: Any, sums: Sums = ()) -> Any:
    """This rank's part, the memory itself. Raises ValueError for a gradient that is summed over ranks where what W has
    is not, or the other way round."""
    if not is_sharded(tensor) or tensor is None:
        return tensor
    if not _is_sum(tensor, sums):
        if any(sums):
            what = "summed over ranks already, and W has a term of such a sum; run W before you redistribute it"
        else:
            what = "a sum still to be made, of which W can fill no part; redistribute it to its parameter's placements"
        raise ValueError(
            f"a gradient of shape {list(tensor.shape)} has placements {tensor.placements}: {what}, or set it to None, "
            "before W runs"
        )
    return tensor._local_tensor


def _is_sum(tensor: Any, sums: Sums) -> bool:
    expected = sums or (False,) * len(tensor.placements)
    return all(placement.is_partial() == term for placement, term in zip(tensor.placements, expected, strict=True))


def empty_terms(sums: Sums, parameter: Any) -> DTensor:
    """Memory for a gradient that is a sum still to be made, as torch leaves it for a weight that is not cut."""
    from torch.distributed.tensor import Partial

    placements = [Partial() if term else place for place, term in zip(parameter.placements, sums, strict=True)]
    part = accumulation.empty_gradient(parameter)._local_tensor  # type: ignore[attr-defined]
    return ShardLayout(parameter.device_mesh, tuple(placements), parameter.shape).tensor(part)


def _of_product(x: Placement, dy: Placement, last: int) -> int | None:
    """How dy^T x is cut where each rank multiplies what it has: by dimension 0 or 1, NOT_CUT, or a SUM over ranks; None
    for what is none of these."""
    if x.is_replicate():
        return 0 if dy.is_shard(last) else NOT_CUT if dy.is_replicate() else None
    if x.is_shard(last):
        return 1 if dy.is_replicate() else None
    return SUM if x.is_shard() and x == dy else None


def placements_for_w(x: DTensor, weight: DTensor, bias: DTensor | None) -> tuple[Placement, ...] | None:
    """How dy of linear(x, weight, bias) must be cut so that W is a product of local parts; None where it is not."""
    from torch.distributed.tensor import Replicate, Shard

    last = x.dim() - 1
    placements: list[Any] = []  # not list[Any](): torch 2.8 cannot trace it
    for rows, weights in zip(x.placements, weight.placements, strict=True):
        by_tokens = rows.is_shard() and not rows.is_shard(last)
        placements.append(Shard(last) if weights.is_shard(0) else rows if by_tokens else Replicate())
    places = [_of_product(*pair, last) for pair in zip(x.placements, placements, strict=True)]
    return tuple(placements) if all(_agrees(parameter, places) for parameter in (weight, bias)) else None


def _agrees(parameter: Any, places: Sequence[int | None]) -> bool:
    """True when a weight [N, K] or bias [N] is cut as the product is; a bias knows no inputs."""
    if parameter is None:
        return True
    expected = [NOT_CUT if place == 1 and parameter.dim() == 1 else place for place in places]
    return all(
        place is not None and (placement.is_replicate() if place < 0 else placement.is_shard(place))
        for placement, place in zip(parameter.placements, expected, strict=True)
    )


def _splits_embedding(weight: Placement, indices: Placement, dy: Placement, last: int) -> bool:
    if not indices.is_replicate():
        return False
    return dy.is_shard(last) if weight.is_shard(1) else dy.is_replicate() and not weight.is_partial()


def _first_row(weight: Any) -> int:
    """The first row of the vocabulary that this rank has."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1][0]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
