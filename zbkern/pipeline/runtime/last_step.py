"""LastStep: what one asks after a step: when its actions ran, what they held, and how they kept to their plan."""

from __future__ import annotations

import itertools

from zbkern.pipeline.runtime.call import Calls
from zbkern.pipeline.runtime.measure.recorder import Recorded, timeline_of
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.simulation.drift import Drift, compare, in_seconds
from zbkern.planning.simulation.timeline import Sample, Timeline


class LastStep:
    """The last step of a Pipeline, which has made these calls."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._recorder = calls, calls.loop.recorder

    @property
    def timeline(self) -> Timeline:
        """When this rank's actions ran, in seconds since its first; other ranks' rows are empty."""
        schedule = self._calls.loop.schedule
        ranks = [Recorded() for _ in range(schedule.ranks)]
        ranks[self._recorder.rank] = Recorded(self._recorder.events(), copies=self._recorder.copies())
        return timeline_of(schedule, ranks)

    def gather_timeline(self) -> Timeline:
        """That of all ranks on one clock (the ranks of one machine share it), in seconds; collective.

        Where the schedule has R, O or L, `peak_memory` is what microbatches held at most on each rank that has them, in
        bytes.
        """
        return timeline_of(self._calls.loop.schedule, self._calls.gather(self._recorder.recorded()))

    @property
    def samples(self) -> list[Sample]:
        """With record=True: after every action, what the queue and the device's memory held."""
        return self._recorder.samples()

    def drift(self, costs: Costs | None = None, planned: Timeline | None = None) -> Drift:
        """The step of all ranks next to its plan: where the time went; collective.

        costs: what was planned with, in milliseconds, as `profile` gives them; the step's own medians when None.
        planned: for a step of packs, its plan's timeline; a simulation would take a pack for one sequence.
        """
        return compare(self.gather_timeline(), None if costs is None else in_seconds(costs), planned)

    def auxiliary_losses(self) -> dict[str, float]:
        """What modules have added to the loss of the last step, or evaluation, with `add_loss`: {name: value}, over all
        ranks; collective. They are not in what `step` and `evaluate` return.
        """
        totals: dict[str, float] = {}
        stages = self._calls.loop.stages.values()
        for of_stage in itertools.chain(*self._calls.gather([stage.losses.totals() for stage in stages])):
            totals.update({name: totals.get(name, 0.0) + value for name, value in of_stage.items()})
        return totals
