"""Backwards whose W waits, beside those of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import zbkern
from zbkern import testing


def backward(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    """The gradient of x, of a loss in which every output has a weight of its own; None where y does not depend on x."""
    x = x.clone().requires_grad_()
    y = forward(x)
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return x.grad


def deferred(
    module: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor], batches: Iterable[Tensor], tolerance: float
) -> zbkern.WGradQueue:
    """The queue in which W of the twin's backwards wait, a key for each batch; module has the same backwards, without
    a queue. Gradients of the batches are equal."""
    queue = zbkern.WGradQueue()
    for key, x in enumerate(batches):
        expected = backward(module, x)
        with queue.defer(key):
            found = backward(twin, x)
        assert (found is None) == (expected is None)
        if found is not None:
            testing.assert_close(found, expected, "dx", tolerance)
    return queue
