"""rehearse: the ranks of a pipeline run alone, one after the other on one device, and are joined to a step."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.rehearsal.alone import AloneTransport, Messages
from zbkern.pipeline.runtime.arguments import device_of, module_list
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.memory.ledger import Ledger
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.replicas.tied_weights import all_ties
from zbkern.pipeline.runtime.slices.sliced_batch import LossFn
from zbkern.planning.costs.chunks import Costs, checked_speeds
from zbkern.planning.simulation import comparison, step_costs
from zbkern.planning.simulation.timeline import Event, Timeline, arrival
from zbkern.schedules.actions import COPIES, Action, ScheduleError, check_count
from zbkern.schedules.ahead import memory_ahead
from zbkern.schedules.dependencies import Result, order_of_running, result
from zbkern.schedules.program import offloads_or_recomputes
from zbkern.schedules.schedule import Schedule

Passes = Sequence[tuple[Action, float]]  # in their order on a rank, with seconds
OverEdges = Callable[[int], Sequence[float]]  # by unit, seconds of its message over the edge behind each chunk
MakeOptimizer = Callable[[Pipeline], torch.optim.Optimizer]


@dataclass(frozen=True)
class Rank:
    """A rank that ran alone: seconds of its passes and of its optimizer's step, and the most memory that it held.

    peak_bytes: on a GPU what torch's allocator has counted; on a CPU weights, gradients, optimizer states, buffers and
    what microbatches held. waiting_bytes: what beside it messages of other ranks hold at most until it takes them.
    """

    passes: Passes
    optimizer: float
    peak_bytes: int
    waiting_bytes: int = 0

    def at(self, speed: float) -> Rank:
        """As it runs where passes take 1/speed of the time."""
        return replace(self, passes=[(a, each / speed) for a, each in self.passes], optimizer=self.optimizer / speed)


@dataclass(frozen=True)
class Rehearsal:
    """What `rehearse` returns. ranks: those that ran, by number, each at its own speed; timeline: of the step that all
    would make, in seconds; alike: the same, were all as fast as this device.

    Passes of ranks that did not run take as long as those of the nearest chunk that did, at their own speed.
    """

    schedule: Schedule
    ranks: Mapping[int, Rank]
    timeline: Timeline
    alike: Timeline
    speeds: tuple[float, ...] | None = None

    @property
    def seconds(self) -> float:
        """Of a step: the pipeline, and the slowest optimizer step behind it."""
        return self.timeline.cost + max(rank.optimizer for rank in self.ranks.values())

    @property
    def costs(self) -> Costs:
        """Costs of the chunks in seconds, as measured here, with the speeds of the ranks. Raises ValueError where
        sequences have slices of their own."""
        if self.schedule.own_slices:
            raise ValueError(
                f"Rehearsal.costs: all sequences must be cut alike; {self.schedule.name} cuts each in its own way: "
                "profile a step of whole sequences for costs, and compare with BatchPlan.published"
            )
        return replace(step_costs.costs([self.alike]), speeds=self.speeds)

    def compare(self, names: Iterable[str] = ("one_f_one_b", "interleaved")) -> list[Timeline]:
        """Published schedules of the same model and batch, simulated with `costs`. Raises ValueError as these do."""
        schedule = self.schedule
        count, slices = schedule.microbatches, schedule.slices
        return comparison.timelines(self.costs, schedule.ranks, count, schedule.chunks, slices, [*names])

    def peak_bytes(self, rank: int) -> int:
        """The most memory that a rank holds: alone, and for messages that wait for it."""
        return self.ranks[rank].peak_bytes + self.ranks[rank].waiting_bytes


def rehearse(
    chunks_of: Callable[[int], nn.Module | Iterable[nn.Module]],
    schedule: Schedule,
    loss_fn: LossFn,
    inputs: Any = None,
    targets: Any = None,
    side: Any = None,
    *,
    ranks: Iterable[int] | None = None,
    optimizer: MakeOptimizer | None = None,
    device: torch.device | str | None = None,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    host_bandwidth: float = math.inf,
    speeds: Sequence[float] | None = None,
    repeats: int = 3,
    options: StepOptions | None = None,
) -> Rehearsal:
    """Runs ranks of a pipeline one after the other on this device, each alone, through the engine as it is.

    Args:
        chunks_of: makes the chunks of a rank, in model order and on the device, as for `Pipeline`; such as
            `lambda rank: [zbkern.convert(chunk) for chunk in cut(config, plan, rank=rank, device="cuda")]`. Random
            weights will do.
        schedule, loss_fn, inputs, targets, side, options: as for `Pipeline` and its `step`.
        ranks: those to run, all where None. Passes of the others are taken to be those of the nearest chunk that ran.
        optimizer: makes the optimizer of a rank from its Pipeline, a `zbkern.pipeline.Optimizer` or torch's, whose step
            and states then count.
        device: None for that of the chunks.
        latency, bandwidth: of a message between ranks, in seconds and bytes per second.
        host_bandwidth: bytes per second that a rank can send or receive where the processor that runs its passes does
            so, as gloo's does between CPUs; its passes wait meanwhile. math.inf where a device copies.
        speeds: of the ranks, where they differ, 1 for this device, as in `plan`.
        repeats: measured steps, after one to warm up.

    Messages from other ranks are made up: random numbers in the shapes and of the size that a rank before has sent. A
    rank whose messages turn out to have another shape runs again. Other ranks' share of tied weights is zero. Times are
    medians; a rank's passes have what its host does between them. Replicas and tensor parallelism are not rehearsed, so
    passes beside each other hide nothing.

    Raises TypeError and ValueError as `Pipeline` does, ScheduleError for a rank that the schedule has not.
    """
    check_count("rehearse: repeats", repeats)
    rates_of_links = ("bandwidth", bandwidth, 0.0), ("host_bandwidth", host_bandwidth, 0.0)
    for name, value, least in (("latency", latency, -1.0), *rates_of_links):
        if not value > least:
            raise ValueError(f"rehearse: {name} must be a number above {max(least, 0):g}; got {value!r}")
    rates = None if speeds is None else checked_speeds("rehearse", speeds, schedule.ranks)
    schedule.validate()
    wanted = [*range(schedule.ranks)] if ranks is None else sorted({*ranks})
    if unknown := [rank for rank in wanted if rank not in range(schedule.ranks)]:
        raise ScheduleError(f"rehearse: ranks must be from 0 to {schedule.ranks - 1}; got {unknown}")
    first = schedule.placement[0]  # whose output shows the others the shape of their input
    order = [first, *(rank for rank in wanted if rank != first)]
    step = _Step(chunks_of, schedule, loss_fn, (inputs, targets, side), optimizer, device, repeats, options)
    found: dict[int, Rank] = {}
    for rank in order:
        found[rank] = step.alone(rank)
    for _ in order:  # messages that were guessed wrong are known by now, and may show others
        again = {schedule.placement[chunk] for chunk in step.messages.wrong()} & found.keys()
        if not again:
            break
        found.update({rank: step.alone(rank) for rank in sorted(again)})
    passes = {rank: found[rank].passes for rank in found}
    links = step.over_edges(latency, bandwidth), step.over_edges(0.0, host_bandwidth)
    alike = joined(schedule, passes, *links)
    waiting = memory_ahead(schedule, step.message_bytes)
    ran = {rank: replace(found[rank], waiting_bytes=round(waiting[rank])) for rank in wanted}
    if rates is None:
        return Rehearsal(schedule, ran, alike, alike)
    ran = {rank: each.at(rates[rank]) for rank, each in ran.items()}
    return Rehearsal(schedule, ran, joined(schedule, passes, *links, rates), alike, rates)


class _Step:
    """The step that every rank runs."""

    def __init__(
        self,
        chunks_of: Callable[[int], nn.Module | Iterable[nn.Module]],
        schedule: Schedule,
        loss_fn: LossFn,
        batch: tuple[Any, Any, Any],
        optimizer: MakeOptimizer | None,
        device: torch.device | str | None,
        repeats: int,
        options: StepOptions | None,
    ) -> None:
        self._chunks_of, self._schedule, self._loss_fn, self._batch = chunks_of, schedule, loss_fn, batch
        self._make_optimizer, self._device, self._repeats = optimizer, device, repeats
        self._options = options or StepOptions()
        self.messages = Messages()

    def alone(self, rank: int) -> Rank:
        """Runs a rank: a step to warm up, then those that are measured."""
        gc.collect()  # the rank before
        torch_counts = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        modules = module_list("rehearse", self._chunks_of(rank))
        device = device_of(self._device, modules)
        ties = {name: copies[0] for name, copies in all_ties(modules, None).items()}
        transport = AloneTransport(rank, self._schedule.ranks, self.messages, ties)
        whole = self._schedule, self._loss_fn, transport, device
        with _copies_are_elsewhere(), Pipeline(modules, *whole, options=self._options) as pipe:
            optimizer = self._make_optimizer(pipe) if self._make_optimizer else None
            peak = peak_bytes(pipe, optimizer, lambda: self._run(pipe, optimizer), self._options)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            steps, ends = [], []
            for _ in range(self._repeats):
                ends.append(self._run(pipe, optimizer))
                steps.append(_lengths(pipe.last.timeline.events[rank]))
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) - torch_counts
        times = [median(each) for each in zip(*([length for _, length in step] for step in steps), strict=True)]
        actions = [action for action, _ in steps[0]]
        return Rank([*zip(actions, times, strict=True)], median(ends), peak)

    def over_edges(self, latency: float, bandwidth: float) -> OverEdges:
        """By unit, the seconds of its message over the edge behind each chunk."""
        edges = range(len(self._schedule.placement) - 1)
        return lambda unit: [latency + self.message_bytes(edge, unit) / bandwidth for edge in edges]

    def message_bytes(self, edge: int, unit: int) -> int:
        """Of a message from this chunk to the next; where that is not known, of the largest one."""
        chunks = range(1, len(self._schedule.placement))
        return self.messages.nbytes(edge + 1, unit) or max(self.messages.nbytes(chunk, unit) for chunk in chunks)

    def _run(self, pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> float:
        """A step of the pipeline; returns the seconds of the optimizer's."""
        pipe.step(*self._batch)
        _wait_for(pipe.device)
        start = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
            if isinstance(optimizer, Optimizer):  # which may have left its step to the next one
                optimizer.validate()
            _wait_for(pipe.device)
        seconds = time.perf_counter() - start
        for module in pipe.modules.values():
            module.zero_grad()
        return seconds


