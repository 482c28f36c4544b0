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


class Float8Storage:
    """As those of TransformerEngine: no tensor, made of two, and nothing but arguments by name makes one."""

    def __new__(cls, *, data: Tensor, scale: Tensor) -> Float8Storage:
        made = object.__new__(cls)
        made._data, made._scale, made._transpose = data, scale, None
        return made

    def dequantize(self) -> Tensor:
        return self._data * self._scale


def quantised(x: Tensor) -> Float8Storage:
    return Float8Storage(data=x / 4, scale=torch.tensor(4.0))


class Product(torch.autograd.Function):
    """B of te.Linear 2.20: the input's gradient is returned, W is put into the module's store, with a function that
    returns those of weight and bias; of the latter None where B has it, which is so in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return nn.functional.linear(x, weight, bias if bias.numel() else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        module = ctx.module
        has_bias = bool(module.bias.numel())

        def wgrad_gemm(x: Any, dy: Any) -> tuple[Any, ...]:
            if module.fp8:
                x, dy = x.dequantize(), dy.dequantize()
            fused = module.fuse_wgrad_accumulation
            dw = weight.main_grad.addmm_(dy.t(), x) if fused else dy.t() @ x
            return dw, dy.sum(0) if has_bias and not module.fp8 else None

        module.wgrad_store.put([quantised(x), quantised(dy)] if module.fp8 else [x, dy], wgrad_gemm)
        return dy @ weight, None, dy.sum(0) if has_bias and module.fp8 else None, None


class Store:
    """Its own store: one for each module, which delays or does not."""

    def __init__(self, delays: bool) -> None:
        self.delay_wgrad_compute = lambda: delays


class Linear(nn.Module):
    """te.Linear: without a bias, its bias is an empty tensor."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, fused: bool = False, delays: bool = True, fp8: bool = False
    ) -> None:
        super().__init__()
        self.fp8 = fp8
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
    queue.exchange(task, [tensor.clone() for tensor in task.tensors])
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
