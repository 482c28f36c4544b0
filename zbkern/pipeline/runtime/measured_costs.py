"""From the timelines of measured steps, and what the ranks know of their chunks, to costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zbkern.pipeline.runtime.memory_saving import MemorySavingStage
from zbkern.pipeline.simulation import drift
from zbkern.pipeline.simulation.timeline import Timeline


class MeasuredParts(NamedTuple):
    """Bytes that an F keeps with an R of named parts, and how much of the chunk's output that R computes again."""

    kept: int
    output: int

    @classmethod
    def of(cls, stage: MemorySavingStage | None) -> MeasuredParts | None:
        return None if stage is None else cls(stage.kept_bytes, stage.output_again_bytes)


class MeasuredChunk(NamedTuple):
    """What a chunk's rank knows of it: bytes, the name of a layer, and of what it shares with others; times."""

    activation: int
    held: float
    static: float
    output: int
    transfer: float
    parts: MeasuredParts | None  # None where it has none of those that an R runs again
    name: str
    tied: str | None
    within: float  # ms of a forward in its layers, and besides them
    besides: float

    @property
    def kept(self) -> int:
        """By an F with an R of named parts."""
        return self.activation if self.parts is None else min(self.activation, self.parts.kept)


def communication(timelines: Sequence[Timeline], chunks: int) -> float | list[float]:
    """The least time over all edges where they are alike, which noise only adds to; else one per edge."""
    hops = drift.hops(timelines)
    least = min(hops.values(), default=0.0)
    if max(hops.values(), default=0.0) <= 2 * least:
        return least
    return [hops.get(edge, least) for edge in range(chunks - 1)]
