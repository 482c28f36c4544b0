"""A stage whose microbatches are recomputed, or offloaded to the host and loaded back, by actions of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.forward_state import ForwardState, RandomState
from zbkern.pipeline.runtime.host_copies import Copy, CopyLanes
from zbkern.pipeline.runtime.recorder import Recorder
from zbkern.pipeline.runtime.saved_tensors import RecomputedTensors, SavedTensors
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.runtime.storages import Place, Storages, keys
from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.program import offloads_or_recomputes
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.wgrad import WGradQueue


def check_memory_saving(
    schedule: Schedule, fill: str, max_wgrad_bytes: int | None, replanner: object | None, gathers: bool
) -> None:
    """Raises ValueError where a schedule with R, O or L meets what would change its order, or does not move."""
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
    if gathers:
        raise ValueError(
            "Pipeline: modules must not be sharded by FSDP2 or tensor parallelism with a schedule that offloads or "
            "recomputes (R, O, L): a recomputation would communicate, and DTensors are not copied; use "
            "DistributedDataParallel, or a schedule without them"
        )


def make_stages(
    modules: Mapping[int, torch.nn.Module],
    schedule: Schedule,
    rank: int,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    queue: WGradQueue,
    recorder: Recorder,
) -> dict[int, Stage]:
    """The stage of every chunk of this rank: one that saves memory where the rank's row has R, O or L."""
    row, count, last = schedule.actions[rank], schedule.microbatches, len(schedule.placement) - 1
    losses = {chunk: loss_fn if chunk == last else None for chunk in modules}
    if not offloads_or_recomputes(row):
        return {chunk: Stage(module, chunk, queue, losses[chunk], count) for chunk, module in modules.items()}
    lanes = CopyLanes(recorder.device, recorder.now)
    stages = {
        chunk: MemorySavingStage(module, chunk, queue, losses[chunk], count, row, lanes, recorder.copied)
        for chunk, module in modules.items()
    }
    recorder.watch([*stages.values()])
    return {**stages}


