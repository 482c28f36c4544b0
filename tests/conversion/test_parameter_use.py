"""Modules that use parameters of modules inside them: found by their code, and their W waits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from zbkern import testing
from zbkern.conversion.parameter_use import uses_parameters_within

WIDTH = 8


class Held(nn.Module):
    """What others use: two layers, a module with an unusual method, and parameters in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.positions = Positions(16, WIDTH)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH, WIDTH))})


class Positions(nn.Embedding):
    def at(self, indices: Tensor) -> Tensor:
        return super().forward(indices)


class OfAChild(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight.t(), self.linear.bias)


class InAMethod(Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)

    def step(self, x: Tensor) -> Tensor:
        return x @ self.linear.weight


class InALambda(Held):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: y @ self.linear.weight)(x)


class InALoop(Held):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, layer.weight)
        return x


class ByIndex(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layers[1].weight)


class OfAList(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0]) @ self.weights[1]


class OfADictionary(Held):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.named["a"])


class ByAnotherMethod(Held):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions.at(torch.arange(len(x)))


class Calls(Held):
    """Calls what is inside it, and asks for a dtype."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.to(self.linear.weight.dtype)).to(self.layers[0].weight.device)
        for layer in self.layers:
            x = layer(x)
        return x + self.positions(torch.arange(len(x)))


USERS = [OfAChild, InAMethod, InALambda, InALoop, ByIndex, OfAList, OfADictionary, ByAnotherMethod]


@pytest.mark.parametrize("kind", USERS, ids=lambda kind: kind.__name__)
def test_w_waits(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind().double()
    twin = zbkern.convert(copy.deepcopy(module))
    x, queue = torch.randn(4, WIDTH, dtype=torch.float64), zbkern.WGradQueue()
    module(x).square().sum().backward()
    with queue.defer():
        twin(x).square().sum().backward()
    assert all(parameter.grad is None for parameter in twin.parameters())
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-12)


def test_a_module_that_calls_what_is_inside_it_is_left_alone() -> None:
    assert not uses_parameters_within(Calls())
    assert not uses_parameters_within(nn.TransformerEncoderLayer(WIDTH, 2))
    assert not uses_parameters_within(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    assert type(zbkern.convert(Calls())) is Calls
