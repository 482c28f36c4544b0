"""The steps that `profile` runs to measure a pipeline, with schedules of their own, and what they show of chunks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern.pipeline.runtime.arguments import device_of, module_list
from zbkern.pipeline.runtime.clock import EventClock
from zbkern.pipeline.runtime.counted_chunk import CountedChunk, tied_names
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.links import measure_links
from zbkern.pipeline.runtime.measured_costs import MeasuredChunk, MeasuredParts, Measurements, largest_message
from zbkern.pipeline.runtime.memory_saving import MemorySavingStage
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.recomputed_parts import names_of_parts
from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.program import merge_neighbours
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.timeline import Timeline
from zbkern.pipeline.transport.base import Transport


@dataclass(frozen=True)
class ProbeSteps:
    """Arguments of the function that measures, under which errors are reported, and of the steps.

    bytes_per_parameter, repeats: as for `profile`. layers: the names of this rank's modules where these are layers,
    whose links are measured, too. The others are as for `Pipeline` and its `step`.
    """

    function: str
    placement: tuple[int, ...]
    loss_fn: Callable[[Any, Any], Tensor] | None
    inputs: Any
    targets: Any
    side: Any
    microbatches: int
    repeats: int
    group: dist.ProcessGroup | Transport | None
    device: torch.device | str | None
    bytes_per_parameter: float | None
    options: StepOptions
    layers: tuple[str, ...] = ()

    def run(self, modules: Iterable[torch.nn.Module]) -> Measurements:
        """Measures this rank's modules with those of the other ranks; collective. Leaves gradients as they were."""
        modules = module_list(self.function, modules)
        device = device_of(self.device, modules)
        names = self.layers or [""] * len(modules)
        counted = [CountedChunk(m, self.side, EventClock(device), n) for m, n in zip(modules, names, strict=True)]

        def loss(output: Any, target: Any) -> Tensor:
            return counted[-1].loss(self.loss_fn, output, target)  # type: ignore[arg-type]

        criterion = None if self.loss_fn is None else loss
        apart = _all_forwards_first(self.placement, self.microbatches)
        with ExitStack() as stack:
            stack.enter_context(_left_as_they_were(counted, device))
            for module in counted:
                stack.enter_context(module.layers_apart())
            pipe = stack.enter_context(Pipeline(counted, apart, criterion, self.group, device, options=self.options))
            if 0 in pipe.modules:
                counted[0].keeps_inputs = True
            separate = self._steps(pipe, apart)
            held = _held_bytes(pipe)
            merged, fused = self._steps(pipe, apart, merge=True), self._steps(pipe, _fused(apart))
            recomputing, parts = None, {}
            if self.options.recompute:
                schedule, stages = self._use_parts(pipe, apart, counted)
                recomputing = self._steps(pipe, schedule)
                parts = {at: MeasuredParts(stage.kept_bytes, stage.output_again_bytes) for at, stage in stages.items()}
            chunks = self._chunks(pipe, counted, held, parts)
            links = None
            if self.layers:
                links = measure_links(self.group, device, pipe.timeout, largest_message(chunks))
        if self.options.recompute and not any(chunk.parts for chunk in chunks):
            raise ValueError(
                f"{self.function}: recompute must name parts of the modules, by patterns of their names or by their "
                f"classes; got {tuple(self.options.recompute)}, which names none"
            )
        return Measurements(chunks, separate, merged, fused, recomputing, links)

    def _steps(self, pipe: Pipeline, schedule: Schedule, merge: bool = False) -> list[Timeline]:
        """Those of `repeats` steps of this schedule, after one to warm up."""
        pipe.queue.merge = merge
        pipe._use_schedule(schedule)
        timelines = []
        for _ in range(1 + self.repeats):
            for parameter in (p for module in pipe.modules.values() for p in module.parameters()):
                parameter.grad = None
            pipe.step(self.inputs, self.targets, self.side)
            timelines.append(_in_milliseconds(pipe.gather_timeline()))
        return timelines[1:]

    def _use_parts(
        self, pipe: Pipeline, schedule: Schedule, counted: Sequence[CountedChunk]
    ) -> tuple[Schedule, dict[int, MemorySavingStage]]:
        """Gives the pipeline stages for the schedule with an R in chunks that have named parts; the stages of these."""
        mine = schedule.chunks_of(pipe.rank)
        inner = {chunk: _by_its_own_name(module) for chunk, module in zip(mine, counted, strict=True)}
        here = [chunk for chunk, module in inner.items() if names_of_parts(module, self.options.recompute)]
        schedule = _recomputing(schedule, {chunk for found in pipe.gather(here) for chunk in found})
        stages = pipe._rebuild_stages(inner, schedule, self.loss_fn, self.options)
        return schedule, {chunk: stages[chunk] for chunk in here}  # type: ignore[misc]

    def _chunks(
        self, pipe: Pipeline, counted: Sequence[CountedChunk], held: dict[int, float], parts: dict[int, MeasuredParts]
    ) -> list[MeasuredChunk]:
        """What is known of all chunks, in model order; collective."""
        known = {}
        for chunk, module, tied in zip(pipe.modules, counted, tied_names(counted, pipe.rank), strict=True):
            within, besides = module.times()
            known[chunk] = MeasuredChunk(
                activation=module.saved_bytes,
                held=held[chunk],
                static=module.static_bytes(self.bytes_per_parameter),
                output=module.output_bytes,
                transfer=module.transfer(self.options.copy_size),
                parts=parts.get(chunk),
                name=module.name,
                tied=tied,
                within=within,
                besides=besides,
            )
        everywhere = {chunk: each for found in pipe.gather(known) for chunk, each in found.items()}
        return [everywhere[chunk] for chunk in range(len(self.placement))]


