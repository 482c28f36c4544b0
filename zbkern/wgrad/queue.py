"""The deferred half of a backward: `WGradTask`, one W that has not run yet, and `WGradQueue`, which holds them.

A zbkern layer's backward computes the gradient of its input at once and, while a queue is deferring on this thread,
adds a task to the queue for the gradient of its weights. Everything that can change between B and W is decided when the
task runs (`accumulation.py`): whether the gradient is added or written, and whether it is `.grad` or `.main_grad`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from zbkern.wgrad import accumulation, forgotten, grouping, side_stream
from zbkern.wgrad.storages import HeldStorages
from zbkern.wgrad.task import WGradTask

_NOTHING: AbstractContextManager[None] = nullcontext()


class WGradQueue:
    """Holds the W of every backward that ran inside `defer`, and runs it when asked, in any order.

    Args:
        max_bytes: held bytes above which the oldest W run at once instead of waiting; None for no limit. W of
            parameters with hooks wait nevertheless, because hooks see all of a backward.
        merge: True runs the pending tasks of one weight as one kernel (equal to separate kernels up to rounding); False
            runs each by itself.
        stream: a CUDA stream on which W runs beside other work (`side_stream.py` explains how, and priorities); None
            for the current one. A merged W holds a multiprocessor for longer than several: merge=False lets others in.
            Gradients are then complete where `join` or `run()` of everything was called; until then nothing else may
            touch them, a backward that does not defer included. Gradients with hooks, which may look at them at once,
            are computed on the current stream.
        wgrads_per_collective: how many pending W run while a collective of a pass inside `defer` is in flight
            (`in_flight`): backwards of tensor-parallel layers, and `zbkern.nn.ExpertParallel`, start the collective,
            run so many W, and only then wait for it. "eager" runs W until the collective has ended, by the clock of
            this rank; a single one where a collective does not tell that.
        regather_inputs: True lets a sequence-parallel linear keep this rank's shard of its input instead of the
            gathered input, and W all-gathers it again: less memory, one more all-gather. Such a W communicates, so all
            ranks of a tensor-parallel group must then run the same W in the same order (not `fill="eager"`, nor a
            `max_bytes`, nor `wgrads_per_collective="eager"`). These two may be set at any time, as attributes.

    Attributes:
        listeners: functions, called with the tasks that have just run, once their gradients are complete.
        check_values: False at first. Of W that are added while it is True the values that they read are compared
            between B and W: writes that torch does not count (through `.data`, say) are errors, too. Waits for the
            device.

    Every method may be called from any thread; a scope of `defer` belongs to the thread that opened it.

    >>> queue = WGradQueue()
    >>> with queue.defer(key=0):          # doctest: +SKIP
    ...     loss.backward()               # B only: input gradients
    >>> queue.run()                       # W: now every .grad is what plain backward() gives
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        merge: bool = True,
        stream: torch.cuda.Stream | None = None,
        *,
        wgrads_per_collective: int | Literal["eager"] = 0,
        regather_inputs: bool = False,
    ) -> None:
        self._side: side_stream.SideStream | None = None
        self._tasks: dict[WGradTask, None] = {}  # a dict keeps the order and forgets one task in constant time
        self.max_bytes = max_bytes
        self.merge = merge
        self.wgrads_per_collective = wgrads_per_collective
        self.regather_inputs = regather_inputs
        self.check_values = False
        self._kept_back: set[Hashable] = set()  # keys whose W no collective covers: what they need is elsewhere
        self.peak_bytes = 0
        self.listeners: list[Callable[[Sequence[WGradTask]], None]] = []
        self._held = HeldStorages()
        self._lock = threading.RLock()
        _count(1)
        self.stream = stream
        forgotten.watch(self)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where W runs; None for the current stream. May be set while no W is pending, else raises RuntimeError."""
        return None if self._side is None else self._side.stream

    @stream.setter
    def stream(self, stream: torch.cuda.Stream | None) -> None:
        with self._lock:
            if self._tasks:
                raise RuntimeError(
                    f"WGradQueue.stream: {len(self)} W are pending, whose inputs no event marks for another stream; "
                    "run() or discard() them first"
                )
            self.join()
            self._side = None if stream is None else side_stream.SideStream(stream)

    @property
    def _in_slice(self) -> bool:
        """Whether a forward of this thread is of a slice of its sequences, in which attention needs what came before:
        a Pipeline says so."""
        return thread.in_slice

    @_in_slice.setter
    def _in_slice(self, value: bool) -> None:
        thread.in_slice = value

    def defer(self, key: Hashable = None) -> _Scope:
        """Inside, every `backward()` of this thread runs B only; its W wait here under `key`.

        Autograd runs on the calling thread meanwhile (also for CUDA), so scopes of several threads do not mix. The
        forward may be inside, too: its graph then has no edges to the weights of zbkern layers, which makes B of small
        layers a fifth faster; backward() gives what it always gives, but torch.autograd.grad towards those weights
        raises, and backward(inputs=[weight]) does not reach them (docs/gradients.md).
        """
        hash(key)  # raises TypeError for what cannot be a key
        return _Scope(self, key)

    def add(self, task: WGradTask, key: Hashable = None) -> None:
        """Adds a task to those that wait. Layers call this; so can a layer of your own (see `current`)."""
        if key is AT_ONCE:
            run_in_backward(task)
            return
        hash(key)
        task.key = key
        with self._lock:
            if self._side is not None and task.tensors[0].device == self._side.stream.device:
                task._ready_event = self._side.record_event()
                self._release(self._side.take_finished())
            if self.check_values:
                task._keep_sums()
            self._tasks[task] = None
            self._hold(task)
            if self.max_bytes is not None and self._held.nbytes > self.max_bytes:
                self._run_early()
            if self._held.nbytes > self.peak_bytes:
                self.peak_bytes = self._held.nbytes

    def _exchange(self, task: WGradTask, tensors: Sequence[Tensor]) -> None:
        """Gives a waiting task other tensors with the same values, such as copies of them elsewhere.

        The task keeps its place among the others. On the queue's own stream its W then comes after what the current
        stream has been given by now. Raises ValueError for a task that does not wait here.
        """
        with self._lock:
            if task not in self._tasks:
                raise ValueError(f"WGradQueue: task must be one that waits in this queue; got {task!r}")
            self._release([task])
            task.tensors = tuple(tensors)
            task._version = task._current_version()
            if task._ready_event is not None and self._side is not None:
                task._ready_event = self._side.record_event()
            self._hold(task)

    def run(self, key: Hashable | list[Hashable] = None) -> int:
        """Runs the W of one key, of a list of keys, or all when key is None; oldest first. Returns how many tasks."""
        with self._lock:
            selected = self._select(key)
            if selected:
                self._run(grouping.batches(selected, self.merge), selected[0])
            if key is None:
                self.join()
        return len(selected)

    def join(self) -> None:
        """Makes the current stream wait for the W on the queue's own stream, whose gradients are then complete."""
        if self._side is not None:
            with self._lock:
                self._release(self._side.join())

    def run_one(self, key: Hashable | list[Hashable] = None) -> bool:
        """Runs the oldest task (of the given keys), with every pending task of its weight among them when merging.

        Returns False when there is none.
        """
        with self._lock:
            selected = self._select(key) if key is not None else self._tasks
            first = next(iter(selected), None)
            if first is None:
                return False
            if first._has_hooks:
                self._run([next(grouping.batches(self._select([first.key]), self.merge))], first)
            else:
                self._run_weight_of(first, selected)
        return True

    def _run_during_collective(self, is_completed: Callable[[], bool] | None = None) -> int:
        """Runs `wgrads_per_collective` of the oldest W, fewer where fewer are pending. Returns how many.

        `in_flight` calls it. W with hooks are left: this backward may have more to add to the same parameter. Those of
        one weight count as one when merging. A number is the same on all ranks of a group; "eager" asks is_completed
        before each W, on a GPU once the device has come as far as the host.
        """
        ran, most = 0, self.wgrads_per_collective
        has_ended = None  # asked before each W
        if most == "eager":
            if self.regather_inputs:
                raise ValueError(
                    'WGradQueue: wgrads_per_collective must be a number with regather_inputs=True, got "eager": such a '
                    "W communicates, and all ranks must run the same"
                )
            has_ended, most = is_completed, 1 if is_completed is None else len(self)
        with self._lock:
            while ran < most:
                ready = [task for task in self._tasks if task.key not in self._kept_back]
                first = next((task for task in ready if not task._has_hooks), None)
                if first is None:
                    break
                if has_ended is not None:
                    if first.tensors[0].is_cuda:
                        torch.cuda.current_stream(first.tensors[0].device).synchronize()
                    if has_ended():
                        break
                self._run_weight_of(first, ready)
                ran += 1
        return ran

    def discard(self, key: Hashable | list[Hashable] = None) -> int:
        """Drops the W of one key, of a list, or all: their gradients are lost. Returns how many."""
        with self._lock:
            dropped = self._select(key)
            for task in dropped:
                del self._tasks[task]
            self._release(dropped)
        return len(dropped)

    def pending(self, key: Hashable | list[Hashable] = None) -> int:
        """Number of tasks that wait, of one key, of a list, or of all."""
        with self._lock:
            return len(self._tasks) if key is None else len(self._select(key))

    def keys(self) -> list[Any]:
        """The keys that have tasks waiting, oldest first."""
        with self._lock:
            return list(dict.fromkeys(task.key for task in self._tasks))

    def tasks(self) -> tuple[WGradTask, ...]:
        """The tasks that wait, oldest first."""
        with self._lock:
            return tuple(self._tasks)

    @property
    def bytes(self) -> int:
        """Bytes of the storages that W keep alive, waiting or running on the queue's stream, each storage once."""
        return self._held.nbytes

    def __len__(self) -> int:
        return len(self._tasks)

    def __bool__(self) -> bool:
        return True  # an empty queue is still a queue: `queue or default` must not replace it

    def __repr__(self) -> str:
        return f"WGradQueue(pending={len(self)}, bytes={self.bytes}, peak_bytes={self.peak_bytes})"

    def __del__(self) -> None:
        if not hasattr(self, "_lock") or _count is None:  # wrong arguments; interpreter exit
            return
        _count(-1)
        self.join()
        if self._tasks:
            warnings.warn(
                f"a WGradQueue was deleted with {len(self._tasks)} W still pending (first: {next(iter(self._tasks))}): "
                "these gradients are lost; call run() before the optimizer step, or discard() to drop them on purpose",
                RuntimeWarning,
                stacklevel=2,
            )

    def _select(self, key: Hashable | list[Hashable]) -> list[WGradTask]:
        """The tasks of these keys; for those who hold the lock."""
        if key is None:
            return [*self._tasks]
        keys = {*key} if isinstance(key, list) else {key}
        return [task for task in self._tasks if task.key in keys]

    def _run_weight_of(self, first: WGradTask, selected: Iterable[WGradTask]) -> None:
        """Runs a task without hooks; when merging, with all of its weight among the selected."""
        group = [task for task in selected if task._weight == first._weight] if self.merge else [first]
        self._run([([group], False)], first)

    def _run(self, batches: Iterable[tuple[grouping.Batch, bool]], first: WGradTask) -> None:
        """first: a task of them, on whose device they run. W computes in the dtypes that B left, and real gradients."""
        device = first.tensors[0].device.type
        autocast = torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(device)
        outer, thread.in_w = thread.in_w, True
        try:
            with (
                torch.autocast(device, enabled=False) if autocast else _NOTHING,
                torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING,
                torch.set_grad_enabled(False),  # half the time of no_grad()
            ):
                for batch, hooked in batches:
                    self._run_batch(batch, hooked)
        finally:
            thread.in_w = outer

    def _run_batch(self, batch: grouping.Batch, hooked: bool) -> None:
        """Runs groups that are one kernel; the tasks leave the queue once their gradients are computed."""
        tasks = batch[0] if len(batch) == 1 else [task for group in batch for task in group]
        for task in tasks:
            if not task._is_unchanged():
                raise RuntimeError(
                    f"WGradQueue: a tensor that {task} needs was modified in place between B and W; run the queue "
                    "before the modification (of a weight, before the optimizer's step), or modify a copy"
                )
        first, side, gradients = tasks[0], None, None
        try:
            if hooked:
                self.join()
                gradients = accumulation.sum_gradients(tasks)
            elif first._ready_event is not None:
                side = self._side
                self._run_on_side_stream(batch, tasks)
            else:
                accumulation.accumulate(batch)
        except Exception as error:
            raise RuntimeError(f"WGradQueue: W of {first} failed and stays in the queue: {error}") from error
        for task in tasks:
            del self._tasks[task]
        if side is None:
            self._release(tasks)
        if gradients:  # the tasks are gone by now: if a hook raises, the gradient is not added twice
            accumulation.accumulate_via_autograd(gradients)
        if self.listeners:
            with _NOTHING if side is None else torch.cuda.stream(side.stream):  # after W, whichever stream it is on
                for listener in self.listeners:
                    listener(tasks)

    def _run_on_side_stream(self, batch: list[list[WGradTask]], tasks: list[WGradTask]) -> None:
        side = self._side
        assert side is not None
        targets = [accumulation.GradientTarget(group[0]) for group in batch]
        ready_events = [task._ready_event for task in tasks]
        if any(target.fresh for target in targets):
            ready_events.append(side.record_event())
        # No priority takes a multiprocessor from a block that runs, so these end after a tile: 44 us on an H100 where W
        # sums over 4096 rows.
        side.launch(lambda: accumulation.run_into(batch, targets, max_tiles=1), ready_events, tasks)
        if any(target.replaces for target in targets):
            self.join()
        for target in targets:
            target.commit()

    def _run_early(self) -> None:
        """Runs the oldest W until the limit holds; those with hooks wait: this backward may have more for them."""
        assert self.max_bytes is not None
        for task in list(self._tasks):
            if self._held.nbytes > self.max_bytes:
                self.join()
            if self._held.nbytes <= self.max_bytes:
                return
            if not task._has_hooks:
                self._run([([[task]], False)], task)
        if self._held.nbytes > self.max_bytes:
            self.join()

    def _hold(self, task: WGradTask) -> None:
        task._storages = self._held.add(task.tensors)

    def _release(self, tasks: Iterable[WGradTask]) -> None:
        for task in tasks:
            self._held.remove(task._storages)


