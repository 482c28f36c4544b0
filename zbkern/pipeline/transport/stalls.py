"""Which rank is stuck, when one has waited too long: asked along the chain of those who wait, until one does not.

That one is stuck; the thread of it that was asked says so in its name. Where it is frozen and says nothing, those who
wait for it name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zbkern.pipeline.transport.activity import Activity
from zbkern.pipeline.transport.mailbox import Mailbox

GRACE = 2.0  # seconds that a stuck rank has to say so itself


class StallDetector:
    """Of one rank. query(peer, tag, waited) and reply(peer, waiting, awaited) send to a peer; fail(reason) to all."""

    def __init__(
        self,
        activity: Activity,
        mailbox: Mailbox,
        query: Callable[[int, str, float], None],
        reply: Callable[[int, int, int], None],
        fail: Callable[[str], None],
    ) -> None:
        self._activity = activity
        self._mailbox = mailbox
        self._query = query
        self._reply = reply
        self._fail = fail
        self._askers: set[int] = set()
        self._link: tuple[int, int] | None = None  # a rank that waits, and for which

    def timed_out(self, peer: int, tag: Any, timeout: float) -> None:
        """After a wait of `timeout` seconds for `tag` from `peer`: returns once a failure is known that explains it."""
        self._link = None
        self._query(peer, str(tag), timeout)
        if self._mailbox.wait_for_failure(GRACE) is not None:
            return
        # where a rank along the chain has answered, the next one has as long to say that it is stuck
        if self._link is None or self._mailbox.wait_for_failure(GRACE) is None:
            self._fail(self._activity.timeout_message(peer, str(tag), timeout, self._link))

    def on_query(self, asker: int, tag: str, waited: float) -> None:
        """`asker` waits for this rank. Says so and asks on when it waits itself, that it is stuck when not."""
        peer = self._activity.awaits
        if peer is None:
            self._fail(self._activity.stuck(tag, waited))
            return
        self._askers.add(asker)
        self._tell((self._activity.rank, peer), {asker})
        self._query(peer, tag, waited)

    def on_reply(self, waiting: int, awaited: int) -> None:
        """A rank that was asked waits itself; that goes on to those who asked this one."""
        if (waiting, awaited) != self._link:
            self._link = waiting, awaited
            self._tell(self._link, self._askers)

    def _tell(self, link: tuple[int, int], askers: Iterable[int]) -> None:
        """The last link that those who asked hear of is where it is stuck."""
        for asker in askers:
            self._reply(asker, *link)
