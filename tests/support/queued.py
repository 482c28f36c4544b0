"""A small model, and tasks made by hand, for tests of the queue."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import zbkern
from zbkern import wgrad


def make_pair(seed: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
    """The same two-layer model twice: torch's, and converted."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()
    return model, zbkern.convert(copy.deepcopy(model))


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4 + index, 5, dtype=torch.float64) for index in range(count)]


def recorder(launches: list[int]) -> wgrad.WGradFunction:
    """A launch that adds its segments up, and tells `launches` how many it had."""

    def launch(segments, outputs, accumulate):
        launches.append(len(segments))
        for index, (value,) in enumerate(segments):
            outputs[0].add_(value) if accumulate or index else outputs[0].copy_(value)

    return launch


def fill(
    queue: zbkern.WGradQueue, kernel: wgrad.WGradFunction | wgrad.WGradKernel, parameters: list[Tensor], keys: int = 3
) -> None:
    """Tasks with gradients of 1, 10, 100, ... for every parameter under the keys 0, 1, 2, ..."""
    for key in range(keys):
        for parameter in parameters:
            queue.add(wgrad.WGradTask(kernel, (torch.full((2,), 10.0**key),), (parameter,)), key)