AT_ONCE = object()
"""A key of `WGradQueue.defer` for the forward and the backward of a pass of which nothing waits: each W runs in it."""


class _Scope:
    """The scope of `WGradQueue.defer`. It is a class because a generator's context takes three times as long."""

    __slots__ = ("_where",)

    def __init__(self, queue: WGradQueue, key: Hashable) -> None:
        self._where = queue, key

    def __enter__(self) -> WGradQueue:
        thread.stack.append((self._where, torch.autograd.set_multithreading_enabled(False)))
        return self._where[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread.stack.pop()[1].__exit__(kind, error, trace)


class no_defer:  # as torch.no_grad
    """What is computed inside, of any layer, has its W in B, also where that B runs within `WGradQueue.defer`.

    For layers that hold many bytes for little W: such a W costs the same time in B, and holds nothing.

    >>> with queue.defer(), no_defer():   # doctest: +SKIP
    ...     y = attention(x)              # nothing of its backward will wait
    """

    def __enter__(self) -> None:
        _count(1)  # where no queue exists yet, forwards do not ask whether they may defer
        thread.stack.append((None, _NOTHING))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread.stack.pop()
        _count(-1)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[tuple[WGradQueue, Hashable] | None, AbstractContextManager[None]]] = []
        self.in_slice = False
        self.in_w = False  # a W runs
        self.give_way: Callable[[], None] | None = None  # of the pass that runs: lets those beside it go on
        self.watch: Callable[[], AbstractContextManager[None]] | None = None  # around waits for collectives


