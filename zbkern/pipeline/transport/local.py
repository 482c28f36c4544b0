"""LocalTransport: a Transport whose ranks are threads of one process; its messages arrive at once, or after a delay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from zbkern.pipeline.transport.base import Tag, Transport
from zbkern.pipeline.transport.framing import StallAnswer, StallQuery
from zbkern.pipeline.transport.mailbox import Call, Mailbox

Delay = Callable[[int, int, Any], float]


class LocalTransport(Transport):
    """A Transport whose ranks are threads; `LocalTransport.ring(n)` makes all of them."""

    def __init__(self, rank: int, ring: _Ring) -> None:
        super().__init__(rank, len(ring.mailboxes))
        ring.members.append(self)
        self._enter(ring)

    @classmethod
    def ring(cls, size: int, delay: Delay | None = None) -> list[LocalTransport]:
        """All ranks. delay(sender, receiver, tag): seconds that a message travels; messages may overtake others."""
        ring = _Ring(size, delay)
        return [cls(rank, ring) for rank in range(size)]

    def _enter(self, ring: _Ring) -> None:
        self._ring = ring
        self._join(ring.mailboxes[self.rank])

    def send(self, peer: int, tag: Tag, message: Any) -> None:
        self._ring.post(self.rank, peer, tag, message)

    def fail(self, reason: str) -> None:
        self._ring.fail(reason)

    def reopen(self) -> None:
        self._enter(self._ring.successor())

    def close(self) -> None:
        self._ring.close(self.rank)

    def _tell(self, peer: int, message: StallQuery | StallAnswer) -> None:
        self._ring.members[peer]._hear(self.rank, message)


class _Ring:
    """What the threads of a LocalTransport share."""

    def __init__(self, size: int, delay: Delay | None) -> None:
        self.mailboxes = [Mailbox(rank) for rank in range(size)]
        self.members: list[LocalTransport] = []
        self._delay = delay
        self._under_way: list[threading.Timer] = []
        self._successor: _Ring | None = None
        self._lock = threading.Lock()

    def post(self, sender: int, receiver: int, tag: Any, message: Any) -> None:
        """Files the message, or has a timer do so later."""
        call = self.mailboxes[sender].call
        seconds = self._delay(sender, receiver, tag) if self._delay else 0.0
        if seconds <= 0:
            self._file(sender, receiver, tag, message, call)
            return
        timer = threading.Timer(seconds, self._file, (sender, receiver, tag, message, call))
        timer.daemon = True
        self._under_way = [other for other in self._under_way if other.is_alive()]
        timer.start()
        self._under_way.append(timer)

    def _file(self, sender: int, receiver: int, tag: Any, message: Any, call: Call) -> None:
        """Puts a message into a mailbox; all fail where the receiver is in another call than the sender was."""
        difference = self.mailboxes[receiver].put(tag, (message, ()), sender, call)
        if difference is not None:
            self.fail(difference)

    def fail(self, reason: str) -> None:
        """Ends what every rank waits for."""
        for mailbox in self.mailboxes:
            mailbox.fail(reason)

    def close(self, rank: int) -> None:
        """Tells all ranks, after what is under way, that nothing more will come from this one."""
        for timer in self._under_way:
            timer.join()
        for mailbox in self.mailboxes:
            mailbox.closed(rank)

    def successor(self) -> _Ring:
        """The ring that all members move to after a failure of this one."""
        with self._lock:
            if self._successor is None:
                self._successor = _Ring(len(self.mailboxes), self._delay)
                self._successor.members = self.members
            return self._successor
