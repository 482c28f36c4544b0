"""Messages between processes that share one GPU, for benchmarks: by copies into memory that both have opened.

NCCL refuses two ranks on one GPU. Here the sender copies a buffer into a slot of memory that CUDA's IPC has opened in
both processes, and records an event. The receiver's stream waits for the event, and copies out. No kernel waits for a
peer, and copies take no multiprocessor. On a CPU slots are a shared file, so that all of this runs without a GPU.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern.pipeline.transport.distributed import DistributedTransport
from zbkern.pipeline.transport.gpu import GpuTransport

SLOTS = 16
SLOT_BYTES = 16 << 20
_LOOK = 2e-5  # seconds between looks at what the other process has done
_SENT, _FREED = 0, 8  # places of these counters, in units of 8 bytes: each in a cache line of its own
_COUNTERS = 16


def shared_memory_transport(device: torch.device) -> DistributedTransport:
    """Pass it as the `group` of a Pipeline, and close it. All ranks are processes of this machine on one device."""
    return _BetweenCpus(None) if device.type == "cpu" else _OnGpu(None, device)


class _BetweenCpus(DistributedTransport):
    device = torch.device("cpu")

    def _communicators(self, ranks: list[int], headers: tuple[Any, Any]) -> tuple[Any, Any]:
        store = dist.distributed_c10d._get_default_store()
        made = store.add(f"bench/shared_memory/{self.rank}", 1)  # as often on all ranks
        self._groups = tuple(
            SharedMemoryGroup(self.rank, f"{made}/{each}", store, self.device) for each in ("up", "down")
        )
        return self._groups

    def _abort(self) -> None:
        super()._abort()
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        super().close()
        for group in self._groups:
            group.abort()


class _OnGpu(_BetweenCpus, GpuTransport):
    pass


class SharedMemoryGroup:
    """A communicator in which a pair of ranks has one direction, as `ProcessGroupNCCL` sends and receives.

    name: the same on all ranks, and of no other group of the store.
    """

    def __init__(self, rank: int, name: str, store: dist.Store, device: torch.device) -> None:
        self._rank, self._name, self._store, self._device = rank, name, store, device
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._ended = threading.Event()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Copied:
        """Starts to send a buffer; waits while all slots are full."""
        return self._channel(self._rank, peer).put(tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Copied:
        """Receives into a buffer: on a GPU in the order of the current stream, on a CPU when it is waited for."""
        return self._channel(peer, self._rank).take(tensors[0])

    def abort(self) -> None:
        """Ends whatever waits for the other process with an error."""
        self._ended.set()

    def _channel(self, source: int, target: int) -> _Channel:
        if (source, target) not in self._channels:
            key = f"bench/{self._name}/{source}/{target}"
            self._channels[source, target] = _Channel(self._rank == source, key, self._store, self._device, self._ended)
        return self._channels[source, target]


class _Channel:
    """Slots from one process to another, which fill and empty in turn. Both count what they have done in a file."""

    def __init__(self, sends: bool, key: str, store: dist.Store, device: torch.device, ended: threading.Event) -> None:
        self._key, self._store, self._device, self._ended = key, store, device, ended
        self._done = 0
        self._mine = [_event(device) for _ in range(SLOTS)]  # full, of the sender; free, of the receiver
        if sends:
            path = tempfile.mkdtemp(prefix="zbkern-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            self._counters = _file(path, "counters", 8 * _COUNTERS, torch.int64)
            if device.type == "cpu":
                self._memory, memory = _file(path, "slots", SLOTS * SLOT_BYTES, torch.uint8), None
            else:
                self._memory = torch.empty(SLOTS * SLOT_BYTES, dtype=torch.uint8, device=device)
                memory = self._memory.untyped_storage()._share_cuda_()  # type: ignore[attr-defined]
            store.set(f"{key}/sender", pickle.dumps((path, memory, _handles(self._mine))))
        else:
            path, memory, events = self._told("sender")
            self._counters = _file(path, "counters", 8 * _COUNTERS, torch.int64)
            if memory is None:
                self._memory = _file(path, "slots", SLOTS * SLOT_BYTES, torch.uint8)
            else:
                storage = torch.UntypedStorage._new_shared_cuda(*memory)  # type: ignore[attr-defined]
                self._memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: SLOTS * SLOT_BYTES]
            self._theirs = _opened(events, device)
            store.set(f"{key}/receiver", pickle.dumps(_handles(self._mine)))
            for file in Path(path).iterdir():
                file.unlink()  # both have it open
            Path(path).rmdir()

    def put(self, buffer: Tensor) -> _Copied:
        for piece in buffer.split(SLOT_BYTES):
            slot = self._done % SLOTS
            if self._done >= SLOTS:
                if self._done == SLOTS:
                    self._theirs = _opened(self._told("receiver"), self._device)
                self._wait_until(_FREED, self._done - SLOTS + 1)
                _wait_for(self._theirs[slot])
            self._slot(slot, len(piece)).copy_(piece, non_blocking=True)
            self._mark(slot, _SENT)
        return _Copied(self._mine[(self._done - 1) % SLOTS])

    def take(self, buffer: Tensor) -> _Copied:
        copies = self._copy_out(buffer)
        if self._device.type == "cpu":
            return _Copied(None, copies)
        for _ in copies:
            pass
        return _Copied(torch.cuda.current_stream(self._device).record_event())

    def _copy_out(self, buffer: Tensor) -> Iterator[None]:
        for piece in buffer.split(SLOT_BYTES):
            slot = self._done % SLOTS
            self._wait_until(_SENT, self._done + 1)
            _wait_for(self._theirs[slot])
            piece.copy_(self._slot(slot, len(piece)), non_blocking=True)
            self._mark(slot, _FREED)
            yield

    def _mark(self, slot: int, counter: int) -> None:
        if self._mine[slot] is not None:
            self._mine[slot].record(torch.cuda.current_stream(self._device))
        self._done += 1
        self._counters[counter] = self._done

    def _slot(self, slot: int, size: int) -> Tensor:
        return self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + size]

    def _told(self, side: str) -> Any:
        """What the other process has put into the store. A call that waits there would keep this one's out of it."""
        while not self._store.check([f"{self._key}/{side}"]):
            self._pause(1e-3)
        return pickle.loads(self._store.get(f"{self._key}/{side}"))

    def _wait_until(self, counter: int, least: int) -> None:
        while int(self._counters[counter]) < least:
            self._pause(_LOOK)

    def _pause(self, seconds: float) -> None:
        if self._ended.is_set():
            raise RuntimeError("the other process will send and receive no more")
        time.sleep(seconds)


class _Copied:
    """A message as a `dist.Work` is. copies: what is done when it is waited for."""

    def __init__(self, event: Any, copies: Iterator[None] | None = None) -> None:
        self._event, self._copies = event, copies

    def wait(self, timeout: timedelta | None = None) -> None:
        for _ in self._copies or ():
            pass
        _wait_for(self._event)

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


def _file(folder: str, name: str, nbytes: int, dtype: torch.dtype) -> Tensor:
    """Memory of a file, of zeros where it is new."""
    return torch.from_file(f"{folder}/{name}", shared=True, size=nbytes // dtype.itemsize, dtype=dtype)


def _event(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(interprocess=True)
    event.record(torch.cuda.current_stream(device))  # it has a handle from then on
    return event


def _handles(events: Sequence[Any]) -> list[Any]:
    return [event and event.ipc_handle() for event in events]


def _opened(handles: Sequence[Any], device: torch.device) -> list[Any]:
    return [handle and torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles]


def _wait_for(event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
