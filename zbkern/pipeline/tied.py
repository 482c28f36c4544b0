"""Weights that several ranks hold, an embedding that is also the head, say: their gradients are summed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zbkern import landing
from zbkern.pipeline.groups import backend_of, close_groups, open_group
from zbkern.pipeline.transport import DistributedTransport, Transport
from zbkern.pipeline.undo import gradient_of

logger = logging.getLogger("zbkern")


class TiedWeights:
    """Those of `tied` that other ranks name, too. Raises ValueError where there is no process group to sum over.

    Warns of copies that differ: they get equal gradients, and would differ for ever. No error, since a checkpoint that
    makes them equal is often loaded later.
    """

    def __init__(self, tied: Mapping[str, Tensor], transport: Transport, group: dist.ProcessGroup | None) -> None:
        self._shared: list[tuple[Tensor, bool, Any]] = []  # whether it is the first holder's, and their communicator
        named = transport.gather({name: _fingerprint(parameter) for name, parameter in tied.items()})
        for name in sorted(tied):
            ranks = [rank for rank, names in enumerate(named) if name in names]
            if len(ranks) == 1:
                continue
            if not isinstance(transport, DistributedTransport):
                raise ValueError("Pipeline: tied parameters across ranks need a torch.distributed group")
            everyone = dist.get_process_group_ranks(group or dist.group.WORLD)
            prints = [named[rank][name] for rank in ranks]
            if transport.rank == ranks[0] and any(found != prints[0] for found in prints if found and prints[0]):
                logger.warning(
                    "Pipeline: the copies of tied %r differ between ranks %s (shape and sum: %s); give them one value, "
                    "from one seed, by a copy or from a checkpoint, before the first step",
                    name,
                    ranks,
                    prints,
                )
            members = [everyone[rank] for rank in ranks]
            backend = backend_of(group, transport.device)
            self._shared.append((tied[name], transport.rank == ranks[0], open_group(members, backend)))

    def begin(self) -> None:
        """Leaves what earlier steps have summed, the same on all holders, with one of them: it is summed once more."""
        for parameter, first, _ in self._shared:
            gradient = gradient_of(parameter)
            if gradient is not None and not first:
                gradient.zero_()

    def sum_gradients(self) -> None:
        """Gives every holder the sum of all holders' gradients; collective among them."""
        for parameter, _, group in self._shared:
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = landing.blank(parameter).zero_()
                if parameter.requires_grad:  # a frozen one only takes part: an optimizer decays what has a gradient
                    parameter.grad = gradient
            group.allreduce([gradient.to_local() if isinstance(gradient, DTensor) else gradient]).wait()

    def close(self) -> None:
        """Ends the communicators."""
        close_groups(group for _, _, group in self._shared)
        self._shared.clear()


def _fingerprint(parameter: Tensor) -> tuple[list[int], float] | None:
    """Shape and sum of all values, the same for the same values; None for a parameter without memory."""
    if parameter.is_meta:
        return None
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return list(parameter.shape), local.detach().sum(dtype=torch.float64).item()
