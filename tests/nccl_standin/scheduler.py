"""Threads that run one at a time, in an order that a seed draws, on a clock that jumps to the next thing that happens.

A thread gives its turn away wherever it could wait: at locks, conditions, queues, joins and sleeps. So every run of a
seed is the same, a time-out of minutes costs nothing, and threads that wait for each other are seen at once: nobody can
run, and nothing will happen.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

HOST = 5e-6  # seconds that a thread's turn takes on average
REAL = 300.0  # seconds of a run by the clock, which are few, on the busiest machine


class Stuck(Exception):
    """No thread can run, and nothing will happen."""


class Ended(BaseException):
    """Unwinds a thread of a run that is over, or of a rank that was killed."""


def _held_lock() -> threading.Lock:
    """That another thread releases. A Semaphore is a Condition, in Python."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Task:
    """A thread. rank: whose it is. dead: killed or frozen, and never run again."""

    def __init__(self, scheduler: Scheduler, rank: int, name: str, function: Callable[[], Any]) -> None:
        self.scheduler, self.rank, self.name, self.function = scheduler, rank, name, function
        self.dead = self.over = False
        self.joined: list[Task] = []  # who waits for its end
        self.baton = _held_lock()
        self.wakes = 0  # how often it has waited: an alarm of an earlier wait is no longer meant
        self.local = SimpleNamespace()  # what a thread keeps for itself, such as its stream
        self.handle: Any = None  # what threading.current_thread() gives
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.baton.acquire()
        try:
            if not self.scheduler.is_over:
                self.function()
        except Ended:
            pass
        except BaseException:
            self.scheduler.errors.append(f"{self.name}: {traceback.format_exc()}")
        self.over = True
        self.scheduler.leave(self)


class Scheduler:
    """`spawn` threads, then `run`. Only the thread whose turn it is may call anything here."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.errors: list[str] = []  # of threads that raised
        self.is_over = False
        self._order = itertools.count()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._runnable: list[Task] = []
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._idle = _held_lock()  # of who called run
        self._waited_for: set[Task] = set()  # `run` ends when these are over, or dead

    @property
    def current(self) -> Task:
        assert self._current is not None
        return self._current

    def spawn(self, rank: int, name: str, function: Callable[[], Any], waited_for: bool = False) -> Task:
        task = Task(self, rank, name, function)
        self._tasks.append(task)
        self._runnable.append(task)
        if waited_for:
            self._waited_for.add(task)
        task.thread.start()
        return task

    def run(self, seconds: float) -> None:
        """Until all that are waited for have ended. Raises Stuck where that cannot be, or takes longer than seconds."""
        self.at(seconds, lambda: None)
        self._limit = seconds
        self._stuck = ""
        self._give_turn(None)
        if not self._idle.acquire(timeout=REAL):
            raise AssertionError(
                f"a thread waits for what is not the scheduler's, such as a real lock:\n{self._places()}"
            )
        self.is_over = True
        for task in self._tasks:  # one after the other
            if not task.over:
                task.baton.release()
            task.thread.join()
        if self._stuck:
            raise Stuck(self._stuck)

    # ---- what happens later

    def at(self, delay: float, function: Callable[[], None]) -> None:
        """Calls it, on any thread, when that time has passed."""
        heapq.heappush(self._alarms, (self.now + delay, next(self._order), function))

    # ---- turns

    def pause(self) -> None:
        """Others may run here."""
        self._check()
        self._runnable.append(self.current)
        self._switch()

    def wait(self, place: list[Task], timeout: float | None = None) -> None:
        """Until `wake` of the same place, or a while; who waits looks again whether it has what it wants."""
        self._check()
        task = self.current
        task.wakes += 1
        place.append(task)
        if timeout is not None:
            self.at(timeout, lambda number=task.wakes: self._alarm(place, task, number))  # type: ignore[misc]
        self._switch()

    def wake(self, place: list[Task]) -> None:
        for task in place:
            task.wakes += 1
            if not task.dead:
                self._runnable.append(task)
        place.clear()

    def wait_until(self, place: list[Task], here: Callable[[], bool], timeout: float | None = None) -> bool:
        """Whether it came true in time."""
        end = None if timeout is None else self.now + timeout
        while not here():
            if end is not None and self.now >= end:
                return False
            self.wait(place, None if end is None else end - self.now)
        return True

    def kill(self, rank: int) -> None:
        """Nothing of this rank runs again; its own thread ends here."""
        for task in self._tasks:
            if task.rank == rank:
                task.dead = True
        self._runnable = [task for task in self._runnable if not task.dead]
        if self.current.dead:
            self._switch()

    def leave(self, task: Task) -> None:
        if not self.is_over:
            self.wake(task.joined)
            self._give_turn(None)

    def _alarm(self, place: list[Task], task: Task, number: int) -> None:
        if task.wakes == number and task in place:
            place.remove(task)
            if not task.dead:
                self._runnable.append(task)

    def _check(self) -> None:
        if self.is_over:
            raise Ended

    def _switch(self) -> None:
        task = self.current
        self._give_turn(task)
        self._check()

    def _give_turn(self, task: Task | None) -> None:
        following = self._next()
        if following is task and task is not None:
            return
        self._current = following
        (self._idle if following is None else following.baton).release()
        if task is not None:
            task.baton.acquire()

    def _next(self) -> Task | None:
        while True:
            while self._alarms and self._alarms[0][0] <= self.now:
                heapq.heappop(self._alarms)[2]()
            if all(task.over or task.dead for task in self._waited_for):
                return None
            if self.now >= self._limit:
                self._stuck = f"not ended after {self.now:g} s\n{self._places()}"
                return None
            if self._runnable:
                self.now += self.random.uniform(0, 2 * HOST)
                index = self.random.randrange(len(self._runnable))
                self._runnable[index], self._runnable[-1] = self._runnable[-1], self._runnable[index]
                return self._runnable.pop()
            if not self._alarms:
                self._stuck = self._places()
                return None
            self.now = self._alarms[0][0]

    def _places(self) -> str:
        """Where each thread that has not ended is."""
        frames, lines = sys._current_frames(), []
        for task in self._tasks:
            if not (task.over or task.dead) and task.thread.ident in frames:
                stack = traceback.extract_stack(frames[task.thread.ident])
                calls = [f"{entry.name}:{entry.lineno}" for entry in stack if "zbkern" in entry.filename]
                lines.append(f"{task.name}: {' > '.join(calls[-6:])}")
        return "\n".join(lines)


class Modules:
    """The parts of the modules threading, queue and time that zbkern's transport uses, over a Scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.threading = SimpleNamespace(
            Thread=lambda **arguments: _Thread(scheduler, **arguments),
            Lock=lambda: _Lock(scheduler),
            Condition=lambda: _Condition(scheduler),
            current_thread=lambda: scheduler.current.handle,
        )
        self.queue = SimpleNamespace(SimpleQueue=_queue(scheduler))
        self.time = SimpleNamespace(
            monotonic=lambda: scheduler.now, sleep=lambda seconds: scheduler.wait_until([], lambda: False, seconds)
        )


