"""How tensors travel between ranks: `DistributedTransport` over torch.distributed, `LocalTransport` between threads.

A message is a pytree of tensors under a `Tag`. Sending never blocks. Receiving is posted ahead for good: one thread per
peer takes whatever that peer sends next, of any shape, and files it in a `Mailbox` until the engine asks for the tag. A
rank that fails tells its peers the same way, and they tell theirs, so every rank ends with the first rank's message.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import queue
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

logger = logging.getLogger("zbkern")

_HEADER_BYTES = 1024
_FOREVER = timedelta(days=365)


class PipelineError(RuntimeError):
    """A step failed, here or on another rank; the message names the rank, the action and the cause."""


class Tag(NamedTuple):
    """What a message is: the input of `chunk` (kind F) or the gradient of its output (kind B), of one microbatch."""

    step: int
    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        what = "input" if self.kind == "F" else "output gradient"
        return f"the {what} of chunk {self.chunk}, microbatch {self.microbatch}"


class Mailbox:
    """Messages that have arrived and were not asked for yet. Thread-safe."""

    def __init__(self) -> None:
        self._messages: dict[Tag, Any] = {}
        self._changed = threading.Condition()
        self._closed: set[int] = set()
        self._first_step = 0
        self.failure: str | None = None

    def put(self, tag: Tag, message: Any) -> None:
        with self._changed:
            if isinstance(tag, Tag) and tag.step < self._first_step:
                return
            self._messages[tag] = message
            self._changed.notify_all()

    def fail(self, reason: str) -> bool:
        """Makes every present and later `take` raise; the first reason stays. True when this was the first."""
        with self._changed:
            first, self.failure = self.failure is None, self.failure or reason
            self._changed.notify_all()
        return first

    def closed(self, peer: int) -> None:
        """Nothing more will come from that rank."""
        with self._changed:
            self._closed.add(peer)
            self._changed.notify_all()

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._messages

    def forget(self, step: int) -> list[Any]:
        """Drops the messages of steps before `step`, those that come later, too; returns what was there."""
        with self._changed:
            self._first_step = step
            old = [tag for tag in self._messages if isinstance(tag, Tag) and tag.step < step]
            return [self._messages.pop(tag) for tag in old]

    def peek(self, tag: Tag) -> Any:
        return self._messages.get(tag)

    def take(self, peer: int, tag: Tag, timeout: float) -> Any:
        def over() -> bool:
            return tag in self._messages or self.failure is not None or peer in self._closed

        with self._changed:
            self._changed.wait_for(over, timeout)
            if self.failure is not None:
                raise PipelineError(self.failure)
            if tag in self._messages:
                return self._messages.pop(tag)
            if peer in self._closed:
                raise PipelineError(f"rank {peer} closed its pipeline while {tag} was awaited from it")
            raise PipelineError(f"{tag} did not come from rank {peer} within {timeout:g} s; it is stuck or overloaded")


class Transport(Protocol):
    """What the engine needs of a transport."""

    rank: int
    size: int

    def send(self, peer: int, tag: Tag, message: Any) -> None:
        """Starts sending a pytree of tensors to `peer` and returns; the tensors must stay as they are."""

    def deliver(self, tag: Tag, message: Any) -> None:
        """Files a message of this rank for itself: neighbouring chunks on one rank hand tensors over directly."""

    def ready(self, tag: Tag) -> bool:
        """True when `receive` would return at once."""

    def receive(self, peer: int, tag: Tag, timeout: float) -> Any:
        """The message from `peer`, waiting up to `timeout` seconds. Raises PipelineError when a rank has failed."""

    def forget(self, step: int) -> None:
        """Drops messages to this rank of steps before `step`, arrived or not: nobody will ask for them."""

    def fail(self, reason: str) -> None:
        """Tells every rank that this one has failed."""

    def gather(self, value: Any) -> list[Any]:
        """One picklable value of every rank, by rank; collective."""

    def close(self) -> None:
        """Ends the transport; collective."""


class LocalTransport:
    """The twin without processes: the ranks are threads of one process. `LocalTransport.ring(n)` makes all of them."""

    def __init__(self, rank: int, mailboxes: Sequence[Mailbox], barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, len(mailboxes)
        self._mailboxes, self._barrier, self._board = mailboxes, barrier, board

    @classmethod
    def ring(cls, size: int) -> list[LocalTransport]:
        mailboxes, barrier, board = [Mailbox() for _ in range(size)], threading.Barrier(size), [None] * size
        return [cls(rank, mailboxes, barrier, board) for rank in range(size)]

    def send(self, peer: int, tag: Tag, message: Any) -> None:
        self._mailboxes[peer].put(tag, message)

    def deliver(self, tag: Tag, message: Any) -> None:
        self._mailboxes[self.rank].put(tag, message)

    def ready(self, tag: Tag) -> bool:
        return tag in self._mailboxes[self.rank]

    def receive(self, peer: int, tag: Tag, timeout: float) -> Any:
        return self._mailboxes[self.rank].take(peer, tag, timeout)

    def forget(self, step: int) -> None:
        self._mailboxes[self.rank].forget(step)

    def fail(self, reason: str) -> None:
        for mailbox in self._mailboxes:
            mailbox.fail(reason)
        self._barrier.abort()

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def close(self) -> None:
        for mailbox in self._mailboxes:
            mailbox.closed(self.rank)


class DistributedTransport:
    """Point to point over torch.distributed: gloo between CPUs, NCCL between GPUs with headers over gloo.

    group: the ranks of this pipeline, None for all. peers: the ranks this one exchanges messages with. Tensors go
    through one communicator per direction (to higher ranks, to lower ranks), so that no order of NCCL calls can
    deadlock; a header with tag, shapes and dtypes precedes each message through a gloo group of its own.
    """

    def __init__(self, group: dist.ProcessGroup | None, peers: Iterable[int], device: torch.device) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), len(ranks)
        self._device = device
        self._control = _new_group(ranks, "gloo")
        self._up = self._down = self._control
        if device.type != "cpu":
            self._up, self._down = (_new_group(ranks, dist.get_backend(group)) for _ in range(2))
        self._mailbox = Mailbox()
        self._peers = sorted(set(peers) - {self.rank})
        self._ended = threading.Lock()
        self._sends: queue.SimpleQueue[list[tuple[dist.Work, Tensor]] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._finish_sends, name="zbkern-send", daemon=True)
        self._receivers = [
            threading.Thread(target=self._receive_from, args=(peer,), name=f"zbkern-from-{peer}", daemon=True)
            for peer in self._peers
        ]
        for thread in (self._sender, *self._receivers):
            thread.start()
        atexit.register(self.close)

    def send(self, peer: int, tag: Tag, message: Any) -> None:
        leaves, spec = pytree.tree_flatten(message)
        tensors = [leaf.detach().contiguous() if isinstance(leaf, Tensor) else None for leaf in leaves]
        shapes = [
            None if tensor is None else (tensor.dtype, tuple(tensor.shape), leaf.requires_grad)
            for tensor, leaf in zip(tensors, leaves, strict=True)
        ]
        works = self._send_header(peer, ("message", tag, shapes, None if isinstance(message, Tensor) else spec))
        group = self._up if peer > self.rank else self._down
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                works.append((group.send([tensor], peer, 1), tensor))
        self._sends.put(works)

    def deliver(self, tag: Tag, message: Any) -> None:
        self._mailbox.put(tag, (message, []))

    def ready(self, tag: Tag) -> bool:
        message = self._mailbox.peek(tag)
        return message is not None and all(work.is_completed() for work in message[1])

    def receive(self, peer: int, tag: Tag, timeout: float) -> Any:
        message, works = self._mailbox.take(peer, tag, timeout)
        for work in works:
            work.wait()
        return message

    def forget(self, step: int) -> None:
        for _, works in self._mailbox.forget(step):
            for work in works:
                work.wait()

    def fail(self, reason: str) -> None:
        self._mailbox.fail(reason)
        self._end("failed", reason)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._control.allgather([lengths], [torch.tensor([payload.numel()])]).wait()
        longest = int(max(int(length) for length in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        buffers = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._control.allgather([buffers], [padded]).wait()
        for rank, (buffer, length) in enumerate(zip(buffers, lengths, strict=True)):
            values[rank] = pickle.loads(buffer[: int(length)].numpy().tobytes())
        return values

    def close(self) -> None:
        atexit.unregister(self.close)
        self._end("closed", "")
        for thread in (self._sender, *self._receivers):
            thread.join(timeout=5)

    def _end(self, what: str, reason: str) -> None:
        """Says the last word to every peer, once: "failed" or "closed". Peers answer with theirs, and threads end."""
        if not self._ended.acquire(blocking=False):
            return
        for peer in self._peers:
            try:
                self._sends.put(self._send_header(peer, (what, None, reason, None)))
            except RuntimeError as error:  # that peer is gone; the others still want to know
                logger.debug("rank %d could not tell rank %d: %s", self.rank, peer, error)
        self._sends.put(None)

    def _send_header(self, peer: int, header: tuple[Any, ...]) -> list[tuple[dist.Work, Tensor]]:
        payload = pickle.dumps(header)
        first = bytearray(_HEADER_BYTES)
        first[:4] = len(payload).to_bytes(4, "little")
        head, rest = payload[: _HEADER_BYTES - 4], payload[_HEADER_BYTES - 4 :]
        first[4 : 4 + len(head)] = head
        parts = [first, bytearray(rest)] if rest else [first]
        tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        return [(self._control.send([tensor], peer, 0), tensor) for tensor in tensors]

    def _receive_header(self, peer: int) -> tuple[Any, ...]:
        first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._control.recv([first], peer, 0).wait()
        data = first.numpy().tobytes()
        length = int.from_bytes(data[:4], "little")
        if length > _HEADER_BYTES - 4:
            rest = torch.empty(length - (_HEADER_BYTES - 4), dtype=torch.uint8)
            self._control.recv([rest], peer, 0).wait()
            data += rest.numpy().tobytes()
        return pickle.loads(data[4 : 4 + length])

    def _receive_from(self, peer: int) -> None:
        """Thread: files everything `peer` sends until it closes or fails."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while True:
                what, tag, detail, spec = self._receive_header(peer)
                if what == "closed":
                    return self._mailbox.closed(peer)
                if what == "failed":
                    return self._pass_on(detail)
                self._receive_message(peer, tag, detail, spec)
        except Exception as error:
            logger.debug("rank %d: receiving from rank %d: %s", self.rank, peer, error)
            if not self._ended.locked():
                self._pass_on(f"rank {peer} ended without a word: its connection was lost")

    def _receive_message(self, peer: int, tag: Tag, shapes: list[Any], spec: Any) -> None:
        group = self._up if peer < self.rank else self._down
        leaves: list[Tensor | None] = []
        works: list[dist.Work] = []
        for shape in shapes:
            if shape is None:
                leaves.append(None)
                continue
            dtype, sizes, requires_grad = shape
            tensor = torch.empty(sizes, dtype=dtype, device=self._device)
            if tensor.numel():
                work = group.recv([tensor], peer, 1)
                if self._device.type == "cpu":
                    work.wait()
                else:
                    works.append(work)
            leaves.append(tensor.requires_grad_(requires_grad))
        message = leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)
        self._mailbox.put(tag, (message, works))

    def _pass_on(self, reason: str) -> None:
        if self._mailbox.fail(reason):
            logger.error("rank %d: pipeline stopped: %s", self.rank, reason)
        self._end("failed", reason)

    def _finish_sends(self) -> None:
        """Thread: lets go of sent tensors as soon as they have left."""
        while (works := self._sends.get()) is not None:
            for work, _tensor in works:
                try:
                    work.wait()
                except Exception as error:  # the receiver is gone; its receiver thread here says so
                    logger.debug("rank %d: a send was not finished: %s", self.rank, error)
            del works


def _new_group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=_FOREVER, backend=backend, use_local_synchronization=True)
