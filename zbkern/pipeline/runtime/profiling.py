"""Measures `Costs` on the machine at hand, by running the real chunks on their real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.arguments import device_of, module_list
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation import drift
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.timeline import Timeline
from zbkern.pipeline.transport.base import Transport


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
) -> Costs:
    """Costs of this pipeline, the same on every rank: times in milliseconds, memory in bytes; collective.

    modules: this rank's chunks, converted. placement: the rank of each chunk in model order. The others are as for
    `Pipeline` and its `step`, with inputs, targets and side inputs of `microbatches` microbatches. Times are
    medians over microbatches and `repeats` steps after one to warm up, with all ranks busy. Gradients and the
    random state are left as they were; buffers that a forward updates (running statistics) are not. Raises
    TypeError or ValueError as a `Pipeline` does.
    """
    _check(placement, repeats)
    counted = [_Counted(module, side) for module in module_list("profile", modules)]
    schedule = _all_forwards_first(tuple(placement), microbatches)
    parameters = [p for module in counted for p in module.parameters()]
    gradients = [p.grad for p in parameters]

    def loss(output: Any, target: Any) -> Tensor:
        return counted[-1].loss(loss_fn, output, target)  # type: ignore[arg-type]

    target = device_of(device, counted)
    here = [target] if target.type == "cuda" else []  # by default of all GPUs, with a warning
    criterion = None if loss_fn is None else loss
    with torch.random.fork_rng(here), Pipeline(counted, schedule, criterion, group, target) as pipe:
        if 0 in pipe.modules:
            counted[0].keeps_inputs = True
        pipe.queue.merge = False  # schedules seldom have two W of a chunk in a row
        timelines = []
        for _ in range(1 + repeats):
            for parameter in parameters:
                parameter.grad = None
            pipe.step(inputs, targets, side)
            timelines.append(pipe.gather_timeline())
        mine = schedule.chunks_of(pipe.rank)
        pinned = pipe.queue.peak_bytes / (microbatches * len(mine))
        memory = {chunk: (module.saved_bytes, pinned) for chunk, module in zip(mine, counted, strict=True)}
        gathered = pipe.gather(memory)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    memories = {chunk: sizes for found in gathered for chunk, sizes in found.items()}
    times = drift.costs([_in_milliseconds(timeline) for timeline in timelines[1:]])
    activation, held = zip(*(memories[chunk] for chunk in range(len(placement))), strict=True)
    return replace(times, activation=activation, held=held, memory_unit="bytes")


def _check(placement: Sequence[int], repeats: int) -> None:
    ranks = placement if isinstance(placement, Sequence) and not isinstance(placement, str) else [None]
    if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise TypeError(f"profile: placement must be a list of ranks, one per chunk in model order; got {placement!r}")
    if not isinstance(repeats, int):
        raise TypeError(f"profile: repeats must be an int; got {repeats!r}")
    if repeats < 1:
        raise ValueError(f"profile: repeats must be at least 1; got {repeats}")


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


def _in_milliseconds(timeline: Timeline) -> Timeline:
    events = [[e._replace(start=e.start * 1e3, end=e.end * 1e3) for e in row] for row in timeline.events]
    return replace(timeline, events=tuple(tuple(row) for row in events), unit="ms")


class _Counted(torch.nn.Module):
    """A chunk whose first forward counts the bytes that live until its backward, every storage once.

    They are what autograd saves, in the loss, too, and the inputs that came in a message; not what is there anyway:
    parameters, buffers, side inputs, and on the first and last chunk the batch.
    """

    def __init__(self, module: torch.nn.Module, side: Any) -> None:
        super().__init__()
        self.module = module
        self.tied_parameters = getattr(module, "tied_parameters", {})
        self.keeps_inputs = False
        self._calls = 0
        self._storages: dict[int, int] = {}
        given = [leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, Tensor)]  # microbatches are views of it
        self._kept = {_address(tensor) for tensor in (*module.parameters(), *module.buffers(), *given)}

    @property
    def saved_bytes(self) -> int:
        """What one microbatch holds from F to B."""
        return sum(size for address, size in self._storages.items() if address not in self._kept)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._calls += 1
        for leaf in pytree.tree_leaves((inputs, keywords)):
            if isinstance(leaf, Tensor):
                self._keep(leaf) if self.keeps_inputs else self._save(leaf)
        with self._counting():
            return self.module(*inputs, **keywords)

    def loss(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Tensor:
        for leaf in pytree.tree_leaves(target):
            if isinstance(leaf, Tensor):
                self._keep(leaf)
        with self._counting():
            return loss_fn(output, target)

    def _counting(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        if self._calls == 1:
            self._storages[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _keep(self, tensor: Tensor) -> None:
        self._kept.add(_address(tensor))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
