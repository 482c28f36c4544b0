"""What a rank holds: how much memory every pass of a schedule takes or frees."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.simulation.costs import ChunkCosts


class Memory:
    """What one rank holds, now and at most so far, in the unit of `Costs.activation`.

    It starts with what it holds all the time. F adds the chunk's activation; B leaves `held`, and BW nothing; W
    releases `held`, a slice of n its n-th part.
    """

    def __init__(self, costs: ChunkCosts, static: float = 0.0) -> None:
        self._costs = costs
        self.now = self.peak = static

    def account(self, action: Action) -> None:
        kind, chunk, _, part = action
        activation, held = self._costs.activation[chunk], self._costs.held[chunk]
        if kind == "F":
            self.now += activation
        elif kind == "B":
            self.now += held - activation  # may be more: W needs output gradients, which came after F
        elif kind == "BW":
            self.now -= activation
        else:
            self.now -= held if part is None else held / part[1]
        self.peak = max(self.peak, self.now)


def static_of_ranks(costs: ChunkCosts, placement: Sequence[int]) -> list[float]:
    """What each rank holds all the time, by the rank of every chunk."""
    total = [0.0] * (max(placement) + 1)
    for chunk, rank in enumerate(placement):
        total[rank] += costs.static[chunk]
    return total
