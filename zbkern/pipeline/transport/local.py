"""LocalTransport: a Transport whose ranks are threads of one process; its messages arrive at once, or after a delay."""

from __future__ import annotations

import collections
import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

from zbkern.pipeline.transport.activity import Activity
from zbkern.pipeline.transport.base import Call, PipelineError, Tag
from zbkern.pipeline.transport.mailbox import Mailbox

Delay = Callable[[int, int, Any], float]


class LocalTransport:
    """A Transport whose ranks are threads; `LocalTransport.ring(n)` makes all of them."""

    def __init__(self, rank: int, ring: _Ring) -> None:
        self.rank, self.size = rank, len(ring.mailboxes)
        self.activity = Activity(rank)
        self._ring = ring
        ring.members.append(self)

    @classmethod
    def ring(cls, size: int, delay: Delay | None = None) -> list[LocalTransport]:
        """All ranks. delay(sender, receiver, tag): seconds that a message travels; messages may overtake others."""
        ring = _Ring(size, delay)
        return [cls(rank, ring) for rank in range(size)]

    def begin(self, call: str) -> None:
        difference = self._ring.mailboxes[self.rank].begin(call)
        if difference is not None:
            self.fail(difference)
            raise PipelineError(difference)

    def send(self, peer: int, tag: Tag, message: Any) -> None:
        self._ring.post(self.rank, peer, tag, message)

    def deliver(self, tag: Tag, message: Any) -> None:
        self._ring.file(self.rank, self.rank, tag, message, self._ring.mailboxes[self.rank].call)

    def ready(self, tag: Tag) -> bool:
        return self._ring.mailboxes[self.rank].peek(tag) is not None

    def receive(self, peer: int, tag: Any, timeout: float) -> Any:
        self.activity.awaits = peer
        try:
            return self._ring.mailboxes[self.rank].take(peer, tag, timeout)
        except TimeoutError:
            raise self._ring.stuck(self.rank, str(tag), timeout) from None
        except PipelineError as error:  # of a peer that closed, perhaps: the others hear that it did
            self.fail(str(error))
            raise
        finally:
            self.activity.awaits = None

    def forget(self, step: int) -> None:
        self._ring.mailboxes[self.rank].forget(step)

    def fail(self, reason: str) -> None:
        self._ring.fail(reason)

    @property
    def failure(self) -> str | None:
        return self._ring.mailboxes[self.rank].failure

    def reopen(self) -> None:
        self._ring = self._ring.successor()
        self._ring.members[self.rank] = self

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        self.begin("gather")
        for mailbox in self._ring.mailboxes:
            self._ring.fail_if(mailbox.compare(self.rank, self._ring.mailboxes[self.rank].call))
        return self._ring.gather(self.rank, value, timeout)

    def close(self) -> None:
        self._ring.close(self.rank)


class _Ring:
    """What the threads of a LocalTransport share."""

    def __init__(self, size: int, delay: Delay | None) -> None:
        self.mailboxes = [Mailbox(rank) for rank in range(size)]
        # what the ranks have given to a gather, by its number, until all have taken it
        self._boards: collections.defaultdict[int, dict[int, Any]] = collections.defaultdict(dict)
        self._taken: collections.Counter[int] = collections.Counter()
        self._given = [0] * size
        self._written = threading.Condition()
        self.members: list[Any] = []
        self._delay = delay
        self._delayed = _DelayedDelivery() if delay else None
        self._successor: _Ring | None = None
        self._lock = threading.Lock()

    def post(self, sender: int, receiver: int, tag: Any, message: Any) -> None:
        """Files the message, or lets a thread do so later."""
        seconds = self._delay(sender, receiver, tag) if self._delay else 0.0
        call = self.mailboxes[sender].call
        if self._delayed is not None and seconds > 0:
            self._delayed.post(seconds, lambda: self.file(sender, receiver, tag, message, call))
        else:
            self.file(sender, receiver, tag, message, call)

    def file(self, sender: int, receiver: int, tag: Any, message: Any, call: Call) -> None:
        """Puts a message into a mailbox; all fail where the receiver is in another call than the sender was."""
        self.fail_if(self.mailboxes[receiver].put(tag, message, sender, call))

    def fail_if(self, reason: str | None) -> None:
        if reason is not None:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """Ends what every rank waits for; a gather that has everything ends well, however late a rank wakes up."""
        for mailbox in self.mailboxes:
            mailbox.fail(reason)
        with self._written:
            self._written.notify_all()

    def stuck(self, rank: int, awaited: str, timeout: float) -> PipelineError:
        """Fails for the rank at the end of the chain of those who wait, which begins with `rank`."""
        for _ in self.members:
            if self.members[rank].activity.awaits is None:
                break
            rank = self.members[rank].activity.awaits
        self.fail(self.members[rank].activity.stuck(awaited, timeout))
        return PipelineError(self.mailboxes[rank].failure)

    def gather(self, rank: int, value: Any, timeout: float | None) -> list[Any]:
        """One value of every rank, by rank."""
        with self._written:
            if self.mailboxes[rank].failure is not None:
                raise PipelineError(self.mailboxes[rank].failure)
            number = self._given[rank]
            self._given[rank] += 1
            board = self._boards[number]
            board[rank] = value
            self._written.notify_all()
            size = len(self.mailboxes)
            self._written.wait_for(lambda: len(board) == size or self.mailboxes[rank].failure, timeout)
            if len(board) == size:
                self._taken[number] += 1
                if self._taken[number] == size:
                    del self._boards[number], self._taken[number]
                return [board[r] for r in range(size)]
            if self.mailboxes[rank].failure is None:
                missing = next(r for r in range(size) if r not in board)
                raise self.stuck(missing, f"its part in gather {number + 1}", timeout or 0)
            raise PipelineError(self.mailboxes[rank].failure)

    def close(self, rank: int) -> None:
        """Tells all ranks, after what this one has sent, that nothing more will come from it."""
        if self._delayed is not None:
            self._delayed.wait()
        for mailbox in self.mailboxes:
            mailbox.closed(rank)

    def successor(self) -> _Ring:
        """The ring that all members move to after a failure of this one."""
        with self._lock:
            if self._successor is None:
                self._successor = _Ring(len(self.mailboxes), self._delay)
                self._successor.members = list(self.members)
            return self._successor


class _DelayedDelivery:
    """Files messages when they are due, from a thread that lives while some are under way."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0  # messages that are due at one time keep their order
        self._running = False
        self._changed = threading.Condition()

    def post(self, seconds: float, file: Callable[[], None]) -> None:
        with self._changed:
            self._count += 1
            heapq.heappush(self._due, (time.monotonic() + seconds, self._count, file))
            self._changed.notify_all()
            if not self._running:
                self._running = True
                threading.Thread(target=self._deliver_due, daemon=True).start()

    def wait(self) -> None:
        """Until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._due)

    def _deliver_due(self) -> None:
        with self._changed:
            while self._due:
                if self._due[0][0] <= time.monotonic():
                    heapq.heappop(self._due)[2]()
                else:
                    self._changed.wait(self._due[0][0] - time.monotonic())
            self._running = False
            self._changed.notify_all()
