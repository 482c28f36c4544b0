"""How long a message takes between neighbouring ranks, the last and the first among them, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern.pipeline.transport.base import Tag, Transport
from zbkern.pipeline.transport.connect import connect_peers, place

_TURNS = 10
_AFTER_ALL_STEPS = 2**31  # in the tags of messages


class Link(NamedTuple):
    """Of messages between two ranks: latency in ms, bandwidth in bytes per ms."""

    latency: float
    bandwidth: float


def measure_links(
    group: dist.ProcessGroup | Transport | None, device: torch.device, timeout: float, size: int
) -> list[Link]:
    """From every rank to the next, and from the last to the first; two ranks have one, one rank has none. Collective.

    size: bytes of the larger messages; the others are of one number. timeout: seconds to wait for one.
    """
    rank, ranks = place(group)
    if ranks == 1:
        return []
    transport = connect_peers(group, device, {(rank - 1) % ranks, (rank + 1) % ranks})
    try:
        transport.begin("profile")
        found = {}
        for low in range(ranks if ranks > 2 else 1):
            high = (low + 1) % ranks
            if transport.rank in (low, high):
                numbers = max(2, size // 4)
                small, large = (
                    _half_of_there_and_back(transport, (low, high), torch.zeros(count, device=device), timeout)
                    for count in (1, numbers)
                )
                rate = 4 * (numbers - 1) / max(large - small, 1e-6 * large)
                found[low] = Link(small * 1e3, rate / 1e3)
        return [rank[low] for low, rank in enumerate(transport.gather(found)) if low in rank]
    finally:
        if transport is not group:
            transport.close()


def slowest(links: Sequence[Link]) -> Link:
    """The longest latency and the least bandwidth of all; where there is no link, messages take no time."""
    latencies, bandwidths = zip(*links, strict=True) if links else ((0.0,), (math.inf,))
    return Link(max(latencies), min(bandwidths))


def _half_of_there_and_back(transport: Transport, link: tuple[int, int], message: Tensor, timeout: float) -> float:
    """Seconds that a message takes between the two ranks of a link, of which this is one; the least of several."""
    (low, high), least = link, math.inf
    for turn in range(_TURNS):
        there, back = (Tag(_AFTER_ALL_STEPS, kind, low, turn) for kind in "FB")
        start = time.perf_counter()
        if transport.rank == low:
            transport.send(high, there, message)
            transport.receive(high, back, timeout)
        else:
            transport.receive(low, there, timeout)
            transport.send(low, back, message)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        least = min(least, time.perf_counter() - start)
    return least / 2
