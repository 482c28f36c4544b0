"""A stage whose microbatches are recomputed, or offloaded to the host and loaded back, by actions of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.forward_state import ForwardState
from zbkern.pipeline.runtime.host_copies import Copy, CopyLanes
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.recomputed_parts import RecomputedParts, parts_of
from zbkern.pipeline.runtime.recorder import Recorder
from zbkern.pipeline.runtime.saved_tensors import OffloadedTensors, RecomputedTensors, SavedTensors
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.runtime.storages import Place, Resident, Storages, Transfer, Travel
from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.program import offloaded_after, offloads_or_recomputes, recomputed, streamed
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.wgrad import WGradQueue, WGradTask


def check_memory_saving(schedule: Schedule, fill: str, max_wgrad_bytes: int | None, replanner: object | None) -> None:
    """Raises ValueError where a schedule with R, O or L meets what would change its order."""
    if not any(offloads_or_recomputes(row) for row in schedule.actions):
        return
    wrong = [
        ('fill must be "planned"', fill != "planned", fill),
        ("max_wgrad_bytes must be None", max_wgrad_bytes is not None, max_wgrad_bytes),
        ("replanner must be None", replanner is not None, replanner),
    ]
    for wanted, is_wrong, got in wrong:
        if is_wrong:
            raise ValueError(
                f"Pipeline: {wanted} with a schedule that offloads or recomputes (R, O, L), whose memory is counted in "
                f"its own order; got {got!r}"
            )


def make_stages(
    modules: Mapping[int, torch.nn.Module],
    schedule: Schedule,
    rank: int,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    queue: WGradQueue,
    recorder: Recorder,
    options: StepOptions,
) -> dict[int, Stage]:
    """The stage of every chunk of this rank: one that saves memory where the rank's row has R, O or L."""
    row, count, last = schedule.actions[rank], schedule.microbatches, len(schedule.placement) - 1
    losses = {chunk: loss_fn if chunk == last else None for chunk in modules}
    arguments = [(module, chunk, queue, losses[chunk], count) for chunk, module in modules.items()]
    if not offloads_or_recomputes(row):
        return {each[1]: Stage(*each) for each in arguments}
    lanes = CopyLanes(recorder.device, recorder.now)
    stages = {
        each[1]: MemorySavingStage(*each, row=row, lanes=lanes, recorder=recorder, options=options)
        for each in arguments
    }
    recorder.watch([*stages.values()])
    return {**stages}


