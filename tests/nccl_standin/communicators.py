"""gloo and NCCL between the threads of a run, with what each of them does that a pipeline must reckon with.

gloo: a message leaves when its receive is posted; what nobody has asked for is lost when its sender closes, or keeps
its work no longer; the first send that finds its peer gone never ends, and later ones raise; a wait that runs out of
time ends all connections of its communicator.

NCCL: a send and its receive each spin on their GPU from when they are issued until the other one is; two ranks connect
in their first call, which waits for the other rank's; kinds of numbers that NCCL does not know are refused; shutdown
waits for what is under way, and abort ends it with whatever is in memory.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tests.nccl_standin.gpu import Flag, Gpu, Stream
from tests.nccl_standin.scheduler import Scheduler, Task

DTYPES = {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
DTYPES |= {torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
Sent = Callable[[], "GlooWork | None"]


class Network:
    """What the ranks of a run have in common: the two ends of every connection."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._made: collections.Counter[tuple[str, int]] = collections.Counter()
        self._ends: dict[tuple[str, int, int], Any] = {}
        self.gone: set[int] = set()  # ranks that were killed

    def number(self, kind: str, rank: int) -> int:
        """Of this rank's communicators of this kind, from zero: ranks make them in one order."""
        self._made[kind, rank] += 1
        return self._made[kind, rank] - 1

    def add(self, kind: str, number: int, rank: int, communicator: Any) -> None:
        self._ends[kind, number, rank] = communicator

    def find(self, kind: str, number: int, rank: int) -> Any:
        return self._ends.get((kind, number, rank))

    def kill(self, rank: int) -> None:
        """The connections of this rank close."""
        self.gone.add(rank)
        for (kind, _, other), end in [*self._ends.items()]:
            if kind == "gloo" and other == rank:
                end.close()


class _GlooEnd:
    """What a rank's communicator is to the others; it outlives the communicator."""

    def __init__(self, network: Network, number: int, rank: int) -> None:
        self.network, self.number, self.rank = network, number, rank
        self.closed = False
        self.arriving: dict[tuple[int, int], collections.deque[Sent]] = collections.defaultdict(collections.deque)
        self.posted: dict[tuple[int, int], collections.deque[GlooWork]] = collections.defaultdict(collections.deque)
        self.found_gone: set[int] = set()
        self.last_from: dict[int, float] = collections.defaultdict(float)  # when the last message of a rank arrives
        network.add("gloo", number, rank, self)

    def close(self) -> None:
        """Who waits for this rank hears it a little later. What it has sent and nobody asked for is lost."""
        if self.closed:
            return
        self.closed = True
        scheduler = self.network.scheduler
        for (kind, number, other), end in [*self.network._ends.items()]:
            if (kind, number) == ("gloo", self.number) and other != self.rank:
                scheduler.at(scheduler.random.uniform(0, 1e-3), lambda end=end: end.lose(self.rank))  # type: ignore[misc]
        for works in self.posted.values():
            for work in works:
                work.finish("closed here")
        for sent in [each for arriving in self.arriving.values() for each in arriving]:
            if (kept := sent()) is not None:
                kept.finish("closed there")

    def lose(self, peer: int) -> None:
        for (other, _), works in self.posted.items():
            if other == peer:
                for work in works:
                    work.finish("Connection closed by peer")
                works.clear()
        for (other, _), arriving in self.arriving.items():
            if other == peer:
                arriving.clear()

    def match(self, peer: int, tag: int) -> None:
        arriving, posted = self.arriving[peer, tag], self.posted[peer, tag]
        while arriving and posted:
            if (sent := arriving.popleft()()) is None:
                continue
            received = posted.popleft()
            if sent.tensor.nbytes > received.tensor.nbytes:
                raise AssertionError(f"gloo would abort: {sent.tensor.nbytes} bytes for {received.tensor.nbytes}")
            received.tensor.view(torch.uint8)[: sent.tensor.nbytes].copy_(sent.tensor.view(torch.uint8))
            sent.finish()
            received.finish()


class GlooWork:
    def __init__(self, end: _GlooEnd, tensor: Tensor) -> None:
        self.tensor = tensor
        self._end, self._scheduler = end, end.network.scheduler
        self._done, self._error = False, ""
        self._waiting: list[Task] = []

    def finish(self, error: str = "") -> None:
        if not self._done:
            self._done, self._error = True, error
            self._scheduler.wake(self._waiting)

    def wait(self, timeout: timedelta) -> bool:
        if not self._scheduler.wait_until(self._waiting, lambda: self._done, timeout.total_seconds()):
            self._end.close()
            raise RuntimeError("gloo: timed out")
        if self._error:
            raise RuntimeError(f"gloo: {self._error}")
        return True

    def is_completed(self) -> bool:
        return self._done


