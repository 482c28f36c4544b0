from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from zbkern.pipeline.transport import turns
from zbkern.pipeline.transport.mailbox import Call, Mailbox, Note
from zbkern.pipeline.transport.turns import Turn

CALL = Call(0, "connecting")


class Peer:
    """What a peer sends, in order: `None` ends the thread that reads it. `readers` counts who has read."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(0)
        self.turn = Turn(self.mailbox)
        self.readers: collections.Counter[str] = collections.Counter()
        self._sent: queue.SimpleQueue[Note | None] = queue.SimpleQueue()
        self._order: list[int] = []
        self._thread = threading.Thread(target=self._read_on, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self._sent.put(tag(number))

    def receive(self, number: int, timeout: float = 60) -> None:
        if not self.turn.ask(tag(number), self._read_arrived):
            self.mailbox.wait_for(1, tag(number), timeout)
            self.turn.waited()
        self.mailbox.take(tag(number))

    def end(self) -> list[int]:
        self._sent.put(None)
        self.turn.call()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._order

    def _read_arrived(self) -> bool | None:
        try:
            sent = self._sent.get(block=False)
        except queue.Empty:
            return None
        assert sent is not None
        self._file(sent, "who asks")
        return True

    def _read_on(self) -> None:
        while True:
            with self.turn:
                sent = self._sent.get()
                if sent is None:
                    return
                self._file(sent, "the thread")

    def _file(self, sent: Note, reader: str) -> None:
        self._order.append(sent.number)
        self.readers[reader] += 1
        self.mailbox.put(sent, (None, ()), 1, CALL)


def tag(number: int) -> Note:
    return Note(number, "a message")


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    if peer._thread.is_alive():
        peer.end()


def test_who_asks_reads_what_is_there_while_the_thread_is_away(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_AWAY", 600.0)  # however busy the machine is
    peer.send(*range(100))
    peer.receive(0)
    peer.start()
    for number in range(1, 100):
        peer.receive(number)
    assert peer.readers == {"who asks": 100}
    assert peer.end() == [*range(100)]


def test_the_thread_reads_what_is_waited_for_at_once_and_anything_when_nobody_asks(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_AWAY", 600.0)
    monkeypatch.setattr(turns, "_MOMENT", 0.0)
    peer.send(0)
    peer.receive(0)
    peer.start()

    def send_once_awaited() -> None:
        while peer.turn._awaited is None:
            time.sleep(0.001)
        peer.send(1, 2)

    sender = threading.Thread(target=send_once_awaited)
    sender.start()
    peer.receive(2)  # 1 comes first, and is not what is waited for
    sender.join()
    monkeypatch.setattr(turns, "_AWAY", 0.01)
    peer.turn.call()
    peer.send(3)
    deadline = time.monotonic() + 60
    while peer.mailbox.peek(tag(3)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert peer.readers == {"who asks": 1, "the thread": 3}


def test_every_message_is_read_once_and_in_order(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_AWAY", 2e-4)
    peer.start()
    sender = threading.Thread(
        target=lambda: [(peer.send(number), time.sleep(1e-4 * (number % 4))) for number in range(500)]
    )
    sender.start()
    for number in range(500):
        peer.receive(number)
    sender.join()
    assert peer.end() == [*range(500)]
