"""Weights that several ranks hold, an embedding that is also the head, say: their gradients are summed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zbkern import landing
from zbkern.pipeline.transport import Transport
from zbkern.pipeline.undo import gradient_of

logger = logging.getLogger("zbkern")


class Share(NamedTuple):
    """A tag: the gradient of a tied weight that a rank has, or on the way from the first holder back, their sum."""

    step: int
    name: str
    rank: int

    def __str__(self) -> str:
        return f"the gradient of tied {self.name!r} from rank {self.rank}"


class TiedWeights:
    """Those of `tied` that other ranks name, too; `connect` has them among the peers of `transport`.

    Warns of copies that differ: they get equal gradients, and would differ for ever. No error, since a checkpoint that
    makes them equal is often loaded later.
    """

    def __init__(self, tied: Mapping[str, Tensor], transport: Transport) -> None:
        self._transport = transport
        self._shared: list[tuple[str, Tensor, list[int]]] = []  # with the ranks that hold it
        named = transport.gather({name: _fingerprint(parameter) for name, parameter in tied.items()})
        for name in sorted(tied):
            ranks = [rank for rank, names in enumerate(named) if name in names]
            if len(ranks) == 1:
                continue
            prints = [named[rank][name] for rank in ranks]
            if transport.rank == ranks[0] and any(found != prints[0] for found in prints if found and prints[0]):
                logger.warning(
                    "Pipeline: the copies of tied %r differ between ranks %s (shape and sum: %s); give them one value, "
                    "from one seed, by a copy or from a checkpoint, before the first step",
                    name,
                    ranks,
                    prints,
                )
            self._shared.append((name, tied[name], ranks))

    def begin(self) -> None:
        """Leaves what earlier steps have summed, the same on all holders, with one of them: it is summed once more."""
        for _, parameter, ranks in self._shared:
            gradient = gradient_of(parameter)
            if gradient is not None and ranks[0] != self._transport.rank:
                gradient.zero_()

    @torch.no_grad()
    def sum_gradients(self, step: int, timeout: float) -> None:
        """Gives every holder the sum of all holders' gradients, the same to the bit; collective among them."""
        transport = self._transport
        for name, parameter, (first, *others) in self._shared:
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = landing.blank(parameter).zero_()
                if parameter.requires_grad:  # a frozen one only takes part: an optimizer decays what has a gradient
                    parameter.grad = gradient
            total = local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if transport.rank == first:
                for rank in others:
                    share = transport.receive(rank, Share(step, name, rank), timeout)
                    total = total + share  # not in place: what was sent must stay
                for rank in others:
                    transport.send(rank, Share(step, name, first), total)
            else:
                transport.send(first, Share(step, name, transport.rank), local)
                total = transport.receive(first, Share(step, name, first), timeout)
            local.copy_(total)


def _fingerprint(parameter: Tensor) -> tuple[list[int], float] | None:
    """Shape and sum of all values, the same for the same values; None for a parameter without memory."""
    if parameter.is_meta:
        return None
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return list(parameter.shape), local.detach().sum(dtype=torch.float64).item()
