"""LocalTransport: a Transport whose ranks are threads of one process; its messages arrive at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.framing import Notice
from zbkern.pipeline.transport.mailbox import Mailbox


class LocalTransport(Transport):
    """A Transport whose ranks are threads; `LocalTransport.ring(n)` makes all of them."""

    def __init__(self, rank: int, ring: _Ring) -> None:
        super().__init__(rank, ring.size)
        self._ring, self._openings, self._stores = ring, 0, 0
        ring.members.append(self)
        self.reopen()

    @classmethod
    def ring(cls, size: int) -> list[LocalTransport]:
        """All ranks."""
        ring = _Ring(size)
        return [cls(rank, ring) for rank in range(size)]

    def send(self, peer: int, tag: Any, message: Any) -> None:
        self.arrival(peer, tag, message)()

    def arrival(self, peer: int, tag: Any, message: Any) -> Callable[[], None]:
        """A function that files a message that is sent now, whenever it is called."""
        mailboxes, call = self._mailboxes, self._mailbox.call

        def arrive() -> None:
            difference = mailboxes[peer].put(tag, (message, ()), self.rank, call)
            if difference is not None:
                for mailbox in mailboxes:
                    mailbox.fail(difference)

        return arrive

    def fail(self, reason: str) -> None:
        for mailbox in self._mailboxes:
            mailbox.fail(reason)

    def reopen(self) -> None:
        self._mailboxes = self._ring.mailboxes_of(self._openings)
        self._openings += 1
        self._join(self._mailboxes[self.rank])

    def store(self) -> dist.Store:
        """What the ranks have in common in their n-th call of this, in the place of torch.distributed's store."""
        self._stores += 1
        return dist.PrefixStore(str(self._stores), self._ring.store)

    def close(self) -> None:
        for mailbox in self._mailboxes:
            mailbox.closed(self.rank)

    def _tell(self, peer: int, message: Notice) -> None:
        self._ring.members[peer]._hear(self.rank, message)


class _Ring:
    """What the threads of a LocalTransport share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members: list[LocalTransport] = []
        self.store = dist.HashStore()
        self._mailboxes: dict[int, list[Mailbox]] = {}
        self._lock = threading.Lock()

    def mailboxes_of(self, opening: int) -> list[Mailbox]:
        """Those of all members for their n-th opening: after a failure they go on with others."""
        with self._lock:
            return self._mailboxes.setdefault(opening, [Mailbox(rank) for rank in range(self.size)])
