"""Weights that several ranks hold, an embedding that is also the head, say: their gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zbkern.pipeline.transport import DistributedTransport, Transport


class TiedWeights:
    """Those of `tied` that other ranks name, too. Raises ValueError where there is no process group to sum over."""

    def __init__(self, tied: Mapping[str, Tensor], transport: Transport, group: dist.ProcessGroup | None) -> None:
        self._shared: list[tuple[Tensor, dist.ProcessGroup]] = []
        named = transport.gather(sorted(tied))
        for name in sorted(tied):
            ranks = [rank for rank, names in enumerate(named) if name in names]
            if len(ranks) == 1:
                continue
            if not isinstance(transport, DistributedTransport):
                raise ValueError("Pipeline: tied parameters across ranks need a torch.distributed group")
            everyone = dist.get_process_group_ranks(group or dist.group.WORLD)
            members = [everyone[rank] for rank in ranks]
            self._shared.append((tied[name], dist.new_group(members, use_local_synchronization=True)))

    def begin(self) -> None:
        """Leaves what earlier steps have summed, the same on all holders, with one of them: it is summed once more."""
        for parameter, group in self._shared:
            if parameter.grad is not None and dist.get_rank(group) > 0:
                parameter.grad.zero_()

    def sum_gradients(self) -> None:
        """Gives every holder the sum of all holders' gradients; collective among them."""
        for parameter, group in self._shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)
