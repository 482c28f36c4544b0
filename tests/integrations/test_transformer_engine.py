"""TransformerEngine's contract of delayed W, by a stand-in: it needs a GPU itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.pages import block
from zbkern import testing
from zbkern.integrations.transformer_engine import use_queue

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


class Product(torch.autograd.Function):
    """B of te.Linear: the input's gradient is returned, W is put into the module's store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return nn.functional.linear(x, weight, bias if bias.numel() else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        module = ctx.module

        def wgrad(x: Tensor, dy: Tensor) -> tuple[Any, ...]:
            if module.fuse_wgrad_accumulation:
                return weight.main_grad.addmm_(dy.t(), x), None
            return dy.t() @ x, dy.sum(0) if module.bias.numel() else None

        module.wgrad_store.put([x, dy], wgrad)
        return dy @ weight, None, None, None


class Store:
    """Its own store: one for each module, which delays or does not."""

    def __init__(self, delays: bool) -> None:
        self.delay_wgrad_compute = lambda: delays


class Linear(nn.Module):
    """te.Linear: without a bias, its bias is an empty tensor."""

    def __init__(self, inputs: int, outputs: int, bias: bool, fused: bool = False, delays: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else torch.empty(0)
        self.fuse_wgrad_accumulation, self.wgrad_store = fused, Store(delays)
        self.reduced = 0

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        self.reduced += 1

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.bias, self)

    def backward_dw(self) -> None:
        self.wgrad_store.pop()


def models(bias: bool, fused: bool) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(Linear(8, 16, bias, fused), nn.GELU(), Linear(16, 4, bias, fused))
    plain = nn.Sequential(nn.Linear(8, 16, bias), nn.GELU(), nn.Linear(16, 4, bias))
    plain.load_state_dict(model.state_dict())
    for parameter in model.parameters() if fused else ():
        parameter.main_grad = torch.zeros_like(parameter)
    return use_queue(model), plain


def later(queue: Any, model: nn.Module, x: Tensor, key: int) -> None:
    with queue.defer(key):
        model(x).square().sum().backward()


def at_once(queue: Any, model: nn.Module, x: Tensor, key: int) -> None:
    model(x).square().sum().backward()


@pytest.mark.parametrize("backward", [later, at_once])
@pytest.mark.parametrize(("bias", "fused"), [(True, False), (False, False), (False, True)])
def test_gradients_are_those_of_plain_backward(bias: bool, fused: bool, backward: Callable[..., None]) -> None:
    model, plain = models(bias, fused)
    queue = zbkern.WGradQueue()
    for key, x in enumerate(torch.randn(3, 5, 8)):
        plain(x).square().sum().backward()
        backward(queue, model, x, key)
    if backward is later:
        assert queue.pending() == 6
        assert not any(p.main_grad.any() if fused else p.grad is not None for p in model.parameters())
        queue.run([0, 2])
        queue.run_one(1)
        queue.run()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        testing.assert_close(ours.main_grad if fused else ours.grad, expected.grad)
        assert not fused or ours.grad_added_to_main_grad
    assert [model[0].reduced, model[2].reduced] == ([3, 3] if fused else [0, 0])


def test_the_pages_block() -> None:
    model, plain = models(bias=True, fused=False)
    x = torch.randn(5, 8)
    exec(block(PAGE, "use_queue(model)"), {"model": model, "x": x, "queue": zbkern.WGradQueue()})
    plain(x).square().mean().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        testing.assert_close(ours.grad, expected.grad)


def test_a_frozen_weight_has_no_gradient() -> None:
    model, _ = models(bias=True, fused=False)
    model[0].weight.requires_grad_(False)
    model(torch.randn(5, 8)).sum().backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="made with delay_wgrad_compute=True; it has none"):
        use_queue(nn.Sequential(nn.Linear(2, 2), Linear(2, 2, True, delays=False)))
    several = Linear(2, 2, True)
    several.weight0 = several.weight
    del several.weight
    with pytest.raises(ValueError, match=r"module '1' must have one weight; Linear has several"):
        use_queue(nn.Sequential(nn.GELU(), several))
    model, _ = models(bias=True, fused=False)
    with pytest.raises(RuntimeError, match=r"call queue.run\(\) instead of backward_dw"):
        model[0].backward_dw()
