"""The programs of docs/gradients.md: a layer of one's own, whose W waits, and W on another stream."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import zbkern
from tests.support.pages import blocks
from tests.support.simulated_streams import Device
from zbkern import WGradQueue

PAGE = Path(__file__).parents[2] / "docs" / "gradients.md"
LAYER, STREAM = blocks(PAGE)


def test_the_layer_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(LAYER, names)
    ours, plain = (kind(3, 4, 3, padding=1, bias=False) for kind in (names["Conv1d"], torch.nn.Conv1d))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 8)
    plain(x).square().sum().backward()
    queue = WGradQueue()
    with queue.defer():
        ours(x).square().sum().backward()
    assert queue.pending() == 1
    queue.run()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)


def test_the_stream_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated device: B and forward on one stream, and the W of the loss on another."""
    device = Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: device.main if priority else device.side)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    layer = zbkern.nn.Linear(3, 4)
    x = torch.randn(2, 3)
    exec(STREAM, {"torch": torch, "zbkern": zbkern, "loss": layer(x).sum()})
    device.finish()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(4, 3))
    gc.collect()  # a queue joins its stream as it goes
