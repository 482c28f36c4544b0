"""The deferred half of a backward: `WGradTask`, one W that has not run yet, and `WGradQueue`, which holds them.

A zbkern layer's backward computes the gradient of its input at once and, while a queue is deferring on this thread,
hands the gradient of its weights over as a task. Everything that can change between B and W is decided when the task
runs: whether the gradient is added or written, and whether it lives in `.grad` or in `.main_grad`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Segment = tuple[Tensor, ...]
Launch = Callable[[Sequence[Segment], Sequence["Tensor | None"], bool], None]


class WGradTask:
    """One W: run `launch(segments, outputs, accumulate)` into the gradients of `parameters`.

    launch: a raw wgrad launch (`kernels/spec.py`); it sums over `segments` and writes or adds to each output, aligned
    with `parameters` (None where a parameter takes no gradient). tensors: what this task's one segment holds, usually
    the layer's input and its output gradient, detached. flops: the arithmetic of the launch. listened: something
    listens at autograd's accumulation of these parameters (autograd.has_listeners), so gradients go through it.
    """

    __slots__ = ("flops", "key", "launch", "listened", "name", "parameters", "tensors", "versions")

    def __init__(
        self,
        launch: Launch,
        tensors: Segment,
        parameters: tuple[Tensor | None, ...],
        *,
        flops: int = 0,
        name: str = "",
        listened: bool = False,
    ) -> None:
        self.launch = launch
        self.tensors = tensors
        self.parameters = parameters
        self.flops = flops
        self.name = name
        self.listened = listened
        self.key: Hashable = None
        self.versions = tuple(tensor._version for tensor in tensors)

    @property
    def delivers(self) -> bool:
        """True when the gradients must go through autograd's accumulation, because hooks wait for them there."""
        return self.listened or any(p is not None and p._post_accumulate_grad_hooks for p in self.parameters)

    def same_weight(self, other: WGradTask) -> bool:
        """True when both can be one launch: the same operation into the same parameters."""
        return self.launch == other.launch and all(
            a is b for a, b in zip(self.parameters, other.parameters, strict=True)
        )

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in self.tensors)
        return f"WGradTask({self.name or 'unnamed layer'}, {shapes}, key={self.key!r})"


