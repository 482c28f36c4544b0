from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import results_on_threads
from zbkern.pipeline import Costs, profile
from zbkern.pipeline.transport.local import LocalTransport


class Slow(torch.autograd.Function):
    """Takes given times forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_time = backward
        time.sleep(forward)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_time)
        return dy, None, None


class SlowBlock(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.times, self.linear = (forward, backward), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(self.linear(x), *self.times)


def measure(blocks: list[nn.Module], **changes: Any) -> list[Costs]:
    """profile of one block per rank on threads; inputs of 4 microbatches of 2 rows."""
    data = torch.randn(8, 16)

    def rank(transport: LocalTransport) -> Costs:
        module = zbkern.convert(blocks[transport.rank])
        arguments = {"repeats": 2, "group": transport, **changes}
        placement = range(len(blocks))
        return profile([module], placement, nn.functional.mse_loss, data, data, **arguments)

    return results_on_threads(len(blocks), rank)


def test_every_rank_gets_the_times_of_every_chunk() -> None:
    costs = measure([SlowBlock(0.02, 0.01), SlowBlock(0.01, 0.03)])
    assert costs[0] == costs[1]
    flat = costs[0].per_chunk(2)
    assert flat.forward == pytest.approx((20, 10), abs=6)  # milliseconds, on a machine that may be busy
    assert flat.backward == pytest.approx((10, 30), abs=6)
    assert all(0 < w < 8 for w in flat.weight)
    assert all(0 <= c < 8 for c in flat.communication)


def test_memory_is_what_the_layers_keep() -> None:
    costs = measure([SlowBlock(0, 0)])[0]
    assert (costs.time_unit, costs.memory_unit) == ("ms", "bytes")
    flat = costs.per_chunk(1)
    rows = 2 * 16 * 4  # bytes of one microbatch's activation
    assert flat.held[0] == 2 * rows  # the linear's input and its output gradient
    assert flat.activation[0] >= rows


def test_gradients_and_random_state_stay_as_they_were() -> None:
    block = SlowBlock(0, 0)
    block.linear.weight.grad = torch.ones(16, 16)
    torch.manual_seed(3)
    expected = torch.random.get_rng_state()
    torch.randn(8, 16)  # what measure() draws
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(expected)
    measure([block])
    assert torch.equal(torch.random.get_rng_state(), after)
    assert torch.equal(block.linear.weight.grad, torch.ones(16, 16))