class MemorySavingStage(Stage):
    """A Stage that also runs R, O and L of its chunk.

    row: this rank's actions, which tell a forward what will become of its activations. lanes: the copies of the rank.
    copied: called with every O and L and its copy, as it begins. The tensors that autograd saves in a forward, those of
    the loss among them, are kept in `SavedTensors`; what W needs stays in the queue, whose tasks get other tensors.
    Parameters, buffers and the batch stay on the device, and are neither moved nor counted.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        chunk: int,
        queue: WGradQueue,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        microbatches: int,
        row: Sequence[Action],
        lanes: CopyLanes,
        copied: Callable[[Action, Copy], None],
    ) -> None:
        super().__init__(module, chunk, queue, loss_fn, microbatches)
        self._lanes = lanes
        self._copied = copied
        self._recomputed: set[int] = set()
        self._offloaded: dict[str, set[int]] = {"F": set(), "B": set()}  # after which pass, and which microbatches
        self._read(row)
        self._activations: dict[int, SavedTensors | RecomputedTensors] = {}
        self._again: dict[int, _Again] = {}
        self._waiting: dict[int, _HeldTensors] = {}
        self._out: dict[int, Copy] = {}  # copies under way
        self._back: dict[int, Copy] = {}
        self._given: Any = None  # in the place of the inputs that the forward is called with

    def _read(self, row: Sequence[Action]) -> None:
        begun = set()
        for kind, chunk, microbatch, _ in row:
            if chunk != self.chunk:
                continue
            if kind == "R":
                self._recomputed.add(microbatch)
            elif kind == "B":
                begun.add(microbatch)
            elif kind == "O":
                self._offloaded["B" if microbatch in begun else "F"].add(microbatch)

    @property
    def nbytes(self) -> int:
        """Bytes on the device of what microbatches hold here: activations from F to B, and what W needs, every storage
        of a microbatch once."""
        kept: Iterable[Any] = (*self._activations.values(), *self._waiting.values())
        return sum(each.nbytes for each in kept)

    def forward(self, microbatch: int, inputs: Any, target: Any = None, side: Mapping[str, Any] | None = None) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(microbatch, inputs, target, side)
        excluded = self._excluded(inputs, target, side)
        if microbatch in self._recomputed:
            tensors: SavedTensors | RecomputedTensors
            tensors = recomputed = RecomputedTensors(self._lanes.device, excluded)
            self._keep_inputs(inputs, recomputed.kept)
            self._again[microbatch] = _Again(inputs, target, side or {}, RandomState(self._lanes.device))
        else:
            tensors = SavedTensors(self._lanes.device, excluded)
            if microbatch in self._offloaded["F"]:
                self._given, inputs = inputs, pytree.tree_map(_stand_in, inputs)
            else:
                self._keep_inputs(inputs, tensors.storages)
        self._activations[microbatch] = tensors
        with tensors.saving():
            outputs = super().forward(microbatch, inputs, target, side)
        self._given = None
        if isinstance(tensors, SavedTensors) and microbatch in self._offloaded["F"]:
            self._begin_offload(microbatch, tensors)
        return outputs

    def backward_input(self, microbatch: int, gradients: Any, *, fused: bool = False) -> Any:
        self._activations.pop(microbatch)  # only the graph keeps them now, and frees each once it has been used
        found = super().backward_input(microbatch, gradients, fused=fused)
        self._waiting[microbatch] = held = self._held(microbatch)
        if microbatch in self._offloaded["B"]:
            self._begin_offload(microbatch, held)
        return found

    def weight(self, *microbatches: int) -> None:
        super().weight(*microbatches)
        for microbatch in microbatches:
            self._waiting.pop(microbatch, None)

    def weight_part(self, microbatch: int, index: int, count: int) -> None:
        super().weight_part(microbatch, index, count)
        self._waiting[microbatch] = self._held(microbatch)

    def save_memory(self, action: Action) -> None:
        """Runs an R, O or L."""
        {"R": self._recompute, "O": self._offload, "L": self._load}[action.kind](action.microbatch)

    def reset(self) -> None:
        super().reset()
        for copy in (*self._out.values(), *self._back.values()):
            copy.wait()  # its memory may be given to others then
        for each in (self._out, self._back, self._activations, self._again, self._waiting):
            each.clear()
        self._given = None

    def _call(self, inputs: Any, side: Mapping[str, Any]) -> Any:
        if self._given is not None:
            given = iter(pytree.tree_leaves(self._given))
            inputs = pytree.tree_map(lambda stand_in: _enter(stand_in, next(given)), inputs)
        return super()._call(inputs, side)

    def _excluded(self, inputs: Any = None, target: Any = None, side: Any = None) -> set[int]:
        batch = (target, side, inputs if self.chunk == 0 else None)
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        return keys([*self.module.parameters(), *self.module.buffers(), *tensors])

    def _keep_inputs(self, inputs: Any, storages: Storages) -> None:
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                storages.place(leaf.detach())

    def _recompute(self, microbatch: int) -> None:
        again, tensors = self._again.pop(microbatch), self._activations[microbatch]
        assert isinstance(tensors, RecomputedTensors)
        state = ForwardState([self.module], self._lanes.device)
        again.random.restore()
        with self.queue.defer((self.chunk, microbatch)), tensors.filling():
            outputs = self._call(again.inputs, again.side)
            if self.loss_fn is not None:
                self._loss(outputs, again.target) / self.microbatches
        del outputs
        state.restore_after_recompute()
        tensors.check()

    def _held(self, microbatch: int) -> _HeldTensors:
        key, moves = (self.chunk, microbatch), microbatch in self._offloaded["B"]
        return _HeldTensors(self.queue, key, Storages(self._lanes.device, self._excluded()), moves)

    def _begin_offload(self, microbatch: int, tensors: SavedTensors | _HeldTensors) -> None:
        self._out[microbatch] = copy = tensors.begin_offload(self._lanes)
        self._copied(Action("O", self.chunk, microbatch), copy)

    def _offload(self, microbatch: int) -> None:
        self._out.pop(microbatch).wait()
        self._movable(microbatch).offloaded()

    def _load(self, microbatch: int) -> None:
        self._back[microbatch] = copy = self._movable(microbatch).begin_load(self._lanes)
        self._copied(Action("L", self.chunk, microbatch), copy)

    def prepare(self, microbatch: int) -> None:
        copy = self._back.pop(microbatch, None)
        if copy is not None:
            copy.wait()
            self._movable(microbatch).loaded()

    def _movable(self, microbatch: int) -> SavedTensors | _HeldTensors:
        found = self._waiting.get(microbatch) or self._activations[microbatch]
        assert not isinstance(found, RecomputedTensors)
        return found


class _Again(NamedTuple):
    """What a forward is run again with."""

    inputs: Any
    target: Any
    side: Mapping[str, Any]
    random: RandomState


class _HeldTensors:
    """What the W of one microbatch need, in the tasks that wait under `key`; nbytes: on the device now.

    moves: they will be offloaded; otherwise they are counted only, and nothing here keeps them alive.
    """

    def __init__(self, queue: WGradQueue, key: tuple[int, int], storages: Storages, moves: bool) -> None:
        self._queue = queue
        tasks = [task for task in queue.tasks() if task.key == key]
        places = [[storages.place(tensor) or tensor for tensor in task.tensors] for task in tasks]
        self._size = self.nbytes = storages.nbytes
        self._moving = (storages, [*zip(tasks, places, strict=True)]) if moves else None

    def begin_offload(self, lanes: CopyLanes) -> Copy:
        assert self._moving is not None
        return self._moving[0].begin_offload(lanes)

    def offloaded(self) -> None:
        """The copy to the host has ended: the tasks keep the tensors there."""
        self.loaded()
        self.nbytes = 0

    def begin_load(self, lanes: CopyLanes) -> Copy:
        assert self._moving is not None
        self.nbytes = self._size
        return self._moving[0].begin_load(lanes)

    def loaded(self) -> None:
        """The copy has ended: the tasks have the tensors where it went."""
        assert self._moving is not None
        storages, moving = self._moving
        storages.move()
        for task, places in moving:
            tensors = [place.tensor if isinstance(place, Place) else place for place in places]
            self._queue.exchange(task, tensors)


class _Enter(torch.autograd.Function):
    """The values of a chunk's input, in a graph that ends in its stand-in: nothing else of it keeps the input alive."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, values: list[Tensor]) -> Tensor:
        return torch.ops.aten._unsafe_view(values[0], values[0].shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _stand_in(leaf: Any) -> Any:
    """For an input that takes a gradient: a leaf of its shape, without memory for values."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape).requires_grad_()


def _enter(stand_in: Any, leaf: Any) -> Any:
    return leaf if stand_in is leaf else _Enter.apply(stand_in, [leaf.detach()])
