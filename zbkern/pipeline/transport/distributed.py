"""DistributedTransport: how tensors travel between the ranks of torch.distributed.

A message is a pytree of tensors under a `Tag`. Sending never blocks. Receiving is posted ahead for good: one thread per
peer takes whatever that peer sends next, of any shape, and files it in a `Mailbox` until the engine asks for the tag.
Between CPUs the engine takes small messages itself, where they have come when it asks (turns.py). A rank that fails
tells its peers the same way, and they tell theirs, so every rank ends with the first rank's message. A rank's final
message goes out before anything here raises, so that a rank that was only told of a failure, and ends, is never taken
for its origin.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.framing import (
    HEADER,
    NEVER,
    REST,
    TENSORS,
    FinalMessage,
    Incoming,
    Message,
    Outgoing,
    TensorHeader,
)
from zbkern.pipeline.transport.mailbox import Call, Mailbox, Note, PipelineError, Tag, described
from zbkern.pipeline.transport.packing import pack, shapes_of, unpack
from zbkern.pipeline.transport.process_groups import (
    FOREVER,
    ConnectionLost,
    new_communicator,
    not_profiled,
    rendezvous_timeout,
)
from zbkern.pipeline.transport.rank_exchange import RankExchange
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.pipeline.transport.turns import Turn

logger = logging.getLogger("zbkern")

_PAUSE = 0.01  # seconds between looks at what has been sent
_NOW = timedelta(milliseconds=1)
_EXIT = 1.0  # seconds in which threads end with their process
_TOGETHER = 5.0  # seconds in which the others close, too, or answer a failure, however busy the machine
_TOLD = 10.0  # seconds in which a rank whose connection broke is told why, however busy the machine


class DistributedTransport(Transport):
    """Point to point over gloo, between CPUs; `GpuTransport` (gpu.py) sends tensors of GPUs another way.

    group: the ranks of this pipeline, None for all. Each direction (to higher ranks, to lower ranks) has a communicator
    of its own: gloo's thread, which spins while somebody sends on the connection that it wants to read, seldom does. A
    header with tag, shapes and dtypes precedes each message. Small tensors come with it, others follow in one buffer.
    """

    _carries = True  # small tensors in headers

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._open()

    def _open(self) -> None:
        with _meeting(self._group) as ranks:
            self._check_opening()
            ranks.exchange("connect")  # gloo would not say who has not come
            self._open_connections()
            self._start_threads()
            try:
                ranks.exchange("connected")  # else what a rank says next, and ends, some might not hear
            except BaseException:
                self.close()
                raise

    def _check_opening(self) -> None:
        """Before ranks connect. What it raises ends the opening on all of them."""

    def _open_connections(self) -> None:
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        headers = new_communicator(ranks), new_communicator(ranks)
        self._up, self._down = map(_Direction, headers, self._communicators(ranks, headers))
        self._join(Mailbox(self.rank))
        self._lost = False
        self._outgoing = {peer: Outgoing(self._carries) for peer in self.peers}
        self._ending = threading.Lock()
        self._final_message: FinalMessage | None = None
        self._uninformed = list(self.peers)  # peers that it was not sent to
        self._header_lock = threading.Lock()
        self._sends: queue.SimpleQueue[tuple[int, Works] | None] = queue.SimpleQueue()
        self._unreachable: set[int] = set()  # peers whose connection has ended
        self._incoming = {peer: Incoming(*self._from(peer), peer, self._carries) for peer in self.peers}
        self._turns = {peer: Turn(self._mailbox) for peer in self.peers}
        self._is_asked_ahead = False  # whether messages must be here before they are asked for
        self._receivers = {
            peer: threading.Thread(target=self._receive_from, args=(peer,), name=f"zbkern-from-{peer}", daemon=True)
            for peer in self.peers
        }
        self._process = os.getpid()  # a child that it forks inherits the connections, and must say nothing on them
        arguments = self._sends, self._receivers, self._unreachable
        self._sender = threading.Thread(target=self._finish_sends, args=arguments, name="zbkern-send", daemon=True)

    def _start_threads(self) -> None:
        for thread in self._threads:
            thread.start()
        # multiprocessing's: it also runs where a child process ends, which has no atexit; the last one runs first
        connections = self._receivers, self._sender, (self._up.headers, self._down.headers)
        self._end_threads = Finalize(None, _end_threads, connections, exitpriority=0)
        self._close_at_exit = Finalize(None, self._end_with_process, exitpriority=0)

    def _communicators(self, ranks: list[int], headers: tuple[Any, Any]) -> tuple[Any, Any]:
        """Of tensors, to higher and to lower ranks."""
        return headers

    def _to(self, peer: int) -> _Direction:
        return self._up if peer > self.rank else self._down

    def _from(self, peer: int) -> _Direction:
        return self._up if peer < self.rank else self._down

    def send(self, peer: int, tag: Tag | Note, message: Any) -> None:
        if peer == self.rank:
            self._mailbox.put(tag, (message, ()), peer, self._mailbox.call)
            return
        leaves = tensors_in(message)
        # not its spec: torch 2.13 warns when one is unpickled
        skeleton = 0 if isinstance(message, Tensor) else pytree.tree_map_only(Tensor, lambda _: 0, message)
        header = TensorHeader(*self._mailbox.call, tag, shapes_of(leaves), skeleton)
        try:
            works = self._start_send(peer, header, leaves)
        except RuntimeError as error:  # the peer is gone: why, this rank's threads know or are about to
            reason = self._mailbox.why_unreachable(peer, _TOLD) or f"rank {peer} cannot be reached: {error}"
            self.fail(reason)
            raise PipelineError(reason) from error
        self._sends.put((peer, works))

    def gather(self, value: Any, timeout: float | None = None, call: str = "gather") -> list[Any]:
        return super().gather(value, rendezvous_timeout() if timeout is None else timeout, call)

    # ---- the end

    def fail(self, reason: str) -> None:
        self._end(FinalMessage("failed", reason))

    def reopen(self) -> None:
        if self._lost:
            raise PipelineError(f"the pipeline cannot go on without a restart: {self._mailbox.failure}")
        self.close()
        self._open()

    def _end_with_process(self) -> None:
        """At the exit of this process, which waits for peers that are gone, or frozen, at most _TOGETHER and _EXIT."""
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
        if _ended(self._threads, _TOGETHER):  # a frozen rank never answers
            self._end_threads.cancel()
        self._receivers = {}  # those that did not end in time have no say in connections opened later
        self._close_communicators()
        self._up = self._down = _Direction(None, None)
        self._incoming = {}

    def _close_communicators(self) -> None:
        """Those of gloo close when nobody refers to them."""

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
                self._send_final(self._uninformed[-1], self._final_message)
                self._uninformed.pop()
            self._sends.put(None)
            if message.ending != "closed":
                self._mailbox.fail(self._final_message.reason or message.reason)
                self._abort()

    def _abort(self) -> None:
        """Ends what this rank waits for elsewhere than in a call of its transport."""

    def _send_final(self, peer: int, message: FinalMessage) -> None:
        try:
            works = self._start_send(peer, message)
            self._sends.put((peer, works))
        except RuntimeError as error:  # that peer is gone; the others still want to know
            logger.debug("rank %d could not tell rank %d: %s", self.rank, peer, error)

    @property
    def _threads(self) -> list[threading.Thread]:
        return [self._sender, *self._receivers.values()]

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

    def _start_send(self, peer: int, message: Message, tensors: Sequence[Tensor] = ()) -> Works:
        """Sends a message, and its tensors. One that is interrupted here is the last but for the final one."""
        headers, group = self._to(peer)
        with self._header_lock, not_profiled():  # all parts of one message before those of another thread's
            parts, carried = self._outgoing[peer].frame(message, tensors)
            works = [(headers.send([part], peer, tag), part) for part, tag in zip(parts, (HEADER, REST), strict=False)]
            if not carried and (packed := pack(tensors)) is not None:
                works.append((group.send([packed], peer, TENSORS), packed))
            self._outgoing[peer].sent()
        return works

    def _finish_sends(
        self,
        sends: queue.SimpleQueue[tuple[int, Works] | None],
        receivers: dict[int, threading.Thread],
        unreachable: set[int],
    ) -> None:
        """Thread: frees what gloo has sent as soon as it has left, give or take a pause.

        gloo never completes a send that is itself the first to find its peer gone; every later one raises at once. So
        what went through gloo is waited for once another send to that peer has begun. The last one to a peer is kept
        until that peer has sent its final message, or is gone; then it is waited for, since gloo forgets what nobody
        keeps, and the peer's last one may be there before this one's is read. For as long as that takes: a wait that
        runs out of time ends the connections to all peers.
        """
        last: dict[int, Works] = {}  # by peer
        while (message := sends.get()) is not None:
            peer, works = message
            self._finish(last.pop(peer, []))
            last[peer] = works
            del message, works
            if sends.empty():
                time.sleep(_PAUSE)  # waking up for every message took a tenth of a tiny step
        for peer, works in last.items():
            receivers[peer].join()
            if peer not in unreachable:
                self._finish(works)

    def _finish(self, works: Works) -> None:
        for work, _ in works:
            try:
                work.wait(FOREVER)
            except Exception as error:  # the receiver is gone; its receiver thread here says so
                logger.debug("rank %d: a send was not finished: %s", self.rank, error)

    # ---- receiving

    def ready(self, tag: Tag | Note) -> bool:
        self._is_asked_ahead = True
        return super().ready(tag)

    def wait_for(self, peer: int, tag: Any, timeout: float | None, instead: Any = None) -> None:
        if self._is_asked_ahead or instead is not None or peer == self.rank or not _can_receive_here():
            for turn in self._turns.values():
                turn.call()
            super().wait_for(peer, tag, timeout, instead)
        elif self._mailbox.failure is not None or not self._turns[peer].ask(tag, partial(self._read_arrived, peer)):
            super().wait_for(peer, tag, timeout)
            self._turns[peer].waited()

    def _read_arrived(self, peer: int) -> bool | None:
        """Reads the peer's next message in this thread, as `Turn.ask` has it."""
        found = self._incoming[peer].has_tensors()
        if found:
            message, data = self._incoming[peer].receive()
            assert isinstance(message, TensorHeader)
            self._file(peer, message, data)
        return found

    def _receive_from(self, peer: int) -> None:
        """Thread: files everything `peer` sends until it closes or fails. What comes after this rank has closed is
        read and dropped, since the peer's threads wait until it is.
        """
        incoming, turn, unreachable = self._incoming[peer], self._turns[peer], self._unreachable
        try:
            while True:
                with turn:
                    message, data = incoming.receive()
                    outlived = self._outlived()
                    if isinstance(message, TensorHeader) and not outlived:
                        self._file(peer, message, data)
                if isinstance(message, FinalMessage):
                    break
                if not isinstance(message, TensorHeader) and not outlived:
                    self._hear(peer, message)
            if outlived:
                return
            if message.ending == "closed":
                self._mailbox.closed(peer)
            else:
                self._fail_all(message)
        except Exception as error:
            logger.debug("rank %d: receiving from rank %d: %s", self.rank, peer, error)
            if isinstance(error, ConnectionLost):
                unreachable.add(peer)
            if self._outlived():
                return
            if not isinstance(error, ConnectionLost):  # the peer is there, and this rank has failed
                self._stop(f"rank {self.rank}, receiving from rank {peer}: {described(error)}")
                return
            if self._final_message is None:
                text = f"rank {peer} exited unexpectedly: its connection closed without notice"
                self._fail_all(FinalMessage("lost", f"{text}; start all ranks again, from a checkpoint"))

    def _outlived(self) -> bool:
        """Whether the connections of the calling thread, a receiver, were closed before it ended."""
        return threading.current_thread() not in self._receivers.values()

    def _file(self, peer: int, header: TensorHeader, data: Tensor | None, works: Sequence[dist.Work] = ()) -> None:
        """data: the bytes of the message's tensors, which are there when the works have ended."""
        assert data is not None
        skeleton, arrived = header.skeleton, iter(unpack(data, header.shapes))
        tree = next(arrived) if skeleton == 0 else pytree.tree_map_only(int, lambda _: next(arrived), skeleton)
        difference = self._mailbox.put(header.tag, (tree, works), peer, Call(header.turn, header.name))
        if difference is not None:
            self._stop(difference)


class _Direction(NamedTuple):
    """The communicators of messages to higher ranks, or to lower ones: gloo's, and those of tensors that follow."""

    headers: Any
    tensors: Any


def _can_receive_here() -> bool:
    """Whether a tensor that the calling thread makes is one for any call, and in no profile, as gloo's must be."""
    return not (torch.is_inference_mode_enabled() or torch.autograd._profiler_enabled())


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
        for communicator in communicators if thread.is_alive() or sender.is_alive() else ():
            with contextlib.suppress(RuntimeError):
                communicator.recv([torch.empty(1)], peer, NEVER).wait(_NOW)
    _ended((*receivers.values(), sender), _EXIT)


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
Works = list[tuple["dist.Work", Tensor]]
