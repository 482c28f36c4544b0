"""Replanner: another schedule once measured costs have left those that the present one was made for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zbkern.pipeline.planner import plan
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation import drift
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.simulator import simulate
from zbkern.pipeline.simulation.timeline import Timeline

logger = logging.getLogger("zbkern")


class Replanner:
    """Every `every` steps: measures costs, plans on rank 0 under the memory of the first schedule, and tells all ranks.

    memory: costs whose `activation` and `held` say what a microbatch holds. gain: the least part of the simulated cost
    that a new schedule must save. time_limit: seconds of search, in which all ranks wait.
    """

    def __init__(
        self, schedule: Schedule, every: int, memory: Costs | None = None, gain: float = 0.01, time_limit: float = 1.0
    ) -> None:
        if every < 1:
            raise ValueError(f"Pipeline: replan_every must be at least 1 step, or 0 for never; got {every}")
        self.every = every
        self.memory = memory or Costs()
        self.limit = list(simulate(schedule, self.memory).peak_memory)
        self.gain = gain
        self.time_limit = time_limit
        self._steps = 0

    def count(self) -> bool:
        """Counts a step; True when it is time to measure and to plan."""
        self._steps += 1
        return self._steps % self.every == 0

    def propose(self, timeline: Timeline) -> Schedule | None:
        """A schedule that is better for the costs of this step, or None."""
        present, costs = timeline.schedule, drift.costs([timeline], self.memory)
        found = plan(
            costs,
            present.stages,
            present.microbatches,
            present.chunks,
            present.placement,
            self.limit,
            self.time_limit,
        )
        now = simulate(present, costs).cost
        saved = 1 - found.timeline.cost / now if now > 0 else 0.0
        logger.info(
            "replanning: %s costs %.4g, %s would save %.1f%%", present.name, now, found.schedule.name, 100 * saved
        )
        return found.schedule if saved >= self.gain else None

    def agree(self, timeline: Timeline, gather: Callable[[Any], list[Any]], rank: int) -> Schedule | None:
        """What rank 0 proposes, on every rank; collective. timeline: of all ranks."""
        proposal = self.propose(timeline) if rank == 0 else None
        text = gather(proposal.to_csv() if proposal is not None else None)[0]
        return None if text is None else Schedule.from_csv(text)
