"""A stage whose microbatches are recomputed, or offloaded to the host and loaded back, by actions of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.forward_state import ForwardState
from zbkern.pipeline.runtime.measure.recorder import Recorder
from zbkern.pipeline.runtime.memory.host_copies import Copy, CopyLanes
from zbkern.pipeline.runtime.memory.recomputation import RecomputedTensors, parts_of
from zbkern.pipeline.runtime.memory.saved_tensors import SavedTensors
from zbkern.pipeline.runtime.memory.storages import Offload, Resident, Storage, Storages
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.slices.sliced_batch import LossFn, Target
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.schedules.actions import Action
from zbkern.schedules.program import offloaded_after, recomputed, streamed
from zbkern.schedules.schedule import Schedule
from zbkern.wgrad import WGradQueue, WGradTask


def _named_parts(
    module: torch.nn.Module, chunk: int, named: Sequence[str | type]
) -> dict[torch.nn.Module, torch.nn.Module | None]:
    """`parts_of` a chunk that has an R. Raises ValueError where it has none of them."""
    found = parts_of(module, named)
    if named and not found:
        names = [name for name, _ in module.named_modules()][1:9]
        raise ValueError(
            f"StepOptions: recompute must name a part of every chunk that has an R in the schedule; chunk {chunk} has "
            f"none for {tuple(named)}; its modules are {names} and so on"
        )
    return found


class MemorySavingStage(Stage):
    """A Stage that also runs R, O and L of its chunk.

    row: this rank's actions, which tell a forward what will become of its activations. lanes: the copies of the rank;
    recorder: of when they run, and of what is held meanwhile. parts: what an R runs again (`parts_of`), the whole chunk
    where there are none; None for what the options name. The others are those of `Stage`. The tensors that autograd
    saves in a forward, those of the loss among them, are kept in `SavedTensors`; what W needs stays in the queue.
    Parameters, buffers and the batch stay on the device, and are neither moved nor counted.
    """

    def __init__(
        self,
        *arguments: Any,
        row: Sequence[Action],
        lanes: CopyLanes,
        recorder: Recorder,
        options: StepOptions,
        parts: Mapping[torch.nn.Module, torch.nn.Module | None] | None,
    ) -> None:
        super().__init__(*arguments)
        self._lanes, self._recorder = lanes, recorder
        self._options, self._copy_size = options, options.copy_size
        self.kept_sizes: list[int] = []  # bytes of the storages that the last F has left
        self.output_again_bytes = 0  # of its output, what the R computes again
        self._parts = parts
        self._comparisons: float | None = None  # how many R are still to be compared with their F, from the first on
        self._kept: dict[int, Any] = {}  # SavedTensors from F to B, _WaitingTasks from B to W
        self._note(row)

    def use(self, schedule: Schedule, row: Sequence[Action], loss_fn: LossFn | None) -> None:
        super().use(schedule, row, loss_fn)
        self._note(row)

    def _note(self, row: Sequence[Action]) -> None:
        chunk = self.chunk
        self._streamed = {microbatch for each, microbatch in streamed(row) if each == chunk}
        self._offloaded = {each[::2] for each in offloaded_after(row) if each[1] == chunk}  # pass, microbatch
        self._recomputed = {microbatch for each, microbatch in recomputed(row) if each == chunk}
        if not self._recomputed:
            return
        if self._parts is None:
            self._parts = _named_parts(self.module, chunk, self._options.recompute)
        if self._comparisons is None:
            self._comparisons = math.inf if self._options.check_values else 2 * len(self._recomputed)

    @property
    def nbytes(self) -> int:
        """Bytes on the device of what microbatches hold here: activations from F to B, what W needs, every storage of a
        microbatch once, and what slices carry."""
        return sum(kept.storages.nbytes for kept in self._kept.values()) + self.carries.nbytes

    def forward(
        self, microbatch: int, inputs: Any, target: Target | None = None, side: Mapping[str, Any] | None = None
    ) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(microbatch, inputs, target, side)
        self._give_back()
        tensors = self._kept[microbatch] = self._saver(microbatch, inputs, target, side)
        with tensors.saving():
            outputs = super().forward(microbatch, inputs, target, side)
            if isinstance(tensors, RecomputedTensors):
                tensors.end(outputs)
                self.output_again_bytes = tensors.computed_again(outputs)
        tensors.storages.drop_unused()
        self.kept_sizes = tensors.storages.sizes
        tensors.storages.begin_offload()
        return outputs

    def backward_input(self, microbatch: int, gradients: Any, *, fused: bool = False) -> Any:
        # only the graph keeps tensors now, and frees each once it has been used
        loads = self._kept.pop(microbatch).storages.loads
        try:
            found = super().backward_input(microbatch, gradients, fused=fused)
        finally:
            for copy in loads:  # also of what no backward has asked for
                copy.wait()
        self._kept[microbatch] = self._tasks(microbatch, ("B", microbatch) in self._offloaded)
        return found

    def weight(self, *microbatches: int) -> None:
        if any(self._kept[microbatch].storages.loads for microbatch in microbatches):
            self._run_as_loaded(microbatches)
        super().weight(*microbatches)
        for microbatch in microbatches:
            del self._kept[microbatch]

    def weight_part(self, microbatch: int, index: int, count: int) -> None:
        self._kept[microbatch].end_loads()
        super().weight_part(microbatch, index, count)
        self._kept[microbatch] = self._tasks(microbatch, offload=False)

    def prepare(self, microbatch: int) -> None:
        self._give_back()
        for copy in self._kept[microbatch].storages.loads[:1]:  # it waits for the others as it comes to their tensors
            copy.wait()

    def save_memory(self, action: Action) -> None:
        """Runs an R, O or L."""
        self._give_back()
        {"R": self._recompute, "O": self._offload, "L": self._load}[action.kind](action.microbatch)

    def reset(self) -> None:
        super().reset()
        for kept in self._kept.values():
            kept.storages.abandon()
        self._kept.clear()

    def close(self) -> None:
        self._lanes.close()

    def _call(self, inputs: Any, side: Mapping[str, Any]) -> Any:
        if self.chunk > 0:  # a tensor that the module keeps is then not the one that is known to be given up
            inputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf), inputs)
        return super()._call(inputs, side)

    def _saver(self, microbatch: int, inputs: Any, target: Any, side: Mapping[str, Any] | None) -> SavedTensors:
        """What a forward saves its tensors in."""
        offload = self._offload_of(microbatch) if ("F", microbatch) in self._offloaded else None
        storages = Storages(self._lanes.device, self._resident(inputs, target, side), offload)
        for tensor in tensors_in(inputs):
            storages.add(tensor)
        if offload is not None or microbatch not in self._recomputed:
            return SavedTensors(storages, microbatch in self._streamed)
        assert self._parts is not None
        assert self._comparisons is not None
        self._comparisons -= 1
        tensors = RecomputedTensors(storages, self._parts, compares=self._comparisons >= 0)
        if not self._parts:
            tensors.begin(self.module, self._outputs, (inputs, target, side or {}), {})
        return tensors

    def _resident(self, inputs: Any = None, target: Any = None, side: Any = None) -> Resident:
        batch = (target, side, inputs if self.chunk == 0 else None)
        return Resident(self.module, tensors_in(batch), (side or {}).get("carry", ()))

    def _recompute(self, microbatch: int) -> None:
        present = ForwardState([self.module], self._lanes.device)
        try:
            self._kept[microbatch].recompute(partial(self.queue.defer, (self.chunk, microbatch)))
        finally:
            present.restore()

    def _tasks(self, microbatch: int, offload: bool) -> _WaitingTasks:
        """What the W of a microbatch that has had its B need; offload: it goes to the host."""
        how = self._offload_of(microbatch) if offload else None
        return _WaitingTasks(self.queue, (self.chunk, microbatch), Storages(self._lanes.device, self._resident(), how))

    def _offload_of(self, microbatch: int) -> Offload:
        transfers = self._recorder.transfers(Action("O", self.chunk, microbatch))

        def began(copy: Copy) -> None:
            transfers.append(copy)
            self._recorder.held()  # what a forward holds before it waits for a copy

        return Offload(self._lanes, self._copy_size, began)

    def _offload(self, microbatch: int) -> None:
        self._kept[microbatch].storages.end_offload()

    def _load(self, microbatch: int) -> None:
        storages: Storages = self._kept[microbatch].storages
        storages.begin_load()
        self._recorder.transfers(Action("L", self.chunk, microbatch)).extend(storages.loads)

    def _give_back(self) -> None:
        """Frees what was offloaded, and held by others, too, until now."""
        for kept in self._kept.values():
            kept.storages.give_back()

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
                    self._kept[task.key[1]].arrive(task)
            self.queue.run_one(keys)
        for microbatch in microbatches:
            self._kept[microbatch].end_loads()


class _WaitingTasks:
    """What the W of one microbatch need that wait under `key`: counted in `storages`, which go to the host where these
    are offloaded."""

    def __init__(self, queue: WGradQueue, key: tuple[int, int], storages: Storages) -> None:
        self._queue = queue
        self.storages = storages
        self._moving: dict[WGradTask, list[Storage]] = {}
        for task in reversed([task for task in queue.tasks() if task.key == key]):  # W begins with what leaves last
            if storages.offload is not None:  # tensors of ours: who else has one then has another in its storage
                queue.exchange(task, [tensor.detach() for tensor in task.tensors])
            self._moving[task] = [storage for tensor in task.tensors for storage in storages.add(tensor)]
            storages.begin_if_full()
        storages.begin_offload()

    def end_loads(self) -> None:
        """Waits for the loads, if there are any, of what the tasks need that still wait."""
        for copy in self.storages.loads:
            copy.wait()
        for task in self._queue.tasks() if self.storages.loads else ():
            self.arrive(task)

    def arrive(self, task: WGradTask) -> None:
        """Waits for the load of what a task needs."""
        if moving := self._moving.get(task):
            for storage in moving:
                storage.arrive()
            self._queue.exchange(task, task.tensors)  # on a stream of the queue's own W comes after the load
