"""Which schedule a step has: the pipeline's own, what its rule makes for the batch, or what the step is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.same_bits import check_order
from zbkern.planning.simulation.comparison import with_microbatches
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.program import offloads_or_recomputes
from zbkern.schedules.schedule import Schedule


class StepSchedules:
    """The schedules of one pipeline, all of the same chunks in the same places.

    own: a Schedule, or a rule that makes one for a number of microbatches; of a rule, `first` is what it makes for as
    many microbatches as `ranks`. A published Schedule is its own rule where lists have another number of microbatches.
    fill, options: the pipeline's, which not every schedule goes with.
    """

    def __init__(self, own: Schedule | Callable[[int], Schedule], ranks: int, fill: str, options: StepOptions) -> None:
        self._takes_lists = callable(own)
        rule = own if callable(own) else lambda count: with_microbatches(own, count)
        self._rule: Callable[[int], Schedule | None] = functools.lru_cache(64)(rule)
        self._fill, self._options = fill, options
        self.first = self._checked("Pipeline", own(ranks) if callable(own) else own)

    def choose(self, call: str, chosen: Schedule | None, batch: tuple[Any, ...]) -> Schedule:
        """The schedule of this call. batch: its inputs, targets and side, of which a rule counts the microbatches.

        Raises TypeError, ValueError or ScheduleError where there is none, or it does not fit the pipeline.
        """
        call = f"Pipeline.{call}"
        if chosen is None:
            counts = {len(part) for part in batch if isinstance(part, list)}
            if not self._takes_lists:
                is_split = any(part is not None and not isinstance(part, list) for part in batch[:2])
                if is_split or len(counts) != 1 or self.first.microbatches in counts:
                    return self.first
            if len(counts) != 1:
                raise ValueError(
                    f"{call}: a pipeline whose schedule is a function needs lists of microbatches, all of one length, "
                    f"on every rank, or schedule= on every rank; got lists of {sorted(counts) or 'no'} microbatches"
                )
            chosen = self._rule(*counts)
            if chosen is None:
                return self.first
        schedule = self._checked(call, chosen)
        if schedule.placement != self.first.placement:
            raise ScheduleError(
                f"{call}: schedule must have this pipeline's chunks in the same places, {self.first.placement}; got "
                f"{schedule.placement}"
            )
        return schedule

    def name(self, schedule: Schedule) -> str:
        """What ranks compare: nothing of the pipeline's own schedule, which they compared when it was made."""
        if schedule.checksum == self.first.checksum:
            return ""
        return f" of {schedule.name} with {schedule.microbatches} microbatches ({schedule.checksum:08x})"

    def _checked(self, call: str, schedule: Any) -> Schedule:
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"{call}: schedule must be a Schedule, such as schedules.zb_v(stages, microbatches) or the schedule of "
                f"a Plan, or a function of the number of microbatches that makes one; got {schedule!r:.60}"
            )
        schedule.validate()
        moves_w = self._fill != "planned" or self._options.max_wgrad_bytes is not None
        if moves_w and any(offloads_or_recomputes(row) for row in schedule.actions):
            raise ValueError(
                f'{call}: fill must be "planned" and max_wgrad_bytes None with a schedule that offloads or recomputes '
                f"(R, O, L), whose memory is counted in its own order; got {self._fill!r} and "
                f"{self._options.max_wgrad_bytes}"
            )
        if self._options.same_bits:
            check_order(call, schedule)
        return schedule
