"""torch.compile, torch.export and fake tensors see converted models as torch's own operations, without graph breaks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from zbkern import testing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.RMSNorm(8)
        self.mlp = zbkern.nn.MLP(8, 12)
        self.attention = zbkern.nn.Attention(8, 2, causal=True)
        self.head = nn.Linear(8, 11)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embedding(indices)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(self.scale(x)))


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net()
    return model, zbkern.convert(copy.deepcopy(model))


def indices(seed: int) -> Tensor:
    return torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("deferred", [True, False])
def test_compiled_gradients_are_equal_without_a_graph_break(deferred: bool) -> None:
    model, twin = pair()
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    queue = zbkern.WGradQueue()
    for key in range(3):
        model(indices(key)).square().mean().backward()
        loss = compiled(indices(key)).square().mean()
        if deferred:
            with queue.defer(key):
                loss.backward()
        else:
            loss.backward()
    queue.run()
    testing.assert_same_gradients(twin, model)


def test_a_compiled_block_inside_an_eager_model_that_defers() -> None:
    """What is compiled keeps its backward in one piece, what is not defers; together the gradients are right."""
    model, twin = pair()
    torch._dynamo.reset()
    twin.mlp.compile(backend="aot_eager", fullgraph=True)
    queue = zbkern.WGradQueue()
    for key in range(3):
        model(indices(key)).square().mean().backward()
        with queue.defer(key):
            twin(indices(key)).square().mean().backward()
    assert queue.run() > 0
    testing.assert_same_gradients(twin, model)


def test_export_traces_torchs_operations() -> None:
    model, twin = pair()
    exported = torch.export.export(twin, (indices(0),))
    testing.assert_close(exported.module()(indices(1)), model(indices(1)))
    assert not [n for n in exported.graph.nodes if n.op == "call_function" and "zbkern" in str(n.target)]


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, twin = pair()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = twin(mode.from_tensor(indices(0)))
    assert y.shape == (2, 6, 11)


def test_dispatch_modes_see_w_run() -> None:
    """A tensor subclass goes through torch's operations: DTensor and others bring their own."""

    class Tagged(Tensor):
        pass

    x = torch.randn(3, 4).as_subclass(Tagged)
    layer = zbkern.nn.Linear(4, 2)
    y = layer(x)
    assert type(y) is Tagged
    testing.assert_close(y.as_subclass(Tensor), F.linear(x.as_subclass(Tensor), layer.weight, layer.bias))
