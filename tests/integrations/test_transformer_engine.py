"""TransformerEngine's contract of delayed W, by a stand-in: it needs a GPU itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.programs import block
from tests.support.transformer_engine import GroupedLinear, LayerNormMLP, Linear
from zbkern import testing
from zbkern.integrations.transformer_engine import use_queue

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def models(bias: bool, fused: bool, fp8: bool = False) -> tuple[nn.Sequential, nn.Sequential]:
    how = {"fused": fused, "fp8": fp8}
    model = nn.Sequential(Linear(8, 16, bias, **how), nn.GELU(), Linear(16, 4, bias, **how))
    plain = nn.Sequential(nn.Linear(8, 16, bias), nn.GELU(), nn.Linear(16, 4, bias))
    plain.load_state_dict(model.state_dict())
    for layer in (model[0], model[2]) if fused else ():
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    return use_queue(model), plain


def later(queue: Any, model: nn.Module, x: Tensor, key: int) -> None:
    with queue.defer(key):
        model(x).square().sum().backward()


def at_once(queue: Any, model: nn.Module, x: Tensor, key: int) -> None:
    model(x).square().sum().backward()


@pytest.mark.parametrize("backward", [later, at_once])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_plain_backward(
    bias: bool, fused: bool, fp8: bool, backward: Callable[..., None]
) -> None:
    model, plain = models(bias, fused, fp8)
    queue = zbkern.WGradQueue()
    for key, x in enumerate(torch.randn(3, 5, 8)):
        plain(x).square().sum().backward()
        backward(queue, model, x, key)
    if backward is later:
        assert queue.pending() == 6
        weights = [model[0].weight, model[2].weight]
        assert not any(p.main_grad.any() if fused else p.grad is not None for p in weights)
        queue.run([0, 2])
        queue.run_one(1)
        queue.run()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        added = fused and ours.dim() == 2
        testing.assert_close(ours.main_grad if added else ours.grad, expected.grad)
        assert not added or ours.grad_added_to_main_grad
    assert [model[0].reduced, model[2].reduced] == ([3, 3] if fused else [0, 0])


def test_a_bias_has_its_gradient_from_b_where_w_returns_none() -> None:
    model, _ = models(bias=True, fused=False)
    queue, x, dy = zbkern.WGradQueue(), torch.randn(5, 8), torch.randn(5, 16)
    for before in (None, torch.ones(16)):
        model[0].bias.grad = before
        with queue.defer():
            model[0].wgrad_store.put([x, dy], lambda x, dy: (dy.t() @ x, None))
        queue.run()
        assert torch.equal(model[0].bias.grad, torch.zeros(16) if before is None else torch.ones(16))


def test_what_an_fp8_storage_holds_can_be_offloaded() -> None:
    """The queue counts its tensors, and W takes those that were put in their place."""
    model, _ = models(bias=False, fused=False, fp8=True)
    queue, x = zbkern.WGradQueue(), torch.randn(5, 8)
    expected = torch.ones(5, 16).t() @ x
    with queue.defer():
        model[0](x).sum().backward()
    assert queue.peak_bytes >= 4 * 5 * (8 + 16)
    (task,) = queue.tasks()
    queue._exchange(task, [tensor.clone() for tensor in task.tensors])
    queue.run()
    testing.assert_close(model[0].weight.grad, expected)


def test_the_pages_block() -> None:
    model, plain = models(bias=True, fused=False)
    x = torch.randn(5, 8)
    exec(block(PAGE, "use_queue(model)"), {"model": model, "x": x, "queue": zbkern.WGradQueue()})
    plain(x).square().mean().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        testing.assert_close(ours.grad, expected.grad)


def test_with_a_frozen_bias_the_weight_has_its_gradient() -> None:
    model, _ = models(bias=True, fused=True)
    model[0].bias.requires_grad_(False)
    model(torch.randn(5, 8)).sum().backward()
    assert model[0].weight.main_grad.any()
    assert model[0].bias.grad is None


def test_a_frozen_weight_has_no_gradient() -> None:
    model, _ = models(bias=True, fused=False)
    model[0].weight.requires_grad_(False)
    model(torch.randn(5, 8)).sum().backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


@pytest.mark.parametrize("frozen", ["", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias"])
@pytest.mark.parametrize("fused", [False, True])
def test_both_w_of_a_layer_norm_mlp_are_one(fused: bool, frozen: str) -> None:
    model, plain = LayerNormMLP(8, 12, fused), LayerNormMLP(8, 12, fused)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        dict(each.named_parameters()).get(frozen, torch.empty(0)).requires_grad_(False)
    use_queue(model)
    queue = zbkern.WGradQueue()
    for key, x in enumerate(torch.randn(3, 5, 8)):
        plain.with_torch(x).square().sum().backward()
        with queue.defer(key):
            model(x).square().sum().backward()
    assert queue.pending() == 3
    queue.run([2, 0])
    queue.run()
    for name, ours in model.named_parameters():
        expected = plain.get_parameter(name).grad
        if fused and name.endswith("weight"):
            testing.assert_close(ours.main_grad, torch.zeros_like(ours) if expected is None else expected)
        elif expected is None:
            assert ours.grad is None
        else:
            testing.assert_close(ours.grad, expected)
    assert model.reduced == (3 if fused else 0)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_one(bias: bool, fp8: bool) -> None:
    model, counts = GroupedLinear(3, 8, 12, bias, fp8=fp8), [4, 0, 5]
    plain = [nn.Linear(8, 12, bias) for _ in range(3)]
    for number, linear in enumerate(plain):
        linear.load_state_dict({name: model.get_parameter(f"{name}{number}") for name in linear.state_dict()})
    use_queue(nn.Sequential(model))
    queue = zbkern.WGradQueue()
    for key, x in enumerate(torch.randn(3, 9, 8)):
        torch.cat([linear(rows) for linear, rows in zip(plain, x.split(counts), strict=True)]).square().sum().backward()
        with queue.defer(key):
            model(x, counts).square().sum().backward()
    assert queue.pending() == 3
    (task, *_) = queue.tasks()
    assert len(task.tensors) == 6 * (2 if fp8 else 1)  # inputs and output gradients; an FP8 storage is two
    queue._exchange(task, [tensor.clone() for tensor in task.tensors])
    queue.run()
    for number, linear in enumerate(plain):
        weight = model.get_parameter(f"weight{number}")
        assert weight.grad_added_to_main_grad
        testing.assert_close(weight.main_grad, linear.weight.grad)
        if bias:
            testing.assert_close(model.get_parameter(f"bias{number}").grad, linear.bias.grad)
    assert model.reduced == 3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="made with delay_wgrad_compute=True; it has none"):
        use_queue(nn.Sequential(nn.Linear(2, 2), Linear(2, 2, True, delays=False)))
    with pytest.raises(ValueError, match=r"module '1' must be made with fuse_wgrad_accumulation=True"):
        use_queue(nn.Sequential(nn.GELU(), GroupedLinear(2, 2, 2, True, fused=False)))
    distributed = nn.Sequential(nn.GELU(), Linear(2, 2, False))
    distributed[1].weight.is_distributed_weight = True
    with pytest.raises(ValueError, match=r"module '1' has distributed weights .* delay_wgrad_compute=False"):
        use_queue(distributed)
    parts = Linear(2, 2, False)
    parts.query_weight = parts.weight  # of parameters_split
    del parts.weight
    operation = Linear(2, 2, False)  # te.ops.GroupedLinear has a store, and _accumulate_into_main_grad
    del operation.fuse_wgrad_accumulation
    for other in (parts, operation):
        with pytest.raises(ValueError, match=r"module '0' must be a Linear, .* GroupedLinear without parameters_split"):
            use_queue(nn.Sequential(other))
    model, _ = models(bias=True, fused=False)
    with pytest.raises(RuntimeError, match=r"call queue.run\(\) instead of backward_dw"):
        model[0].backward_dw()
