"""Inside torch.compile, too, W of modules that own parameters is deferred, without a graph break."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zbkern
from tests.test_interception import CASES, backward, pair
from zbkern import testing

SEPARABLE = [
    *("experts, batched", "experts, all at once", "experts times tokens", "linear, half of a matrix", "linear by name"),
    *("@ from the left", "@ of the transposed", "mm", "einsum with heads", "einsum, weight first", "split", "unbind"),
    *("conv1d, same, uneven", "conv1d, weight reshaped", "conv2d", "conv_transpose1d", "embedding"),
]
IN_B = ["1 + weight", "positions", "decays", "masked weight", "matmul with a vector", "through an autograd function"]
MIXED = ["in place on a product", "several uses", "sum of weights", "addmm", "linear, bias of two dimensions"]


def compiled(module: nn.Module, **options: object) -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(module, **{"backend": "aot_eager", "fullgraph": True, **options})


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [*SEPARABLE, *IN_B, *MIXED])
def test_compiled_gradients_are_torchs(name: str) -> None:
    module, twin = pair(*CASES[name], torch.float64)
    queue = zbkern.WGradQueue()
    graph = compiled(twin, dynamic=False)
    for key in range(2):
        x = torch.randn(6, 8, dtype=torch.float64)
        expected = backward(module, x)
        with queue.defer(key):
            testing.assert_close(backward(graph, x), expected, "dx", 1e-10)
    assert counters["stats"]["unique_graphs"] == 1
    if name in SEPARABLE:
        assert all(p.grad is None for p in twin.parameters() if p.dim() > 1)
    assert (queue.run() > 0) == (name not in IN_B)
    testing.assert_same_gradients(twin, module, tolerance=1e-10)