thread = _Thread()
_backward_queues: weakref.WeakValueDictionary[int, WGradQueue] = weakref.WeakValueDictionary()  # by running backward
possible = False  # some queue exists, so W may be deferred
_alive = 0
_counting = threading.Lock()


def _count(change: int) -> None:
    global _alive, possible
    with _counting:
        _alive += change
        possible = _alive > 0


def current() -> tuple[WGradQueue, Hashable] | None:
    """The queue and key of the innermost `defer` scope of this thread, or None, also inside `no_defer`."""
    stack = thread.stack
    return stack[-1][0] if stack else None


def may_defer() -> bool:
    """False inside `no_defer`."""
    stack = thread.stack
    return not stack or stack[-1][0] is not None


def leaves_to_autograd() -> bool:
    """Whether no W of this thread's passes waits, or must be a kernel of its own: torch's autograd may do all of it."""
    where = current()
    return where is not None and where[1] is AT_ONCE and where[0].merge


def run_in_backward(task: WGradTask) -> None:
    """Runs a task that is not deferred: now, or for hooks when this backward ends and all contributions are in.

    Autograd, too, calls a parameter's hooks once per backward.
    """
    if not task._has_hooks:
        accumulation.accumulate([[task]])
        return
    backward = torch._C._current_graph_task_id()
    queue = _backward_queues.get(backward)
    if queue is None:
        queue = _backward_queues[backward] = WGradQueue()
        # Only the callback owns the queue: if the backward fails, both go, and its gradients with them, as in torch.
        torch.autograd.Variable._execution_engine.queue_callback(queue.run)  # type: ignore[arg-type]
    queue.add(task)
