"""What a pipeline keeps for backward goes to the host and comes back, beside the passes: the same gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zbkern
from tests.support import needs
from zbkern.pipeline import Pipeline, Schedule, StepOptions
from zbkern.pipeline.transport.local import LocalTransport

pytestmark = needs.GPU

DEVICE, WIDTH, ROWS = "cuda", 512, 256
ORDERS = {
    "whole microbatches": "0F0,0O0,0F1,0O1,0F2,0L0,0B0,0L1,0B1,0B2",
    "what waits for W": "0F0,0I0,0O0,0F1,0I1,0W1,0F2,0L0,0W0,0B2",
    "computed again": "0F0,0O0,0F1,0L0,0B0,0B1,0F2,0R2,0B2",
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers).to(DEVICE)


@pytest.mark.parametrize("copy_size", [1 << 16, 1 << 30], ids=["in small transfers", "in one"])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_those_of_tensors_that_stayed(order: str, copy_size: int) -> None:
    schedule, ours, theirs = Schedule.from_csv(ORDERS[order]), zbkern.convert(model()), model()
    x, target = (torch.randn(3 * ROWS, WIDTH, device=DEVICE) for _ in range(2))
    (transport,) = LocalTransport.ring(1)
    options = StepOptions(copy_size=copy_size)
    with Pipeline([ours], schedule, nn.functional.mse_loss, transport, DEVICE, options=options) as pipe:
        for _ in range(2):  # buffers on the host are used again
            ours.zero_grad()
            loss = pipe.step(x, target)
    for inputs, targets in zip(x.chunk(3), target.chunk(3), strict=True):
        (nn.functional.mse_loss(theirs(inputs), targets) / 3).backward()
    expected = nn.functional.mse_loss(copy.deepcopy(theirs)(x), target)
    assert loss is not None
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    zbkern.testing.assert_same_gradients(ours, theirs, tolerance=1e-4)
