"""Passes that take turns on one rank: each runs until a collective of its own is in flight, then the next goes on.

Each has a thread, the first that of the caller, and one of them runs at a time: whose turn it is depends on the program
alone, never on a clock. Autograd keeps a running backward in its thread, so that two passes need two.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from zbkern.pipeline.runtime.overlap.thread_state import ThreadState
from zbkern.wgrad.queue import thread


class _Stopped(BaseException):
    """Ends a pass where another one has failed."""


class Passes:
    """Runs passes beside each other. Threads begin with the first that need them, and end at `close`."""

    def __init__(self, device: torch.device) -> None:
        self.error: BaseException | None = None  # of the first pass that has failed
        self._device = device
        self._of_torch: list[Any] = [torch.default_generator]
        if device.type == "cuda":
            self._of_torch.append(torch.cuda.default_generators[torch.cuda.device(device).idx])
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # for any of them; None ends one
        self._mutex = threading.Lock()  # for whose turn it is, and who is left

    def run(self, passes: Sequence[Callable[[], None]], forwards: Sequence[int], of_python: bool = False) -> None:
        """Returns once all have ended. Where one raises, the others end at their next turn, and its error is raised.

        forwards: which of them are forwards. The first draws the random numbers that it draws alone, and what comes
        after the passes goes on from there; each other one has numbers of its own. A backward may draw those of a
        forward that it runs again; what else it draws comes from the numbers of before. of_python: whether this
        holds for Python's numbers, too, which takes too long for every turn.
        """
        count = len(passes)
        while len(self._threads) < count - 1:
            run = ThreadState(self._device).run
            self._threads.append(threading.Thread(target=run, args=(self._serve,), name="zbkern pass", daemon=True))
            self._threads[-1].start()
        self._generators = [*self._of_torch, _PythonNumbers] if of_python else self._of_torch
        self._random = self._random_at_first(count, forwards)
        self._turns = [threading.Lock() for _ in passes]
        for turn in self._turns:
            turn.acquire()
        self.error, self._left, self._holder, self._all_ended = None, [*range(count)], 0, threading.Event()
        for index in range(1, count):
            self._work.put(partial(self._run, index, passes[index]))
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
        for _ in self._threads:
            self._work.put(None)
        while self._threads:
            self._threads.pop().join()

    def _serve(self) -> None:
        for work in iter(self._work.get, None):
            work()

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

    def _random_now(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators]

    def _set_random(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _random_at_first(self, count: int, forwards: Sequence[int]) -> list[list[Any]]:
        """The random numbers with which each pass begins."""
        before = self._random_now()
        states = [before] * count
        for index in forwards[1:]:
            seed = zlib.crc32(b"".join(bytes(state.tolist()) for state in before[: len(self._of_torch)]), index)
            for generator in self._generators:
                generator.manual_seed(seed)
            states[index] = self._random_now()
        return states


class _PythonNumbers:
    """Those of Python's `random`, as a generator of torch's."""

    get_state, set_state = staticmethod(random.getstate), staticmethod(random.setstate)
    manual_seed = staticmethod(random.seed)
