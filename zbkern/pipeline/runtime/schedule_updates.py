"""Another schedule while a pipeline runs, from whatever plans one: `zbkern.pipeline.Replanner`, or one of your own."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from zbkern.pipeline.schedules.program import offloads_or_recomputes
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.timeline import Timeline

logger = logging.getLogger("zbkern")


@runtime_checkable
class ReplannerLike(Protocol):
    """A Replanner, as a Pipeline knows it. It has no state: pipelines may share one."""

    @property
    def every(self) -> int:
        """Steps after which it is asked; the same on all ranks."""

    @property
    def trial(self) -> int:
        """Steps that a new schedule runs, and after which it stays if they were no slower; the same on all ranks."""

    def memory_limits(self, schedule: Schedule) -> Sequence[float]:
        """By rank: what the pipeline's first schedule holds, which later ones may hold, too."""

    def propose(self, timeline: Timeline, limits: Sequence[float]) -> Schedule | None:
        """A schedule that is better for the times of this step, or None.

        It has the placement, the microbatches and the slices of `timeline.schedule`, and no R, O or L.
        """


class ScheduleUpdates:
    """Counts the steps of a pipeline, and has all ranks take what rank 0's replanner proposes, on trial."""

    def __init__(self, replanner: ReplannerLike, schedule: Schedule) -> None:
        self._replanner = replanner
        self._limits = replanner.memory_limits(schedule)
        self._refused: set[str] = set()  # as CSV: those that were slower
        self.restart()

    def restart(self) -> None:
        """Counts from zero: after a failure ranks may have counted differently."""
        self._steps = 0
        self._before: tuple[Schedule, float] | None = None  # of a schedule on trial: the one before, seconds of a step
        self._forget_times()

    def _forget_times(self) -> None:
        self._ended: float | None = None  # when the last step did
        self._times: list[float] = []  # seconds of each step since then

    def due(self) -> bool:
        """Counts a step; True when it is time to plan, or when a trial ends."""
        now = time.perf_counter()
        if self._ended is not None:
            self._times.append(now - self._ended)
        self._ended = now
        self._steps += 1
        if self._before is not None:
            return len(self._times) >= self._replanner.trial
        return self._steps % self._replanner.every == 0

    def agree(self, timeline: Timeline, gather: Callable[[Any], list[Any]], rank: int) -> Schedule | None:
        """The schedule that takes over on every rank, if any: what rank 0's replanner proposes, or, where that was
        slower in its trial, the one before it; collective. timeline: of all ranks.

        Raises on rank 0, for the caller to tell the others, what `propose` raises, TypeError for what is no Schedule,
        and ScheduleError or ValueError for one that cannot take over.
        """
        if self._before is not None:
            return self._judge(timeline.schedule, gather)
        proposal = self._replanner.propose(timeline, self._limits) if rank == 0 else None
        if proposal is not None:
            _check_proposal(f"{type(self._replanner).__name__}.propose", proposal, timeline.schedule)
        text = gather(proposal.to_csv() if proposal is not None else None)[0]
        if text is None or text in self._refused:
            return None
        if self._times and self._replanner.trial:
            self._before = timeline.schedule, statistics.median(self._times[-self._replanner.trial :])
        self._forget_times()
        return Schedule.from_csv(text)

    def _judge(self, present: Schedule, gather: Callable[[Any], list[Any]]) -> Schedule | None:
        assert self._before is not None
        (previous, seconds), self._before = self._before, None
        both = gather((seconds, statistics.median(self._times)))
        before, now = (max(rank) for rank in zip(*both, strict=True))
        self._forget_times()
        if now <= before:
            return None
        logger.info("replanning: steps took %.4g s, %.4g s before: %s runs again", now, before, previous.name)
        self._refused.add(present.to_csv())
        return previous


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
