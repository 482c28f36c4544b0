from __future__ import annotations

import collections
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from zbkern.pipeline.transport import framing
from zbkern.pipeline.transport.framing import CallNotice, Incoming, Message, Outgoing, TensorHeader
from zbkern.pipeline.transport.mailbox import Note, Tag
from zbkern.pipeline.transport.packing import pack, shapes_of, unpack
from zbkern.pipeline.transport.process_groups import ConnectionLost


class Wire:
    """A communicator of gloo over libuv, which waits for ever where a receive is longer than what was sent."""

    def __init__(self) -> None:
        self.sent: dict[int, list[Tensor]] = collections.defaultdict(list)
        self._posted: dict[int, list[Tensor]] = collections.defaultdict(list)
        self.closed = False

    def send(self, part: Tensor, tag: int) -> None:
        self.sent[tag].append(part)
        self._match(tag)

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> Wire:
        if self.closed:
            raise RuntimeError("Connection closed by peer")
        self._posted[tag].append(buffers[0])
        self._match(tag)
        return self

    def wait(self, timeout: timedelta) -> bool:
        return True

    def _match(self, tag: int) -> None:
        while self.sent[tag] and self._posted[tag]:
            part, buffer = self.sent[tag].pop(0), self._posted[tag].pop(0)
            assert part.numel() == buffer.numel()
            buffer.copy_(part)


class Connection:
    def __init__(self, carries: bool) -> None:
        self.wire, self._carries = Wire(), carries
        self.outgoing, self.incoming = Outgoing(carries), Incoming(self.wire, self.wire, 0, carries)

    def pass_on(self, message: Message, *tensors: Tensor) -> tuple[bool, bytes]:
        """Whether its tensors came with it, and its header's bytes; it arrives as it was."""
        parts, carried = self.outgoing.frame(message, tensors)
        self.outgoing.sent()
        for part, tag in zip(parts, (framing.HEADER, framing.REST), strict=False):
            self.wire.send(part, tag)
        between_cpus = isinstance(message, TensorHeader) and self._carries
        if between_cpus and not carried and (packed := pack(tensors)) is not None:
            self.wire.send(packed, framing.TENSORS)
        arrived, data = self.incoming.receive()
        assert arrived == message
        assert type(getattr(arrived, "tag", None)) is type(getattr(message, "tag", None))
        assert not any(self.wire.sent.values())
        assert between_cpus is (data is not None)
        if data is not None:
            for sent, received in zip(tensors, unpack(data, shapes_of(tensors)), strict=True):
                assert torch.equal(sent, received)
                assert received.requires_grad is sent.requires_grad
        return carried, bytes(parts[0][:64].tolist())


def header(tag: Tag | Note, *tensors: Tensor, name: str = "step", skeleton: Any = 0) -> TensorHeader:
    return TensorHeader(3, name, tag, shapes_of(tensors), skeleton)


def test_a_header_like_one_before_it_is_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = torch.randn(2, 3, requires_grad=True), torch.arange(4)
    forms: list[tuple[dict[str, Any], tuple[Tensor, ...]]] = [
        ({}, (one,)),
        ({"name": "evaluate"}, (one,)),
        ({}, (one.detach(),)),
        ({}, (two,)),
        ({"skeleton": {"a": [0, None], "b": 0}}, (one, two)),
        ({"skeleton": {"a": [0, 1.5], "b": 0}}, (one, two)),
        ({"skeleton": ()}, ()),
    ]
    connection = Connection(carries=True)
    for kind in "FB":
        for keywords, tensors in forms:
            connection.pass_on(header(Tag(0, kind, 1, 0), *tensors, **keywords), *tensors)

    def refuse(data: Any) -> Any:
        raise AssertionError(f"pickled again: {data}")

    monkeypatch.setattr(framing, "_pickled", refuse)
    monkeypatch.setattr(framing, "decode", refuse)
    for kind in "FB":
        for number, (keywords, tensors) in enumerate(forms):
            tag = Tag(2**40 + number, kind, number, 10_000)
            connection.pass_on(header(tag, *tensors, **keywords), *tensors)


