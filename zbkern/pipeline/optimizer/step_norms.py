"""The norms of an optimizer step: the sums of squares of this rank and those before it, and what they clip."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zbkern.pipeline.optimizer.clipping import clip_coefficient, exact_sum, squared_norms
from zbkern.pipeline.optimizer.norm_chain import NormChain
from zbkern.pipeline.optimizer.own_settings import Settings, joined
from zbkern.pipeline.optimizer.parts import Part


class StepNorms:
    """The norms of the gradients of these torch optimizers, over all ranks of the chain.

    limits: of each norm, the largest that gradients are left with; None for any. shared: {id: name} of parameters that
    have copies, also of those that come with a later group; copies count once. device: where sums are taken.
    """

    def __init__(
        self,
        chain: NormChain,
        parts: Sequence[Part],
        limits: Sequence[float | None],
        shared: Mapping[int, str],
        device: torch.device,
    ) -> None:
        self.chain, self.limits = chain, limits
        self._parts, self._device = parts, device
        self.settings: Settings = {}  # what the optimizers have set in the last step, which all ranks must have alike
        self._uncounted: set[int] = set()  # ids of parameters that have another copy in the norm, and of their masters
        counted = {*chain.counted}
        for key, name in shared.items():
            if name in counted:
                self._uncounted.add(key)
            counted.add(name)
        self.leave_out_masters()

    def leave_out_masters(self) -> None:
        """Counts no master of a parameter that is not counted; again once there are new masters."""
        pairs = itertools.chain(*(part.masters for part in self._parts))
        self._uncounted |= {id(master) for parameter, master in pairs if id(parameter) in self._uncounted}

    def pass_on(self, gradients: Sequence[list[tuple[Tensor, Tensor]]], step: int) -> Tensor:
        """The squares of this rank and of those whose squares it receives, fp64 [norms, gradients]; sent to the next
        rank. Where the chain ends they are summed, [norms, 1].

        gradients: (parameter, gradient) of each torch optimizer. step: the number of the optimizer's step.
        """
        counted: list[list[Tensor]] = [[] for _ in self.limits]
        uncounted: list[Tensor] = []
        for part, pairs in zip(self._parts, gradients, strict=True):
            for parameter, gradient in pairs:
                (uncounted if id(parameter) in self._uncounted else counted[part.norm]).append(gradient)
        received: list[Tensor] = []
        if self.chain.ends_here and any(
            isinstance(gradient, DTensor) for gradient in itertools.chain(*counted, uncounted)
        ):
            # with this rank's shards, other pipelines of its mesh learn what ranks without shards have found
            received = self._receive(step)
            uncounted += received
        own = squared_norms(counted, uncounted).to(self._device)
        squares = torch.cat([*(received or self._receive(step)), own], 1)
        if self.chain.ends_here:  # each is added once, or the sum would depend on where ranks begin
            return torch.tensor([[exact_sum(row)] for row in squares.tolist()], dtype=torch.float64)
        self.chain.send_sum(step, squares, self.settings)
        return squares

    def _receive(self, step: int) -> list[Tensor]:
        """The squares of the ranks before this one, whose optimizers must be the same as those here."""
        squares, settings = [], []
        for received in self.chain.receive_sums(step):
            squares.append(received[0])
            settings.append(received[1])
        self.settings = joined(self.chain.transport.rank, self.settings, settings)
        return squares

    def of(self, total: Tensor) -> tuple[list[float], list[float]]:
        """The norms that these squares give, and the factors by which they clip gradients."""
        norms = [math.sqrt(exact_sum(squares)) for squares in total.tolist()]
        self.chain.transport.check_received()
        return norms, [clip_coefficient(norm, limit) for norm, limit in zip(norms, self.limits, strict=True)]
