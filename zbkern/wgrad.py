"""The deferred half of a backward: `WGradTask`, one W that has not run yet, and `WGradQueue`, which holds them.

A zbkern layer's backward computes the gradient of its input at once and, while a queue is deferring on this thread,
hands the gradient of its weights over as a task. Everything that can change between B and W is decided when the task
runs (`landing.py`): whether the gradient is added or written, and whether it lives in `.grad` or in `.main_grad`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from zbkern import landing

Segment = tuple[Tensor, ...]
Launch = Callable[[Sequence[Segment], Sequence["Tensor | None"], bool], None]


class WGradTask:
    """One W: run `launch(segments, outputs, accumulate)` into the gradients of `parameters`.

    launch: a raw wgrad launch (`kernels/spec.py`); it sums over `segments` and writes or adds to each output, aligned
    with `parameters` (None where a parameter takes no gradient). tensors: what this task's one segment holds, usually
    the layer's input and its output gradient, detached. arithmetic: the launch's flops, or a function of `tensors`
    that counts them when somebody asks. listened: something that leaves no trace on the parameters waits for their
    gradients at autograd's accumulation, as DistributedDataParallel's reducer does.
    """

    __slots__ = ("_arithmetic", "key", "launch", "listened", "name", "parameters", "tensors", "version", "weight")

    def __init__(
        self,
        launch: Launch,
        tensors: Segment,
        parameters: tuple[Tensor | None, ...],
        arithmetic: int | Callable[[Segment], int] = 0,
        name: str = "",
        listened: bool = False,
    ) -> None:
        self.launch = launch
        self.tensors = tensors
        self.parameters = parameters
        self._arithmetic = arithmetic
        self.name = name
        self.listened = listened
        self.key: Hashable = None
        version = 0  # grows whenever one of the tensors is modified in place
        for tensor in tensors:
            version += tensor._version
        self.version = version
        self.weight = (launch, *map(id, parameters))  # equal for tasks that can be one launch

    @property
    def flops(self) -> int:
        """The arithmetic of the launch."""
        return self._arithmetic if isinstance(self._arithmetic, int) else self._arithmetic(self.tensors)

    @property
    def delivers(self) -> bool:
        """True when the gradients must go through autograd's accumulation, because hooks wait for them there."""
        if self.listened:
            return True
        for parameter in self.parameters:  # a loop: half the time of any() over a generator, and this runs per task
            if parameter is not None and (parameter._post_accumulate_grad_hooks or parameter._backward_hooks):
                return True
        return False

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in self.tensors)
        return f"WGradTask({self.name or 'unnamed layer'}, {shapes}, key={self.key!r})"


