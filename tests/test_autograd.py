"""Other ways to ask autograd than one backward(): each against torch."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from tests.tied import Block, loss_of, microbatches, pair
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


def test_retain_graph_and_two_backwards() -> None:
    model, twin = pair()
    queue = zbkern.WGradQueue()
    for _ in range(2):
        for each in (model, twin):
            loss = loss_of(each, microbatches(1)[0])
            for _ in range(2):
                if each is twin:
                    with queue.defer():
                        loss.backward(retain_graph=True)
                else:
                    loss.backward(retain_graph=True)
    queue.run()
    testing.assert_same_gradients(twin, model)


def test_parametrized_weights_are_not_leaves_and_still_right() -> None:
    torch.manual_seed(0)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4).double())
    twin = copy.deepcopy(model)
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return zbkern.functional.linear(x, twin.weight, twin.bias)

    queue = zbkern.WGradQueue()
    for _ in range(3):
        x = torch.randn(3, 5, dtype=torch.float64)
        model(x).square().sum().backward()
        with queue.defer():
            forward(x).square().sum().backward()
    queue.run()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        testing.assert_close(a.grad, b.grad)


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


@pytest.mark.parametrize("deferred", [True, False])
def test_autograd_grad_towards_inputs_accumulates_nothing(deferred: bool) -> None:
    model, twin = pair(Block)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    queue = zbkern.WGradQueue()
    for inside in (True, False):
        with queue.defer() if inside else contextlib.nullcontext():
            loss = twin(x).square().sum()
        with queue.defer() if deferred else contextlib.nullcontext():
            (got,) = torch.autograd.grad(loss, x)
        testing.assert_close(got, torch.autograd.grad(model(x).square().sum(), x)[0])
        assert queue.pending() == 0
        assert all(p.grad is None for p in twin.parameters())


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
