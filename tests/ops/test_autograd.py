"""Other ways to ask autograd than one backward(): each against torch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from tests.support.tied import loss_of, microbatches, pair
from zbkern import testing


@pytest.mark.parametrize("inside", [True, False])
def test_create_graph(inside: bool) -> None:
    model, twin = pair()
    queue = zbkern.WGradQueue()
    (x,) = microbatches(1)
    for each in (model, twin):
        with queue.defer() if inside else contextlib.nullcontext():
            loss = loss_of(each, x)
        loss.backward(create_graph=True)
        sum(p.grad.square().sum() for p in each.parameters()).backward()
    testing.assert_same_gradients(twin, model)


def test_a_weight_modified_between_forward_and_backward_is_torchs_error() -> None:
    layer = zbkern.nn.Linear(4, 3)
    queue = zbkern.WGradQueue()
    for _ in range(2):
        y = layer(torch.randn(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), queue.defer():
            y.backward()
        with queue.defer():
            layer(torch.randn(2, 4)).sum().backward()
    queue.discard()


def test_autograd_grad_towards_weights() -> None:
    """Right for every graph but those whose forward was inside a scope: there torch says that the weight is missing."""
    layer = zbkern.nn.Linear(4, 3)
    x = torch.randn(2, 4)
    (expected,) = torch.autograd.grad(F.linear(x, layer.weight, layer.bias).square().sum(), layer.weight)
    queue = zbkern.WGradQueue()
    loss = layer(x).square().sum()
    with queue.defer():
        testing.assert_close(torch.autograd.grad(loss, layer.weight)[0], expected)
        loss = layer(x).square().sum()
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss, layer.weight)
    assert queue.pending() == 0
    testing.assert_close(torch.autograd.grad(layer(x).square().sum(), layer.weight)[0], expected)


# ---- a derivative inside of the loss: gradient penalties, forces


def forces(model: nn.Module, x: Tensor, create_graph: bool = True) -> Tensor:
    """-dE/dx of the energy that the model gives."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
    return -gradient


def force_matching(model: nn.Module, x: Tensor) -> Tensor:
    return (forces(model, x) - x.detach().sin()).square().sum() + model(x).square().sum()


def squared_slope(model: nn.Module, x: Tensor) -> Tensor:
    """R1: the penalty alone."""
    return forces(model, x).square().sum()


class Energy(nn.Module):
    """Every layer that has a derivative of its derivative, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.rms = nn.Linear(6, 6), nn.LayerNorm(6), nn.RMSNorm(6)
        self.mlp = zbkern.nn.MLP(6, 8)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.tanh(self.first(x)))
        return self.last(self.mlp(self.rms(torch.tanh(self.norm(x)))))


PLACES = ("forward and backward inside", "forward inside", "backward inside", "neither, with hooks", "both, with hooks")


def penalised(place: str, penalty: Callable, batches: list[Tensor]) -> tuple[nn.Module, nn.Module, list[int]]:
    """A plain model and one whose W waits after a backward through the penalty, and how often a hook was called."""
    torch.manual_seed(0)
    model = Energy().double()
    twin, queue, calls = zbkern.convert(copy.deepcopy(model)), zbkern.WGradQueue(), []
    if "hooks" in place:
        twin.first.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    for key, x in enumerate(batches):
        penalty(model, x).backward()
        with queue.defer(key) if place.startswith(("forward", "both")) else contextlib.nullcontext():
            loss = penalty(twin, x)
        assert not calls[key:], "a hook ran in the first order"
        if key == 0:
            assert all(p.grad is None for p in twin.parameters()), "the first order left something"
            assert queue.pending() == 0
        with queue.defer(key) if "backward inside" in place or "both" in place else contextlib.nullcontext():
            loss.backward()
        queue.run(key)
    return model, twin, calls


@pytest.mark.parametrize("penalty", [force_matching, squared_slope])
@pytest.mark.parametrize("place", PLACES)
def test_gradient_penalties(place: str, penalty: Callable) -> None:
    batches = [torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    model, twin, calls = penalised(place, penalty, batches)
    testing.assert_same_gradients(twin, model)
    assert len(calls) == (2 if "hooks" in place else 0)


def test_autograd_grad_of_a_penalty_towards_weights_is_torchs_error_where_there_are_no_edges() -> None:
    """Half of the gradient would reach them: better none than that."""
    layer, queue = zbkern.nn.Linear(4, 3), zbkern.WGradQueue()
    x = torch.randn(2, 4, requires_grad=True)
    with queue.defer():
        loss = squared_slope(lambda x: torch.tanh(layer(x)), x)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, layer.weight)
    (slope,) = torch.autograd.grad(loss, x)
    assert slope.abs().sum() > 0
    assert queue.pending() == 0
    assert layer.weight.grad is None


def test_a_penalty_lands_in_main_grad() -> None:
    layer, queue = zbkern.nn.Linear(4, 3).double(), zbkern.WGradQueue()
    plain = copy.deepcopy(layer)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x = torch.randn(2, 4, dtype=torch.double, requires_grad=True)
    for each in (plain, layer):
        squared_slope(lambda x, each=each: torch.tanh(each(x)), x).backward()
    testing.assert_close(layer.weight.main_grad, plain.weight.grad)
    assert layer.weight.grad is None
    assert queue.pending() == 0