class _Thread:
    def __init__(
        self, scheduler: Scheduler, target: Callable[..., Any], args: Any = (), name: str = "", daemon: bool = True
    ) -> None:
        self._scheduler, self._target, self._arguments, self.name = scheduler, target, args, name
        self._task: Task | None = None

    def start(self) -> None:
        rank = self._scheduler.current.rank
        self._task = self._scheduler.spawn(rank, f"rank {rank} {self.name}", lambda: self._target(*self._arguments))
        self._task.handle = self

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        self._scheduler.wait_until(self._task.joined, lambda: not self.is_alive(), timeout)


class _Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holder: Task | None = None
        self._waiting: list[Task] = []

    def __enter__(self) -> None:
        self._scheduler.pause()
        self._scheduler.wait_until(self._waiting, lambda: self._holder is None)
        self._holder = self._scheduler.current

    def __exit__(self, *_: Any) -> None:
        self._holder = None
        if not self._scheduler.is_over:
            self._scheduler.wake(self._waiting)


class _Condition:
    """With an RLock, as threading's."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holder: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []  # for the lock
        self._sleeping: list[Task] = []  # to be notified

    def __enter__(self) -> None:
        if self._scheduler.current is not self._holder:
            self._scheduler.pause()
            self._scheduler.wait_until(self._waiting, lambda: self._holder is None)
            self._holder = self._scheduler.current
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
            if not self._scheduler.is_over:
                self._scheduler.wake(self._waiting)

    def notify_all(self) -> None:
        self._scheduler.wake(self._sleeping)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now + timeout
        while not (value := predicate()):
            if end is not None and self._scheduler.now >= end:
                return value
            with self._released():
                self._scheduler.wait(self._sleeping, None if end is None else end - self._scheduler.now)
        return value

    @contextlib.contextmanager
    def _released(self) -> Iterator[None]:
        depth, self._depth, self._holder = self._depth, 0, None
        self._scheduler.wake(self._waiting)
        yield
        self._scheduler.wait_until(self._waiting, lambda: self._holder is None)
        self._depth, self._holder = depth, self._scheduler.current


def _queue(scheduler: Scheduler) -> type:
    class SimpleQueue(collections.deque):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__()
            self._waiting: list[Task] = []

        def put(self, item: Any) -> None:
            self.append(item)
            scheduler.wake(self._waiting)

        def get(self) -> Any:
            scheduler.wait_until(self._waiting, lambda: len(self) > 0)
            return self.popleft()

        def empty(self) -> bool:
            return len(self) == 0

    return SimpleQueue
