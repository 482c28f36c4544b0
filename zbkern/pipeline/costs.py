"""Costs: how long each pass of each chunk takes, and how much memory it holds; a JSON file can carry them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PerChunk = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times and memory of one microbatch in one chunk: a number, or one per chunk in model order.

    forward, backward, weight: time of F, B and W, in any one unit (B is the input gradient alone). communication: latency of the
    edge between neighbouring chunks on different ranks, a number or one per edge (edge i joins chunks i and i+1).
    activation: memory a microbatch holds after F until B; held: what is left of it between B and W. A fused BW takes
    backward + weight - split_overhead. merge_saving is what a W gains when it directly follows another W of
    the same chunk. The unit of memory is free; `memory_limit` and `peak_memory` use the same one.
    """

    forward: PerChunk = 1.0
    backward: PerChunk = 1.0
    weight: PerChunk = 1.0
    communication: PerChunk = 0.0
    activation: PerChunk = 1.0
    held: PerChunk = 0.5
    split_overhead: PerChunk = 0.0
    merge_saving: PerChunk = 0.0
