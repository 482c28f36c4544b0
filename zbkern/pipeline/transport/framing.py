"""The messages that ranks exchange beside tensors, and how each becomes bytes of a gloo communicator and back."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbkern.pipeline.transport.base import Call, Tag, Values
from zbkern.pipeline.transport.process_groups import finish

_HEADER_BYTES = 1024  # what a receive is posted for; few messages need a second part
_LENGTH_BYTES = 4

Sizes = list[tuple[torch.dtype, tuple[int, ...]]]


class TensorHeader(NamedTuple):
    """A pytree of tensors follows, on the communicator of tensors.

    shapes: by leaf (dtype, shape, requires_grad), None for a leaf that is no tensor. usual: the tensors are of the
    first message's sizes, for which the receiver has posted a receive. skeleton: the tree with 0 for every leaf; None
    for a single tensor. turn, name: the Call that it is sent in.
    """

    turn: int
    name: str
    tag: Tag
    shapes: Sequence[tuple[torch.dtype, tuple[int, ...], bool] | None]
    usual: bool
    skeleton: Any

    @property
    def call(self) -> Call:
        return Call(self.turn, self.name)

    @property
    def sizes(self) -> Sizes:
        """dtype and size of the tensors."""
        return [shape[:2] for shape in self.shapes if shape is not None]


class GatherMessage(NamedTuple):
    """Pickled values of a gather, by rank."""

    call: Call
    tag: Values
    values: list[bytes]


class StallQuery(NamedTuple):
    """The sender has waited `waited` seconds for `tag` from the receiver, and asks why."""

    tag: str
    waited: float


class StallReply(NamedTuple):
    """Rank `waiting` sends nothing because it waits for rank `awaited` itself."""

    waiting: int
    awaited: int


class FinalMessage(NamedTuple):
    """Nothing follows. ending: "closed", "failed" with the `reason`, or "lost" when a process has gone."""

    ending: str
    reason: str


Message = TensorHeader | GatherMessage | StallQuery | StallReply | FinalMessage
_KINDS: tuple[Any, ...] = (TensorHeader, GatherMessage, StallQuery, StallReply, FinalMessage)


def frame(message: Message) -> list[Tensor]:
    """The bytes of a message: uint8 [1024], and the rest where it is longer."""
    payload = pickle.dumps((_KINDS.index(type(message)), *message))  # by number: a class's name costs microseconds
    first = bytearray(_HEADER_BYTES)
    first[:_LENGTH_BYTES] = len(payload).to_bytes(_LENGTH_BYTES, "little")
    room = _HEADER_BYTES - _LENGTH_BYTES
    head, rest = payload[:room], payload[room:]
    first[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
    parts = [first, bytearray(rest)] if rest else [first]
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def receive_message(group: Any, peer: int) -> Message:
    """The next message of `peer` on this communicator; waits for it. Raises RuntimeError when the connection ends."""
    data = _receive_bytes(group, peer, _HEADER_BYTES)
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if end > _HEADER_BYTES:
        data += _receive_bytes(group, peer, end - _HEADER_BYTES)
    kind, *fields = pickle.loads(data[_LENGTH_BYTES:end])
    return _KINDS[kind](*fields)


def _receive_bytes(group: Any, peer: int, count: int) -> bytes:
    buffer = torch.empty(count, dtype=torch.uint8)
    finish(group.recv([buffer], peer, 0), buffer.device)
    return buffer.numpy().tobytes()
