"""no_defer, and convert(defer=...): layers whose W runs in B, which hold nothing; gradients are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zbkern
from zbkern import testing
from zbkern.kernels import reference


class Block(nn.Module):
    """Pre-norm attention and gated MLP, of zbkern's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = zbkern.nn.RMSNorm(8), zbkern.nn.RMSNorm(8)
        self.attention = zbkern.nn.Attention(8, 2, 1, causal=True)
        self.mlp = zbkern.nn.MLP(8, 28)

    def forward(self, x: Tensor) -> Tensor:
        y, x = self.after(self.attention(self.before(x)), x)
        return x + self.mlp(y)


class Loop(nn.Module):
    """A module that zbkern does not know, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return sum(nn.functional.linear(x, self.weight[i]) for i in range(2))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Loop(), nn.Linear(8, 8)).double()


def train(twin: nn.Module, queue: zbkern.WGradQueue, forward_inside: bool, steps: int = 2) -> list[Tensor]:
    """Two microbatches; returns the inputs' gradients."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
        if not forward_inside:
            y = twin(x)
        with queue.defer():
            (twin(x) if forward_inside else y).square().sum().backward()
        found.append(x.grad)
    return found


CHOICES: dict[str, Callable[[str, nn.Module], bool]] = {
    "products of attention": lambda name, module: not isinstance(module, zbkern.nn.Linear),
    "a whole submodule": lambda name, module: not name.endswith("attention"),
    "MLP": lambda name, module: not name.endswith("mlp"),
    "intercepted": lambda name, module: name != "1",
    "everything": lambda name, module: False,
}


@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_are_those_of_deferring_all(choice: str, forward_inside: bool, steps: int) -> None:
    """Up to the rounding of products whose operands lie elsewhere in memory."""
    whole, part = zbkern.convert(model()), zbkern.convert(model(), defer=CHOICES[choice])
    queues = zbkern.WGradQueue(merge=False), zbkern.WGradQueue(merge=False)
    inputs = [train(twin, queue, forward_inside, steps) for twin, queue in zip((whole, part), queues, strict=True)]
    if choice != "intercepted" or forward_inside:
        assert queues[1].pending() < queues[0].pending()
        assert queues[1].bytes < queues[0].bytes
    assert queues[1].bytes == 0 or choice != "everything"
    for queue in queues:
        queue.run()
    for a, b in zip(*inputs, strict=True):
        testing.assert_close(a, b, "dx", 1e-14)
    testing.assert_same_gradients(part, whole, tolerance=1e-12 if steps > 1 else 1e-14)


def test_hooks_and_main_grads_have_their_gradient_after_b() -> None:
    linear = zbkern.convert(nn.Linear(3, 2), defer=lambda name, module: False)
    seen: list[Tensor] = []
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    linear.bias.main_grad = torch.zeros(2)
    queue = zbkern.WGradQueue()
    x = torch.randn(4, 3)
    with queue.defer():
        linear(x).sum().backward()
    assert torch.equal(seen[0], linear.weight.grad)
    testing.assert_close(linear.weight.grad, x.sum(0).expand(2, 3))
    assert torch.equal(linear.bias.main_grad, torch.full((2,), 4.0))


def test_an_error_in_a_forward_leaves_the_scope() -> None:
    linear = zbkern.convert(nn.Linear(3, 2), defer=lambda name, module: False)
    queue = zbkern.WGradQueue()
    with pytest.raises(ValueError, match="K"):
        linear(torch.randn(2, 5))
    other = zbkern.nn.Linear(3, 2)
    with queue.defer():
        other(torch.randn(2, 3)).sum().backward()
    assert queue.pending() == 1
    queue.discard()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_head_that_does_not_wait_computes_its_logits_once(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hook, its gradient comes by W all the same."""
    later: list[int] = []
    wgrad = reference.cross_entropy_wgrad
    monkeypatch.setattr(reference, "cross_entropy_wgrad", lambda *a: (later.append(1), wgrad(*a))[1])
    queue = zbkern.WGradQueue()
    weight = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    x, target = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.arange(7)
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with queue.defer():
        with zbkern.no_defer():
            loss = zbkern.functional.linear_cross_entropy(
                x, weight, target, options=zbkern.functional.CrossEntropyOptions(chunk=3)
            )
        loss.backward()
    assert queue.pending() == 0
    assert len(later) == hooked
    expected = torch.autograd.grad(nn.functional.cross_entropy(x @ weight.T, target), (x, weight))
    for got, wanted in zip((x.grad, weight.grad), expected, strict=True):
        testing.assert_close(got, wanted)


def test_create_graph_and_wrong_arguments() -> None:
    layer = zbkern.convert(nn.Linear(3, 2).double(), defer=lambda name, module: False)
    queue = zbkern.WGradQueue()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with queue.defer():
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert queue.pending() == 0
    found = layer.weight.grad.clone()
    plain = zbkern.restore(layer)
    plain.zero_grad()
    (gradient,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    testing.assert_close(found, plain.weight.grad)
