"""Backwards whose W waits, beside those of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zbkern
from zbkern import testing


def backward(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    """The gradient of x, of a loss in which every output (of several, the first) has a weight of its own; None where y
    does not depend on x."""
    x = x.clone().requires_grad_()
    y = forward(x)
    y = y[0] if isinstance(y, tuple) else y
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


def check(
    module: nn.Module,
    twin: nn.Module,
    batches: Iterable[Tensor] | None = None,
    tolerance: float = 1e-12,
    forward: Callable[[Tensor], Tensor] | None = None,
    waits: bool = True,
) -> int:
    """Gradients of `deferred` are equal once W has run; how many W there were. forward: how the twin is called where
    that is not by itself. waits: no parameter of the twin has a gradient before."""
    batches = [torch.randn(6, 8, dtype=torch.float64)] if batches is None else batches
    queue = deferred(module, twin if forward is None else forward, batches, tolerance)
    assert not waits or all(p.grad is None for p in twin.parameters())
    count = queue.run()
    testing.assert_same_gradients(twin, module, tolerance=tolerance)
    return count


def compiled(module: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    """In one graph, afresh."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(module, **{"backend": "aot_eager", "fullgraph": True, **options})
