"""Ranks on this machine for benchmarks: gloo processes, with one thread for compute each, or threads of this one."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zbkern.pipeline.transport.local import LocalTransport

Delay = Callable[[int, int, Any], float]
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}  # mallopt(3)


def run(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) on `size` ranks; what it returned on rank 0. function: of a module's top level.

    glibc is told to keep freed memory: returning and requesting it again costs 5 us per page, up to a tenth of a step.
    """
    for name, value in KEEP.items():
        os.environ.setdefault(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.Manager().dict()
    mp.spawn(_rank, args=(size, port, function, arguments, results), nprocs=size)
    return results[0]


class DelayedTransport(LocalTransport):
    """Its messages arrive after delay(sender, receiver, tag) seconds, and may overtake others."""

    delay: Delay

    def __init__(self, rank: int, ring: Any) -> None:
        super().__init__(rank, ring)
        self._under_way: list[threading.Timer] = []

    def send(self, peer: int, tag: Any, message: Any) -> None:
        seconds = self.delay(self.rank, peer, tag)
        if seconds <= 0 or peer == self.rank:
            super().send(peer, tag, message)
            return
        timer = threading.Timer(seconds, self.arrival(peer, tag, message))
        timer.daemon = True
        self._under_way = [other for other in self._under_way if other.is_alive()]
        timer.start()
        self._under_way.append(timer)

    def close(self) -> None:
        for timer in self._under_way:
            timer.join()
        super().close()


def delayed_ring(size: int, delay: Delay) -> list[LocalTransport]:
    """All ranks of a LocalTransport whose messages take this long."""
    ring: Any = DelayedTransport.ring(size)
    for transport in ring:
        transport.delay = delay
    return ring


def run_in_threads(rings: Sequence[Sequence[LocalTransport]], function: Callable[[int], Any]) -> Any:
    """function(rank) on a thread for every rank of these rings; what it returned on rank 0.

    If one raises, the others are told through its rings, and the first error is raised here.
    """
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def rank_loop(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            for ring in rings:
                ring[rank].fail(f"rank {rank}: {error}")

    threads = [threading.Thread(target=rank_loop, args=(rank,)) for rank in range(len(rings[0]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _rank(rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    found = function(*arguments)
    if rank == 0:
        results[0] = found
    dist.destroy_process_group()
