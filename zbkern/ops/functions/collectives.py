"""Collectives that others cover: started, then passes beside this one and W of the queue run, then they are waited for.

Where torch's tensor parallelism communicates in a backward, `cover_backward_of` calls `wgrad.in_flight` between the
start and the wait.
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
from zbkern.wgrad.beside import is_any_beside

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


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
    """A gradient that B needs next, waited for; while it is in flight, others run."""
    part = gradient._local_tensor
    if not is_wrapped(part) or torch.is_grad_enabled():
        return gradient
    waits = not part.completed  # type: ignore[attr-defined]
    return ShardLayout.of(gradient).tensor(wgrad.in_flight(lambda: arrived(part)) if waits else arrived(part))


def local_of(tensor: DTensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """This rank's part of a gradient, cut as `placements` say; others run while other ranks send their parts."""
    moves = placements is not None and tuple(tensor.placements) != tuple(placements)
    if torch.is_grad_enabled():  # create_graph=True
        return (tensor.redistribute(placements=placements) if moves else tensor).to_local()
    if moves:
        tensor = tensor.redistribute(placements=placements, async_op=True)
    return arriving(tensor)._local_tensor


def cover_backward_of(x: DTensor) -> None:
    """In B, lets others run beside the collective that brings the gradient of x to what x was before a redistribution.

    torch starts that collective after this layer's backward, in the node that made x, once the gradients of all who
    use x are summed. A hook before that node starts it instead, and lets others run; the node then has nothing to do.
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
    if torch.is_grad_enabled() or not is_any_beside():
        return None
    if gradient is None or tuple(gradient.placements) == placements or dtype not in (None, gradient.dtype):
        return None
    local = local_of(gradient, placements)
    return (ShardLayout(gradient.device_mesh, placements, gradient.shape).tensor(local),)


class AllToAll(torch.autograd.Function):
    """Rows to and from every rank of a group: sent[r] rows of x go to rank r, received[r] rows come from there.

    B is the way back. Others run while they are in flight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.route = sent, received, group
        y, work = _start(x, sent, received, group)
        wgrad.in_flight(work.wait, work.is_completed)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.route
        if torch.is_grad_enabled():  # create_graph=True
            return AllToAll.apply(dy, received, sent, group), None, None, None
        dx, work = _start(dy, received, sent, group)
        wgrad.in_flight(work.wait, work.is_completed)
        return dx, None, None, None


def exchange_counts(sent: Tensor, ranks: int, group: Any) -> tuple[Tensor, list[int], list[int]]:
    """How many rows come from every rank for each expert of this one, when sent[i] rows go to expert i of all; and how
    many rows go to every rank, and come from there.

    Others run until the numbers are on the host. On a GPU they come by a stream of their own: other passes compute
    meanwhile on the current one.
    """
    if ranks == 1:
        return sent, [], []
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    if sent.device.type != "cuda":
        wgrad.in_flight(work.wait, work.is_completed)
        both = torch.stack((sent, received))
    else:
        side = torch.cuda.Stream(sent.device)
        side.wait_stream(torch.cuda.current_stream(sent.device))
        with torch.cuda.stream(side):
            work.wait()
            both = torch.empty((2, len(sent)), dtype=sent.dtype, pin_memory=True)
            both[0].copy_(sent, non_blocking=True)
            both[1].copy_(received, non_blocking=True)
            arrived = side.record_event()
        wgrad.in_flight(arrived.synchronize, arrived.query)  # whatever uses `received` comes after this
    out, back = both.view(2, ranks, -1).sum(2).tolist()
    return received, out, back


def _start(x: Tensor, sent: list[int], received: list[int], group: Any) -> tuple[Tensor, Any]:
    y = x.new_empty((sum(received), *x.shape[1:]))
    return y, dist.all_to_all_single(y, x.contiguous(), received, sent, group=group, async_op=True)
