"""Measures `Costs` and `ModelCosts` on the machine at hand, by running real chunks or layers on their real ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.arguments import device_of, module_list
from zbkern.pipeline.runtime.clock import EventClock
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.links import slowest_link
from zbkern.pipeline.runtime.memory_saving import MemorySavingStage, make_stages
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.recomputed_parts import names_of_parts
from zbkern.pipeline.runtime.storages import Resident, key, keys, parts
from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.program import merge_neighbours
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


class _Parts(NamedTuple):
    """Bytes that an F keeps with an R of named parts, and how much of the chunk's output that R computes again."""

    kept: int
    output: int

    @classmethod
    def of(cls, stage: MemorySavingStage | None) -> _Parts | None:
        return None if stage is None else cls(stage.kept_bytes, stage.output_again_bytes)


class _Chunk(NamedTuple):
    """What a chunk's rank knows of it: bytes, the name of a layer, and of what it shares with others; times."""

    activation: int
    held: float
    static: float
    output: int
    transfer: float
    parts: _Parts | None  # None where it has none of those that an R runs again
    name: str
    tied: str | None
    within: float  # ms of a forward in its layers, and besides them
    besides: float

    @property
    def kept(self) -> int:
        """By an F with an R of named parts."""
        return self.activation if self.parts is None else min(self.activation, self.parts.kept)


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
) -> tuple[Costs, list[_Chunk], tuple[float, float]]:
    """Costs of the chunks, what their ranks know of them, and latency and bandwidth in ms and bytes per ms."""
    modules = module_list(function, modules)
    target = device_of(device, modules)
    counted = [_Counted(module, side, EventClock(target)) for module in modules]
    apart = _all_forwards_first(placement, microbatches)
    parameters = [p for module in counted for p in module.parameters()]
    gradients = [p.grad for p in parameters]

    def loss(output: Any, target: Any) -> Tensor:
        return counted[-1].loss(loss_fn, output, target)  # type: ignore[arg-type]

    here = [target] if target.type == "cuda" else []  # by default of all GPUs, with a warning
    criterion = None if loss_fn is None else loss
    with ExitStack() as stack:
        stack.callback(_set_gradients, parameters, gradients)
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
                timelines.append(_in_milliseconds(pipe.gather_timeline()))
            return timelines[1:]

        separate = steps(apart, False)
        mine = apart.chunks_of(pipe.rank)
        held = _held_bytes(pipe, microbatches)
        merged, fused = steps(apart, True), steps(_fused(apart), False)
        recomputed: dict[int, MemorySavingStage] = {}
        again = separate
        if options.recompute:
            schedule, recomputed = _use_parts(pipe, apart, counted, names, loss_fn, options)
            again = steps(schedule, False)
        static = _static_bytes(counted, bytes_per_parameter)
        tied = _tied_names(counted, pipe.rank)
        known = {
            chunk: _Chunk(
                *(module.saved_bytes, held[chunk], static[at], module.output_bytes, module.transfer(options.copy_size)),
                *(_Parts.of(recomputed.get(chunk)), name, tied[at], *module.times()),
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
        communication=_communication(separate, len(placement)),
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


def _set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _communication(timelines: Sequence[Timeline], chunks: int) -> float | list[float]:
    """The least time over all edges where they are alike, which noise only adds to; else one per edge."""
    hops = drift.hops(timelines)
    least = min(hops.values(), default=0.0)
    if max(hops.values(), default=0.0) <= 2 * least:
        return least
    return [hops.get(edge, least) for edge in range(chunks - 1)]


def _held_bytes(pipe: Pipeline, microbatches: int) -> dict[int, float]:
    """By this rank's chunks, what a microbatch holds between B and W: what the queue frees in all W of a chunk."""
    bytes_after = [sample.pinned for sample in pipe.samples]
    groups = list(merge_neighbours(pipe.schedule.actions[pipe.rank]))
    held = {}
    for group, before, after in zip(groups[1:], bytes_after, bytes_after[1:], strict=False):
        if group[0].kind == "W":
            held[group[0].chunk] = (before - after) / microbatches
    return held


def _static_bytes(modules: Sequence[torch.nn.Module], bytes_per_parameter: float | None) -> list[float]:
    found = []
    for module in modules:
        each = bytes_per_parameter
        weights = sum(p.numel() * (4 * p.element_size() if each is None else each) for p in module.parameters())
        found.append(weights + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()))
    return found


def _tied_names(modules: Sequence[torch.nn.Module], rank: int) -> list[str | None]:
    """By module, one name for those that share a parameter: the declared one, on whichever rank the others are."""
    declared = [dict(getattr(module, "tied_parameters", {})) for module in modules]
    owners: dict[int, list[int]] = {}
    for at, module in enumerate(modules):
        for parameter in module.parameters():
            owners.setdefault(id(parameter), []).append(at)
    shared = [found for found in owners.values() if len(found) > 1]
    here = [next((f"rank {rank}: {found[0]}" for found in shared if at in found), None) for at in range(len(modules))]
    return [next(iter(names), own) for names, own in zip(declared, here, strict=True)]


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


def _use_parts(
    pipe: Pipeline,
    schedule: Schedule,
    counted: Sequence[_Counted],
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
    schedule = _recomputing(schedule, {chunk for found in pipe.gather(here) for chunk in found})
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


def _in_milliseconds(timeline: Timeline) -> Timeline:
    events = [[e._replace(start=e.start * 1e3, end=e.end * 1e3) for e in row] for row in timeline.events]
    return replace(timeline, events=tuple(tuple(row) for row in events), unit="ms")


class _Saved:
    """A tensor that autograd has saved, and that lives as long as the graph has it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Counted(torch.nn.Module):
    """A chunk whose first forward counts the bytes that live until its backward, every storage once.

    They are what autograd saves, in the loss, too, and the inputs that came in a message; not what stays anyway:
    parameters, buffers, side inputs, and on the first and last chunk the batch.
    """

    def __init__(self, module: torch.nn.Module, side: Any, clock: EventClock) -> None:
        super().__init__()
        self._clock = clock
        self._marks: list[Any] = []  # of the forward that runs: it begins, its first layer does, its last one ends
        self._forwards: list[tuple[Any, ...]] = []  # those of all forwards, and their ends
        self.module = module
        self.tied_parameters = getattr(module, "tied_parameters", {})
        self.keeps_inputs = False
        self.output_bytes = 0  # of one microbatch
        self._calls = 0
        self._packed: list[weakref.ref[_Saved]] = []
        self._storages: dict[int, int] = {}
        given = [leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, Tensor)]  # microbatches are views of it
        self._resident = Resident(module, given)
        self._kept: set[int] = set()

    @property
    def saved_bytes(self) -> int:
        """What one microbatch holds from F to B."""
        return sum(self._saved())

    def transfer(self, copy_size: int) -> float:
        """Bytes of a transfer to the host that begins once copy_size have been saved: the mean of two neighbours, those
        that are largest."""
        transfers = [0]
        for size in self._saved():
            if transfers[-1] >= copy_size:
                transfers.append(0)
            transfers[-1] += size
        return max([copy_size, *(sum(pair) / 2 for pair in pairwise(transfers))])

    def _saved(self) -> list[int]:
        """Bytes of every storage, in the order in which they were saved."""
        return [size for storage, size in self._storages.items() if storage not in self._kept]

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._calls += 1
        for leaf in pytree.tree_leaves((inputs, keywords)):
            if isinstance(leaf, Tensor):
                self._keep(leaf) if self.keeps_inputs else self._count(leaf)
        self._marks = [self._clock.now()]
        with self._counting():
            output = self.module(*inputs, **keywords)
        self._mark()
        self._forwards.append(tuple(self._marks))
        self._count_saved()
        if self._calls == 1:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            self.output_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return output

    def _mark(self, *_: Any) -> None:
        self._marks.append(self._clock.now())

    def times(self) -> tuple[float, float]:
        """Milliseconds of a forward in its layers and besides them, medians; zeros where it has nothing else."""
        four = [[self._clock.seconds(mark) for mark in marks] for marks in self._forwards if len(marks) == 4]
        if not four:
            return 0.0, 0.0
        within = median(left - entered for _, entered, left, _ in four)
        return 1e3 * within, 1e3 * median(end - begin - (left - entered) for begin, entered, left, end in four)

    @contextmanager
    def layers_apart(self) -> Iterator[None]:
        """Marks where the layers of a part of a model begin and end, which computes more than these."""
        hooks = []
        if layers := getattr(self.module, "layer_names", None):
            hooks.append(self.module.get_submodule(layers[0]).register_forward_pre_hook(self._mark))
            hooks.append(self.module.get_submodule(layers[-1]).register_forward_hook(self._mark))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Tensor:
        for leaf in pytree.tree_leaves(target):
            if isinstance(leaf, Tensor):
                self._keep(leaf)
        with self._counting():
            value = loss_fn(output, target)
        self._count_saved()
        return value

    def _counting(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor)

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        if self._calls == 1:
            self._packed.append(weakref.ref(saved))
        return saved

    def _count_saved(self) -> None:
        """Counts what the graph still holds: of parts of it that lead to no output, nothing."""
        packed, self._packed = self._packed, []
        for reference in packed:
            if (saved := reference()) is not None:
                self._count(saved.tensor)

    def _count(self, tensor: Tensor) -> None:
        if self._calls == 1:
            for part in parts(tensor):
                if key(part) not in self._resident:
                    self._storages[key(part)] = part.untyped_storage().nbytes()

    def _keep(self, tensor: Tensor) -> None:
        self._kept |= keys([tensor])
