"""Measures `Costs` and `ModelCosts` on the machine at hand, by running real chunks or layers on their real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern.pipeline.runtime.arguments import device_of, module_list
from zbkern.pipeline.runtime.clock import EventClock
from zbkern.pipeline.runtime.counted_chunk import CountedChunk, static_bytes, tied_names
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.links import slowest_link
from zbkern.pipeline.runtime.measured_costs import MeasuredChunk, MeasuredParts, communication
from zbkern.pipeline.runtime.memory_saving import MemorySavingStage
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.probe_steps import (
    all_forwards_first,
    fused_backwards,
    held_bytes,
    in_milliseconds,
    set_gradients,
    use_parts,
)
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation import drift
from zbkern.pipeline.simulation.costs import COPY_SIZE, Costs
from zbkern.pipeline.simulation.layers import LayerCosts, ModelCosts
from zbkern.pipeline.simulation.timeline import Timeline
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.connect import is_transport
from zbkern.pipeline.transport.local import LocalTransport


def profile(
    modules: Iterable[torch.nn.Module],
    placement: Sequence[int],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    inputs: Any = None,
    targets: Any = None,
    microbatches: int = 4,
    group: dist.ProcessGroup | Transport | None = None,
    device: torch.device | str | None = None,
    repeats: int = 3,
    side: Any = None,
    bytes_per_parameter: float | None = None,
    copy_size: int = COPY_SIZE,
    recompute: Sequence[str | type] = (),
) -> Costs:
    """Costs of this pipeline, the same on every rank: times in milliseconds, memory in bytes; collective.

    modules: this rank's chunks, converted. placement: the rank of each chunk in model order. The others are as for
    `Pipeline` and its `step`, with inputs, targets and side inputs of `microbatches` microbatches. Times are
    medians over microbatches and `repeats` steps after one to warm up, with all ranks busy: of F, B and W apart, of
    fused BW (`split_overhead`), and of W that are merged (`merge_saving`). communication is one number, or one per
    edge where one takes more than twice as long as another. bytes_per_parameter: of a weight, its gradient
    and optimizer states together (`static`), which a rank's memory includes; None for AdamW's two moments, all in the
    weight's dtype. copy_size: that of the `StepOptions` to come; in the costs it is what transfers of these activations
    have, which end with whole tensors. recompute: likewise, the parts of chunks that an R runs again, for the time of
    R and what an F keeps; else an R is a whole F, which keeps what it is given. In a chunk without such a part there is
    nothing to recompute. Gradients and the random state are left as they were; buffers that a forward updates (running
    statistics) are not. Under tensor parallelism, memory is that of this rank's part, and every pipeline measures times
    of its own: give all of them the schedule planned for one. Raises TypeError or ValueError as a `Pipeline` does.
    """
    _check("profile", placement, microbatches, repeats, bytes_per_parameter)
    options = StepOptions(record=True, copy_size=copy_size, recompute=recompute)
    group = _group(group) if len({*placement}) == 1 else group
    arguments = loss_fn, inputs, targets, side, microbatches, group, device, repeats, bytes_per_parameter
    return _measured("profile", modules, tuple(placement), *arguments, (), options)[0]


def profile_layers(
    layers: Mapping[str, torch.nn.Module],
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    inputs: Any = None,
    targets: Any = None,
    microbatches: int = 4,
    group: dist.ProcessGroup | Transport | None = None,
    device: torch.device | str | None = None,
    repeats: int = 3,
    side: Any = None,
    bytes_per_parameter: float | None = None,
    recompute: Sequence[str | type] = (),
) -> ModelCosts:
    """Costs of every layer, from which `plan` cuts the model into chunks; the same on every rank; collective.

    layers: this rank's, by name, converted: each takes what the one before returns, across ranks, too, so that ranks
    hold any cut of the model; with one rank, all layers. The others are as for `profile`, targets and loss_fn for the
    rank of the last layer. latency and bandwidth are those of the slowest link between ranks that follow each other,
    from messages of one number and of the size that the layers send; without a second rank there is no link to measure,
    and messages take no time. forward_overhead is what a forward of one of `layer_chunks` takes besides its layer; the
    layers' times do not have it. Layers are tied (`LayerCosts.tied`) that declare a shared parameter, as `layer_chunks`
    do, on whichever ranks they are, or that share one on a rank. recompute: parts as for `profile`, which may be whole
    layers: their names here begin with the layer's own, unless the layer is one of `layer_chunks`, which have those of
    the model. For a model of the transformers library `layer_chunks` makes the layers. Raises TypeError or ValueError
    as `profile` does.
    """
    if not isinstance(layers, Mapping) or not layers:
        raise TypeError(
            f"profile_layers: layers must be a mapping with the module of every name, such as dict(model."
            f"named_children()); got {type(layers).__name__}"
        )
    group = _group(group)
    if is_transport(group):
        counts = group.gather(len(layers))
    else:
        counts = [0] * dist.get_world_size(group)
        dist.all_gather_object(counts, len(layers), group)
    placement = tuple(rank for rank, count in enumerate(counts) for _ in range(count))
    _check("profile_layers", placement, microbatches, repeats, bytes_per_parameter)
    arguments = loss_fn, inputs, targets, side, microbatches, group, device, repeats, bytes_per_parameter
    options, names = StepOptions(record=True, recompute=recompute), tuple(layers)
    costs, details, link = _measured("profile_layers", layers.values(), placement, *arguments, names, options)
    flat = costs.per_chunk(len(placement))
    found = tuple(
        LayerCosts(
            details[chunk].name,
            max(details[chunk].within, flat.forward[chunk] - details[chunk].besides),
            flat.backward[chunk],
            flat.weight[chunk],
            flat.activation[chunk],
            flat.held[chunk],
            max(0.0, flat.backward[chunk] + flat.weight[chunk] - flat.fused[chunk]),
            flat.merge_saving[chunk],
            details[chunk].output,
            flat.static[chunk],
            details[chunk].tied,
        )
        for chunk in range(len(placement))
    )
    if recompute and flat.checkpoint is not None:
        found = tuple(
            replace(layer, recompute=time, checkpoint=kept, output_again=chunk.parts.output if chunk.parts else 0)
            for layer, time, kept, chunk in zip(found, flat.recompute, flat.checkpoint, details, strict=True)
        )
    overhead = median(chunk.besides for chunk in details)
    size = costs.copy_size
    return ModelCosts(found, *link, "ms", "bytes", copy_size=size, forward_overhead=overhead)


def _group(group: dist.ProcessGroup | Transport | None) -> dist.ProcessGroup | Transport | None:
    """One process alone needs no torch.distributed."""
    alone = group is None and not (dist.is_available() and dist.is_initialized())
    return LocalTransport.ring(1)[0] if alone else group


def _measured(
    function: str,
    modules: Iterable[torch.nn.Module],
    placement: tuple[int, ...],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    inputs: Any,
    targets: Any,
    side: Any,
    microbatches: int,
    group: dist.ProcessGroup | Transport | None,
    device: torch.device | str | None,
    repeats: int,
    bytes_per_parameter: float | None,
    names: Sequence[str],
    options: StepOptions,
) -> tuple[Costs, list[MeasuredChunk], tuple[float, float]]:
    """Costs of the chunks, what their ranks know of them, and latency and bandwidth in ms and bytes per ms."""
    modules = module_list(function, modules)
    target = device_of(device, modules)
    counted = [CountedChunk(module, side, EventClock(target)) for module in modules]
    apart = all_forwards_first(placement, microbatches)
    parameters = [p for module in counted for p in module.parameters()]
    gradients = [p.grad for p in parameters]

    def loss(output: Any, target: Any) -> Tensor:
        return counted[-1].loss(loss_fn, output, target)  # type: ignore[arg-type]

    here = [target] if target.type == "cuda" else []  # by default of all GPUs, with a warning
    criterion = None if loss_fn is None else loss
    with ExitStack() as stack:
        stack.callback(set_gradients, parameters, gradients)
        for module in counted:
            stack.enter_context(module.layers_apart())
        stack.enter_context(torch.random.fork_rng(here))
        pipe = stack.enter_context(Pipeline(counted, apart, criterion, group, target, options=options))
        if 0 in pipe.modules:
            counted[0].keeps_inputs = True

        def steps(schedule: Schedule, merge: bool) -> list[Timeline]:
            pipe.queue.merge = merge
            pipe._use(schedule)
            timelines = []
            for _ in range(1 + repeats):
                for parameter in parameters:
                    parameter.grad = None
                pipe.step(inputs, targets, side)
                timelines.append(in_milliseconds(pipe.gather_timeline()))
            return timelines[1:]

        separate = steps(apart, False)
        mine = apart.chunks_of(pipe.rank)
        held = held_bytes(pipe, microbatches)
        merged, fused = steps(apart, True), steps(fused_backwards(apart), False)
        recomputed: dict[int, MemorySavingStage] = {}
        again = separate
        if options.recompute:
            schedule, recomputed = use_parts(pipe, apart, counted, names, loss_fn, options)
            again = steps(schedule, False)
        static = static_bytes(counted, bytes_per_parameter)
        tied = tied_names(counted, pipe.rank)
        known = {
            chunk: MeasuredChunk(
                *(module.saved_bytes, held[chunk], static[at], module.output_bytes, module.transfer(options.copy_size)),
                *(MeasuredParts.of(recomputed.get(chunk)), name, tied[at], *module.times()),
            )
            for at, (chunk, module, name) in enumerate(zip(mine, counted, names or [""] * len(mine), strict=True))
        }
        details = {chunk: each for found in pipe.gather(known) for chunk, each in found.items()}
        chunks = [details[chunk] for chunk in range(len(placement))]
        link = slowest_link(pipe, [chunk.output for chunk in chunks]) if names else (0.0, math.inf)
    times = drift.costs(separate)
    flat, one, several = (drift.costs(each).per_chunk(len(placement)) for each in (separate, fused, merged))
    whole = [b + w for b, w in zip(one.backward, one.weight, strict=True)]  # of a BW
    overhead = [max(0.0, b + w - bw) for b, w, bw in zip(flat.backward, flat.weight, whole, strict=True)]
    # of m W in a row, m - 1 follow another one
    share = microbatches / max(1, microbatches - 1)
    saving = [min(w, max(0.0, w - each) * share) for w, each in zip(flat.weight, several.weight, strict=True)]
    costs = replace(
        times,
        communication=communication(separate, len(placement)),
        activation=[chunk.activation for chunk in chunks],
        held=[chunk.held for chunk in chunks],
        static=[chunk.static for chunk in chunks],
        checkpoint=[0, *(chunk.output for chunk in chunks[:-1])],
        split_overhead=overhead,
        merge_saving=saving,
        copy_size=max(chunk.transfer for chunk in chunks),
        memory_unit="bytes",
    )
    if options.recompute:
        lengths = drift.costs(again).per_chunk(len(placement)).recompute
        if not any(chunk.parts for chunk in chunks):
            raise ValueError(
                f"{function}: recompute must name parts of the modules, by patterns of their names or by their "
                f"classes; got {tuple(options.recompute)}, which names none"
            )
        costs = replace(
            costs,
            recompute=[length if chunk.parts else 0.0 for length, chunk in zip(lengths, chunks, strict=True)],
            checkpoint=[
                min(chunk.parts.kept, chunk.activation) if chunk.parts else chunk.activation for chunk in chunks
            ],
        )
    return costs, chunks, link


def _check(
    function: str, placement: Sequence[int], microbatches: int, repeats: int, bytes_per_parameter: float | None
) -> None:
    ranks = placement if isinstance(placement, Sequence) and not isinstance(placement, str) else [None]
    if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise TypeError(
            f"{function}: placement must be a list of ranks, one per chunk in model order; got {placement!r}"
        )
    for name, value in (("microbatches", microbatches), ("repeats", repeats)):
        if not isinstance(value, int):
            raise TypeError(f"{function}: {name} must be an int; got {value!r}")
        if value < 1:
            raise ValueError(f"{function}: {name} must be at least 1; got {value}")
    if bytes_per_parameter is not None and not isinstance(bytes_per_parameter, (int, float)):
        raise TypeError(f"{function}: bytes_per_parameter must be a number or None; got {bytes_per_parameter!r}")
