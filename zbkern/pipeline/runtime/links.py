"""How long a message takes between neighbouring ranks, measured through a pipeline's own connections."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.transport.base import Tag

_TURNS = 10
_AFTER_ALL_STEPS = 2**31  # in the tags of messages


def slowest_link(pipe: Pipeline, outputs: Sequence[int]) -> tuple[float, float]:
    """Latency in ms and bandwidth in bytes per ms, the worst over the edges between ranks; collective.

    outputs: bytes that every chunk sends. From messages of one number and of that size; 0 and inf without an edge.
    """
    placement, found = pipe.schedule.placement, []
    pipe.transport.begin("profile")
    for edge, (low, high) in enumerate(pairwise(placement)):
        if low == high or pipe.rank not in (low, high):
            continue
        numbers = max(2, outputs[edge] // 4)
        small, large = (_half_of_there_and_back(pipe, low, high, edge, count) for count in (1, numbers))
        if pipe.rank == low:
            rate = 4 * (numbers - 1) / max(large - small, 1e-6 * large)
            found.append((small * 1e3, rate / 1e3))
    links = [link for rank in pipe.gather(found) for link in rank]
    return max((link[0] for link in links), default=0.0), min((link[1] for link in links), default=math.inf)


def _half_of_there_and_back(pipe: Pipeline, low: int, high: int, edge: int, count: int) -> float:
    """Seconds of a message of so many fp32 numbers, the least of several turns."""
    message, least = torch.zeros(count, device=pipe.device), math.inf
    for turn in range(_TURNS):
        there, back = (Tag(_AFTER_ALL_STEPS, kind, edge, turn) for kind in "FB")
        start = time.perf_counter()
        if pipe.rank == low:
            pipe.transport.send(high, there, message)
            pipe.transport.receive(high, back, pipe.timeout)
        else:
            pipe.transport.receive(low, there, pipe.timeout)
            pipe.transport.send(low, back, message)
        if pipe.device.type == "cuda":
            torch.cuda.synchronize(pipe.device)
        least = min(least, time.perf_counter() - start)
    return least / 2
