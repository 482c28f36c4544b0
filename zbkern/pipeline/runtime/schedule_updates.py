"""Another schedule while a pipeline runs, from whatever plans one: `zbkern.pipeline.Replanner`, or one of your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.timeline import Timeline


@runtime_checkable
class ReplannerLike(Protocol):
    """A Replanner, as a Pipeline knows it. It has no state: pipelines may share one."""

    @property
    def every(self) -> int:
        """Steps after which it is asked; the same on all ranks."""

    def memory_limits(self, schedule: Schedule) -> Sequence[float]:
        """By rank: what the pipeline's first schedule holds, which later ones may hold, too."""

    def propose(self, timeline: Timeline, limits: Sequence[float]) -> Schedule | None:
        """A schedule that is better for the times of this step, of the same chunks in the same places, or None."""


class ScheduleUpdates:
    """Counts the steps of a pipeline, and has all ranks take what rank 0's replanner proposes."""

    def __init__(self, replanner: ReplannerLike, schedule: Schedule) -> None:
        self._replanner = replanner
        self._limits = replanner.memory_limits(schedule)
        self.restart()

    def restart(self) -> None:
        """Counts from zero: after a failure ranks may have counted differently."""
        self._steps = 0

    def due(self) -> bool:
        """Counts a step; True when it is time to plan."""
        self._steps += 1
        return self._steps % self._replanner.every == 0

    def agree(self, timeline: Timeline, gather: Callable[[Any], list[Any]], rank: int) -> Schedule | None:
        """What rank 0's replanner proposes, on every rank; collective. timeline: of all ranks."""
        proposal = self._replanner.propose(timeline, self._limits) if rank == 0 else None
        text = gather(proposal.to_csv() if proposal is not None else None)[0]
        return None if text is None else Schedule.from_csv(text)