def joined(
    schedule: Schedule,
    passes: Mapping[int, Passes],
    travel: OverEdges,
    handling: OverEdges,
    speeds: Sequence[float] | None = None,
) -> Timeline:
    """The timeline of a step whose ranks take so long for their passes, each in its order.

    travel: of a message from rank to rank. handling: the part of it in which the sender, and another one in which the
    receiver, can run no pass. Ranks without passes have those of the nearest chunk. speeds: of the ranks, by which all
    that is measured is divided.
    """
    lengths = {action: length for some in passes.values() for action, length in some}
    known = sorted({action.chunk for action in lengths})
    rows = [[a for a in row if a.kind not in COPIES] for row in schedule.actions]
    ends: dict[Result | None, float] = {}
    events: list[list[Event]] = [[] for _ in rows]
    free = [0.0] * len(rows)  # when a rank can run its next pass
    for rank, action in order_of_running(rows, len(schedule.placement)):
        nearest = min(known, key=lambda chunk: (abs(chunk - action.chunk), -chunk))
        length = lengths.get(action, lengths.get(action._replace(chunk=nearest), 0.0))
        length /= speeds[rank] if speeds else 1.0
        _, arrived = arrival(action, ends, travel(action.unit), schedule.placement)
        receiving, sending = _handling(action, schedule.placement, handling)
        start = max(free[rank] + receiving, arrived)  # a rank that waits handles the message on its way
        events[rank].append(Event(rank, action, start, start + length))
        ends[result(action)] = start + length
        free[rank] = start + length + sending
    return Timeline(schedule, tuple(map(tuple, events)), unit="s")