class WGradQueue:
    """Holds the W of every backward that ran inside `defer`, and runs it when asked, in any order.

    max_bytes: pinned bytes above which the oldest W run at once instead of waiting; None for no limit.
    merge: True runs the pending tasks of one weight as one launch (equal to separate launches up to rounding);
    "exact" runs them one after the other in the order of their backwards, bit for bit as separate launches; False
    never groups. listeners: called with the tasks of each launch once their gradients have landed. Every method may be
    called from any thread; a scope of `defer` belongs to the thread that opened it.

    >>> queue = WGradQueue()
    >>> with queue.defer(key=0):          # doctest: +SKIP
    ...     loss.backward()               # B only: input gradients
    >>> queue.run()                       # W: now every .grad is what plain backward() gives
    """

    def __init__(self, max_bytes: int | None = None, merge: bool | str = True) -> None:
        self._tasks: dict[WGradTask, None] = {}  # a dict keeps the order and forgets one task in constant time
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 0):
            raise ValueError(
                f"WGradQueue: max_bytes must be a number of bytes >= 0, or None for no limit; got {max_bytes!r}"
            )
        if merge not in (True, False, "exact"):
            raise ValueError(f'WGradQueue: merge must be True, False or "exact"; got {merge!r}')
        self.max_bytes = max_bytes
        self.merge = merge
        self.peak_bytes = 0
        self.listeners: list[Callable[[Sequence[WGradTask]], None]] = []
        self._pinned: dict[int, int] = {}  # storage -> how many task tensors live in it
        self._bytes = 0
        self._lock = threading.RLock()
        _count(1)

    def defer(self, key: Hashable = None) -> _Scope:
        """Inside, every `backward()` of this thread runs B only; its W wait here under `key`.

        Autograd runs on the calling thread meanwhile (also for CUDA), so scopes of several threads do not mix. The
        forward may be inside, too: its graph then has no edges to the weights of zbkern layers, which makes B of small
        layers a fifth faster; backward() gives what it always gives, but torch.autograd.grad towards those weights
        raises, and backward(inputs=[weight]) does not reach them (docs/gradients.md).
        """
        return _Scope(self, key)

    def add(self, task: WGradTask, key: Hashable = None) -> None:
        """Takes a task over. Layers call this; so can a layer of your own (see `current`)."""
        task.key = key
        with self._lock:
            self._tasks[task] = None
            pinned = self._pinned
            for tensor in task.tensors:
                storage = tensor.untyped_storage()
                address = storage._cdata
                if address in pinned:
                    pinned[address] += 1
                else:
                    pinned[address] = 1
                    self._bytes += storage.nbytes()
            if self.max_bytes is not None and self._bytes > self.max_bytes:
                self._run_early()
            if self._bytes > self.peak_bytes:
                self.peak_bytes = self._bytes

    def run(self, key: Hashable | list[Hashable] = None) -> int:
        """Runs the W of one key, of a list of keys, or all when key is None; oldest first. Returns how many tasks."""
        with self._lock:
            selected = self._select(key)
            if selected:
                self._run_groups(self._groups(selected))
        return len(selected)

    def run_one(self, key: Hashable | list[Hashable] = None) -> bool:
        """Runs the oldest task (of the given keys), with every pending task of its weight among them when merging.

        Returns False when there is none.
        """
        with self._lock:
            selected = self._select(key) if key is not None else self._tasks
            first = next(iter(selected), None)
            if first is None:
                return False
            if first.delivers:
                group = self._groups(self._select([first.key]))[0]
            elif self.merge:
                weight = first.weight
                group = [task for task in selected if task.weight == weight]
            else:
                group = [first]
            self._run_groups([group])
        return True

    def discard(self, key: Hashable | list[Hashable] = None) -> int:
        """Drops the W of one key, of a list, or all: their gradients are lost. Returns how many."""
        with self._lock:
            dropped = self._select(key)
            self._remove(dropped)
        return len(dropped)

    def pending(self, key: Hashable | list[Hashable] = None) -> int:
        """Number of tasks that wait, of one key, of a list, or of all."""
        return len(self._tasks) if key is None else len(self._select(key))

    def keys(self) -> list[Hashable]:
        """The keys that have tasks waiting, oldest first."""
        with self._lock:
            return list(dict.fromkeys(task.key for task in self._tasks))

    def tasks(self) -> tuple[WGradTask, ...]:
        """The tasks that wait, oldest first."""
        with self._lock:
            return tuple(self._tasks)

    @property
    def bytes(self) -> int:
        """Bytes of the storages that waiting tasks keep alive, each storage counted once."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._tasks)

    def __bool__(self) -> bool:
        return True  # an empty queue is still a queue: `queue or default` must not replace it

    def __repr__(self) -> str:
        return f"WGradQueue(pending={len(self)}, bytes={self.bytes}, peak_bytes={self.peak_bytes})"

    def __del__(self) -> None:
        if not hasattr(self, "_lock") or _count is None:  # the constructor refused its arguments; interpreter exit
            return
        _count(-1)
        if self._tasks:
            warnings.warn(
                f"a WGradQueue was deleted with {len(self._tasks)} W still pending (first: {next(iter(self._tasks))}): "
                "these gradients are lost; call run() before the optimizer step, or discard() to drop them on purpose",
                RuntimeWarning,
                stacklevel=2,
            )

    def _select(self, key: Hashable | list[Hashable]) -> list[WGradTask]:
        with self._lock:
            if key is None:
                return [*self._tasks]
            keys = key if isinstance(key, list) else [key]
            return [task for task in self._tasks if task.key in keys]

    def _groups(self, selected: Iterable[WGradTask]) -> list[list[WGradTask]]:
        """The tasks in groups that run together, oldest group first.

        May: the same weight, when merging. Must: tasks of one key that share a parameter whose hooks listen, because
        autograd calls those once per backward, after all its contributions (DistributedDataParallel relies on it).
        """
        groups: dict[Hashable, list[WGradTask]] = {}
        merge = bool(self.merge)
        joined: dict[tuple[Hashable, int], Hashable] = {}  # (key, parameter) -> its group, where hooks listen
        for task in selected:
            if not task.delivers:
                groups.setdefault(task.weight if merge else task, []).append(task)
                continue
            shares = [(task.key, id(p)) for p in task.parameters if p is not None]
            found = list(dict.fromkeys(joined[share] for share in shares if share in joined))
            label = found[0] if found else task
            groups.setdefault(label, []).append(task)
            for other in found[1:]:
                groups[label] += groups.pop(other)
                joined.update((share, label) for share, group in joined.items() if group is other)
            joined.update((share, label) for share in shares)
        return list(groups.values())

    def _run_groups(self, groups: Sequence[list[WGradTask]]) -> None:
        device = groups[0][0].tensors[0].device.type
        if torch.is_autocast_enabled(device):  # W computes in the dtypes that B left
            with torch.autocast(device, enabled=False):
                return self._run_groups(groups)
        with torch.no_grad():
            for tasks in groups:
                self._run_group(tasks)
        return None

    def _run_group(self, tasks: list[WGradTask]) -> None:
        """Runs tasks that may run together; they leave the queue once their gradients have landed."""
        for task in tasks:
            version = 0
            for tensor in task.tensors:
                version += tensor._version
            if version != task.version:
                raise RuntimeError(
                    f"WGradQueue: a tensor that {task} needs was modified in place between B and W; "
                    "run the queue before the modification, or modify a copy"
                )
        first = tasks[0]
        if first.delivers:
            try:
                gradients = landing.sum_gradients(tasks)
            except Exception as error:
                raise _failed(first, error) from error
            self._remove(tasks)  # before the hooks: if one raises, the gradient has landed all the same
            if gradients:
                landing.hand_over(gradients)
        elif self.merge is True or len(tasks) == 1:
            try:
                landing.accumulate(first, [task.tensors for task in tasks])
            except Exception as error:
                raise _failed(first, error) from error
            self._remove(tasks)
        else:
            for task in tasks:
                self._run_group([task])
            return
        for listener in self.listeners:
            listener(tasks)

    def _run_early(self) -> None:
        """Runs the oldest W until the limit holds. Where hooks listen, the gradient is computed but kept.

        They hear of it when the task is asked for: this backward may have more to add to the same parameter.
        """
        assert self.max_bytes is not None
        for task in list(self._tasks):
            if self._bytes <= self.max_bytes:
                return
            if not task.delivers:
                self._run_groups([[task]])
            elif task.launch is not landing.add_gradients:
                with torch.no_grad():
                    gradients = landing.sum_gradients([task])
                self._remove([task])
                if gradients:
                    parameters, sums = zip(*gradients, strict=True)
                    self.add(WGradTask(landing.add_gradients, sums, parameters, 0, task.name, task.listened), task.key)

    def _remove(self, tasks: Iterable[WGradTask]) -> None:
        pinned = self._pinned
        for task in tasks:
            del self._tasks[task]
            for tensor in task.tensors:
                storage = tensor.untyped_storage()
                address = storage._cdata
                uses = pinned[address] - 1
                if uses:
                    pinned[address] = uses
                else:
                    del pinned[address]
                    self._bytes -= storage.nbytes()


class _Scope:
    """What `WGradQueue.defer` returns: a class, because a generator's context takes three times as long."""

    __slots__ = ("_key", "_queue")

    def __init__(self, queue: WGradQueue, key: Hashable) -> None:
        self._queue = queue
        self._key = key

    def __enter__(self) -> WGradQueue:
        _scopes.modes.append(torch.autograd.set_multithreading_enabled(False))
        _scopes.stack.append((self._queue, self._key))
        return self._queue

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _scopes.stack.pop()
        _scopes.modes.pop().__exit__(kind, error, trace)


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[WGradQueue, Hashable]] = []
        self.modes: list[torch.autograd.set_multithreading_enabled] = []


