"""Other ways to ask autograd than one backward(): each against torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zbkern
from tests.support.tied import Tied, microbatch, pair
from zbkern import testing


@pytest.mark.parametrize("inside", [True, False])
def test_create_graph(inside: bool) -> None:
    """Of all weights' gradients; test_gradients.py has derivatives of inputs within a loss."""
    model, twin = pair()
    for each in (model, twin):
        with zbkern.WGradQueue().defer() if inside else contextlib.nullcontext():
            loss = each(microbatch(Tied, 0)).square().mean()
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


def squared_slope(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A gradient penalty alone."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


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