def _handling(action: Action, placement: Sequence[int], handling: OverEdges) -> tuple[float, float]:
    """Seconds of a rank for the message that a pass takes, and for the one that it sends."""
    edges = action.chunk - 1, action.chunk
    taken, sent = edges if action.kind == "F" else reversed(edges)
    if result(action) is None:
        return 0.0, 0.0
    seconds = handling(action.unit)

    def over(edge: int) -> float:
        crosses = 0 <= edge < len(placement) - 1 and placement[edge] != placement[edge + 1]
        return seconds[edge] if crosses else 0.0

    return over(taken), over(sent)


def _lengths(events: Sequence[Event]) -> Passes:
    """Each with what its host did before: nothing else keeps a rank that is alone from its next pass. One that ends
    before the one in front of it, beside which it ran, took no more time."""
    ends = accumulate((event.end for event in events), max, initial=events[0].start)
    return [(event.action, end - before) for event, (before, end) in zip(events, pairwise(ends), strict=True)]


def peak_bytes(
    pipe: Pipeline, optimizer: torch.optim.Optimizer | None, step: Callable[[], object], options: StepOptions
) -> int:
    """What this rank holds at most in a step, which is run: weights, buffers, gradients and what an optimizer keeps
    that has made a step; and what microbatches hold, by the ledger, which schedules with R, O or L have anyway."""
    loop = pipe._calls.loop
    saves = offloads_or_recomputes(pipe.schedule.actions[pipe.rank])
    if not saves:
        loop.use_ledger(Ledger(pipe.modules, loop.recorder, options))
    step()
    if not saves:
        loop.use_ledger(None)
    owned = {id(each): each for part in pipe.modules.values() for each in (*part.parameters(), *part.buffers())}
    states = optimizer.state.values() if optimizer else ()
    kept = [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]
    kept += [master for _, master in getattr(optimizer, "masters", ())]
    gradients = [getattr(each, "main_grad", each) for each in owned.values() if each.requires_grad]
    static = sum(each.numel() * each.element_size() for each in (*owned.values(), *kept, *gradients))
    return static + loop.recorder.peak_bytes


@contextmanager
def _copies_are_elsewhere() -> Iterator[None]:
    """Inside, nothing is said about weights that other ranks seem to have: what they have is not known."""
    logger = logging.getLogger("zbkern")

    def is_of_one_rank(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Pipeline: ")

    logger.addFilter(is_of_one_rank)
    try:
        yield
    finally:
        logger.removeFilter(is_of_one_rank)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
