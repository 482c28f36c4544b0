"""How long a message takes between neighbouring ranks, measured."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zbkern.pipeline.runtime.measure.clock import EventClock
from zbkern.pipeline.transport.base import Tag, Transport

_TURNS = 10
_AFTER_ALL_STEPS = 2**31  # in the tags of messages


class Link(NamedTuple):
    """How fast messages between two ranks are: latency in ms, bandwidth in bytes per ms."""

    latency: float
    bandwidth: float


def slowest_link(transport: Transport, device: torch.device, timeout: float, size: int) -> Link:
    """The longest latency and the least bandwidth from any rank to the next; with one rank messages take no time.

    size: bytes of the larger messages; the others are of one number. timeout: seconds to wait for one. Collective.
    """
    transport.begin("profile")
    clock, measured = EventClock(device), []
    for low in range(transport.size - 1):
        if transport.rank in (low, low + 1):
            numbers = max(2, size // 4)
            small, large = (
                _half_of_there_and_back(transport, low, torch.zeros(count, device=device), clock, timeout)
                for count in (1, numbers)
            )
            rate = 4 * (numbers - 1) / max(large - small, 1e-6 * large)
            if transport.rank == low:  # which sends first, and so sees all of the way there and back
                measured.append((small * 1e3, rate / 1e3))
    links = [link for of_rank in transport.gather(measured) for link in of_rank]
    latencies, bandwidths = zip(*links, strict=True) if links else ((0.0,), (math.inf,))
    return Link(max(latencies), min(bandwidths))


def _half_of_there_and_back(
    transport: Transport, low: int, message: Tensor, clock: EventClock, timeout: float
) -> float:
    """Seconds that a message takes between a rank and the next, of which this is one; the least of several."""
    high, least = low + 1, math.inf
    for turn in range(_TURNS):
        there, back = (Tag(_AFTER_ALL_STEPS, kind, low, turn) for kind in "FB")
        start = clock.now()
        if transport.rank == low:
            transport.send(high, there, message)
            transport.receive(high, back, timeout)
        else:
            transport.receive(low, there, timeout)
            transport.send(low, back, message)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        least = min(least, clock.seconds(clock.now()) - clock.seconds(start))
    return least / 2
