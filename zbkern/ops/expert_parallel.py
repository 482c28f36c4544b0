"""Experts spread over ranks: tokens go to the ranks of their experts and back, by two all-to-alls each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern.ops.functions.collectives import AllToAll, exchange_counts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Routing = tuple[Tensor, Tensor]


class ExpertParallel(torch.nn.Module):
    """A mixture of experts, each rank of a group with its own: input and output [..., K], the tokens of this rank.

    experts: this rank's, a module `experts(rows, counts)` with an attribute num_experts: counts[i] of the rows [M, K],
    which are sorted, are for its expert i (zbkern.nn.Experts, say). Rank r of the group has experts r num_experts to
    (r + 1) num_experts of the model. router: a module from tokens [T, K] to one score per expert of the model, such as
    a linear; a token goes to the top_k best, with the softmax of their scores as weights. Without a router, forward
    takes the routing: (experts, weights), each [..., top_k]; experts int64. group: a process group, None for all ranks;
    or a DeviceMesh of one dimension: the parameters of `experts` then become DTensors, Shard(0) of all the model's, as
    norms, clipping and checkpoints need them.

    Ranks may have different numbers of tokens, and none. The host waits once per forward, for the numbers of tokens
    that go to each rank. Between the start of each all-to-all and the wait for it, `zbkern.in_flight` lets other passes
    of the rank and W run. An expert's gradient is the sum over the tokens of all ranks; the
    router's is that of this rank's tokens, as under data parallelism.
    """

    def __init__(
        self,
        experts: torch.nn.Module,
        router: torch.nn.Module | None = None,
        top_k: int = 2,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if top_k < 1:
            raise ValueError(f"ExpertParallel: top_k must be a number of experts >= 1; got {top_k!r}")
        self.experts, self.router, self.top_k = experts, router, top_k
        if group is not None and not isinstance(group, dist.ProcessGroup):
            shard_parameters(experts, group)
            group = group.get_group()
        self.group = group

    @property
    def collective_forward(self) -> bool:
        """For a Pipeline: other ranks of the group must run this forward for every one that this rank runs."""
        return self._ranks() > 1

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self._route(rows) if routing is None else self._check(x, routing)
        to_expert = chosen.flatten()
        order = torch.argsort(to_expert, stable=True)
        position = torch.argsort(order)  # of every choice among the sorted ones
        ranks = self._ranks()
        local = self.experts.num_experts
        assert isinstance(local, int)
        try:
            sent = torch.bincount(to_expert, minlength=ranks * local)
        except RuntimeError:
            if int(to_expert.min()) >= 0:
                raise
            sent = to_expert[:0]  # negative ones cannot be counted
        if len(sent) != ranks * local:
            raise ValueError(
                f"ExpertParallel: routing must choose experts 0 to {ranks * local - 1}, of {ranks} ranks with {local} "
                f"each; got {int(to_expert.min())} to {int(to_expert.max())}"
            )
        received, out, back = exchange_counts(sent, ranks, self.group)
        there = _Take.apply(rows, order, position, chosen.shape[1])
        if ranks > 1:
            there = AllToAll.apply(there, out, back, self.group)
        expert_of = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(received)
        by_expert = torch.argsort(expert_of, stable=True)  # they came sorted by rank first
        by_rank = torch.argsort(by_expert)
        y = self.experts(_Take.apply(there, by_expert, by_rank, 1), received.view(ranks, local).sum(0))
        home = _Take.apply(y, by_rank, by_expert, 1)
        if ranks > 1:
            home = AllToAll.apply(home, back, out, self.group)
        results = _Take.apply(home, position, order, 1).view(*chosen.shape, y.shape[-1])
        return (weights.to(y.dtype).unsqueeze(-1) * results).sum(1).view(*x.shape[:-1], y.shape[-1])

    def _ranks(self) -> int:
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    def _route(self, rows: Tensor) -> Routing:
        if self.router is None:
            raise ValueError(
                "ExpertParallel: a block without a router takes the routing: forward(x, (experts, weights))"
            )
        scores, total = self.router(rows), self._ranks() * self.experts.num_experts  # type: ignore[operator]
        if scores.shape != (len(rows), total) or self.top_k > total:
            raise ValueError(
                f"ExpertParallel: router must give one score per expert of the model, {[len(rows), total]}, and top_k "
                f"be at most as many; got {list(scores.shape)} and top_k={self.top_k}"
            )
        best, chosen = scores.topk(self.top_k)
        return chosen, torch.softmax(best, -1)

    def _check(self, x: Tensor, routing: Routing) -> Routing:
        chosen, weights = routing
        if chosen.shape != weights.shape or chosen.shape[:-1] != x.shape[:-1] or chosen.is_floating_point():
            raise ValueError(
                f"ExpertParallel: routing must be (experts, weights), both {[*x.shape[:-1], 'top_k']} for this x, "
                f"experts of an integer dtype; got {chosen.dtype} {list(chosen.shape)} and {list(weights.shape)}"
            )
        return chosen.reshape(-1, chosen.shape[-1]), weights.reshape(-1, weights.shape[-1])


def shard_parameters(experts: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Makes DTensors of this rank's experts' parameters, in place: Shard(0) over the ranks of the mesh."""
    from torch.distributed.tensor import DTensor, Shard

    if getattr(mesh, "ndim", None) != 1:
        raise ValueError(
            "ExpertParallel: group must be a process group, a DeviceMesh of one dimension, or None for all ranks; got "
            f"{mesh!r}"
        )
    for module in experts.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                whole = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
                module.register_parameter(name, torch.nn.Parameter(whole, requires_grad=parameter.requires_grad))


class _Take(torch.autograd.Function):
    """x[index // copies], index a permutation of copies x rows. B gathers, too, instead of adding up: deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index if copies == 1 else index // copies)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        dx = dy.index_select(0, inverse)
        return dx if ctx.copies == 1 else dx.view(-1, ctx.copies, dx.shape[-1]).sum(1), None, None, None
