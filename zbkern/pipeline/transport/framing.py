"""The messages that ranks exchange beside tensors, and how each becomes bytes of a gloo communicator and back."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.transport.mailbox import Note, Tag
from zbkern.pipeline.transport.packing import Shapes
from zbkern.pipeline.transport.process_groups import receive_into

_HEADER_BYTES = 1024  # what a receive is posted for; few messages need a second part
_LENGTH_BYTES = 4


class TensorHeader(NamedTuple):
    """A pytree of tensors, bytes, floats and None. The tensors follow, packed, on the communicator of tensors.

    shapes: of every tensor. usual: they are as many bytes as the first message's, for which the receiver has posted a
    receive. skeleton: the tree with 0 for every tensor. turn, name: the Call that it is sent in.
    """

    turn: int
    name: str
    tag: Tag | Note
    shapes: Shapes
    usual: bool
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


def frame(message: Message) -> list[Tensor]:
    """The bytes of a message: uint8 [1024], and the rest where it is longer."""
    payload = encode((_KINDS.index(type(message)), *message))  # by number: a class's name costs microseconds
    data = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
    parts = data[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"), data[_HEADER_BYTES:]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]


def receive_message(group: Any, peer: int) -> Message:
    """The next message of `peer` on this communicator; waits for it. Raises ConnectionLost when the connection ends."""
    data = _receive_bytes(group, peer, _HEADER_BYTES)
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if end > _HEADER_BYTES:
        data += _receive_bytes(group, peer, end - _HEADER_BYTES)
    kind, *fields = decode(data[_LENGTH_BYTES:end])
    return _KINDS[kind](*fields)


def _receive_bytes(group: Any, peer: int, count: int) -> bytes:
    data = bytearray(count)
    buffer = torch.frombuffer(data, dtype=torch.uint8)  # of the same memory, without NumPy, which may not be there
    receive_into(group, buffer, peer)
    return bytes(data)


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
