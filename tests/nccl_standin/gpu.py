"""A GPU's streams on a few hardware queues, whose operations take time and hold each other up, and compute nothing.

A queue issues in order: it waits while its first operation is one that must wait, for an event or for what is before it
in its own stream. What is behind it then waits, too, whatever stream it is of, as on a GPU with
CUDA_DEVICE_MAX_CONNECTIONS queues.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from tests.nccl_standin.scheduler import Scheduler, Task


class Flag:
    """Something that happens once."""

    def __init__(self) -> None:
        self.is_set = False
        self._then: list[Callable[[], None]] = []

    def fire(self) -> None:
        if not self.is_set:
            self.is_set, then, self._then = True, self._then, []
            for function in then:
                function()

    def then(self, function: Callable[[], None]) -> None:
        if self.is_set:
            function()
        else:
            self._then.append(function)


class Stream:
    def __init__(self, gpu: Gpu, queue: int) -> None:
        self.gpu, self.queue = gpu, queue
        self.last = Flag()  # the end of what was put here last
        self.last.fire()

    def put(self, begin: Callable[[Flag], None] | None) -> Flag:
        """An operation: `begin` is called when it is issued, and fires the flag when it ends; None for an event."""
        end = Flag()
        self.gpu.issue(self.queue, begin, self.last, end)
        self.last = end
        return end

    def compute(self, seconds: float) -> Flag:
        return self.put(lambda end: self.gpu.scheduler.at(seconds, end.fire))

    def record(self) -> Flag:
        return self.put(None)

    def wait_for(self, flag: Flag) -> None:
        """What comes after it begins when the flag has fired. It holds up its whole queue till then."""
        self.gpu.issue(self.queue, lambda end: end.fire(), self.last, end := Flag(), flag)
        self.last = end

    def synchronize(self) -> None:
        """The calling thread waits for all that was put here."""
        self.gpu.wait_for(self.record())


class Gpu:
    """queues: hardware queues, which streams take in turn. strict: an event, too, holds up its queue."""

    def __init__(self, scheduler: Scheduler, queues: int, strict: bool) -> None:
        self.scheduler, self.strict = scheduler, strict
        self._queues: list[collections.deque[Any]] = [collections.deque() for _ in range(queues)]
        self._blocked = [False] * queues
        self._made = scheduler.random.randrange(queues)
        self.dead = False  # with its process: what was put there does not run
        self.errors: list[str] = []  # what a real one would have got wrong in silence
        self.is_behind = False  # whether its host goes on while it waits
        self.spinning = 0  # such kernels now
        self.spins = 0.0  # seconds in which kernels of sends and receives waited for the other side
        self.default = self.stream()
        self._owners: dict[int, Stream] = {}  # of received memory by its address
        self._used: list[tuple[Any, Stream]] = []
        self._recorded: set[tuple[int, Stream]] = set()

    def stream(self) -> Stream:
        self._made += 1
        return Stream(self, self._made % len(self._queues))

    def wait_for(self, flag: Flag) -> None:
        place: list[Task] = []
        flag.then(lambda: self.scheduler.wake(place))
        self.scheduler.wait_until(place, lambda: flag.is_set)

    def own(self, tensor: Any, stream: Stream) -> None:
        """The tensor's memory is of this stream, and free for its next tensor when nobody refers to it."""
        self._owners[_address(tensor)] = stream

    def use(self, tensor: Any, stream: Stream) -> None:
        """What is on this stream will use the memory."""
        self._used.append((tensor, stream))  # kept: no other tensor gets the address

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        """torch.Tensor.record_stream"""
        self._recorded.add((_address(tensor), stream))

    def check_memory(self) -> None:
        """Memory that another stream uses than its own, which does not know, would be used twice."""
        for tensor, stream in self._used:
            address = _address(tensor)
            if self._owners[address] is not stream and (address, stream) not in self._recorded:
                self.errors.append("received memory is used on a stream that its own does not wait for: record_stream")

    def issue(self, queue: int, begin: Any, before: Flag, end: Flag, also: Flag | None = None) -> None:
        self._queues[queue].append((begin, before, end, also))
        if not self._blocked[queue]:
            self._advance(queue)

    def _advance(self, number: int) -> None:
        self._blocked[number] = False
        queue = self._queues[number]
        while queue and not self.dead:
            begin, before, end, also = queue[0]
            if begin is None and not self.strict:
                queue.popleft()
                before.then(end.fire)
                continue
            if (awaited := next((flag for flag in (before, also) if flag and not flag.is_set), None)) is not None:
                self._blocked[number] = True
                awaited.then(lambda: self._advance(number))
                return
            queue.popleft()
            if begin is None:
                end.fire()
            else:
                begin(end)


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


class Event:
    """torch.cuda.Event"""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._flag = Flag()
        self._gpu: Gpu | None = None

    def record(self, stream: Stream) -> None:
        self._gpu, self._flag = stream.gpu, stream.record()

    def query(self) -> bool:
        return self._flag.is_set

    def synchronize(self) -> None:
        assert self._gpu is not None
        self._gpu.wait_for(self._flag)
