"""Where a gradient goes: added to in place, in `.main_grad` or `.grad` of another dtype than the weight's."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.tied import Block, pair
from zbkern import testing


def test_a_gradient_that_there_is_is_added_to_in_place() -> None:
    """As autograd does; one that requires gradients, too."""
    for requires in (False, True):
        model, twin = pair(Block)
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad = torch.ones_like(parameter).requires_grad_(requires)
        kept, queue, x = twin.up.weight.grad, zbkern.WGradQueue(), torch.randn(3, 6, dtype=torch.float64)
        model(x).sum().backward()
        with queue.defer():
            twin(x).sum().backward()
        queue.run()
        testing.assert_same_gradients(twin, model)
        assert requires or twin.up.weight.grad is kept


def in_bf16_and_float64() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layer = zbkern.nn.Linear(16, 8).bfloat16()
    wide = nn.Linear(16, 8).double()
    wide.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    return layer, wide


@pytest.mark.parametrize("max_bytes", [None, 2000])  # some W early, whose sums wait for the hooks
@pytest.mark.parametrize("hooked", [False, True])
def test_main_grad_in_fp32_under_bf16_weights(hooked: bool, max_bytes: int | None) -> None:
    layer, wide = in_bf16_and_float64()
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        if hooked:
            parameter.register_post_accumulate_grad_hook(lambda p: None)
    queue = zbkern.WGradQueue(max_bytes)
    for key in range(8):
        x = torch.randn(32, 16).bfloat16()
        wide(x.double()).sum().backward()
        with queue.defer(key):
            layer(x).sum().backward()
    queue.run()
    for parameter, other in zip(layer.parameters(), wide.parameters(), strict=True):
        assert not parameter.grad.any() if hooked else parameter.grad is None
        assert parameter.grad_added_to_main_grad is True
        testing.assert_close(parameter.main_grad, other.grad, tolerance=1e-5)  # far below bf16's 4e-3


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("asked", [torch.float32, None])
def test_grad_dtype_under_bf16_weights(asked: torch.dtype | None, hooked: bool) -> None:
    layer, wide = in_bf16_and_float64()
    seen: list[torch.dtype] = []
    for parameter in layer.parameters():
        parameter.grad_dtype = asked
        if hooked:
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    queue = zbkern.WGradQueue()
    x = torch.randn(32, 16).bfloat16()
    for _ in range(2):  # the first gradient is written, the second added
        for _ in range(2):
            wide(x.double()).square().sum().backward()
            with queue.defer():
                layer(x).square().sum().backward()
        queue.run()
    for parameter, other in zip(layer.parameters(), wide.parameters(), strict=True):
        assert parameter.grad.dtype == (asked or torch.bfloat16)
        testing.assert_close(parameter.grad, other.grad, tolerance=1e-2)  # the activations are bf16
    assert seen == [asked or torch.bfloat16] * (4 if hooked else 0)


def test_gradients_are_compared_where_a_model_keeps_them() -> None:
    got, expected = nn.Linear(3, 2), nn.Linear(3, 2)
    for module in (got, expected):
        module.bias.requires_grad_(False)  # has no main_grad
    expected.weight.grad = torch.ones(2, 3)
    got.weight.main_grad = torch.ones(2, 3)
    testing.assert_same_gradients(got, expected, attribute="main_grad")
    got.weight.main_grad[0, 0] = 2
    with pytest.raises(AssertionError, match="gradient of weight: differs by"):
        testing.assert_same_gradients(got, expected, attribute="main_grad")
    with pytest.raises(AssertionError, match="weight: gradient is None, expected a tensor"):
        testing.assert_same_gradients(got, expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_main_grad_protocol(hooked: bool) -> None:
    layer = zbkern.nn.Linear(4, 3)
    twin = copy.deepcopy(layer)
    ready: list[Tensor] = []
    layer.weight.main_grad = torch.full((3, 4), 5.0)
    layer.weight.overwrite_main_grad = True
    layer.weight.grad_added_to_main_grad = False
    layer.bias.main_grad = torch.full((3,), 5.0)
    if hooked:
        layer.weight.register_post_accumulate_grad_hook(lambda p: ready.append(p.grad))
    queue = zbkern.WGradQueue()
    x = torch.randn(2, 4)
    with queue.defer():
        layer(x).sum().backward()
    twin(x).sum().backward()
    assert layer.weight.main_grad[0, 0] == 5
    assert not ready
    queue.run()
    testing.assert_close(layer.weight.main_grad, twin.weight.grad)
    testing.assert_close(layer.bias.main_grad, 5 + twin.bias.grad)
    assert layer.weight.grad_added_to_main_grad is True
    assert not hasattr(layer.bias, "grad_added_to_main_grad")
    if hooked:  # told once that it is ready; what it sees adds nothing
        assert len(ready) == 1
        assert not ready[0].any()


class ForeignLinear(torch.autograd.Function):
    """Somebody's own, which returns the gradient of its weight to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)


