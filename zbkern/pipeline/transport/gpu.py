"""GpuTransport: a DistributedTransport whose tensors travel between GPUs, over NCCL, while passes run.

A send and a receive are kernels, each of which waits on its GPU for the other one. The host waits for neither: what
reads a message has its stream wait. So a host may have gone on, and returned from calls, when a rank fails.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern.pipeline.transport.distributed import DistributedTransport, Works
from zbkern.pipeline.transport.framing import TENSORS, Message, TensorHeader
from zbkern.pipeline.transport.mailbox import Note, PipelineError, Tag, described
from zbkern.pipeline.transport.nccl import check_backend, check_hardware_queues, close_nccl, new_nccl
from zbkern.pipeline.transport.packing import pack, packed_bytes
from zbkern.pipeline.transport.process_groups import rendezvous_timeout
from zbkern.pipeline.transport.tensors import tensors_in

_LOOK = 0.02  # seconds between looks at what the GPU waits for
_DRAINED = 2.0  # seconds that a GPU has, after a failure, for messages of calls that are over


class GpuTransport(DistributedTransport):
    """Headers go through gloo, and the tensors of a message through NCCL in one buffer, with a communicator for each
    direction, so that no order of NCCL's calls can deadlock.

    A receive is posted when its header comes, and its kernel waits there for what the sender has yet to compute. It
    waits for nothing but work that the sender's host has launched already.
    """

    _carries = False

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device = device
        self._unfinished = ""  # why ranks cannot go on though all are there
        super().__init__(group)

    def _check_opening(self) -> None:
        if self._unfinished:
            raise PipelineError(self._unfinished)
        check_hardware_queues(os.environ)

    def _open_connections(self) -> None:
        super()._open_connections()
        self._is_asked_ahead = True
        self._locks = {id(each.tensors): threading.Lock() for each in (self._up, self._down)}
        self._receiving = torch.cuda.Stream(self.device)  # every stream more may share a hardware queue with others
        self._aborted = False
        self._pairs: set[tuple[int, int]] = set()  # of ranks that are connected for tensors
        self._last_sent: dict[int, dist.Work] = {}  # by peer: those before it have ended then
        self._last_received: dict[int, dist.Work] = {}  # of those that a call has taken
        self._earlier: list[dist.Work] = []  # what calls that are over have left to the GPU
        self._watched: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(
            target=self._watch_receives, args=(self._watched,), name="zbkern-watch", daemon=True
        )

    @property
    def _threads(self) -> list[threading.Thread]:
        return [*super()._threads, self._watcher]

    def _communicators(self, ranks: list[int], headers: tuple[Any, Any]) -> tuple[Any, Any]:
        check_backend(self._group)
        return new_nccl(ranks), new_nccl(ranks)

    def begin(self, call: str) -> None:
        super().begin(call)
        self.end()

    def end(self) -> None:
        self._earlier = [*self._last_sent.values(), *self._last_received.values()]

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """NCCL connects two ranks in their first message, while each waits for the other's call.

        So all take the pairs in one order, from one thread, before anything that they could wait for is under way.
        """
        new = sorted({(min(pair), max(pair)) for pair in pairs} - self._pairs)
        self._pairs.update(new)
        mine = [pair for pair in new if self.rank in pair and pair[0] != pair[1]]
        if not mine:
            return
        done = Note(len(self._pairs), "a connection of NCCL")
        call = self._mailbox.call

        def connect_all() -> None:
            try:
                for pair in mine:
                    self._connect_pair(*pair)
            except Exception as error:
                self._stop(f"rank {self.rank}, connecting: {described(error)}")
            self._mailbox.put(done, (None, ()), self.rank, call)

        # not the caller's: NCCL waits for a rank that has ended meanwhile, and nothing would end that
        threading.Thread(target=connect_all, name="zbkern-connect", daemon=True).start()
        try:
            self._mailbox.wait_for(self.rank, done, rendezvous_timeout())
        except TimeoutError:
            self.fail(f"rank {self.rank}: NCCL did not connect in {rendezvous_timeout():g} s")
            raise PipelineError(self._mailbox.failure) from None
        self._mailbox.take(done)

    def _connect_pair(self, low: int, high: int) -> None:
        peer = low + high - self.rank
        with self._on_stream():
            for (_, group), sends in ((self._up, self.rank == low), (self._down, self.rank == high)):
                token = torch.empty(1, dtype=torch.uint8, device=self.device)
                with self._locks[id(group)]:
                    (group.send if sends else group.recv)([token], peer, TENSORS).wait()
                self._receiving.synchronize()  # before NCCL allocates for the other one, which waits for the device

    # ---- sending and receiving

    def _start_send(self, peer: int, message: Message, tensors: Sequence[Tensor] = ()) -> Works:
        packed = pack(tensors)
        works = super()._start_send(peer, message)
        if packed is not None:
            group = self._to(peer).tensors
            with self._locks[id(group)]:  # its memory stays until NCCL has sent it: torch has recorded NCCL's stream
                self._last_sent[peer] = group.send([packed], peer, TENSORS)
        return works

    def _receive_from(self, peer: int) -> None:
        with self._on_stream():  # a receive begins at once, not after the work that is queued on another
            super()._receive_from(peer)

    def _file(self, peer: int, header: TensorHeader, data: Tensor | None, works: Sequence[dist.Work] = ()) -> None:
        group = self._from(peer).tensors
        data = torch.empty(packed_bytes(header.shapes), dtype=torch.uint8, device=self.device)
        if data.numel():
            with self._locks[id(group)]:
                works = [group.recv([data], peer, TENSORS)]
        super()._file(peer, header, data, works)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """For threads that receive: a stream that nothing else uses."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._receiving):
            yield

    def _settle(self, message: Any, works: Sequence[dist.Work]) -> None:
        """The current stream waits for what still arrives; the memory stays until this stream is done with it."""
        for work in works:
            work.wait()
        if works:
            stream = torch.cuda.current_stream(self.device)
            for tensor in tensors_in(message):
                tensor.record_stream(stream)

    def _watch(self, peer: int, tag: Tag | Note, works: Sequence[dist.Work], timeout: float | None) -> None:
        self._last_received[peer] = works[-1]
        self._watched.put((peer, tag, works, timeout))

    def _watch_receives(self, watched: queue.SimpleQueue[_Watched | None]) -> None:
        """Thread: what the GPU waits for has the time-out of a message; a call that waits for the GPU has none."""
        while (item := watched.get()) is not None:
            peer, tag, works, timeout = item
            start = time.monotonic()
            while not all(work.is_completed() for work in works):
                self._device_awaits = peer
                if timeout is not None and time.monotonic() - start > timeout:
                    self._stop(self._why_nothing_comes(peer, f"{tag} was awaited for {timeout:g} s by the GPU"))
                    return
                time.sleep(_LOOK)
            self._device_awaits = None
            del item, works

    def check_received(self) -> None:
        if self._aborted:
            raise PipelineError(self._mailbox.failure)

    # ---- the end

    def reopen(self) -> None:
        pairs = self._pairs
        super().reopen()
        self.connect(pairs)

    def close(self) -> None:
        self._watched.put(None)
        super().close()

    def _close_communicators(self) -> None:
        if not self._aborted:
            close_nccl([self._up.tensors, self._down.tensors])

    def _abort(self) -> None:
        """Ends what the GPU waits for, since it may never come: whoever waits for the GPU would never hear of it.

        Messages of earlier calls come if all ranks are there. Where one does not, what those calls have returned is
        wrong here, and ranks cannot go on.
        """
        if self._aborted:
            return
        deadline = time.monotonic() + _DRAINED
        while late := [work for work in self._earlier if not work.is_completed()]:
            if self._lost or time.monotonic() > deadline:
                break
            time.sleep(_LOOK)
        if late and not self._lost:
            self._unfinished = (
                f"the pipeline cannot go on without a restart: rank {self.rank} had messages of an earlier call under "
                f"way that did not end: {self._mailbox.failure}"
            )
        self._aborted = True
        close_nccl([self._up.tensors, self._down.tensors], abort=True)


_Watched = tuple[int, Tag | Note, Sequence["dist.Work"], float | None]
