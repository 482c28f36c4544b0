"""Replanner: another schedule once measured costs have left those that the present one was made for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from zbkern.pipeline.planner import PlanOptions, plan
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation import drift
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.simulator import simulate
from zbkern.pipeline.simulation.timeline import Timeline

logger = logging.getLogger("zbkern")


@dataclass(frozen=True)
class Replanner:
    """For `Pipeline(replanner=)`: measures costs every so often, and plans within the memory of the first schedule.

    every: steps between measurements, the same on all ranks. costs: their `activation` and `held` say what a microbatch
    holds; `Costs()` when None. gain: the least part of the simulated cost that a new schedule must save. time_limit:
    seconds of search, in which all ranks wait. trial: steps of a new schedule after which the one before runs again, if
    their median took longer than that of the steps before; 0 for no trial. Raises TypeError or ValueError for arguments
    out of range.
    """

    every: int
    costs: Costs | None = None
    gain: float = 0.01
    time_limit: float = 1.0
    trial: int = 3

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("trial", 0)):
            steps = getattr(self, name)
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
                raise ValueError(f"Replanner: {name} must be a whole number of steps, at least {least}; got {steps!r}")
        if self.costs is not None and not isinstance(self.costs, Costs):
            got = type(self.costs).__name__
            raise TypeError(f"Replanner: costs must be a zbkern.pipeline.Costs or None; got {got}")
        for name, value in (("gain", self.gain), ("time_limit", self.time_limit)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"Replanner: {name} must be a number, 0 or above; got {value!r}")

    @property
    def _memory(self) -> Costs:
        return Costs() if self.costs is None else self.costs

    def memory_limits(self, schedule: Schedule) -> Sequence[float]:
        """By rank: the most that this schedule holds, in the units of `costs`."""
        return simulate(schedule, self._memory).peak_memory

    def propose(self, timeline: Timeline, limits: Sequence[float]) -> Schedule | None:
        """A schedule that is better for the costs of this step and holds no more than `limits`, by rank; or None."""
        present, costs = timeline.schedule, drift.costs([timeline], self._memory)
        found = plan(
            costs,
            present.stages,
            present.sequences,
            present.chunks,
            present.placement,
            list(limits),
            slices=present.slices,
            options=PlanOptions(time_limit=self.time_limit),
        )
        now = simulate(present, costs).cost
        saved = 1 - found.timeline.cost / now if now > 0 else 0.0
        logger.info(
            "replanning: %s costs %.4g, %s would save %.1f%%", present.name, now, found.schedule.name, 100 * saved
        )
        return found.schedule if saved >= self.gain else None