class WGradQueue:
    """Holds the W of every backward that ran inside `defer`, and runs it when asked, in any order.

    max_bytes: pinned bytes above which the oldest W run at once instead of waiting; None for no limit.
    merge: True runs the pending tasks of one weight as one launch (equal to separate launches up to rounding);
    "exact" runs them one after the other in the order of their backwards, bit for bit as separate launches; False
    never groups.

    >>> queue = WGradQueue()
    >>> with queue.defer(key=0):          # doctest: +SKIP
    ...     loss.backward()               # B only: input gradients
    >>> queue.run()                       # W: now every .grad is what plain backward() gives
    """

    def __init__(self, max_bytes: int | None = None, merge: bool | str = True) -> None:
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 0):
            raise ValueError(
                f"WGradQueue: max_bytes must be a number of bytes >= 0, or None for no limit; got {max_bytes!r}"
            )
        if merge not in (True, False, "exact"):
            raise ValueError(f'WGradQueue: merge must be True, False or "exact"; got {merge!r}')
        self.max_bytes = max_bytes
        self.merge = merge
        self.peak_bytes = 0
        self._tasks: list[WGradTask] = []
        self._pinned: dict[int, list[int]] = {}  # storage -> [uses, bytes]
        self._bytes = 0
        self._lock = threading.RLock()

    @contextmanager
    def defer(self, key: Hashable = None) -> Iterator[WGradQueue]:
        """Inside, every `backward()` of this thread runs B only; its W wait here under `key`.

        Autograd runs on the calling thread meanwhile (also for CUDA), so scopes of several threads do not mix.
        """
        stack = _scopes.stack
        stack.append((self, key))
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield self
        finally:
            stack.pop()

    def add(self, task: WGradTask, key: Hashable = None) -> None:
        """Takes a task over. Layers call this; so can a layer of your own (see `current`)."""
        task.key = key
        with self._lock:
            self._tasks.append(task)
            for tensor in task.tensors:
                storage = tensor.untyped_storage()
                uses = self._pinned.setdefault(storage._cdata, [0, storage.nbytes()])
                if uses[0] == 0:
                    self._bytes += uses[1]
                uses[0] += 1
            while self.max_bytes is not None and self._bytes > self.max_bytes and self._tasks:
                self._run_group(self._group_of(self._tasks[0], merge=False))
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def run(self, key: Hashable | list[Hashable] = None) -> int:
        """Runs the W of one key, of a list of keys, or all when key is None; oldest first. Returns how many ran."""
        with self._lock:
            selected = self._select(key)
            waiting = set(map(id, selected))
            for task in selected:
                if id(task) not in waiting:
                    continue
                group = self._group_of(task, merge=bool(self.merge), among=waiting)
                self._run_group(group)
                waiting.difference_update(map(id, group))
        return len(selected)

    def run_one(self, key: Hashable | list[Hashable] = None) -> bool:
        """Runs the oldest task (of the given keys), with every pending task of its weight among them when merging.

        Returns False when there is none.
        """
        with self._lock:
            selected = self._select(key)
            if not selected:
                return False
            self._run_group(self._group_of(selected[0], merge=bool(self.merge), among=set(map(id, selected))))
        return True

    def discard(self, key: Hashable | list[Hashable] = None) -> int:
        """Drops the W of one key, of a list, or all: these gradients are lost. Returns how many."""
        with self._lock:
            dropped = self._select(key)
            self._remove(dropped)
        return len(dropped)

    def pending(self, key: Hashable | list[Hashable] = None) -> int:
        """Number of tasks that wait, of one key, of a list, or of all."""
        return len(self._select(key))

    def keys(self) -> list[Hashable]:
        """The keys that have tasks waiting, oldest first."""
        return list(dict.fromkeys(task.key for task in self._tasks))

    def tasks(self) -> tuple[WGradTask, ...]:
        """The tasks that wait, oldest first."""
        return tuple(self._tasks)

    @property
    def bytes(self) -> int:
        """Bytes of the storages that waiting tasks keep alive, each storage counted once."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"WGradQueue(pending={len(self)}, bytes={self.bytes}, peak_bytes={self.peak_bytes})"

    def __del__(self) -> None:
        if getattr(self, "_tasks", None):
            warnings.warn(
                f"a WGradQueue was deleted with {len(self._tasks)} W still pending (first: {self._tasks[0]}): these "
                "gradients are lost; call run() before the optimizer step, or discard() to drop them on purpose",
                ResourceWarning,
                stacklevel=2,
            )

    def _select(self, key: Hashable | list[Hashable]) -> list[WGradTask]:
        if key is None:
            return list(self._tasks)
        keys = key if isinstance(key, list) else [key]
        return [task for task in self._tasks if task.key in keys]

    def _group_of(self, first: WGradTask, merge: bool, among: set[int] | None = None) -> list[WGradTask]:
        """`first` with the tasks that must or may run in its launch.

        May: the same weight. Must: tasks of the same key that share a parameter whose hooks listen, because autograd
        calls those once per backward, after all contributions of the backward (DistributedDataParallel relies on it).
        """
        group = [first]
        for task in self._tasks:
            if task is first or (among is not None and id(task) not in among):
                continue
            must = first.delivers and task.key == first.key and _share_parameter(task, first)
            if must or (merge and not first.delivers and task.same_weight(first)):
                group.append(task)
        return group

    def _run_group(self, tasks: list[WGradTask]) -> None:
        for task in tasks:
            for tensor, version in zip(task.tensors, task.versions, strict=True):
                if tensor._version != version:
                    raise RuntimeError(
                        f"WGradQueue: a tensor that {task} needs was modified in place between B and W; "
                        "run the queue before the modification, or modify a copy"
                    )
        try:
            with torch.no_grad(), torch.autocast(tasks[0].tensors[0].device.type, enabled=False):
                if tasks[0].delivers:
                    _deliver(tasks)
                elif self.merge is True or len(tasks) == 1:
                    _accumulate(tasks[0], [task.tensors for task in tasks])
                else:
                    for task in tasks:
                        _accumulate(task, [task.tensors])
        except Exception as error:
            raise RuntimeError(f"WGradQueue: W of {tasks[0]} failed and stays in the queue: {error}") from error
        self._remove(tasks)

    def _remove(self, tasks: list[WGradTask]) -> None:
        gone = set(map(id, tasks))
        self._tasks = [task for task in self._tasks if id(task) not in gone]
        for task in tasks:
            for tensor in task.tensors:
                storage = tensor.untyped_storage()._cdata
                uses = self._pinned[storage]
                uses[0] -= 1
                if uses[0] == 0:
                    self._bytes -= uses[1]
                    del self._pinned[storage]


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[WGradQueue, Hashable]] = []


_scopes = _Scopes()


def current() -> tuple[WGradQueue, Hashable] | None:
    """The queue and key of the innermost `defer` scope of this thread, or None."""
    stack = _scopes.stack
    return stack[-1] if stack else None


def _share_parameter(a: WGradTask, b: WGradTask) -> bool:
    return any(p is q for p in a.parameters if p is not None for q in b.parameters)


def _accumulate(task: WGradTask, segments: list[Segment]) -> None:
    """Runs one launch straight into the gradients: added in place where one exists, written where none does."""
    finished: list[Callable[[], None]] = []
    targets = [None if p is None else _target(p, finished) for p in task.parameters]
    fresh = {is_fresh for target in targets if target is not None for is_fresh in (target[1],)}
    if len(fresh) > 1:  # one launch has one mode: start the missing gradients at zero and add to all
        for target in targets:
            if target is not None and target[1]:
                target[0].zero_()
    outputs = [None if target is None else target[0] for target in targets]
    task.launch(segments, outputs, fresh != {True})
    for finish in finished:
        finish()


def _target(parameter: Tensor, finished: list[Callable[[], None]]) -> tuple[Tensor, bool]:
    """Where this gradient goes now, and whether the launch writes (True) or adds (False); `finished` runs after it."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        overwrite = bool(
            getattr(parameter, "overwrite_main_grad", False) or getattr(parameter, "zero_out_wgrad", False)
        )
        if hasattr(parameter, "grad_added_to_main_grad"):
            finished.append(lambda: setattr(parameter, "grad_added_to_main_grad", True))
        return main_grad, overwrite
    grad = parameter.grad
    if grad is None:
        fresh = torch.empty_like(parameter, requires_grad=False)
        finished.append(lambda: setattr(parameter, "grad", fresh))
        return fresh, True
    if grad.is_sparse or grad.requires_grad:
        dense = torch.zeros_like(parameter, requires_grad=False)
        finished.append(lambda: setattr(parameter, "grad", grad + dense))
        return dense, False
    return grad, False


def _deliver(tasks: list[WGradTask]) -> None:
    """Sums the contributions of one backward and hands them to autograd: every hook sees what it always sees."""
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for task in tasks:
        outputs: list[Tensor | None] = []
        for parameter in task.parameters:
            if parameter is None:
                outputs.append(None)
                continue
            if id(parameter) not in sums:
                sums[id(parameter)] = (parameter, torch.zeros_like(parameter, requires_grad=False))
            outputs.append(sums[id(parameter)][1])
        task.launch([task.tensors], outputs, True)
    hand_over([parameter for parameter, _ in sums.values()], [gradient for _, gradient in sums.values()])


def hand_over(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Gives gradients to leaf parameters through autograd's accumulation: every kind of hook runs as in a backward."""
    with torch.enable_grad():
        views: list[Any] = [parameter.view_as(parameter) for parameter in parameters]
    torch.autograd.backward(views, list(gradients))
