"""What a rank holds: how much memory every pass of a schedule takes or frees."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zbkern.planning.costs.chunks import ROUNDING, checked_number
from zbkern.planning.costs.flat import FlatCosts
from zbkern.schedules.actions import Action
from zbkern.schedules.program import recomputed, streamed

Limit = float | Sequence[float] | None  # one number, or one per rank


class Memory:
    """What one rank holds, now and at most so far, in the unit of `Costs.activation`.

    It starts with `static`, the model states of its chunks. F adds the chunk's activation, or `checkpoint` where an R
    adds the rest, or `streamed` where its O follows directly; B leaves `held`, and BW nothing; W releases `held`. O
    releases what the microbatch holds, L takes it again. Of a sequence in slices `carried` is
    there from its first F to its last B, and `carried_gradients` from its first B on. row: the rank's actions; they are
    accounted in its order, or in another one that keeps that of every unit.
    """

    def __init__(self, costs: FlatCosts, row: Sequence[Action] = (), static: float = 0.0) -> None:
        self._costs = costs
        self._recomputed, self._streamed = recomputed(row), streamed(row)
        self._waiting: set[tuple[int, int]] = set()  # those whose B has run
        self.now = self.peak = static
        if self._recomputed and costs.whole.checkpoint is None:
            raise ValueError(
                "Costs: checkpoint must be given for a schedule that recomputes: the memory that a microbatch holds "
                "between an F and its R, which is what the chunk was given"
            )

    def account(self, action: Action) -> None:
        kind, chunk, unit = action
        key, costs = (chunk, unit), self._costs.of_unit(unit)
        activation, held, kept = costs.activation[chunk], costs.held[chunk], costs.activation[chunk]
        if key in self._recomputed and costs.checkpoint is not None:
            kept = min(activation, costs.checkpoint[chunk])
        self.now += self._costs.carried_change(kind, chunk, unit)
        if kind == "F":
            self.now += costs.streamed[chunk] if key in self._streamed else kept
        elif kind == "R":
            self.now += activation - kept
        elif kind == "O":
            leaves = key in self._streamed and key not in self._waiting
            self.now -= costs.streamed[chunk] if leaves else self.copied(*key)
        elif kind == "L":
            self.now += self.copied(*key)
        elif kind == "B":
            self.now += held - activation  # may be more: W needs output gradients, which came after F
            self._waiting.add(key)
        elif kind == "BW":
            self.now -= activation
        else:
            self.now -= held
        self.peak = max(self.peak, self.now)

    def copied(self, chunk: int, unit: int) -> float:
        """What an O or L of this unit moves now: its activations, or after B what its W needs."""
        costs = self._costs.of_unit(unit)
        return costs.held[chunk] if (chunk, unit) in self._waiting else costs.activation[chunk]


def exceeds(peak: float, limit: float | None) -> bool:
    """Whether a rank holds more than it may, by more than rounding."""
    return limit is not None and peak > limit * (1 + ROUNDING)


def limits_of(function: str, given: Limit, stages: int) -> list[float] | None:
    """The memory limit of every rank, None for none. Raises TypeError or ValueError in the name of `function`."""
    if given is None:
        return None
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * stages
    if len(each) != stages:
        raise ValueError(f"{function}: memory_limit must be one number or one per rank ({stages}); got {len(each)}")
    return [checked_number(function, "memory_limit", limit, math.inf, "one number or one per rank") for limit in each]