def test_notes_are_not_forms_and_forms_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "_FORMS", 3)
    connection = Connection(carries=True)
    for turn in range(2):
        for size in range(1, 7):
            x = torch.randn(size)
            connection.pass_on(header(Note(size, "a note"), x), x)
            _, data = connection.pass_on(header(Tag(turn, "F", 1, size), x), x)
            assert (data[:4] == bytes(4)) is (turn == 1 and size <= 3)


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("carries", [True, False])
def test_tensors_come_with_their_header_once_a_receive_has_room(
    carries: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "_CARRIED_BYTES", 4000)
    monkeypatch.setattr(framing, "_AHEAD", ahead)
    connection = Connection(carries)
    sizes: list[int] = []  # of all messages
    for count in (100, 100, 20, 500, 300, 2000, 1000, 1000, 1000, 20, 1000):
        x = torch.randn(count).to(torch.float32)
        room = max([size for size in sizes[: len(sizes) + 1 - ahead] if size <= 4000], default=0)
        assert connection.pass_on(header(Tag(0, "F", 1, 0), x), x)[0] is (carries and x.nbytes <= room)
        connection.pass_on(CallNotice(4, "x" * count))  # some are longer than what is posted for a header
        sizes += [x.nbytes, 0]


def test_a_message_is_there_when_all_of_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "_AHEAD", 2)
    connection, x = Connection(carries=True), torch.randn(10)
    assert connection.incoming.has_tensors() is None  # nothing was received yet
    for _ in range(3):
        connection.pass_on(header(Tag(0, "F", 1, 0), x), x)
    assert connection.incoming.has_tensors() is None
    (part,), carried = connection.outgoing.frame(header(Tag(0, "F", 1, 7), x), [x])
    assert carried
    arriving = connection.incoming._posted[0][0]
    arriving[:-1].copy_(part[:-1])
    assert connection.incoming.has_tensors() is None
    arriving[-1:].copy_(part[-1:])
    assert connection.incoming.has_tensors()
    arriving.copy_(connection.outgoing.frame(CallNotice(1, "x"))[0][0])
    assert connection.incoming.has_tensors() is False


def test_what_came_before_the_connection_ended_is_read() -> None:
    connection, x = Connection(carries=True), torch.randn(10)
    connection.pass_on(header(Tag(0, "F", 1, 0), x), x)
    sent = [CallNotice(number, "x") for number in range(2)]
    for message in (*sent, framing.FinalMessage("failed", "why")):
        parts, _ = connection.outgoing.frame(message)
        connection.outgoing.sent()
        connection.wire.send(parts[0], framing.HEADER)
    connection.wire.closed = True
    assert [connection.incoming.receive()[0] for _ in range(3)] == [*sent, framing.FinalMessage("failed", "why")]
    connection.incoming._posted.clear()
    with pytest.raises(ConnectionLost):
        connection.incoming.receive()


def test_an_interruption_leaves_the_room_that_the_peer_has_posted() -> None:
    x = torch.randn(10)
    connection = Connection(carries=True)
    connection.outgoing.frame(header(Tag(0, "F", 1, 0), x), [x])
    connection.pass_on(framing.FinalMessage("failed", "interrupted"))


def test_what_is_carried_is_what_is_packed() -> None:
    tensors = [torch.randn(3), torch.randn(4, 5).t(), torch.ones(3, dtype=torch.bool), torch.zeros(0)]
    packed = pack(tensors)
    assert packed is not None
    connection = Connection(carries=True)
    message = header(Tag(0, "F", 1, 0), *tensors, skeleton=(0, 0, 0, 0))
    while not connection.pass_on(message, *tensors)[0]:
        pass
    assert connection.pass_on(message, *tensors)[0]


def test_only_data_is_read() -> None:
    connection = Connection(carries=True)
    parts, _ = connection.outgoing.frame(CallNotice(1, "x"))
    bad = pickle.dumps((3, 1, print))
    data = (len(bad).to_bytes(4, "little") + bad).ljust(parts[0].numel(), b"\0")
    connection.wire.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), framing.HEADER)
    with pytest.raises(TypeError, match="cannot send a"):
        connection.incoming.receive()
