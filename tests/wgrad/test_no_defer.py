"""no_defer, and convert(defer=...): layers whose W runs in B, which hold nothing; gradients are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zbkern


def test_nothing_of_what_does_not_wait_is_held() -> None:
    """Gradients are in tests/test_gradients.py."""
    held = []
    for kinds in ((), zbkern.nn.MLP, (zbkern.nn.MLP, zbkern.nn.Linear), nn.Module):
        model = nn.Sequential(zbkern.nn.Attention(8, 2), zbkern.nn.MLP(8, 12), zbkern.nn.RMSNorm(8))
        zbkern.convert(model, defer=lambda name, module, kinds=kinds: not isinstance(module, kinds))
        queue = zbkern.WGradQueue()
        with queue.defer():
            model(torch.randn(2, 5, 8)).square().sum().backward()
        held.append((queue.bytes, queue.pending()))
        queue.discard()
    assert held == sorted(held, reverse=True)
    assert len({*held}) == 4
    assert held[-1] == (0, 0)


def test_an_error_in_a_forward_leaves_the_scope() -> None:
    linear = zbkern.convert(nn.Linear(3, 2), defer=lambda name, module: False)
    queue = zbkern.WGradQueue()
    with pytest.raises(ValueError, match="K"):
        linear(torch.randn(2, 5))
    other = zbkern.nn.Linear(3, 2)
    with queue.defer():
        other(torch.randn(2, 3)).sum().backward()
    assert queue.pending() == 1
    queue.discard()
