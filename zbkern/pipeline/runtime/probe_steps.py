"""The steps that `profile` runs to measure a pipeline: their schedules, and what a step of each has shown."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.runtime.counted_chunk import CountedChunk
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.memory_saving import MemorySavingStage, make_stages
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.recomputed_parts import names_of_parts
from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.program import merge_neighbours
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.timeline import Timeline


def all_forwards_first(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """All F, then all B, then all W: no rank waits inside a pass, and each first pass shows the latency of its edge."""
    actions: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    pairs = [(chunk, microbatch) for chunk in range(len(placement)) for microbatch in range(microbatches)]
    last = len(placement) - 1
    for chunk, microbatch in sorted(pairs, key=lambda pair: (pair[0] + pair[1], pair[0])):
        actions[placement[chunk]].append(Action("F", chunk, microbatch))
    for chunk, microbatch in sorted(pairs, key=lambda pair: (last - pair[0] + pair[1], -pair[0])):
        actions[placement[chunk]].append(Action("B", chunk, microbatch))
    for chunk, microbatch in pairs:
        actions[placement[chunk]].append(Action("W", chunk, microbatch))
    return Schedule.build(actions, placement, microbatches, "profile")


def fused_backwards(schedule: Schedule) -> Schedule:
    """The same with BW in the place of every B, and no W."""
    actions = [
        [action._replace(kind="BW") if action.kind == "B" else action for action in row if action.kind != "W"]
        for row in schedule.actions
    ]
    return Schedule.build(actions, schedule.placement, schedule.microbatches, "profile")


def recomputing(schedule: Schedule, chunks: Container[int]) -> Schedule:
    """The same with an R before every B of these chunks."""
    actions: list[list[Action]] = [[] for _ in schedule.actions]
    for row, found in zip(schedule.actions, actions, strict=True):
        for action in row:
            found += [action._replace(kind="R")] if action.kind == "B" and action.chunk in chunks else []
            found.append(action)
    return Schedule.build(actions, schedule.placement, schedule.microbatches, "profile")


def use_parts(
    pipe: Pipeline,
    schedule: Schedule,
    counted: Sequence[CountedChunk],
    names: Sequence[str],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    options: StepOptions,
) -> tuple[Schedule, dict[int, MemorySavingStage]]:
    """Gives the pipeline stages for the schedule with an R in chunks that have named parts; the stages of these."""
    mine = schedule.chunks_of(pipe.rank)
    inner = {chunk: module.module for chunk, module in zip(mine, counted, strict=True)}  # by their own names
    for chunk, name in zip(mine, names, strict=False):
        if not hasattr(inner[chunk], "layer_names"):
            inner[chunk] = _Under(name, inner[chunk])
    here = [chunk for chunk, module in inner.items() if names_of_parts(module, options.recompute)]
    schedule = recomputing(schedule, {chunk for found in pipe.gather(here) for chunk in found})
    pipe._stages = make_stages(inner, schedule, pipe.rank, loss_fn, pipe.queue, pipe._recorder, options)
    return schedule, {chunk: pipe._stages[chunk] for chunk in here}  # type: ignore[misc]


class _Under(torch.nn.Module):
    """A layer under its name, which those of its parts begin with."""

    def __init__(self, name: str, layer: torch.nn.Module) -> None:
        super().__init__()
        first, _, rest = name.partition(".")
        self.first = first
        self.add_module(first, _Under(rest, layer) if rest else layer)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._modules[self.first](*inputs, **keywords)  # type: ignore[misc]


def held_bytes(pipe: Pipeline, microbatches: int) -> dict[int, float]:
    """By this rank's chunks, what a microbatch holds between B and W: what the queue frees in all W of a chunk."""
    bytes_after = [sample.pinned for sample in pipe.samples]
    groups = list(merge_neighbours(pipe.schedule.actions[pipe.rank]))
    held = {}
    for group, before, after in zip(groups[1:], bytes_after, bytes_after[1:], strict=False):
        if group[0].kind == "W":
            held[group[0].chunk] = (before - after) / microbatches
    return held


def in_milliseconds(timeline: Timeline) -> Timeline:
    events = [[e._replace(start=e.start * 1e3, end=e.end * 1e3) for e in row] for row in timeline.events]
    return replace(timeline, events=tuple(tuple(row) for row in events), unit="ms")


def set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