@pytest.mark.parametrize("where", ["node", "parameter"])
@pytest.mark.parametrize("each", [False, True])
def test_main_grad_of_a_weight_whose_other_use_is_somebody_elses_function(each: bool, where: str) -> None:
    """A framework's hook adds what autograd accumulates to main_grad, unless it is told that it is there already. The
    embedding's part, whose W waits, must not say so of the head's: W run after each microbatch, or all at the end."""
    weight = nn.Parameter(torch.randn(32, 8))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    expected = weight.detach().clone().requires_grad_()

    def add(*_: Any) -> None:
        if weight.grad is not None and not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(add) if where == "node" else weight.register_post_accumulate_grad_hook(add)
    queue = zbkern.WGradQueue()
    for key in range(3):
        tokens = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(key))
        ForeignLinear.apply(nn.functional.embedding(tokens, expected), expected).square().mean().backward()
        with queue.defer(key):
            ForeignLinear.apply(zbkern.functional.embedding(tokens, weight), weight).square().mean().backward()
        if each:
            queue.run(key)
    queue.run()
    testing.assert_close(weight.main_grad, expected.grad)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_main_grad_that_autograd_adds_to_cannot_be_overwritten(deferred: bool, hooked: bool) -> None:
    weight, queue = nn.Parameter(torch.randn(32, 8)), zbkern.WGradQueue()
    weight.main_grad, weight.overwrite_main_grad = torch.zeros_like(weight), True
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda _: None)

    def backward_and_w() -> None:
        with queue.defer() if deferred else nullcontext():
            ForeignLinear.apply(zbkern.functional.embedding(torch.arange(5), weight), weight).sum().backward()
        queue.run()

    with pytest.raises(RuntimeError, match=r"overwrite_main_grad must be False .*, here \[32, 8\]"):
        backward_and_w()
    assert queue.pending() == deferred
    weight.overwrite_main_grad = False
    assert queue.run() == deferred
    assert weight.main_grad.any() == deferred


def test_main_grad_is_found_when_w_runs_not_before() -> None:
    layer = zbkern.nn.Linear(4, 3, bias=False)
    queue = zbkern.WGradQueue()
    for key in range(2):
        with queue.defer(key):
            layer(torch.ones(2, 4)).sum().backward()
    queue.run(0)
    layer.weight.main_grad = torch.zeros(3, 4)
    queue.run(1)
    assert torch.equal(layer.weight.main_grad, layer.weight.grad)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_weight_that_has_a_sparse_gradient(deferred: bool) -> None:
    """Tied to an embedding of torch's whose backward, a sparse one, ran first: the sum is dense."""
    torch.manual_seed(0)
    x, results = torch.randn(4, 3, dtype=torch.float64), []
    values = torch.randn(5, 3, dtype=torch.float64)
    for linear in (nn.functional.linear, zbkern.functional.linear):
        weight, queue = nn.Parameter(values.clone()), zbkern.WGradQueue()
        nn.functional.embedding(torch.tensor([1, 4, 1]), weight, sparse=True).square().sum().backward()
        assert weight.grad.is_sparse
        with queue.defer() if deferred else nullcontext():
            linear(x, weight).square().sum().backward()
        queue.run()
        results.append(weight.grad)
    testing.assert_close(results[1], results[0], "weight.grad")
