"""Passes that take turns on one rank: each runs until a collective of its own is in flight, then the next goes on.

Each has a thread, the first that of the caller, and one of them runs at a time: whose turn it is depends on the program
alone, never on a clock. Autograd keeps a running backward in its thread, so that two passes need two.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from zbkern.pipeline.runtime.overlap.thread_state import ThreadState
from zbkern.wgrad.queue import thread


class _Stopped(BaseException):
    """Ends a pass where another one has failed."""


class Passes:
    """Runs passes beside each other. Threads begin with the first that need them, and end at `close`."""

    def __init__(self, device: torch.device) -> None:
        self.error: BaseException | None = None  # of the first pass that has failed
        self._device = device
        self._generators = [torch.default_generator]  # of what torch draws
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[torch.cuda.device(device).idx])
        self._workers: list[_Worker] = []
        self._mutex = threading.Lock()  # for whose turn it is, and who is left

    def run(self, passes: Sequence[Callable[[], None]], forwards: Sequence[int]) -> None:
        """Returns once all have ended. Where one raises, the others end at their next turn, and its error is raised.

        forwards: which of them are forwards. The first draws the random numbers that it draws alone, and what comes
        after the passes goes on from there; each other one has numbers of its own. A backward may draw those of a
        forward that it runs again; what else it draws comes from the numbers of before.
        """
        count = len(passes)
        while len(self._workers) < count - 1:
            self._workers.append(_Worker(ThreadState(self._device)))
        self._random = self._random_at_first(count, forwards)
        self._turns = [threading.Lock() for _ in passes]
        for turn in self._turns:
            turn.acquire()
        self.error, self._left, self._holder, self._all_ended = None, [*range(count)], 0, threading.Event()
        for index in range(1, count):
            self._workers[index - 1].start(partial(self._run, index, passes[index]))
        try:
            self._turns[0].release()
            self._run(0, passes[0])
            while not self._all_ended.wait(0.1):  # a signal that comes just before a wait does not end it
                pass
        except BaseException as interrupted:  # Ctrl-C, which comes between any two steps of this thread
            self.error = self.error or interrupted
            self._leave(0)
            self._all_ended.wait()
        if forwards:
            self._set_random(self._random[forwards[0]])
        error, self.error = self.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the threads."""
        while self._workers:
            self._workers.pop().end()

    def _run(self, index: int, work: Callable[[], None]) -> None:
        """All of a pass, in its thread, from its first turn on."""
        try:
            self._await_turn(index)
            thread.give_way = partial(self._give_way, index)
            work()
        except _Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._random[index] = self._random_now()
            self._leave(index)

    def _leave(self, index: int) -> None:
        """Lets the others go on without this pass; once more does nothing, and ends what was interrupted."""
        thread.give_way = None
        with self._mutex:
            if index in self._left:
                self._left.remove(index)
            if self._holder == index and self._left:
                self._holder = self._after(index)
                self._turns[self._holder].release()
            if not self._left:
                self._all_ended.set()

    def _give_way(self, index: int) -> None:
        """Lets the others have their turns, until the last of them gives way, or all have ended."""
        if self.error is not None:  # Ctrl-C, where this pass alone is left
            raise _Stopped
        with self._mutex:
            after = self._after(index)
            if after == index:
                return
            self._random[index] = self._random_now()
            self._holder = after
        self._turns[after].release()
        self._await_turn(index)

    def _await_turn(self, index: int) -> None:
        self._turns[index].acquire()
        if self.error is not None:
            raise _Stopped
        self._set_random(self._random[index])

    def _after(self, index: int) -> int:
        return next((other for other in self._left if other > index), self._left[0])

    def _random_now(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_random(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _random_at_first(self, count: int, forwards: Sequence[int]) -> list[list[Tensor]]:
        """The random numbers with which each pass begins."""
        before = self._random_now()
        states = [before] * count
        for index in forwards[1:]:
            seed = zlib.crc32(b"".join(bytes(state.tolist()) for state in before), index)
            for generator in self._generators:
                generator.manual_seed(seed)
            states[index] = self._random_now()
        return states


class _PythonNumbers:
    """Gives way with the random numbers of Python as the others have left them, and goes on with its own."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.others, self._give_way = random.getstate(), give_way

    def __call__(self) -> None:
        own = random.getstate()
        random.setstate(self.others)
        self._give_way()
        self.others = random.getstate()
        random.setstate(own)


@contextmanager
def own_python_numbers() -> Iterator[None]:
    """Inside, what a pass draws by Python's `random`, as a forward that runs again, is not what those beside it draw.

    Torch's are each pass's own. For a turn these would take too long.
    """
    assert thread.give_way is not None
    thread.give_way = numbers = _PythonNumbers(thread.give_way)
    try:
        yield
    finally:
        random.setstate(numbers.others)


class _Worker:
    """A thread that runs one pass after the other."""

    def __init__(self, state: ThreadState) -> None:
        self._work: Callable[[], None] | None = None
        self._wakes = threading.Lock()
        self._wakes.acquire()
        self._thread = threading.Thread(target=state.run, args=(self._loop,), name="zbkern pass", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None] | None) -> None:
        self._work = work
        self._wakes.release()

    def end(self) -> None:
        self.start(None)
        self._thread.join()

    def _loop(self) -> None:
        while True:
            self._wakes.acquire()
            work, self._work = self._work, None
            if work is None:
                return
            work()
