"""Which stage runs a chunk: a plain one, or one that saves memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zbkern.pipeline.runtime.measure.recorder import Recorder
from zbkern.pipeline.runtime.memory.host_copies import CopyLanes
from zbkern.pipeline.runtime.memory.memory_saving import MemorySavingStage
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.slices.sliced_batch import LossFn, adds_up
from zbkern.pipeline.runtime.stage import Stage
from zbkern.schedules.program import offloads_or_recomputes
from zbkern.schedules.schedule import Schedule


def make_stages(
    modules: Mapping[int, torch.nn.Module],
    schedule: Schedule,
    loss_fn: LossFn | None,
    recorder: Recorder,
    options: StepOptions,
    parts: Mapping[int, Mapping[torch.nn.Module, Any]] | None = None,
    counts: bool = False,
) -> dict[int, Stage]:
    """The stage of every chunk of the recorder's rank: one that saves memory where the rank's row has R, O or L, or
    where it is to count it (`counts`). parts: what an R runs again, by chunk; by default what the options name."""
    row, last = schedule.actions[recorder.rank], len(schedule.placement) - 1
    own = {last: loss_fn} if not schedule.is_sliced or adds_up(loss_fn) else {}  # else SequenceLosses computes it
    stages = {chunk: (module, chunk, recorder.queue, own.get(chunk), schedule) for chunk, module in modules.items()}
    if not (counts or offloads_or_recomputes(row)):
        return {chunk: Stage(*stage) for chunk, stage in stages.items()}
    lanes = CopyLanes(recorder.device, recorder.now)
    how: Any = {"row": row, "lanes": lanes, "recorder": recorder, "options": options}
    return {
        chunk: MemorySavingStage(*stage, **how, parts=None if parts is None else parts.get(chunk, {}))
        for chunk, stage in stages.items()
    }
