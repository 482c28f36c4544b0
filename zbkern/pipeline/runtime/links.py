"""How long a message takes between neighbouring ranks, the last and the first among them, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbkern.pipeline.simulation.layers import PerLink
from zbkern.pipeline.transport.base import Tag, Transport
from zbkern.pipeline.transport.connect import connect_peers, place

_TURNS = 10
_AFTER_ALL_STEPS = 2**31  # in the tags of messages
_ALIKE = 2.0  # times as long as another link takes, up to which the difference may be noise


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
                ends = _Ends(transport, device, timeout, low, high)
                numbers = max(2, size // 4)
                small, large = (ends.half_of_there_and_back(count) for count in (1, numbers))
                rate = 4 * (numbers - 1) / max(large - small, 1e-6 * large)
                found[low] = Link(small * 1e3, rate / 1e3)
        return [rank[low] for low, rank in enumerate(transport.gather(found)) if low in rank]
    finally:
        if transport is not group:
            transport.close()


def latency_and_bandwidth(links: Sequence[Link], size: float) -> tuple[PerLink, PerLink]:
    """Those of the slowest link where messages of this size take about as long on all; else one per link."""
    if not links:
        return 0.0, math.inf
    times = [link.latency + size / link.bandwidth for link in links]
    latencies, bandwidths = zip(*links, strict=True)
    if max(times) <= _ALIKE * min(times):
        return max(latencies), min(bandwidths)
    return latencies, bandwidths


class _Ends(NamedTuple):
    """Of a link: this rank is one of the two."""

    transport: Transport
    device: torch.device
    timeout: float
    low: int
    high: int

    def half_of_there_and_back(self, count: int) -> float:
        """Seconds of a message of so many fp32 numbers, the least of several turns."""
        message, least = torch.zeros(count, device=self.device), math.inf
        for turn in range(_TURNS):
            there, back = (Tag(_AFTER_ALL_STEPS, kind, self.low, turn) for kind in "FB")
            start = time.perf_counter()
            if self.transport.rank == self.low:
                self.transport.send(self.high, there, message)
                self.transport.receive(self.high, back, self.timeout)
            else:
                self.transport.receive(self.low, there, self.timeout)
                self.transport.send(self.low, back, message)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            least = min(least, time.perf_counter() - start)
        return least / 2
