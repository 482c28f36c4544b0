"""The ledger: what a rank's units hold between their passes, and R, O and L, which change that.

From its F to its B a unit holds here what autograd saves in a chunk, the loss among it, and its input; from its B
to its W what its W need. Parameters, buffers and the batch stay on the device, and are neither moved nor counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.forward_state import ForwardState
from zbkern.pipeline.runtime.measure.recorder import Recorder
from zbkern.pipeline.runtime.memory.host_copies import Lanes
from zbkern.pipeline.runtime.memory.recomputation import Parts, Recomputation, named_parts
from zbkern.pipeline.runtime.memory.storages import Resident, Saved, Storages
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.schedules.actions import Action
from zbkern.schedules.program import offloaded_after, recomputed, streamed
from zbkern.wgrad import WGradTask
from zbkern.wgrad.queue import AT_ONCE

Key = tuple[int, int]  # chunk, unit


class Ledger:
    """The ledger of a rank with these modules, by chunk. It notes in `recorder` what actions do to memory.

    parts: what an R runs again, by chunk (`parts_of`), the whole chunk where there are none; by default what the
    options name. `use` comes before the first pass.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        recorder: Recorder,
        options: StepOptions,
        parts: Mapping[int, Parts] | None = None,
    ) -> None:
        self._modules, self._recorder, self._options = modules, recorder, options
        self._queue = recorder.queue
        self._lanes = Lanes(recorder.device, recorder.now, options.copy_size)
        self._parts = dict(parts or {})
        self._recorded: Counter[tuple[int, bool]] = Counter()  # F noted for an R, by chunk and whether of a slice
        self._held: dict[Key, Storages] = {}
        self._again: dict[Key, Recomputation] = {}  # until the R
        self.kept_sizes: dict[int, list[int]] = {}  # by chunk, bytes of the storages that its last F has left
        self.output_again_bytes: dict[int, int] = {}  # of its output, what the R computes again

    def use(self, row: Sequence[Action], at_once: Collection[Key] = ()) -> None:
        """Between steps: from now on this rank has these actions, which tell a pass what becomes of what it leaves.

        at_once: those of which no W waits.
        """
        again = recomputed(row)
        for chunk in {chunk for chunk, _ in again} - self._parts.keys():
            self._parts[chunk] = named_parts(self._modules[chunk], chunk, self._options.recompute)
        self._streamed, self._offloaded, self._recomputed = streamed(row), offloaded_after(row), again
        self._at_once = at_once

    @property
    def nbytes(self) -> int:
        """Bytes on the device of what units hold, every storage of a unit once."""
        return sum(storages.nbytes for storages in self._held.values())

    @property
    def handlers(self) -> dict[str, Callable[[Action], None]]:
        """What runs R, O and L."""
        return {"R": self._recompute, "O": self._offload, "L": self._load}

    # ---- around F, B and W

    def forward(self, key: Key, run: Callable[..., Any], inputs: Any, target: Any, side: Mapping[str, Any]) -> Any:
        """What `run` returns for these inputs; what autograd saves in it is held from now on."""
        if not torch.is_grad_enabled():
            return run(inputs, target, side)
        self._give_back()
        chunk = key[0]
        batch = tensors_in((target, side, inputs if chunk == 0 else None))
        storages = self._held[key] = self._storages("F", key, batch, side.get("carry", ()))
        for tensor in tensors_in(inputs):
            storages.add(tensor)
        if chunk > 0:  # a tensor that the module keeps is then not the one that is known to be given up
            inputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf), inputs)
        if storages.began is None and key in self._recomputed:
            own = sum(each == chunk for each, _ in self._recomputed)
            kind = chunk, "carry" in side
            compares = self._options.check_values or self._recorded[kind] < 2 * own  # in two steps that have them
            self._recorded[kind] += 1
            again = self._again[key] = Recomputation(storages, self._parts[chunk], compares)
            outputs = again.forward(self._modules[chunk], run, inputs, target, side)
            self.output_again_bytes[chunk] = again.output_bytes
        else:
            with saved_tensors_hooks(partial(storages.save, streams=key in self._streamed), Saved.get):
                outputs = run(inputs, target, side)
        storages.drop_unused()
        self.kept_sizes[chunk] = storages.sizes
        storages.begin_offload()
        return outputs

    def prepare(self, key: Key) -> None:
        """Before B or W: waits for what they need first; they wait for the rest as they come to it."""
        self._give_back()
        for copy in self._held[key].loads[:1]:
            copy.wait()

    @contextmanager
    def backward(self, key: Key) -> Iterator[None]:
        """Around the backward, from which on its W hold what they need."""
        loads = self._held.pop(key).loads  # only the graph keeps tensors now, and frees each once it has been used
        try:
            yield
        finally:
            for copy in loads:  # also of what no backward has asked for
                copy.wait()
        self._hold_tasks(key)

    @contextmanager
    def weight(self, keys: list[Any]) -> Iterator[None]:
        """Around W, after which nothing is held. What has been loaded runs before, each as soon as it is there."""
        if any(self._held[key].loads for key in keys):
            self._run_as_loaded(keys)
        yield
        self._queue._kept_back.difference_update(keys)
        for key in keys:
            del self._held[key]

    # ---- R, O and L

    def _recompute(self, action: Action) -> None:
        start, key = self._recorder.now(), action[1:]
        self._give_back()
        present = ForwardState([self._modules[action.chunk]], self._lanes.device)
        try:
            self._again.pop(key).run(partial(self._queue.defer, AT_ONCE if key in self._at_once else key))
        finally:
            present.restore()
        self._recorder.done((action,), start)

    def _offload(self, action: Action) -> None:
        self._give_back()
        self._held[action[1:]].end_offload()
        self._recorder.held()

    def _load(self, action: Action) -> None:
        self._give_back()
        self._held[action[1:]].begin_load(self._recorder.copying(action))

    # ---- between steps

    def reset(self) -> None:
        """Forgets units that were begun and not finished."""
        for storages in self._held.values():
            storages.abandon()
        self._held.clear()
        self._again.clear()
        self._queue._kept_back.clear()

    def close(self) -> None:
        """Waits for the copies under way; no-op the second time."""
        self._lanes.close()

    def _storages(self, kind: str, key: Key, batch: Sequence[Tensor] = (), carried: Any = ()) -> Storages:
        """New storages for what a pass leaves."""
        began = self._recorder.copying(Action("O", *key)) if (kind, *key) in self._offloaded else None
        return Storages(self._lanes, Resident(self._modules[key[0]], batch, carried), began)

    def _give_back(self) -> None:
        """Frees what was offloaded, and held by others, too, until now."""
        for storages in self._held.values():
            storages.give_back()

    def _hold_tasks(self, key: Key) -> None:
        storages = self._held[key] = self._storages("B", key)
        if storages.began is not None:  # no collective may cover what its W do meanwhile
            self._queue._kept_back.add(key)
        for task in reversed([task for task in self._queue.tasks() if task.key == key]):  # W begins with the last
            if storages.began is not None:  # tensors of ours: who else has one then has another in its storage
                self._queue._exchange(task, [tensor.detach() for tensor in task.tensors])
            for tensor in task.tensors:
                storages.add(tensor)
            storages.begin_if_full()
        storages.begin_offload()

    def _run_as_loaded(self, keys: list[Any]) -> None:
        """Runs W of one weight after the other, each as soon as what it needs has been loaded.

        What is left are W with hooks, which may have to run together, and have waited for all loads.
        """
        while waiting := [task for task in self._queue.tasks() if task.key in keys]:
            if waiting[0]._has_hooks:
                break
            for task in waiting:
                if task._weight == waiting[0]._weight:
                    self._arrive(task)
            self._queue.run_one(keys)
        for key in keys:
            self._end_loads(key)

    def _end_loads(self, key: Key) -> None:
        """Waits for the loads, if there are any, of what W need that still wait."""
        if loads := self._held[key].loads:
            for copy in loads:
                copy.wait()
            for task in self._queue.tasks():
                if task.key == key:
                    self._arrive(task)

    def _arrive(self, task: WGradTask) -> None:
        """Waits for the load of what a task needs."""
        for tensor in task.tensors:
            self._held[task.key].arrive(tensor)
        self._queue._exchange(task, task.tensors)  # on a stream of the queue's own W comes after the load
