"""Who reads what a peer sends next: the peer's own thread, or for a moment whoever waits for it.

The thread is one hop more than a message needs, and it wants Python's lock in the middle of a pass. So who asks for a
message looks for it first, and the thread stays away while somebody asks often. It reads whatever else comes, and
whenever nobody has asked for a while.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from zbkern.pipeline.transport.mailbox import Mailbox

_MOMENT = 2e-4  # seconds for which who asks looks for itself: the thread takes half of that to wake up and to tell
_AWAY = 0.02  # seconds after which nobody asks often: a failure that the peer tells waits for no longer

_give_way: Callable[[], Any] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Turn:
    """That of one peer. `ask` and `waited` are for who waits, the others for the peer's thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._reading = threading.Lock()
        self._called = threading.Event()
        self._asked = -_AWAY  # when somebody asked last
        self._awaited: Any = None  # the tag that somebody waits for, and does not look for

    def ask(self, tag: Any, read_arrived: Callable[[], bool | None]) -> bool:
        """Whether the message is there. If not, the thread reads on until it is, or `waited`.

        read_arrived: reads a message that is there completely, and returns True; None where none is, False where it is
        for the thread.
        """
        peek = self._mailbox.peek
        if peek(tag) is not None:
            return True
        start = self._asked = time.monotonic()
        if self._reading.acquire(blocking=False):
            try:
                while (found := read_arrived()) or (found is None and time.monotonic() - start < _MOMENT):
                    if peek(tag) is not None:
                        return True
                    if not found:
                        _give_way()
            finally:
                self._reading.release()
        self._awaited = tag
        self._called.set()
        return False

    def waited(self) -> None:
        """After the wait that follows `ask`."""
        self._awaited = None

    def call(self) -> None:
        """Has the thread read on, whoever asks."""
        self._asked = -_AWAY
        self._called.set()

    def __enter__(self) -> None:
        while time.monotonic() - self._asked < _AWAY and not self._is_awaited():
            self._called.wait(_AWAY)
            self._called.clear()
        self._reading.acquire()

    def __exit__(self, *_: object) -> None:
        self._reading.release()

    def _is_awaited(self) -> bool:
        tag = self._awaited
        return tag is not None and self._mailbox.peek(tag) is None