class MemorySavingStage(Stage):
    """A Stage that also runs R, O and L of its chunk.

    stage: the arguments of `Stage`. row: this rank's actions, which tell a forward what will become of its activations.
    lanes: the copies of the rank; recorder: of when they run, and of what is held meanwhile. The tensors that autograd
    saves in a forward, those of the loss among them, are kept in `SavedTensors`; what W needs stays in the queue, whose
    tasks get other tensors. Parameters, buffers and the batch stay on the device, and are neither moved nor counted.
    """

    def __init__(
        self, *stage: Any, row: Sequence[Action], lanes: CopyLanes, recorder: Recorder, options: StepOptions
    ) -> None:
        super().__init__(*stage)
        self._lanes = lanes
        self._recorder = recorder
        self._copy_size = options.copy_size
        self.kept_bytes = 0  # by the last F with an R
        self.output_again_bytes = 0  # of its output, what the R computes again
        self._recomputed = {microbatch for chunk, microbatch in recomputed(row) if chunk == self.chunk}
        named = options.recompute if self._recomputed else ()
        self._parts = parts_of(self.module, self.chunk, named) if named else {}
        self._streamed = {microbatch for chunk, microbatch in streamed(row) if chunk == self.chunk}
        self._offloaded = {each[::2] for each in offloaded_after(row) if each[1] == self.chunk}  # pass, microbatch
        self._activations: dict[int, SavedTensors | RecomputedTensors] = {}
        self._again: dict[int, _Again] = {}
        self._waiting: dict[int, _HeldTensors] = {}
        self._loads: dict[int, list[Transfer]] = {}  # under way
        self._given: Any = None  # in the place of the inputs that the forward is called with

    @property
    def nbytes(self) -> int:
        """Bytes on the device of what microbatches hold here: activations from F to B, and what W needs, every storage
        of a microbatch once."""
        return sum(each.nbytes for each in (*self._activations.values(), *self._waiting.values()))

    def forward(self, microbatch: int, inputs: Any, target: Any = None, side: Mapping[str, Any] | None = None) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(microbatch, inputs, target, side)
        tensors = self._activations[microbatch] = self._saver(microbatch, inputs, target, side)
        if tensors.travel is not None and self.chunk > 0:  # the batch stays, and the caller has its gradient
            self._given, inputs = inputs, pytree.tree_map(_stand_in, inputs)
        with tensors.saving():
            outputs = super().forward(microbatch, inputs, target, side)
            if isinstance(tensors, RecomputedParts):
                self.output_again_bytes = tensors.computed_again(outputs)
        self._given = None
        if tensors.travel is not None:
            tensors.travel.begin()
        if microbatch in self._recomputed:
            self.kept_bytes = tensors.nbytes
        if microbatch in self._again:
            self._again[microbatch].before.keep_written()
        return outputs

    def backward_input(self, microbatch: int, gradients: Any, *, fused: bool = False) -> Any:
        self._activations.pop(microbatch)  # only the graph keeps them now, and frees each once it has been used
        found = super().backward_input(microbatch, gradients, fused=fused)
        self._end_loads(microbatch)  # of what no backward has asked for
        self._waiting[microbatch] = self._held(microbatch, ("B", microbatch) in self._offloaded)
        return found

    def weight(self, *microbatches: int) -> None:
        if any(microbatch in self._loads for microbatch in microbatches):
            self._run_as_loaded(microbatches)
        super().weight(*microbatches)
        for microbatch in microbatches:
            self._waiting.pop(microbatch, None)

    def weight_part(self, microbatch: int, index: int, count: int) -> None:
        self._end_load_of_held(microbatch)
        super().weight_part(microbatch, index, count)
        self._waiting.pop(microbatch)
        if index < count - 1:
            self._waiting[microbatch] = self._held(microbatch, offload=False)

    def prepare(self, microbatch: int) -> None:
        for transfer in self._loads.get(microbatch, [])[:1]:  # it waits for the others as it comes to their tensors
            transfer.end()

    def save_memory(self, action: Action) -> None:
        """Runs an R, O or L."""
        {"R": self._recompute, "O": self._offload, "L": self._load}[action.kind](action.microbatch)

    def reset(self) -> None:
        super().reset()
        for each in (*self._activations.values(), *self._waiting.values()):
            if each.travel is not None:
                each.travel.abandon()
        for transfer in [each for loads in self._loads.values() for each in loads]:
            transfer.abandon()
        for kept in (self._activations, self._again, self._waiting, self._loads):
            kept.clear()
        self._given = None

    def close(self) -> None:
        self._lanes.close()

    def _call(self, inputs: Any, side: Mapping[str, Any]) -> Any:
        if self._given is not None:
            given = iter(pytree.tree_leaves(self._given))
            inputs = pytree.tree_map(lambda stand_in: _enter(stand_in, next(given)), inputs)
        return super()._call(inputs, side)

    def _saver(
        self, microbatch: int, inputs: Any, target: Any, side: Mapping[str, Any] | None
    ) -> SavedTensors | RecomputedTensors:
        """What a forward saves its tensors in."""
        resident = self._resident(inputs, target, side)
        storages = Storages(self._lanes.device, resident)
        if ("F", microbatch) in self._offloaded:
            return OffloadedTensors(self._travel(microbatch, storages), microbatch in self._streamed)
        whole = microbatch in self._recomputed and not self._parts
        kept = Storages(self._lanes.device, resident) if whole else storages
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                kept.place(leaf.detach())
        if microbatch not in self._recomputed:
            return SavedTensors(storages)
        if not whole:
            return RecomputedParts(storages, self._parts, self._lanes.device)
        self._again[microbatch] = _Again(inputs, target, side or {}, self._forward_state())
        return RecomputedTensors(kept, storages)

    def _resident(self, inputs: Any = None, target: Any = None, side: Any = None) -> Resident:
        batch = (target, side, inputs if self.chunk == 0 else None)
        return Resident(self.module, [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)])

    def _recompute(self, microbatch: int) -> None:
        tensors = self._activations[microbatch]
        present = self._forward_state()
        try:
            if isinstance(tensors, RecomputedParts):
                tensors.recompute(partial(self.queue.defer, (self.chunk, microbatch)))
            else:
                assert isinstance(tensors, RecomputedTensors)
                self._recompute_all(microbatch, tensors)
        finally:
            present.restore()

    def _recompute_all(self, microbatch: int, tensors: RecomputedTensors) -> None:
        again = self._again.pop(microbatch)
        again.before.restore()
        with self.queue.defer((self.chunk, microbatch)), tensors.filling():
            outputs = self._call(again.inputs, again.side)
            if self.loss_fn is not None:
                self._loss(outputs, again.target) / self.microbatches
        del outputs
        tensors.check()

    def _forward_state(self) -> ForwardState:
        return ForwardState([self.module], self._lanes.device)

    def _held(self, microbatch: int, offload: bool) -> _HeldTensors:
        """What the W of a microbatch that has had its B need; offload: it goes to the host."""
        storages, key = Storages(self._lanes.device, self._resident()), (self.chunk, microbatch)
        travel = self._travel(microbatch, storages) if offload else None
        return _HeldTensors(self.queue, key, storages, travel)

    def _travel(self, microbatch: int, storages: Storages) -> Travel:
        transfers = self._recorder.transfers(Action("O", self.chunk, microbatch))

        def began(copy: Copy) -> None:
            transfers.append(copy)
            self._recorder.held()  # what a forward holds before it waits for a copy

        return Travel(storages, self._lanes, self._copy_size, began)

    def _offload(self, microbatch: int) -> None:
        self._movable(microbatch).end_offload()

    def _load(self, microbatch: int) -> None:
        travel = self._movable(microbatch).travel
        assert travel is not None
        self._loads[microbatch] = travel.begin_load()
        transfers = self._recorder.transfers(Action("L", self.chunk, microbatch))
        transfers += [transfer.copy for transfer in self._loads[microbatch]]

    def _run_as_loaded(self, microbatches: Sequence[int]) -> None:
        """Runs W of one weight after the other, each as soon as what it needs has been loaded.

        What is left are W with hooks, which may have to run together, and have waited for all loads.
        """
        keys: list[Any] = [(self.chunk, microbatch) for microbatch in microbatches]
        while waiting := [task for task in self.queue.tasks() if task.key in keys]:
            if waiting[0].has_hooks:
                break
            for task in waiting:
                if task.weight == waiting[0].weight:
                    self._waiting[task.key[1]].exchange(task)
            self.queue.run_one(keys)
        for microbatch in microbatches:
            self._end_load_of_held(microbatch)

    def _end_load_of_held(self, microbatch: int) -> None:
        if self._end_loads(microbatch):
            self._waiting[microbatch].exchange_all()

    def _end_loads(self, microbatch: int) -> bool:
        """Waits for the loads of a microbatch; whether there were any."""
        loads = self._loads.pop(microbatch, [])
        for transfer in loads:
            transfer.end()
        return bool(loads)

    def _movable(self, microbatch: int) -> OffloadedTensors | _HeldTensors:
        found = self._waiting.get(microbatch) or self._activations[microbatch]
        assert isinstance(found, (OffloadedTensors, _HeldTensors))
        return found


