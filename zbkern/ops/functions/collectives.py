"""Collectives of B that W covers: started, then W of the queue runs, then they are waited for.

Where torch's tensor parallelism communicates in a backward, `cover_backward_of` lets W run between the start and the
wait (`WGradQueue(wgrads_per_collective=...)`). All ranks run the same number of W there, at the same points.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern import wgrad
from zbkern.ops.functions._shapes import ShardLayout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def run_w() -> None:
    """Runs W of the queue that this backward defers to, as many as it wants to run beside a collective."""
    scope = wgrad.current()
    if scope is not None and scope[0].wgrads_per_collective:
        scope[0].run_during_collective()


def arrived(tensor: Any) -> Tensor:
    """The tensor itself, waited for: kernels read memory, which an AsyncCollectiveTensor has none of."""
    return tensor.trigger_wait() if is_wrapped(tensor) else tensor


def is_wrapped(tensor: Any) -> bool:
    """True for an AsyncCollectiveTensor, waited for or not."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


class Arrived(torch.autograd.Function):
    """`arrived` within a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        tensor = arrived(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def arriving(gradient: DTensor) -> DTensor:
    """A gradient that B needs next, waited for; while it is in flight, W runs."""
    part = gradient._local_tensor
    if not is_wrapped(part) or torch.is_grad_enabled():
        return gradient
    if not part.completed:  # type: ignore[attr-defined]
        run_w()
    return ShardLayout.of(gradient).tensor(arrived(part))


def local_of(tensor: DTensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """This rank's part of a gradient, cut as `placements` say; W runs while other ranks send their parts."""
    moves = placements is not None and tuple(tensor.placements) != tuple(placements)
    if torch.is_grad_enabled():  # create_graph=True
        return (tensor.redistribute(placements=placements) if moves else tensor).to_local()
    if moves:
        tensor = tensor.redistribute(placements=placements, async_op=True)
    return arriving(tensor)._local_tensor


def cover_backward_of(x: DTensor) -> None:
    """In B, lets W run beside the collective that brings the gradient of x to what x was before a redistribution.

    torch starts that collective after this layer's backward, in the node that made x, once the gradients of all who
    use x are summed. A hook before that node starts it instead and runs W; the node then finds nothing to be done.
    """
    node: Any = x.grad_fn
    placements = None if node is None else _before(node)
    if placements is None or node.metadata.get("zbkern_covered"):
        return
    node.metadata["zbkern_covered"] = True
    node.register_prehook(functools.partial(_cover, placements, getattr(node, "bwd_op_dtype", None)))


def _before(node: Any) -> tuple[Placement, ...] | None:
    """How the gradient is cut that a redistribution, or from_local, returns; None where that is not known."""
    spec = getattr(node, "current_spec", None)  # Redistribute
    placements = getattr(node, "forward_input_placements", None) if spec is None else spec.placements  # from_local
    if getattr(node, "grad_placements", None) is not None or placements is None:
        return None
    return None if any(placement.is_partial() for placement in placements) else tuple(placements)


def _cover(
    placements: tuple[Placement, ...], dtype: torch.dtype | None, gradients: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    (gradient,) = gradients
    scope = wgrad.current()
    if scope is None or not scope[0].wgrads_per_collective or torch.is_grad_enabled():
        return None
    if gradient is None or tuple(gradient.placements) == placements or dtype not in (None, gradient.dtype):
        return None
    local = local_of(gradient, placements)
    return (ShardLayout(gradient.device_mesh, placements, gradient.shape).tensor(local),)


class AllToAll(torch.autograd.Function):
    """Rows to and from every rank of a group: sent[r] rows of x go to rank r, received[r] rows come from there.

    B is the way back; W runs while it is in flight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.route = sent, received, group
        y, work = _start(x, sent, received, group)
        work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.route
        if torch.is_grad_enabled():  # create_graph=True
            return AllToAll.apply(dy, received, sent, group), None, None, None
        dx, work = _start(dy, received, sent, group)
        run_w()
        work.wait()
        return dx, None, None, None


def _start(x: Tensor, sent: list[int], received: list[int], group: Any) -> tuple[Tensor, Any]:
    y = x.new_empty((sum(received), *x.shape[1:]))
    return y, dist.all_to_all_single(y, x.contiguous(), received, sent, group=group, async_op=True)
