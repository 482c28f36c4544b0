"""LocalTransport: a Transport whose ranks are threads of one process; its messages arrive at once, or after a delay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from zbkern.pipeline.transport.base import Tag, Transport
from zbkern.pipeline.transport.framing import StallAnswer, StallQuery
from zbkern.pipeline.transport.mailbox import Mailbox

Delay = Callable[[int, int, Any], float]


class LocalTransport(Transport):
    """A Transport whose ranks are threads; `LocalTransport.ring(n)` makes all of them."""

    def __init__(self, rank: int, ring: _Ring) -> None:
        super().__init__(rank, ring.size)
        self._ring, self._openings = ring, 0
        ring.members.append(self)
        self.reopen()

    @classmethod
    def ring(cls, size: int, delay: Delay | None = None) -> list[LocalTransport]:
        """All ranks. delay(sender, receiver, tag): seconds that a message travels; messages may overtake others."""
        ring = _Ring(size, delay)
        return [cls(rank, ring) for rank in range(size)]

    def send(self, peer: int, tag: Tag, message: Any) -> None:
        mailboxes, call = self._mailboxes, self._mailbox.call

        def arrive() -> None:
            difference = mailboxes[peer].put(tag, (message, ()), self.rank, call)
            if difference is not None:
                _fail(mailboxes, difference)

        seconds = self._ring.delay(self.rank, peer, tag) if self._ring.delay else 0.0
        if seconds > 0:
            self._ring.run_later(seconds, arrive)
        else:
            arrive()

    def fail(self, reason: str) -> None:
        _fail(self._mailboxes, reason)

    def reopen(self) -> None:
        self._mailboxes = self._ring.mailboxes_of(self._openings)
        self._openings += 1
        self._join(self._mailboxes[self.rank])

    def close(self) -> None:
        for timer in self._ring.under_way:
            timer.join()
        for mailbox in self._mailboxes:
            mailbox.closed(self.rank)

    def _tell(self, peer: int, message: StallQuery | StallAnswer) -> None:
        self._ring.members[peer]._hear(self.rank, message)


class _Ring:
    """What the threads of a LocalTransport share."""

    def __init__(self, size: int, delay: Delay | None) -> None:
        self.size, self.delay = size, delay
        self.members: list[LocalTransport] = []
        self.under_way: list[threading.Timer] = []
        self._mailboxes: dict[int, list[Mailbox]] = {}
        self._lock = threading.Lock()

    def mailboxes_of(self, opening: int) -> list[Mailbox]:
        """Those of all members for their n-th opening: after a failure they go on with others."""
        with self._lock:
            return self._mailboxes.setdefault(opening, [Mailbox(rank) for rank in range(self.size)])

    def run_later(self, seconds: float, arrive: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, arrive)
        timer.daemon = True
        self.under_way = [other for other in self.under_way if other.is_alive()]
        timer.start()
        self.under_way.append(timer)


def _fail(mailboxes: Sequence[Mailbox], reason: str) -> None:
    """Ends what every rank waits for."""
    for mailbox in mailboxes:
        mailbox.fail(reason)
