"""DistributedTransport: how tensors travel between the ranks of torch.distributed.

A message is a pytree of tensors under a `Tag`. Sending never blocks. Receiving is posted ahead for good: one thread per
peer takes whatever that peer sends next, of any shape, and files it in a `Mailbox` until the engine asks for the tag. A
rank that fails tells its peers the same way, and they tell theirs, so every rank ends with the first rank's message.
A rank's final message goes out before anything here raises, so that a rank that was only told of a failure, and ends,
is never taken for its origin.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.framing import (
    DTYPES,
    FinalMessage,
    Message,
    Sizes,
    TensorHeader,
    frame,
    receive_message,
)
from zbkern.pipeline.transport.mailbox import Call, Mailbox, Note, PipelineError, Tag, described
from zbkern.pipeline.transport.process_groups import (
    FOREVER,
    backend_of,
    close_groups,
    finish,
    new_communicator,
    not_profiled,
    rendezvous_timeout,
)
from zbkern.pipeline.transport.rank_exchange import RankExchange
from zbkern.pipeline.transport.tensors import tensors_in

logger = logging.getLogger("zbkern")

_USUAL, _OTHER, _NEVER = 1, 2, 3  # tags of tensors, and of none; 0 is that of headers
_PAUSE = 0.002  # seconds between looks at what has been sent
_LAST = timedelta(seconds=1)  # for the last message to a peer that is there
_NOW = timedelta(milliseconds=1)
_TOGETHER = 5.0  # seconds in which the others close, too
_TOLD = 10.0  # seconds in which a rank whose connection broke is told why, however busy the machine


class DistributedTransport(Transport):
    """Point to point over torch.distributed: gloo between CPUs, NCCL between GPUs with headers over gloo.

    group: the ranks of this pipeline, None for all. Each direction (to higher ranks, to lower ranks) has a communicator
    of its own: no order of NCCL calls can deadlock, and gloo's thread, which spins while somebody sends on the
    connection that it wants to read, seldom does. A header with tag, shapes and dtypes precedes each message, always
    through gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._open()

    def _open(self) -> None:
        with _meeting(self._group) as ranks:
            ranks.exchange("connect")  # gloo would not say who has not come
            self._open_connections()
            try:
                ranks.exchange("connected")  # else what a rank says next, and ends, some might not hear
            except BaseException:
                self.close()
                raise

    def _open_connections(self) -> None:
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        self._headers_up, self._headers_down = (new_communicator(ranks, "gloo") for _ in range(2))
        self._up, self._down = self._headers_up, self._headers_down
        if not self._on_cpu:
            self._up, self._down = (new_communicator(ranks, backend_of(self._group, self.device)) for _ in range(2))
        self._join(Mailbox(self.rank))
        self._lost = False
        self._usual_to: dict[int, Sizes] = {}  # what each peer has posted a receive for, once something was sent to it
        self._ending = threading.Lock()
        self._final_message: FinalMessage | None = None
        self._uninformed = list(self.peers)  # peers that it was not sent to
        self._header_lock = threading.Lock()
        self._sends: queue.SimpleQueue[tuple[int, _Works] | None] = queue.SimpleQueue()
        self._unreachable: set[int] = set()  # peers whose connection has ended
        self._receivers = {
            peer: threading.Thread(target=self._receive_from, args=(peer,), name=f"zbkern-from-{peer}", daemon=True)
            for peer in self.peers
        }
        self._process = os.getpid()  # a child that it forks inherits the connections, and must say nothing on them
        arguments = self._sends, self._receivers, self._unreachable
        self._sender = threading.Thread(target=self._finish_sends, args=arguments, name="zbkern-send", daemon=True)
        for thread in (self._sender, *self._receivers.values()):
            thread.start()
        # multiprocessing's: it also runs where a child process ends, which has no atexit; the last one runs first
        connections = self._receivers, self._sender, (self._headers_up, self._headers_down)
        self._end_threads = Finalize(None, _end_threads, connections, exitpriority=0)
        self._close_at_exit = Finalize(None, self._end_with_process, exitpriority=0)

    def send(self, peer: int, tag: Tag | Note, message: Any) -> None:
        if peer == self.rank:
            self._mailbox.put(tag, (message, ()), peer, self._mailbox.call)
            return
        leaves = tensors_in(message)
        shapes = [(str(leaf.dtype), tuple(leaf.shape), leaf.requires_grad) for leaf in leaves]
        tensors = [leaf.detach().contiguous() for leaf in leaves]
        # not its spec: torch 2.13 warns when one is unpickled; a single tensor, as most are, need not be walked
        skeleton = 0 if isinstance(message, Tensor) else pytree.tree_map_only(Tensor, lambda _: 0, message)
        header = TensorHeader(*self._mailbox.call, tag, shapes, False, skeleton)
        sizes = header.sizes
        if self._on_cpu and sizes == self._usual_to.get(peer):
            header = header._replace(usual=True)
        if sizes:
            self._usual_to.setdefault(peer, sizes)
        try:
            works = self._start_send(peer, header)
            works += self._start_tensors(peer, tensors, _USUAL if header.usual else _OTHER)
        except RuntimeError as error:  # the peer is gone: why, this rank's threads know or are about to
            reason = self._mailbox.why_unreachable(peer, _TOLD) or f"rank {peer} cannot be reached: {error}"
            self.fail(reason)
            raise PipelineError(reason) from error
        self._sends.put((peer, works))

    def _settle(self, message: Any, works: Sequence[dist.Work]) -> None:
        """The current stream waits for what still arrives; the memory stays until this stream is done with it."""
        for work in works:
            work.wait()
        if works:
            stream = torch.cuda.current_stream(self.device)
            for tensor in tensors_in(message):
                tensor.record_stream(stream)

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        return super().gather(value, rendezvous_timeout() if timeout is None else timeout)

    # ---- the end

    def fail(self, reason: str) -> None:
        self._end(FinalMessage("failed", reason))

    def reopen(self) -> None:
        if self._lost:
            raise PipelineError(f"the pipeline cannot go on without a restart: {self._mailbox.failure}")
        self.close()
        self._open()

    def _end_with_process(self) -> None:
        """At the exit of this process, which waits for peers that are gone, or frozen, at most _TOGETHER and _LAST."""
        # what ends a child process is on its way through here; of others what nobody caught has been printed
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):  # by which torch.multiprocessing ends a child whose error it has written down
            error = error.__context__
        if error is not None and not isinstance(error, PipelineError):
            self.fail(f"rank {self.rank}: {described(error)}")
        self.close()

    def close(self) -> None:
        self._close_at_exit.cancel()
        if os.getpid() != self._process:
            return
        self._end(FinalMessage("closed", ""))
        wait = _TOGETHER if self._mailbox.failure is None else 2  # a frozen rank never answers
        if _ended((*self._receivers.values(), self._sender), wait):
            self._end_threads.cancel()
        self._receivers = {}  # those that did not end in time have no say in connections opened later
        close_groups([self._up, self._down])
        self._headers_up = self._headers_down = self._up = self._down = None

    def _end(self, message: FinalMessage) -> None:
        """Sends this rank's final message to every peer, and only then lets its calls raise. Peers answer with theirs.

        Of several the first is sent. To peers that an interruption left out the next call sends it, `close` at last.
        """
        if os.getpid() != self._process:
            return
        self._lost = self._lost or message.ending == "lost"
        with self._ending:
            if self._final_message is None:
                self._final_message = message
            while self._uninformed:
                if self._uninformed[-1] not in self._unreachable:
                    self._send_final(self._uninformed[-1], self._final_message)
                self._uninformed.pop()
            self._sends.put(None)
            if message.ending != "closed":
                self._mailbox.fail(self._final_message.reason or message.reason)

    def _send_final(self, peer: int, message: FinalMessage) -> None:
        try:
            works = self._start_send(peer, message)
            if self._on_cpu:  # what the peer has posted a receive for
                empty = [torch.empty(size, dtype=DTYPES[dtype]) for dtype, size in self._usual_to.get(peer, [])]
                works += self._start_tensors(peer, empty, _USUAL)
            self._sends.put((peer, works))
        except RuntimeError as error:  # that peer is gone; the others still want to know
            logger.debug("rank %d could not tell rank %d: %s", self.rank, peer, error)

    def _stop(self, reason: str) -> None:
        self._fail_all(FinalMessage("failed", reason))

    def _fail_all(self, message: FinalMessage) -> None:
        """A rank has failed, and no call of this rank is about to raise: the log says so at once."""
        if self._mailbox.failure is None:
            logger.error("rank %d: pipeline stopped: %s", self.rank, message.reason)
        self._end(message)

    # ---- sending

    def _tell(self, peer: int, message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # it is gone: that, too, is about to be known
            self._sends.put((peer, self._start_send(peer, message)))

    def _start_send(self, peer: int, message: Message) -> _Works:
        group = self._headers_up if peer > self.rank else self._headers_down
        with self._header_lock, not_profiled():  # both parts of one message before those of another thread's
            return [(group.send([part], peer, 0), part) for part in frame(message)]

    def _start_tensors(self, peer: int, tensors: list[Tensor], slot: int) -> _Works:
        group = self._up if peer > self.rank else self._down
        with not_profiled() if self._on_cpu else contextlib.nullcontext():
            return [(group.send([tensor], peer, slot), tensor) for tensor in tensors if tensor.numel()]

    def _finish_sends(
        self,
        sends: queue.SimpleQueue[tuple[int, _Works] | None],
        receivers: dict[int, threading.Thread],
        unreachable: set[int],
    ) -> None:
        """Thread: frees sent tensors as soon as they have left, give or take a pause.

        gloo never completes a send that is itself the first to find its peer gone; every later one raises at once. So
        what went through gloo is waited for once another send to that peer has begun. The last one to a peer is kept
        until that peer has sent its final message, or is gone; then it is waited for, for gloo forgets what its
        receiver has not asked for when the connection closes, and the peer's last one may be there before this one's.
        """
        last: dict[int, _Works] = {}  # by peer
        with self._stream_of_its_own() as stream:  # no other stream waits for a send
            while (message := sends.get()) is not None:
                peer, works = message
                self._finish(last.pop(peer, []))
                last[peer] = [work for work in works if work[1].device.type == "cpu"]
                if stream is not None:
                    self._finish([work for work in works if work[1].device.type != "cpu"])
                    departure = torch.cuda.Event(blocking=True)
                    departure.record(stream)
                    departure.synchronize()
                del message, works
                if sends.empty():
                    time.sleep(_PAUSE)  # waking up for every message took a tenth of a tiny step
        for peer, works in last.items():
            receivers[peer].join()
            if peer not in unreachable:
                self._finish(works, _LAST)

    def _finish(self, works: _Works, timeout: timedelta = FOREVER) -> None:
        for work, tensor in works:
            try:
                finish(work, tensor.device, timeout)
            except Exception as error:  # the receiver is gone; its receiver thread here says so
                logger.debug("rank %d: a send was not finished: %s", self.rank, error)

    # ---- receiving

    def _receive_tensors(self, peer: int, sizes: Sizes, slot: int) -> _Posted:
        group = self._up if peer < self.rank else self._down
        tensors = [torch.empty(size, dtype=DTYPES[dtype], device=self.device) for dtype, size in sizes]
        return tensors, [group.recv([tensor], peer, slot) for tensor in tensors if tensor.numel()]

    def _receive_from(self, peer: int) -> None:
        """Thread: files everything `peer` sends until it closes or fails."""
        group = self._headers_up if peer < self.rank else self._headers_down
        posted: _Posted | None = None
        try:
            with self._stream_of_its_own():  # a receive begins at once, not after the work that is queued on another
                while True:
                    message = receive_message(group, peer)
                    if self._outlived():
                        return
                    if isinstance(message, FinalMessage):
                        break
                    if isinstance(message, TensorHeader):
                        posted = self._receive_tree(peer, message, posted)
                    else:
                        self._hear(peer, message)
            if message.ending == "closed":
                self._mailbox.closed(peer)
            else:
                self._fail_all(message)
            with contextlib.suppress(RuntimeError):  # it has said its last, and may be gone
                for work in posted[1] if posted else []:
                    finish(work, self.device)
        except Exception as error:
            logger.debug("rank %d: receiving from rank %d: %s", self.rank, peer, error)
            if self._outlived():
                return
            self._unreachable.add(peer)
            if self._final_message is None:
                self._fail_all(
                    FinalMessage("lost", f"rank {peer} exited unexpectedly: its connection closed without notice")
                )

    def _outlived(self) -> bool:
        """Whether the connections of the calling thread, a receiver, were closed before it ended."""
        return threading.current_thread() not in self._receivers.values()

    def _receive_tree(self, peer: int, header: TensorHeader, posted: _Posted | None) -> _Posted | None:
        """Files a message; returns the receive that is posted for the next one with tensors.

        Where nobody waits for a receive to be posted, a message takes half the time: the sender's call sends it. So
        one is there for the next message of the usual sizes, those of the first; only on a CPU, because NCCL's would
        keep multiprocessors busy.
        """
        shapes, skeleton, usual, sizes = header.shapes, header.skeleton, header.usual, header.sizes
        tensors, works = posted if usual and posted else self._receive_tensors(peer, sizes, _OTHER)
        if self._on_cpu:
            while works:
                finish(works.pop(0), self.device)
        arrived = (tensor.requires_grad_(shape[2]) for tensor, shape in zip(tensors, shapes, strict=True))
        tree = next(arrived) if skeleton == 0 else pytree.tree_map_only(int, lambda _: next(arrived), skeleton)
        difference = self._mailbox.put(header.tag, (tree, works), peer, Call(header.turn, header.name))
        if difference is not None:
            self._stop(difference)
        if self._on_cpu and sizes and (usual or posted is None):
            return self._receive_tensors(peer, sizes, _USUAL)
        return posted

    @contextlib.contextmanager
    def _stream_of_its_own(self) -> Iterator[torch.cuda.Stream | None]:
        """For one of the threads: on CUDA, a stream that nothing else uses."""
        if self.device.type != "cuda":
            yield None
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream


def _ended(threads: Sequence[threading.Thread], wait: float) -> bool:
    """Whether all of them have ended, in at most so many seconds."""
    deadline = time.monotonic() + wait
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _end_threads(receivers: _Threads, sender: threading.Thread, communicators: Sequence[Any]) -> None:
    """At the exit of this process, which would abort if a thread that waits in gloo for its peer woke up while Python
    ends, as it does when the peer exits. One wait for a peer that runs out of time ends all others."""
    for peer, thread in receivers.items():
        for communicator in communicators if thread.is_alive() else ():
            with contextlib.suppress(RuntimeError):
                communicator.recv([torch.empty(1)], peer, _NEVER).wait(_NOW)
    _ended((*receivers.values(), sender), _LAST.total_seconds())


def meet(group: dist.ProcessGroup | None, value: Any = None) -> list[Any]:
    """One small value of each rank, as JSON has it, by rank, before they are connected; collective.

    Raises PipelineError on all ranks where one has not come within the time-out of init_process_group.
    """
    with _meeting(group) as ranks:
        return ranks.exchange("connect", value, lambda values: [values] * ranks.size)


def _meeting(group: dist.ProcessGroup | None) -> RankExchange:
    hint = ", the time-out of init_process_group; all ranks construct a pipeline, or go on after a failure, together"
    return RankExchange("Pipeline", group, rendezvous_timeout(), hint)


_Threads = dict[int, threading.Thread]  # by peer
_Works = list[tuple["dist.Work", Tensor]]
_Posted = tuple[list[Tensor], list["dist.Work"]]
