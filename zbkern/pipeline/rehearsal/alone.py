"""A rank without the others: what it sends is noted, and what it waits for is made up in the shapes that were noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.optimizer.norm_chain import total_tag
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.framing import Notice
from zbkern.pipeline.transport.mailbox import Mailbox, Note, Tag

Key = tuple[int, int]  # the chunk that takes a message, and its unit


class _Values(NamedTuple):
    """A tensor of numbers in a message: random ones of this deviation take its place."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    deviation: float


class Messages:
    """What chunks have sent forward. Made-up messages are random numbers as large as those that were sent.

    Integers and booleans, such as masks and positions, are those of the message itself. A chunk whose input nobody has
    sent gets what the nearest chunk before it was sent for the same unit: in most models all these have one shape.
    `wrong` says where that was not so, once the sender has run.
    """

    def __init__(self) -> None:
        self._sent: dict[Key, Any] = {}
        self._given: dict[Key, Any] = {}
        self._random: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def note(self, chunk: int, unit: int, message: Any) -> None:
        """A chunk is sent this, as in every step: the first tells."""
        if (chunk, unit) not in self._sent:  # to look at it takes time, which belongs to no measured step
            self._sent[chunk, unit] = pytree.tree_map_only(Tensor, self._noted, message)

    def input(self, chunk: int, unit: int) -> Any:
        """What a chunk takes."""
        source = next((each for each in range(chunk, 0, -1) if (each, unit) in self._sent), None)
        if source is None:
            raise RuntimeError(
                f"rehearse: chunk {chunk} needs the shape of its input, and no chunk before it has run: let ranks have "
                "that of the first chunk among them"
            )
        self._given[chunk, unit] = noted = self._sent[source, unit]
        return pytree.tree_map_only((_Values, Tensor), self._made, noted, is_leaf=_is_noted)

    def output_gradient(self, chunk: int, unit: int) -> Any:
        """The gradient of what a chunk has sent, None for what takes none."""

        def gradient(noted: _Values | Tensor) -> Tensor | None:
            takes_one = isinstance(noted, _Values) and noted.requires_grad
            return self._made(noted._replace(requires_grad=False, deviation=1.0)) if takes_one else None  # type: ignore

        noted = self._sent[chunk + 1, unit]
        return pytree.tree_map_only((_Values, Tensor), gradient, noted, is_leaf=_is_noted)

    def nbytes(self, chunk: int, unit: int) -> int:
        """Bytes of what a chunk takes, 0 where that is not known."""
        noted = self._sent.get((chunk, unit), self._given.get((chunk, unit)))
        leaves = pytree.tree_leaves(noted, is_leaf=_is_noted)
        return sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves if _is_noted(leaf))

    def wrong(self) -> set[int]:
        """Chunks that were given another shape than the one that was sent to them later."""
        known = self._given.keys() & self._sent.keys()
        return {key[0] for key in known if _form(self._given[key]) != _form(self._sent[key])}

    def _noted(self, tensor: Tensor) -> _Values | Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.detach().clone()
        deviation = float(tensor.detach().float().std(correction=0)) if tensor.numel() else 0.0
        return _Values(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, deviation)

    def _made(self, noted: _Values | Tensor) -> Tensor:
        """In memory of its own, as a message that arrives."""
        if isinstance(noted, Tensor):
            return noted.clone()
        kind = noted.shape, noted.dtype
        if kind not in self._random:
            self._random[kind] = torch.randn(noted.shape, device=noted.device).to(noted.dtype)
        return (self._random[kind] * noted.deviation).requires_grad_(noted.requires_grad)


def _is_noted(leaf: Any) -> bool:
    return isinstance(leaf, (_Values, Tensor))


def _form(noted: Any) -> Any:
    leaves, structure = pytree.tree_flatten(noted, is_leaf=_is_noted)
    shapes = [(leaf.shape, leaf.dtype, leaf.requires_grad) if _is_noted(leaf) else leaf for leaf in leaves]
    return shapes, structure


class AloneTransport(Transport):
    """The connection of a rank that runs alone: messages of others are there at once, made up.

    tied: {name: weight} of those that other ranks hold, too: their gradients add zeros, as others' norms do.
    """

    def __init__(self, rank: int, size: int, messages: Messages, tied: Mapping[str, Tensor]) -> None:
        super().__init__(rank, size)
        self._messages, self._tied = messages, tied
        self._squares = torch.zeros(0, dtype=torch.float64)  # the last squared norms of gradients that it has sent

    @property
    def peers(self) -> list[int]:
        return []

    def send(self, peer: int, tag: Any, message: Any) -> None:
        if isinstance(tag, Tag) and tag.kind == "F":
            self._messages.note(tag.chunk, tag.unit, message)
        elif isinstance(tag, Note) and tag.what.startswith("the squared gradient norm"):
            self._squares, _ = message
        if peer == self.rank:
            self._mailbox.put(tag, (message, ()), peer, self._mailbox.call)

    def ready(self, tag: Any) -> bool:
        return True

    def wait_for(self, peer: int, tag: Any, timeout: float | None, instead: Any = None) -> None:
        if peer == self.rank:
            super().wait_for(peer, tag, timeout, instead)

    def receive(self, peer: int, tag: Any, timeout: float | None) -> Any:
        if peer == self.rank:
            return super().receive(peer, tag, timeout)
        if isinstance(tag, Tag):
            make = self._messages.input if tag.kind == "F" else self._messages.output_gradient
            return make(tag.chunk, tag.unit)
        for name, weight in self._tied.items():
            if tag.what.startswith(f"the gradient of tied {name!r} "):
                return torch.zeros_like(weight).requires_grad_(weight.requires_grad)
        return self._squares.tolist() if tag == total_tag(tag.number) else (torch.zeros_like(self._squares), {})

    def gather(self, value: Any, timeout: float | None = None, call: str = "gather") -> list[Any]:
        return [value] * self.size

    def broadcast(self, source: int, message: Any, timeout: float | None) -> Any:
        return message

    def fail(self, reason: str) -> None:
        self._mailbox.fail(reason)

    def reopen(self) -> None:
        self._join(Mailbox(self.rank))

    def close(self) -> None:
        """Nobody hears of it."""

    def _tell(self, peer: int, message: Notice) -> None:
        """Nobody is there to be told."""
