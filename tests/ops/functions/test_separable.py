"""An op of the user's own: its W waits, merges, accumulates and runs hooks as that of a layer of ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.deferred import backward, deferred
from zbkern import testing
from zbkern.wgrad import WGradQueue

calls: list[str] = []


class Convolution(zbkern.SeparableFunction):
    """conv1d with a bias; what W needs besides tensors is hashable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return nn.functional.conv1d(x, weight, bias, padding=padding)

    @staticmethod
    def dgrad(ctx: Any, dy: Tensor) -> tuple[Any, tuple[Any, ...]]:
        calls.append("B")
        x, weight = ctx.saved_tensors
        dx = nn.grad.conv1d_input(x.shape, weight, dy, padding=ctx.padding) if ctx.needs[0] else None
        return (dx, None), (x, dy, weight.shape, ctx.padding)

    @staticmethod
    def wgrad(x: Tensor, dy: Tensor, shape: torch.Size, padding: int) -> tuple[Tensor, Tensor]:
        calls.append("W")
        return nn.grad.conv1d_weight(x, shape, dy, padding=padding), dy.sum((0, 2))


class Layer(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return Convolution.apply(x, self.padding[0], weights=(self.weight, self.bias), name="layer")


class Products(zbkern.SeparableFunction):
    """(x a, x b): two inputs that take gradients, two outputs, and a W that takes all microbatches at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y, a, b)
        return x * a, y * b

    @staticmethod
    def dgrad(ctx: Any, da: Tensor, db: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
        x, y, a, b = ctx.saved_tensors
        return (da * a, db * b), (x, y, da, db)

    @classmethod
    def launch(cls, segments: Any, outputs: Any, accumulate: bool, options: Any = ()) -> None:
        calls.append(f"W of {len(segments)}")
        for x, y, da, db in segments:
            for output, gradient in zip(outputs, ((x * da).sum(0), (y * db).sum(0)), strict=True):
                if output is not None:
                    output.add_(gradient) if accumulate else output.copy_(gradient)
            accumulate = True


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def models(bias: bool = True) -> tuple[nn.Sequential, nn.Sequential]:
    """The same model with torch's convolutions and with ours."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1, bias=bias), nn.Tanh(), nn.Conv1d(4, 2, 3, bias=bias)).double()
    own = copy.deepcopy(plain)
    for module in own:
        if isinstance(module, nn.Conv1d):
            module.__class__ = Layer
    return plain, own


@pytest.mark.parametrize("frozen", [(), ("0.weight", "0.bias", "2.weight")])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_torchs_and_w_waits_and_merges(bias: bool, frozen: tuple[str, ...]) -> None:
    plain, own = models(bias)
    for model in (plain, own):
        for name in frozen if bias else frozen[::2]:
            model.get_parameter(name).requires_grad_(False)
    batches = torch.randn(3, 2, 3, 8, dtype=torch.double)
    queue = deferred(plain, own, batches, 1e-12)
    waiting = 3 * (1 if frozen else 2) * (bias or not frozen)
    assert calls == ["B"] * 6
    assert [task.name for task in queue.tasks()] == ["layer"] * waiting
    assert all(p.grad is None for p in own.parameters())
    assert queue.run_one() == (waiting > 0)  # one layer, all three microbatches
    assert queue.pending() == max(waiting - 3, 0)
    queue.run()
    testing.assert_same_gradients(own, plain)
    for x in batches:  # without a queue
        testing.assert_close(backward(own, x), backward(plain, x))
    testing.assert_same_gradients(own, plain)
    with torch.no_grad():
        testing.assert_close(own(batches[0]), plain(batches[0]))


def test_several_inputs_and_outputs_and_a_launch_of_its_own() -> None:
    a, b = (nn.Parameter(torch.randn(3)) for _ in range(2))
    queue = WGradQueue()
    inputs = torch.randn(2, 2, 4, 3, requires_grad=True)
    with queue.defer():
        for x, y in inputs:
            first, second = Products.apply(x, y, weights=(a, b))
            (first.square() + second).sum().backward()
    queue.run()
    assert calls == ["W of 2"]
    found = [inputs.grad, a.grad, b.grad]
    free = inputs.detach().requires_grad_()
    loss = ((free[:, 0] * a).square() + free[:, 1] * b).sum()
    torch.testing.assert_close(found, list(torch.autograd.grad(loss, [free, a, b])))


def test_its_backward_has_no_derivative() -> None:
    weight = nn.Parameter(torch.ones(1, 1, 1))
    x = torch.ones(1, 1, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="Convolution: its backward has no derivative"):
        torch.autograd.grad(Convolution.apply(x, 0, weights=(weight, None)).sum(), x, create_graph=True)