_scopes = _Scopes()
_endings: weakref.WeakValueDictionary[int, WGradQueue] = weakref.WeakValueDictionary()  # by running backward
possible = False  # some queue exists, so W may be deferred
_alive = 0
_counting = threading.Lock()


def _count(change: int) -> None:
    global _alive, possible
    with _counting:
        _alive += change
        possible = _alive > 0


def current() -> tuple[WGradQueue, Hashable] | None:
    """The queue and key of the innermost `defer` scope of this thread, or None."""
    stack = _scopes.stack
    return stack[-1] if stack else None


def run_in_backward(task: WGradTask) -> None:
    """Runs a task that nobody defers: now, or where hooks listen when this backward ends and all contributions are in.

    Autograd, too, calls a parameter's hooks once per backward.
    """
    if not task.delivers:
        landing.accumulate(task, [task.tensors])
        return
    backward = torch._C._current_graph_task_id()
    queue = _endings.get(backward)
    if queue is None:
        queue = _endings[backward] = WGradQueue()
        # Only the callback owns the queue: if the backward fails, both go, and its gradients with them, as in torch.
        torch.autograd.Variable._execution_engine.queue_callback(queue.run)
    queue.add(task)


def _failed(task: WGradTask, error: Exception) -> RuntimeError:
    return RuntimeError(f"WGradQueue: W of {task} failed and stays in the queue: {error}")
