"""Another schedule while a pipeline runs, from whatever plans one: `zbkern.pipeline.Replanner`, or one of your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from zbkern.pipeline.schedules.program import offloads_or_recomputes
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
        """A schedule that is better for the times of this step, or None.

        It has the placement, the microbatches and the slices of `timeline.schedule`, and no R, O or L.
        """


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
        """What rank 0's replanner proposes, on every rank; collective. timeline: of all ranks.

        Raises on rank 0, for the caller to tell the others, what `propose` raises, TypeError for what is no Schedule,
        and ScheduleError or ValueError for one that cannot take over.
        """
        proposal = self._replanner.propose(timeline, self._limits) if rank == 0 else None
        if proposal is not None:
            _check_proposal(f"{type(self._replanner).__name__}.propose", proposal, timeline.schedule)
        text = gather(proposal.to_csv() if proposal is not None else None)[0]
        return None if text is None else Schedule.from_csv(text)


def _check_proposal(call: str, proposal: Schedule, present: Schedule) -> None:
    """Ranks keep their chunks, and users split their batches: only the order of the actions may change."""
    if not isinstance(proposal, Schedule):
        raise TypeError(f"{call}: must return a zbkern.pipeline.Schedule or None; got {type(proposal).__name__}")
    proposal.validate()
    if _fixed(proposal) != _fixed(present):
        raise ValueError(
            f"{call}: must have the placement {present.placement} and {present.microbatches} microbatches of the "
            f"schedule that runs, {present!r}; got {proposal!r} with placement {proposal.placement}; plan with those "
            "of timeline.schedule, and with its slices"
        )
    if any(offloads_or_recomputes(row) for row in proposal.actions):
        raise ValueError(
            f"{call}: must not offload or recompute (R, O, L), for which the stages of a running pipeline are not "
            f"made; got {proposal!r}; construct a Pipeline with it and without replanner"
        )


def _fixed(schedule: Schedule) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
    return schedule.stages, tuple(schedule.placement), schedule.microbatches, schedule.slices