class _Again(NamedTuple):
    """What a forward is run again with."""

    inputs: Any
    target: Any
    side: Mapping[str, Any]
    before: ForwardState


class _HeldTensors:
    """What the W of one microbatch need, in the tasks that wait under `key`.

    travel: they are offloaded from here on; without it they are counted only, and nothing here keeps them alive.
    """

    def __init__(self, queue: WGradQueue, key: tuple[int, int], storages: Storages, travel: Travel | None) -> None:
        self._queue = queue
        self.travel = travel
        self._moving: dict[WGradTask, list[Place | Tensor]] = {}
        for task in reversed([task for task in queue.tasks() if task.key == key]):  # W begins with what leaves last
            places = [storages.place(tensor) or tensor for tensor in task.tensors]
            if travel is not None:
                self._moving[task] = places
                travel.begin_if_full()
        if travel is not None:
            travel.begin()
        self._counted = storages.nbytes

    @property
    def nbytes(self) -> int:
        """On the device now."""
        return self._counted if self.travel is None else self.travel.storages.nbytes

    def end_offload(self) -> None:
        """Waits for the copies to the host: the tasks keep the tensors there."""
        assert self.travel is not None
        self.travel.end()
        self.exchange_all()

    def exchange_all(self) -> None:
        """Gives the tasks that wait the tensors where they are now."""
        waiting = self._queue.tasks()
        for task in self._moving:
            if task in waiting:
                self.exchange(task)

    def exchange(self, task: WGradTask) -> None:
        """Gives a task the tensors where they are now; waits for their load."""
        places = self._moving.get(task, [])
        if places:
            self._queue.exchange(task, [place.tensor if isinstance(place, Place) else place for place in places])


class _Enter(torch.autograd.Function):
    """The values of a chunk's input, in a graph that ends in its stand-in: nothing else of it keeps the input alive."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, values: list[Tensor]) -> Tensor:
        return torch.ops.aten._unsafe_view(values[0], values[0].shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _stand_in(leaf: Any) -> Any:
    """For an input that takes a gradient: a leaf of its shape and strides, which the gradient gets, without memory."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    stand_in = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    stand_in.untyped_storage().resize_(0)
    return stand_in.requires_grad_()


def _enter(stand_in: Any, leaf: Any) -> Any:
    return leaf if stand_in is leaf else _Enter.apply(stand_in, [leaf.detach()])
