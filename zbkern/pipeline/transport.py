"""How tensors travel between ranks: what the engine needs of a transport, and `DistributedTransport`.

A message is a pytree of tensors under a `Tag`. Sending never blocks. Receiving is posted ahead for good: one thread per
peer takes whatever that peer sends next, of any shape, and files it in a `Mailbox` until the engine asks for the tag. A
rank that fails tells its peers the same way, and they tell theirs, so every rank ends with the first rank's message.
A rank that waits too long asks along the chain of those who wait, until one is found that does not: that one is stuck,
and the thread that was asked says so in its name. Where it is frozen and says nothing, those who wait for it name it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import pickle
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.groups import backend_of, close_groups, meet, meeting_time, open_group
from zbkern.pipeline.mailbox import Activity, Mailbox, PipelineError, Tag, Values

logger = logging.getLogger("zbkern")

_USUAL, _OTHER = 1, 2  # tags of tensors; 0 is that of headers
_HEADER_BYTES = 1024
_PAUSE = 0.002  # seconds between looks at what has been sent


GRACE = 2.0  # seconds that a stuck rank has to say so itself


class Transport(Protocol):
    """What the engine needs of a transport."""

    rank: int
    size: int
    activity: Activity

    def send(self, peer: int, tag: Any, message: Any) -> None:
        """Starts sending a pytree of tensors to `peer` and returns; the tensors must stay as they are.

        Raises PipelineError when the peer is gone.
        """

    def deliver(self, tag: Any, message: Any) -> None:
        """Files a message of this rank for itself: neighbouring chunks on one rank hand tensors over directly."""

    def ready(self, tag: Any) -> bool:
        """True when `receive` would return at once."""

    def receive(self, peer: int, tag: Any, timeout: float) -> Any:
        """The message from `peer`. Raises PipelineError when a rank has failed, or is stuck for `timeout` seconds."""

    def forget(self, step: int) -> None:
        """Drops messages to this rank of steps before `step`, arrived or not: nobody will ask for them."""

    def fail(self, reason: str) -> None:
        """Tells every rank that this one has failed."""

    def reopen(self) -> None:
        """Makes a transport that has failed usable again, without the messages that were under way; collective.

        Raises PipelineError when a rank was lost: only a restart brings it back.
        """

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """One picklable value of every rank, by rank; collective.

        Raises PipelineError as `receive` does. timeout: None for as long as ranks wait for each other to start.
        """

    def close(self) -> None:
        """Ends the transport; collective."""


class DistributedTransport:
    """Point to point over torch.distributed: gloo between CPUs, NCCL between GPUs with headers over gloo.

    group: the ranks of this pipeline, None for all. peers: the ranks this one exchanges messages with, besides those
    before and after it. Each direction (to higher ranks, to lower ranks) has a communicator of its own: no order of
    NCCL calls can deadlock, and gloo's thread, which spins while somebody sends on the connection that it wants to
    read, seldom does. A header with tag, shapes and dtypes precedes each message, always through gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None, peers: Iterable[int], device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.activity = Activity(self.rank)
        self._group = group
        self.device = device
        self._on_cpu = device.type == "cpu"
        neighbours = {self.rank - 1, self.rank + 1} & set(range(self.size))
        self._peers = sorted(({*peers} | neighbours) - {self.rank})
        self._open()

    def _open(self) -> None:
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        meet(ranks)
        self._headers_up, self._headers_down = (open_group(ranks, "gloo") for _ in range(2))
        self._up, self._down = self._headers_up, self._headers_down
        if not self._on_cpu:
            self._up, self._down = (open_group(ranks, backend_of(self._group, self.device)) for _ in range(2))
        self._mailbox = Mailbox()
        self._lost, self._gathers = False, 0
        self._usual_to: dict[int, _Sizes] = {}  # what each peer has posted a receive for, once something was sent to it
        self._askers: set[int] = set()
        self._link: tuple[int, int] | None = None  # a rank that waits, and for which
        self._ended = threading.Lock()
        self._header_lock = threading.Lock()
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
        sizes = _sizes(shapes)
        usual = self._on_cpu and sizes == self._usual_to.get(peer)
        self._usual_to.setdefault(peer, sizes)
        # not the spec itself: torch 2.13 warns when one is unpickled
        skeleton = None if isinstance(message, Tensor) else pytree.tree_unflatten([0] * len(leaves), spec)
        with self._reaching(peer):
            works = self._send_header(peer, ("message", tag, (shapes, usual), skeleton))
            works += self._send_tensors(peer, [t for t in tensors if t is not None], _USUAL if usual else _OTHER)
        self._sends.put(works)

    def deliver(self, tag: Tag, message: Any) -> None:
        self._mailbox.put(tag, (message, []))

    def ready(self, tag: Tag) -> bool:
        message = self._mailbox.peek(tag)
        return message is not None and all(work.is_completed() for work in message[1])

    def receive(self, peer: int, tag: Any, timeout: float) -> Any:
        self.activity.awaits = peer
        try:
            message, works = self._mailbox.take(peer, tag, timeout)
        except TimeoutError:
            self._link = None
            self._ask(peer, str(tag), timeout)
            if self._mailbox.wait_for_failure(GRACE) is None and (
                self._link is None
                or self._mailbox.wait_for_failure(GRACE) is None  # whoever is next has the first word
            ):
                self.fail(self.activity.silent(peer, str(tag), timeout, self._link))
            raise PipelineError(self._mailbox.failure) from None
        finally:
            self.activity.awaits = None
        self._settle(message, works)
        return message

    def forget(self, step: int) -> None:
        for message, works in self._mailbox.forget(step):
            self._settle(message, works)

    def _settle(self, message: Any, works: list[dist.Work]) -> None:
        """The current stream waits for what still arrives; the memory stays until this stream is done with it."""
        for work in works:
            work.wait()
        if works:
            stream = torch.cuda.current_stream(self.device)
            for leaf in pytree.tree_leaves(message):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)

    def fail(self, reason: str) -> None:
        self._mailbox.fail(reason)
        self._end("failed", reason)

    def reopen(self) -> None:
        if self._lost:
            raise PipelineError(f"the pipeline cannot go on without a restart: {self._mailbox.failure}")
        self.close()
        self._open()

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        # from rank to rank and back, because an allgather of gloo would wait for a frozen rank without a word
        timeout = meeting_time() if timeout is None else timeout
        self._gathers += 1
        earlier, everything = Values(self._gathers, False), Values(self._gathers, True)
        values = [pickle.dumps(value)]
        if self.rank > 0:
            values = self.receive(self.rank - 1, earlier, timeout) + values
        if self.rank < self.size - 1:
            self._send_values(self.rank + 1, earlier, values)
            values = self.receive(self.rank + 1, everything, timeout)
        if self.rank > 0:
            self._send_values(self.rank - 1, everything, values)
        return [pickle.loads(pickled) for pickled in values]

    def close(self) -> None:
        atexit.unregister(self.close)
        self._end("closed", "")
        deadline = time.monotonic() + (5 if self._mailbox.failure is None else 2)  # a frozen rank never answers
        for thread in (self._sender, *self._receivers):
            thread.join(max(0.0, deadline - time.monotonic()))
        close_groups([self._up, self._down])
        self._headers_up = self._headers_down = self._up = self._down = None

    def _end(self, what: str, reason: str) -> None:
        """Says the last word to every peer, once: "failed", "lost" or "closed". Peers answer with theirs, and end."""
        if not self._ended.acquire(blocking=False):
            return
        for peer in self._peers:
            try:
                works = self._send_header(peer, (what, None, reason, None))
                if self._on_cpu:  # what the peer has posted a receive for
                    empty = [torch.empty(size, dtype=dtype) for dtype, size in self._usual_to.get(peer, [])]
                    works += self._send_tensors(peer, empty, _USUAL)
                self._sends.put(works)
            except RuntimeError as error:  # that peer is gone; the others still want to know
                logger.debug("rank %d could not tell rank %d: %s", self.rank, peer, error)
        self._sends.put(None)

    def _ask(self, peer: int, tag: str, waited: float) -> None:
        """Asks `peer` why nothing comes; the answer is a failure that reaches everybody."""
        with contextlib.suppress(RuntimeError):  # it is gone: that, too, is about to be known
            self._sends.put(self._send_header(peer, ("asked", tag, waited, None)))

    def _asked(self, asker: int, tag: str, waited: float) -> None:
        """Thread: `asker` waits for this rank. Says so and asks on when it waits itself, that it is stuck when not."""
        peer = self.activity.awaits
        if peer is None:
            self._pass_on(self.activity.stuck(tag, waited))
            return
        self._askers.add(asker)
        self._answer((self.rank, peer), {asker})
        self._ask(peer, tag, waited)

    def _answer(self, link: tuple[int, int], askers: Iterable[int]) -> None:
        """Tells those who asked which rank waits for which; the last link that they hear of is where it is stuck."""
        for asker in askers:
            with contextlib.suppress(RuntimeError):
                self._sends.put(self._send_header(asker, ("waits", None, link, None)))

    def _answered(self, link: tuple[int, int]) -> None:
        """Thread: the answer of a rank that waits itself; it goes on to those who asked this one."""
        if link != self._link:
            self._link = link
            self._answer(link, self._askers)

    def _send_values(self, peer: int, tag: Values, values: list[bytes]) -> None:
        with self._reaching(peer):
            self._sends.put(self._send_header(peer, ("values", tag, values, None)))

    @contextlib.contextmanager
    def _reaching(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the peer is gone: why, this rank's threads know or are about to
            raise PipelineError(self._mailbox.wait_for_failure(GRACE) or f"rank {peer} is gone: {error}") from error

    def _send_header(self, peer: int, header: tuple[Any, ...]) -> list[tuple[dist.Work, Tensor]]:
        payload = pickle.dumps(header)
        first = bytearray(_HEADER_BYTES)
        first[:4] = len(payload).to_bytes(4, "little")
        head, rest = payload[: _HEADER_BYTES - 4], payload[_HEADER_BYTES - 4 :]
        first[4 : 4 + len(head)] = head
        parts = [first, bytearray(rest)] if rest else [first]
        tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        group = self._headers_up if peer > self.rank else self._headers_down
        with self._header_lock:  # both parts of one header before those of another thread's
            return [(group.send([tensor], peer, 0), tensor) for tensor in tensors]

    def _send_tensors(self, peer: int, tensors: list[Tensor], slot: int) -> list[tuple[dist.Work, Tensor]]:
        group = self._up if peer > self.rank else self._down
        return [(group.send([tensor], peer, slot), tensor) for tensor in tensors if tensor.numel()]

    def _receive_tensors(self, peer: int, sizes: _Sizes, slot: int) -> tuple[list[Tensor], list[dist.Work]]:
        group = self._up if peer < self.rank else self._down
        tensors = [torch.empty(size, dtype=dtype, device=self.device) for dtype, size in sizes]
        return tensors, [group.recv([tensor], peer, slot) for tensor in tensors if tensor.numel()]

    def _receive_header(self, peer: int) -> tuple[Any, ...]:
        group = self._headers_up if peer < self.rank else self._headers_down
        first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        group.recv([first], peer, 0).wait()
        data = first.numpy().tobytes()
        length = int.from_bytes(data[:4], "little")
        if length > _HEADER_BYTES - 4:
            rest = torch.empty(length - (_HEADER_BYTES - 4), dtype=torch.uint8)
            group.recv([rest], peer, 0).wait()
            data += rest.numpy().tobytes()
        return pickle.loads(data[4 : 4 + length])

    def _receive_from(self, peer: int) -> None:
        """Thread: files everything `peer` sends until it closes or fails."""
        posted: _Posted | None = None
        try:
            with self._stream_of_its_own():  # a receive begins at once, not after the work that is queued on another
                while True:
                    what, tag, detail, skeleton = self._receive_header(peer)
                    if what == "message":
                        posted = self._receive_message(peer, tag, detail, skeleton, posted)
                    elif what == "values":
                        self._mailbox.put(tag, (detail, []))
                    elif what == "asked":
                        self._asked(peer, tag, detail)
                    elif what == "waits":
                        self._answered(detail)
                    else:
                        break
            if what == "closed":
                self._mailbox.closed(peer)
            else:
                self._pass_on(detail, what)
            for work in posted[1] if posted else []:
                work.wait()
        except Exception as error:
            logger.debug("rank %d: receiving from rank %d: %s", self.rank, peer, error)
            if not self._ended.locked():
                self._pass_on(f"rank {peer} ended without a word: its connection was lost", "lost")

    def _receive_message(
        self, peer: int, tag: Tag, detail: tuple[list[Any], bool], skeleton: Any, posted: _Posted | None
    ) -> _Posted | None:
        """Files a message; returns the receive that is posted for the next one.

        Where nobody waits for a receive to be posted, a message takes half the time: the sender's call sends it. So
        one is there for the next message of the usual sizes, those of the first; only on a CPU, because NCCL's would
        keep multiprocessors busy.
        """
        shapes, usual = detail
        sizes = _sizes(shapes)
        tensors, works = posted if usual and posted else self._receive_tensors(peer, sizes, _OTHER)
        if self._on_cpu:
            while works:
                works.pop(0).wait()
        found = iter(tensors)
        leaves = [None if shape is None else next(found).requires_grad_(shape[2]) for shape in shapes]
        message = leaves[0] if skeleton is None else pytree.tree_unflatten(leaves, pytree.tree_structure(skeleton))
        self._mailbox.put(tag, (message, works))
        if self._on_cpu and (usual or posted is None):
            return self._receive_tensors(peer, sizes, _USUAL)
        return posted

    def _pass_on(self, reason: str, what: str = "failed") -> None:
        self._lost = self._lost or what == "lost"
        if self._mailbox.fail(reason):
            logger.error("rank %d: pipeline stopped: %s", self.rank, reason)
        self._end(what, reason)

    def _finish_sends(self) -> None:
        """Thread: lets go of sent tensors as soon as they have left, give or take a pause."""
        with self._stream_of_its_own() as stream:  # no other stream waits for a send
            while (works := self._sends.get()) is not None:
                for work, _ in works:
                    try:
                        work.wait()
                    except Exception as error:  # the receiver is gone; its receiver thread here says so
                        logger.debug("rank %d: a send was not finished: %s", self.rank, error)
                if stream is not None:
                    departure = torch.cuda.Event(blocking=True)
                    departure.record(stream)
                    departure.synchronize()
                works = _ = None
                if self._sends.empty():
                    time.sleep(_PAUSE)  # waking up for every message took a tenth of a tiny step

    @contextlib.contextmanager
    def _stream_of_its_own(self) -> Iterator[torch.cuda.Stream | None]:
        """For one of the threads: on CUDA, a stream that nothing else uses."""
        if self.device.type != "cuda":
            yield None
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream


_Sizes = list[tuple[torch.dtype, tuple[int, ...]]]
_Posted = tuple[list[Tensor], list["dist.Work"]]


def _sizes(shapes: list[Any]) -> _Sizes:
    """dtype and size of the tensors of a message."""
    return [shape[:2] for shape in shapes if shape is not None]
