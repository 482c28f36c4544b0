"""The messages that ranks exchange, and how each becomes bytes of a gloo communicator and back."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import io
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.transport.mailbox import Note, Tag
from zbkern.pipeline.transport.packing import Shapes, copy_packed, packed_bytes
from zbkern.pipeline.transport.process_groups import ConnectionLost, finish_receive, post_receive

HEADER, TENSORS, NEVER, REST = range(4)  # tags of gloo's messages: REST of a longer header; NEVER of none
_AHEAD = 4  # receives that are posted: pipelines send so many messages or more before they need one back
_HEADER_BYTES = 1024  # what a receive is posted for; few headers need a second part
_LENGTH_BYTES = 4
_TRAILER_BYTES = 8  # behind the tensors: zeros, where before the message there is something else
_ZEROS = bytes(_TRAILER_BYTES)
_CARRIED_BYTES = 1 << 18  # of tensors: to copy more takes longer than a message of their own
_FORMS = 256  # of headers that a connection remembers
_NUMBERS = struct.Struct("<IIqqqq")  # a header whose form is known: 0 for a length, the form, turn, step, chunk, unit


class TensorHeader(NamedTuple):
    """A pytree of tensors, bytes, floats and None. The tensors come with it or follow, packed.

    shapes: of every tensor. skeleton: the tree with 0 for every tensor. turn, name: the Call that it is sent in.
    """

    turn: int
    name: str
    tag: Tag | Note
    shapes: Shapes
    skeleton: Any


class StallQuery(NamedTuple):
    """The receiver sends nothing, and was awaited as the text says: why?"""

    awaited: str


class StallAnswer(NamedTuple):
    """The sender waits for this rank itself."""

    awaits: int


class CallNotice(NamedTuple):
    """The sender is in this Call."""

    turn: int
    name: str


class FinalMessage(NamedTuple):
    """Nothing follows. ending: "closed", "failed" with the `reason`, or "lost" when a process has gone."""

    ending: str
    reason: str


Notice = StallQuery | StallAnswer | CallNotice
Message = TensorHeader | Notice | FinalMessage
_KINDS: tuple[Any, ...] = (TensorHeader, StallQuery, StallAnswer, CallNotice, FinalMessage)


class Outgoing:
    """Messages to one peer as bytes: each says only what `Incoming` does not know from those before it.

    carries: whether tensors travel with their header. A message of their own takes as long as the first, or twice as
    long where its receive is not posted yet. A posted one has room for the largest tensors, of a limited size, of the
    messages that had been read when it was posted: all but the last _AHEAD.
    """

    def __init__(self, carries: bool) -> None:
        self._rooms = _Rooms(_CARRIED_BYTES if carries else 0)
        self._size = 0  # of the tensors of the message that was framed last
        self._forms: dict[Any, int] = {}

    def frame(self, message: Message, tensors: Sequence[Tensor] = ()) -> tuple[list[Tensor], bool]:
        """The bytes of a message, uint8 [posted], and the rest of a longer header; whether its tensors are in them."""
        room = self._rooms.of_next
        posted = _buffer(_HEADER_BYTES + room + _TRAILER_BYTES)
        ctypes.memset(posted.data_ptr() + _HEADER_BYTES + room, 0, _TRAILER_BYTES)
        data, carried, self._size = b"", False, 0
        if isinstance(message, TensorHeader):
            self._size = packed_bytes(message.shapes)
            carried = 0 < self._size <= room
            if carried:
                copy_packed(tensors, posted.data_ptr() + _HEADER_BYTES)
            data = self._as_known(message)
        data = data or _pickled(message)
        ctypes.memmove(posted.data_ptr(), data, min(len(data), _HEADER_BYTES))
        rest = data[_HEADER_BYTES:]
        return [posted, torch.frombuffer(bytearray(rest), dtype=torch.uint8)] if rest else [posted], carried

    def sent(self) -> None:
        """The peer has what `frame` returned last. An interruption before that leaves the room that it has posted."""
        self._rooms.passed(self._size)

    def _as_known(self, header: TensorHeader) -> bytes:
        """Empty for a form that the peer does not know."""
        tag = header.tag
        if not isinstance(tag, Tag):
            return b""
        skeleton = header.skeleton if header.skeleton == 0 else encode(header.skeleton)  # which hashes
        form = header.name, tag.kind, header.shapes, skeleton
        number = self._forms.get(form)
        if number is not None:
            return _NUMBERS.pack(0, number, header.turn, tag.step, tag.chunk, tag.unit)
        if len(self._forms) < _FORMS:
            self._forms[form] = len(self._forms)
        return b""


class Incoming:
    """The messages of one peer. group: its communicator; tensors: the one of those that follow their message, between
    CPUs. carries: as the peer's `Outgoing` has it.

    Receives of the next _AHEAD messages are posted: a sender that finds none sends twice as often.
    """

    def __init__(self, group: Any, tensors: Any, peer: int, carries: bool) -> None:
        self._group, self._tensors, self._peer, self._carries = group, tensors, peer, carries
        self._rooms = _Rooms(_CARRIED_BYTES if carries else 0)
        self._forms: list[TensorHeader] = []
        self._posted: collections.deque[tuple[Tensor, dist.Work]] = collections.deque()

    def receive(self) -> tuple[Message, Tensor | None]:
        """The next message, and between CPUs the bytes of its tensors; waits for it.

        Raises ConnectionLost when the connection ends.
        """
        if not self._posted:  # before the first message, or once the connection has ended
            for _ in range(_AHEAD):
                self._post(0)
        posted, work = self._posted.popleft()
        finish_receive(work)
        data = _read(posted, _HEADER_BYTES)
        zero, form, turn, step, chunk, unit = _NUMBERS.unpack_from(data)
        if zero == 0:
            _, name, tag, shapes, skeleton = self._forms[form]
            message: Message = TensorHeader(turn, name, Tag(step, tag.kind, chunk, unit), shapes, skeleton)
        else:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            if end > _HEADER_BYTES:
                rest = _buffer(end - _HEADER_BYTES)
                finish_receive(post_receive(self._group, rest, self._peer, REST))
                data += _read(rest, end - _HEADER_BYTES)
            kind, *fields = decode(data[_LENGTH_BYTES:end])
            message = _KINDS[kind](*fields)
            if isinstance(message, TensorHeader) and isinstance(message.tag, Tag) and len(self._forms) < _FORMS:
                self._forms.append(message)
        if isinstance(message, FinalMessage):
            return message, None
        size = packed_bytes(message.shapes) if isinstance(message, TensorHeader) else 0
        is_carried = 0 < size <= self._rooms.of_next
        # a copy, since what keeps an input must hold no more than its bytes
        tensors = posted[_HEADER_BYTES : _HEADER_BYTES + size].clone() if is_carried else None
        with contextlib.suppress(ConnectionLost):  # what came before the end is there, where it was posted
            self._post(self._rooms.passed(size))
        if tensors is None and self._carries and isinstance(message, TensorHeader):
            tensors = _buffer(size)
            if size:
                finish_receive(post_receive(self._tensors, tensors, self._peer, TENSORS))
        return message, tensors

    def has_tensors(self) -> bool | None:
        """Whether the next message is there, a header that is known and its tensors; None where nothing is there."""
        if not self._posted:
            return None
        address, room = self._posted[0][0].data_ptr(), self._rooms.of_next
        if ctypes.string_at(address + _HEADER_BYTES + room, _TRAILER_BYTES) != _ZEROS:
            return None
        zero, form = _NUMBERS.unpack(ctypes.string_at(address, _NUMBERS.size))[:2]
        return zero == 0 and form < len(self._forms) and 0 < packed_bytes(self._forms[form].shapes) <= room

    def _post(self, room: int) -> None:
        buffer = _buffer(_HEADER_BYTES + room + _TRAILER_BYTES)
        ctypes.memset(buffer.data_ptr() + _HEADER_BYTES + room, 255, _TRAILER_BYTES)
        self._posted.append((buffer, post_receive(self._group, buffer, self._peer, HEADER)))


class _Rooms:
    """How much room for tensors the next messages have, beside their headers. Both sides count alike."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._largest = 0
        self._next = collections.deque([0] * _AHEAD)

    @property
    def of_next(self) -> int:
        return self._next[0]

    def passed(self, size: int) -> int:
        """After a message with tensors of this size; returns the room of the one that comes _AHEAD after it."""
        if self._largest < size <= self._limit:
            self._largest = size
        self._next.popleft()
        self._next.append(self._largest)
        return self._largest


def _buffer(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")  # whatever torch.set_default_device says


def _pickled(message: Message) -> bytes:
    payload = encode((_KINDS.index(type(message)), *message))  # by number: a class's name costs microseconds
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def _read(buffer: Tensor, count: int) -> bytes:
    return ctypes.string_at(buffer.data_ptr(), count)  # without NumPy, which may not be there


encode = pickle.dumps


def decode(data: bytes) -> Any:
    """What was encoded: numbers, strings, containers of them, and of NamedTuples and nodes of pytrees; no code runs.

    Raises TypeError for anything else.
    """
    return _DataOnly(io.BytesIO(data)).load()


class _DataOnly(pickle.Unpickler):
    """Knows no class or function but those of data, in modules that this process has imported itself."""

    def find_class(self, module: str, name: str) -> Any:
        return _class_of_data(module, name)


@functools.cache
def _class_of_data(module: str, name: str) -> type:
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    is_namedtuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    if is_namedtuple or kind in pytree.SUPPORTED_NODES:
        return kind
    raise TypeError(
        f"cannot send a {module}.{name} to other ranks: only numbers, strings, and lists, tuples, sets and dicts of "
        "them, NamedTuples and registered pytree nodes, which are read without running anybody's code"
    )
