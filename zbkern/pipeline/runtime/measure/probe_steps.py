"""The steps that `profile` runs to measure a pipeline, with schedules of their own, and what they show of chunks."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbkern.pipeline.runtime.arguments import device_of, module_list
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.forward_state import left_as_they_were
from zbkern.pipeline.runtime.measure.clock import EventClock
from zbkern.pipeline.runtime.measure.links import slowest_link
from zbkern.pipeline.runtime.measure.measured_costs import SLICES, MeasuredChunk, Measurements
from zbkern.pipeline.runtime.measure.network import NetworkWatch
from zbkern.pipeline.runtime.memory.ledger import Ledger
from zbkern.pipeline.runtime.memory.recomputation import Parts, parts_of
from zbkern.pipeline.runtime.options import ProfileOptions, StepOptions
from zbkern.pipeline.runtime.slices.sliced_batch import ENDS, LossFn, check_sliceable, length_of, lengths_of_pack
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.planning.simulation import step_costs
from zbkern.planning.simulation.timeline import Timeline, rescaled
from zbkern.schedules.actions import Action, check_count
from zbkern.schedules.program import merge_neighbours
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.slices import order_of_backward

logger = logging.getLogger("zbkern")

STEADY = 0.1  # no more steps where the quartiles of each pass's times are this near to each other
_NOTHING = nullcontext()
PATIENCE = 4  # times as many steps at most
_WHICH_LAYER = {"idx", "index", "layer_id", "layer_idx", "number", "zbkern_name"}  # attributes, in any library


class _Kind(NamedTuple):
    """A kind of steps: their schedule, whether all W of a chunk run at once, and what counts memory."""

    schedule: Schedule
    merge: bool = False
    ledger: Ledger | None = None
    network: NetworkWatch | None = None
    packs: tuple[Any, Any] | None = None  # inputs and side inputs in the place of those of the batch


@dataclass(frozen=True)
class ProbeSteps:
    """How to measure: function is the one that does, under which errors are reported; batch: inputs, targets and side
    inputs of a step; the others are as for it.

    Raises TypeError or ValueError for microbatches that are no number of them.
    """

    function: str
    batch: tuple[Any, Any, Any]
    microbatches: int
    loss_fn: LossFn | None
    group: dist.ProcessGroup | Transport | None
    device: torch.device | str | None
    options: ProfileOptions

    def __post_init__(self) -> None:
        check_count(f"{self.function}: microbatches", self.microbatches)

    def run(
        self,
        modules: torch.nn.Module | Iterable[torch.nn.Module],
        placement: tuple[int, ...],
        layers: tuple[str, ...] = (),
    ) -> Measurements:
        """Measures this rank's modules with those of the other ranks; collective. Leaves gradients as they were.

        layers: the names of the modules where these are layers, between which messages are measured, too.
        """
        modules = module_list(self.function, modules)
        device = device_of(self.device, modules)
        watches = [_ForwardWatch(module, EventClock(device)) for module in modules]
        apart = _all_forwards_first(placement, self.microbatches)
        with ExitStack() as stack:
            stack.enter_context(left_as_they_were(modules, device))
            for watch in watches:
                stack.enter_context(watch.watching())
            record = StepOptions(record=True)
            pipe = stack.enter_context(Pipeline(modules, apart, self.loss_fn, self.group, device, options=record))
            counting, network = self._ledger(pipe), NetworkWatch(pipe._calls.loop.recorder)
            self._step(pipe, _Kind(apart, ledger=counting))
            held_bytes, held = counting.kept_sizes, _held_bytes(pipe)
            packs = self._packs(pipe)
            kinds = self._kinds(pipe, layers, network, packs is not None)
            timelines = self._in_turn(pipe, kinds)
            again = (kinds["recomputing"].ledger if "recomputing" in kinds else None) or counting
            known: dict[int, MeasuredChunk] = {}
            for chunk, watch, tied in zip(pipe.modules, watches, _tied_names(modules, pipe.rank), strict=True):
                within, besides = watch.times()
                activation, recomputes = sum(held_bytes[chunk]), chunk in again.output_again_bytes
                carries = pipe._calls.loop.stages[chunk].carries  # of the steps in slices, the last ones, if any
                known[chunk] = MeasuredChunk(
                    activation=activation,
                    held=held[chunk],
                    static=_static_bytes(watch.module, self.options.bytes_per_parameter),
                    output=watch.output_bytes,
                    transfer=_transfer_bytes(held_bytes[chunk], self.options.copy_size),
                    recomputes=recomputes,
                    kept=min(activation, sum(again.kept_sizes[chunk])) if recomputes else activation,
                    output_again=again.output_again_bytes[chunk] if recomputes else 0,
                    name=layers[len(known)] if layers else "",
                    tied=tied,
                    within=within,
                    besides=besides,
                    kind=_kind(watch.module),
                    carried=carries.nbytes_of_one,
                    carried_gradients=carries.gradient_nbytes_of_one,
                    tokens=length_of(self.batch[0]),
                    network_forward=network.medians("F", chunk)[0],
                    network_backward=network.medians("B", chunk)[0],
                    collectives=max(network.medians(kind, chunk)[1] for kind in "FB"),
                )
            everywhere = {chunk: one for of_rank in pipe.gather(known) for chunk, one in of_rank.items()}
            chunks = [everywhere[chunk] for chunk in range(len(placement))]
            largest = max((chunk.output for chunk in chunks[:-1]), default=0)
            link = slowest_link(pipe._calls.transport, device, pipe._calls.timeout, largest) if layers else None
        return Measurements(chunks, link, **timelines, packs=packs)

    def _kinds(self, pipe: Pipeline, layers: Sequence[str], network: NetworkWatch, packed: bool) -> dict[str, _Kind]:
        """The steps that are timed."""
        kinds = {
            "separate": _Kind(pipe.schedule, network=network),
            "merged": _Kind(pipe.schedule, merge=True),
            "fused": _Kind(_changed(pipe.schedule, _fused)),
            **self._recomputing(pipe, layers),
            **self._sliced(pipe),
        }
        return {**kinds, "packed": _Kind(pipe.schedule, packs=self.options.packs)} if packed else kinds

    def _in_turn(self, pipe: Pipeline, kinds: Mapping[str, _Kind]) -> dict[str, list[Timeline]]:
        """The timelines of `repeats` steps of each kind, after one to warm up; of more while their times differ.

        Kinds take turns, so that what slows the machine for a while does not look like a difference between them.
        """
        found: dict[str, list[Timeline]] = {name: [] for name in kinds}

        def differ() -> bool:  # replicas communicate in a step: all take as many
            return pipe._calls.on_any_replica(any(step_costs.spread(each[1:]) > STEADY for each in found.values()))

        repeats, turns = self.options.repeats, 0
        while turns <= repeats or (turns <= PATIENCE * repeats and differ()):
            for name, kind in kinds.items():
                found[name].append(self._step(pipe, kind))
            turns += 1
        timed = {name: each[1:] for name, each in found.items()}
        if pipe.rank == 0:
            self._warn_of_noise(max(map(step_costs.spread, timed.values())))
        return timed

    def _step(self, pipe: Pipeline, kind: _Kind) -> Timeline:
        for parameter in (p for module in pipe.modules.values() for p in module.parameters()):
            parameter.grad = None
        pipe.queue.merge = kind.merge
        pipe._calls.loop.use_ledger(kind.ledger)
        with _NOTHING if kind.network is None else kind.network.watching():
            inputs, targets, side = self.batch
            if kind.packs is not None:
                inputs, side = kind.packs
            pipe.step(inputs, targets, side, schedule=kind.schedule)
        return rescaled(pipe.last.gather_timeline(), 1e3, "ms")

    def _warn_of_noise(self, spread: float) -> None:
        if spread > STEADY:
            more = PATIENCE * self.options.repeats
            logger.warning(
                f"{self.function}: after {more} steps the middle half of the times of one pass still spreads over "
                f"{spread:.0%} of their median; plans for these costs may not keep what they promise. Close other "
                f"programs on these machines, or measure more steps: options=ProfileOptions(repeats={2 * more})"
            )

    def _recomputing(self, pipe: Pipeline, layers: Sequence[str]) -> dict[str, _Kind]:
        """Steps with an R in chunks that have named parts; none where none are named."""
        named = self.options.recompute
        if not named:
            return {}
        parts = {}
        for index, (chunk, module) in enumerate(pipe.modules.items()):
            of_model = not layers or hasattr(module, "layer_names")  # the names of its parts are whole
            if named_in_chunk := parts_of(module, named, "" if of_model else layers[index]):
                parts[chunk] = named_in_chunk
        again = {chunk for chunks in pipe.gather([*parts]) for chunk in chunks}
        if not again:
            raise ValueError(
                f"{self.function}: recompute must name parts of the modules, by patterns of their names or by their "
                f"classes; got {tuple(named)}, which names none"
            )
        count = pipe.schedule.microbatches
        before = {Action("B", at, each): Action("R", at, each) for at in again for each in range(count)}
        schedule = _changed(pipe.schedule, lambda each: [before[each], each] if each in before else [each])
        return {"recomputing": _Kind(schedule, ledger=self._ledger(pipe, parts))}

    def _sliced(self, pipe: Pipeline) -> dict[str, _Kind]:
        """Steps with every sequence in slices; none where not asked."""
        if not self.options.slices:
            return {}
        check_sliceable(pipe.modules.values())
        tokens = max(each or 0 for each in pipe.gather(length_of(self.batch[0])))
        slices = SLICES if tokens >= sum(SLICES) else (1, 1)
        return {"sliced": _Kind(_all_forwards_first(pipe.schedule.placement, self.microbatches, slices))}

    def _packs(self, pipe: Pipeline) -> list[list[int]] | None:
        """The lengths of the sequences in each row of the packs, None where none were asked for."""
        if self.options.packs is None:
            return None
        found = [lengths for side in self.options.packs[1] or () if len(lengths := lengths_of_pack(side)) > 1]
        everywhere = [each for each in pipe.gather(found) if each]
        if not everywhere:
            names = ", ".join(sorted(ENDS))
            raise ValueError(
                f"{self.function}: packs must have side inputs of each row, with the ends of its sequences by one of "
                f"the names {names}; got none (as_packs makes such)"
            )
        return everywhere[0]

    def _ledger(self, pipe: Pipeline, parts: Mapping[int, Parts] | None = None) -> Ledger:
        """parts: as for it."""
        return Ledger(pipe.modules, pipe._calls.loop.recorder, StepOptions(copy_size=self.options.copy_size), parts)


class _ForwardWatch:
    """Notes the bytes of a chunk's output, and how long its forwards take in its layers and besides them."""

    def __init__(self, module: torch.nn.Module, clock: EventClock) -> None:
        self.module = module
        self.output_bytes = 0  # of one microbatch
        self._clock = clock
        self._forwards: list[list[Any]] = []  # marks: it begins, its first layer does, its last one ends, it ends

    @contextmanager
    def watching(self) -> Iterator[None]:
        layers = getattr(self.module, "layer_names", None)
        hooks = [self.module.register_forward_pre_hook(lambda *_: self._forwards.append([self._clock.now()]))]
        if layers:
            hooks.append(self.module.get_submodule(layers[0]).register_forward_pre_hook(self._mark))
            hooks.append(self.module.get_submodule(layers[-1]).register_forward_hook(self._mark))
        hooks.append(self.module.register_forward_hook(self._end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def times(self) -> tuple[float, float]:
        """Milliseconds of a forward in its layers and besides them, medians; zeros where it has nothing else."""
        four = [[self._clock.seconds(mark) for mark in marks] for marks in self._forwards if len(marks) == 4]
        if not four:
            return 0.0, 0.0
        within = median(left - entered for _, entered, left, _ in four)
        return 1e3 * within, 1e3 * median(end - begin - (left - entered) for begin, entered, left, end in four)

    def _mark(self, *_: Any) -> None:
        self._forwards[-1].append(self._clock.now())

    def _end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._mark()
        self.output_bytes = sum(leaf.numel() * leaf.element_size() for leaf in tensors_in(output))


def _kind(module: torch.nn.Module) -> int:
    """A checksum that is the same for layers that do the same work, in all processes.

    It is of the classes of their parts, with their settings and parameters. Placeholders in a chunk of a model do not
    count.
    """
    layers = []
    for name in getattr(module, "layer_names", [""]):
        for part in module.get_submodule(name).modules():
            settings = {k: v for k, v in vars(part).items() if isinstance(v, (int, float, str, tuple))}
            shapes = [(*p.shape, p.dtype, p.requires_grad) for p in part.parameters(recurse=False)]
            plain = sorted((k, repr(v)) for k, v in settings.items() if k not in _WHICH_LAYER)
            layers.append((type(part).__qualname__, plain, shapes))
    return zlib.crc32(repr(layers).encode())


def _static_bytes(module: torch.nn.Module, bytes_per_parameter: float | None) -> float:
    """Bytes that stay: so many for every parameter, by default weight, gradient and two moments; and the buffers."""
    each = bytes_per_parameter
    weights = sum(p.numel() * (4 * p.element_size() if each is None else each) for p in module.parameters())
    return weights + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


def _transfer_bytes(sizes: Sequence[int], copy_size: int) -> float:
    """Bytes of a transfer to the host that begins once copy_size have been saved: the mean of two neighbours, those
    that are largest. sizes: of the storages as they are saved."""
    transfers = [0]
    for size in sizes:
        if transfers[-1] >= copy_size:
            transfers.append(0)
        transfers[-1] += size
    return max([copy_size, *(sum(pair) / 2 for pair in pairwise(transfers))])


def _tied_names(modules: Sequence[torch.nn.Module], rank: int) -> list[str | None]:
    """By module, one name for those that share a parameter: the declared one, on whichever rank the others are."""
    declared = [dict(getattr(module, "tied_parameters", {})) for module in modules]
    owners: dict[int, list[int]] = {}
    for at, module in enumerate(modules):
        for parameter in module.parameters():
            owners.setdefault(id(parameter), []).append(at)
    shared = [users for users in owners.values() if len(users) > 1]
    here = [next((f"rank {rank}: {users[0]}" for users in shared if at in users), None) for at in range(len(modules))]
    return [next(iter(names), local) for names, local in zip(declared, here, strict=True)]


def _held_bytes(pipe: Pipeline) -> dict[int, float]:
    """By this rank's chunks, what a microbatch holds between B and W: what the queue frees in all W of a chunk."""
    bytes_after = [sample.pinned for sample in pipe.last.samples]
    groups = list(merge_neighbours(pipe.schedule.actions[pipe.rank]))
    held = {}
    for group, before, after in zip(groups[1:], bytes_after, bytes_after[1:], strict=False):
        if group[0].kind == "W":
            held[group[0].chunk] = (before - after) / pipe.schedule.microbatches
    return held


def _all_forwards_first(placement: tuple[int, ...], microbatches: int, slices: tuple[int, ...] = (1,)) -> Schedule:
    """All F, then all B, then all W: no rank waits inside a pass, and each first pass shows the latency of its edge."""
    actions: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    units = microbatches * len(slices)
    pairs = [(chunk, unit) for chunk in range(len(placement)) for unit in range(units)]
    last, order = len(placement) - 1, order_of_backward(units, len(slices))
    for chunk, unit in sorted(pairs, key=lambda pair: (pair[0] + pair[1], pair[0])):
        actions[placement[chunk]].append(Action("F", chunk, unit))
    for chunk, unit in sorted(pairs, key=lambda pair: (last - pair[0] + pair[1], -pair[0])):
        actions[placement[chunk]].append(Action("B", chunk, order[unit]))
    for chunk, unit in pairs:
        actions[placement[chunk]].append(Action("W", chunk, unit))
    return Schedule.build(actions, placement, microbatches, "profile", slices)


def _changed(schedule: Schedule, change: Callable[[Action], Sequence[Action]]) -> Schedule:
    """A schedule with other actions in the place of each."""
    actions = [[changed for action in row for changed in change(action)] for row in schedule.actions]
    return Schedule.build(actions, schedule.placement, schedule.microbatches, "profile")


def _fused(action: Action) -> Sequence[Action]:
    """BW in the place of B, and no W."""
    return {"B": [action._replace(kind="BW")], "W": []}.get(action.kind, [action])