class Gloo:
    """A rank's communicator over gloo. It closes with the last reference."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._scheduler, self._rank = network, network.scheduler, rank
        self._number = network.number("gloo", rank)
        self._end = _GlooEnd(network, self._number, rank)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> GlooWork:
        self._scheduler.pause()
        work = GlooWork(self._end, tensors[0])
        theirs = self._network.find("gloo", self._number, peer)
        if theirs is None or theirs.closed:
            if peer in self._end.found_gone:
                raise RuntimeError("gloo: Connection closed by peer")
            self._end.found_gone.add(peer)
            return work
        place, end, sent = (self._rank, tag), self._end, weakref.ref(work)

        def arrive() -> None:
            if not end.closed and not theirs.closed:
                theirs.arriving[place].append(sent)
                theirs.match(*place)

        now, random = self._scheduler.now, self._scheduler.random
        when = max(now + random.uniform(5e-6, 2e-4), theirs.last_from[self._rank])
        theirs.last_from[self._rank] = when  # one connection: in the order of sends
        self._scheduler.at(when - now, arrive)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> GlooWork:
        self._scheduler.pause()
        work = GlooWork(self._end, tensors[0])
        theirs = self._network.find("gloo", self._number, peer)
        if theirs is not None and theirs.closed and not self._end.arriving[peer, tag]:
            raise RuntimeError("gloo: Connection closed by peer")
        self._end.posted[peer, tag].append(work)
        self._end.match(peer, tag)
        return work

    def __del__(self) -> None:
        self._end.close()


class Pair:
    """A send and its receive."""

    def __init__(self) -> None:
        self.sent: Tensor | None = None  # what was in the sender's memory when it called send
        self.source: Tensor | None = None  # that memory
        self.target: Tensor | None = None
        self.issued = {"send": Flag(), "recv": Flag()}
        self.begun: dict[str, float] = {}
        self.known: list[Task] = []  # who waits for what was sent
        self.travel = 0.0  # seconds from when both are issued


class NcclWork:
    def __init__(self, nccl: Nccl, pair: Pair, end: Flag, kind: str) -> None:
        self._nccl, self._pair, self._end, self._kind = nccl, pair, end, kind

    def wait(self) -> bool:
        """The current stream waits. What was sent is then in memory for whoever computes on this stream."""
        nccl, pair = self._nccl, self._pair
        stream = nccl.current()
        stream.wait_for(self._end)
        if self._kind == "recv":
            assert pair.target is not None
            nccl.scheduler.wait_until(pair.known, lambda: pair.sent is not None or nccl.aborted)
            if pair.sent is not None and (self._end.is_set or not nccl.aborted):
                pair.target.copy_(pair.sent)
            nccl.gpu.use(pair.target, stream)
        return True

    def is_completed(self) -> bool:
        return self._end.is_set


class Nccl:
    """send and recv of a rank's ProcessGroupNCCL. current: gives the stream of the calling thread."""

    def __init__(
        self, network: Network, rank: int, gpu: Gpu, current: Callable[[], Stream], on_call: Callable[[str], None]
    ) -> None:
        self.scheduler, self.gpu, self.current = network.scheduler, gpu, current
        self._network, self.rank, self._on_call = network, rank, on_call
        self._number = network.number("nccl", rank)
        self._pairs: dict[tuple[int, str], collections.deque[Pair]] = collections.defaultdict(collections.deque)
        self._streams: dict[int, tuple[Stream, Stream]] = {}  # by peer: torch's, and NCCL's own
        self._inside: list[bool] = []  # of each thread in a call, whether it connects
        self._begun: set[int] = set()  # peers that this rank connects to, or has
        self._connecting: dict[int, list[Task]] = collections.defaultdict(list)
        self._ends: list[Flag] = []
        self._all: list[Pair] = []
        self.aborted = self.closed = False
        self.calls = self._spinning = 0
        network.add("nccl", self._number, rank, self)

    # ---- connecting

    @contextlib.contextmanager
    def _call(self, peer: int) -> Iterator[tuple[Stream, Stream]]:
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        connects = peer not in self._streams
        if self._inside:
            self.gpu.errors.append("two calls at once: ProcessGroupNCCL changes what both read where one connects")
        self._inside.append(connects)
        try:
            if connects:
                self._connect(peer)
            self.scheduler.pause()
            yield self._streams[peer]
        finally:
            self._inside.remove(connects)

    def _connect(self, peer: int) -> None:
        def is_there() -> bool:
            other = self._network.find("nccl", self._number, peer)
            return other is not None and self.rank in other._begun

        if self.gpu.spinning:
            self.gpu.errors.append("connects while a kernel waits for another rank: NCCL waits for the device here")
        self._begun.add(peer)
        if (theirs := self._network.find("nccl", self._number, peer)) is not None:
            self.scheduler.wake(theirs._connecting[self.rank])
        self.scheduler.wait_until(self._connecting[peer], is_there)  # no abort ends it
        self._streams[peer] = self.gpu.stream(), self.gpu.stream()

    # ---- operations

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> NcclWork:
        self._on_call("send")
        tensor = self._checked(tensors)
        with self._call(peer) as streams:
            self._on_call("connected send")
            pair = self._pair(peer, "send")
            pair.source, pair.sent = tensor, tensor.clone()
            self.scheduler.wake(pair.known)
            return self._put(pair, "send", streams)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> NcclWork:
        self._on_call("recv")
        tensor = self._checked(tensors)
        with self._call(peer) as streams:
            pair = self._pair(peer, "recv")
            pair.target = tensor.detach()
            tensor.view(torch.uint8).fill_(255)  # NaN, until it has arrived for who waits for it
            self.gpu.own(tensor, self.current())
            return self._put(pair, "recv", streams)

    def _checked(self, tensors: list[Tensor]) -> Tensor:
        (tensor,) = tensors
        if tensor.dtype not in DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        if not tensor.is_contiguous() or tensor.requires_grad:
            raise ValueError("NCCL takes contiguous tensors; got one that is not, or takes a gradient")
        return tensor

    def _pair(self, peer: int, kind: str) -> Pair:
        """The n-th send from one to the other is for the n-th receive: who comes first leaves the pair for the peer."""
        waiting = self._pairs[peer, kind]
        if waiting:
            pair = waiting.popleft()
        else:
            pair = Pair()
            other = "recv" if kind == "send" else "send"
            self._network.find("nccl", self._number, peer)._pairs[self.rank, other].append(pair)
        self._all.append(pair)
        return pair

    def _put(self, pair: Pair, kind: str, streams: tuple[Stream, Stream]) -> NcclWork:
        stream, own = streams
        stream.wait_for(self.current().record())
        stream.wait_for(own.record())  # as NCCL does, with a stream of its own
        end = stream.put(lambda end: self._spin(pair, kind, end))
        self._ends.append(end)
        own.wait_for(end)
        self.calls += 1
        return NcclWork(self, pair, end, kind)

    def _spin(self, pair: Pair, kind: str, end: Flag) -> None:
        if self.aborted:
            end.fire()
            return
        pair.begun[kind] = self.scheduler.now
        self.gpu.spinning += 1
        self._spinning += 1
        other = "recv" if kind == "send" else "send"

        def meet() -> None:
            if not self.aborted:
                self._end_spin()
                self.gpu.spins += self.scheduler.now - pair.begun[kind]
                self.scheduler.at(pair.travel, lambda: self._arrive(pair, kind, end))

        if other not in pair.begun:
            pair.travel = self.scheduler.random.uniform(1e-5, 1e-4)
        pair.issued[kind].fire()
        pair.issued[other].then(meet)

    def _end_spin(self) -> None:
        self.gpu.spinning -= 1
        self._spinning -= 1

    def _arrive(self, pair: Pair, kind: str, end: Flag) -> None:
        if kind == "send" and not self.aborted:
            assert pair.source is not None
            assert pair.sent is not None
            # where its host is ahead, what it writes later is in memory already
            if not self.gpu.is_behind and not torch.equal(pair.source.view(torch.uint8), pair.sent.view(torch.uint8)):
                self.gpu.errors.append(f"memory was written before it was sent, {[*pair.source.shape]}")
        end.fire()

    # ---- the end

    def shutdown(self) -> None:
        if self.aborted:
            self.gpu.errors.append("a communicator was finalised after it was aborted")
        self.closed = True
        for end in self._ends:
            self.gpu.wait_for(end)

    def abort(self) -> None:
        self.aborted = self.closed = True
        while self._spinning:
            self._end_spin()
        for end in self._ends:
            end.fire()
        for pair in self._all:
            self.scheduler.wake(pair.known)
        self.scheduler.pause()