@contextmanager
def _left_as_they_were(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Gradients and the random state."""
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # by default of all GPUs, with a warning
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _by_its_own_name(counted: CountedChunk) -> torch.nn.Module:
    """The module that is measured, under the name of its layer, unless it has those of the model."""
    whole = not counted.name or hasattr(counted.module, "layer_names")
    return counted.module if whole else _Under(counted.name, counted.module)


class _Under(torch.nn.Module):
    """A layer under its name, which those of its parts begin with."""

    def __init__(self, name: str, layer: torch.nn.Module) -> None:
        super().__init__()
        first, _, rest = name.partition(".")
        self.first = first
        self.add_module(first, _Under(rest, layer) if rest else layer)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._modules[self.first](*inputs, **keywords)  # type: ignore[misc]


def _held_bytes(pipe: Pipeline) -> dict[int, float]:
    """By this rank's chunks, what a microbatch holds between B and W: what the queue frees in all W of a chunk."""
    bytes_after = [sample.pinned for sample in pipe.samples]
    groups = list(merge_neighbours(pipe.schedule.actions[pipe.rank]))
    held = {}
    for group, before, after in zip(groups[1:], bytes_after, bytes_after[1:], strict=False):
        if group[0].kind == "W":
            held[group[0].chunk] = (before - after) / pipe.schedule.microbatches
    return held


def _all_forwards_first(placement: tuple[int, ...], microbatches: int) -> Schedule:
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


def _fused(schedule: Schedule) -> Schedule:
    """The same with BW in the place of every B, and no W."""
    actions = [
        [action._replace(kind="BW") if action.kind == "B" else action for action in row if action.kind != "W"]
        for row in schedule.actions
    ]
    return Schedule.build(actions, schedule.placement, schedule.microbatches, "profile")


def _recomputing(schedule: Schedule, chunks: Container[int]) -> Schedule:
    """The same with an R before every B of these chunks."""
    actions: list[list[Action]] = [[] for _ in schedule.actions]
    for row, found in zip(schedule.actions, actions, strict=True):
        for action in row:
            found += [action._replace(kind="R")] if action.kind == "B" and action.chunk in chunks else []
            found.append(action)
    return Schedule.build(actions, schedule.placement, schedule.microbatches, "profile")


def _in_milliseconds(timeline: Timeline) -> Timeline:
    events = [[e._replace(start=e.start * 1e3, end=e.end * 1e3) for e in row] for row in timeline.events]
    return replace(timeline, events=tuple(tuple(row) for row in events), unit="ms")
