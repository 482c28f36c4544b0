"""no_defer, and convert(defer=...): layers whose W runs in B, which hold nothing; gradients are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zbkern
from zbkern import testing
from zbkern.kernels import reference


def test_nothing_of_what_does_not_wait_is_held() -> None:
    """Gradients are in tests/test_gradients.py."""
    held = []
    for kinds in ((), zbkern.nn.MLP, (zbkern.nn.MLP, zbkern.nn.Linear), nn.Module):
        model = nn.Sequential(zbkern.nn.Attention(8, 2), zbkern.nn.MLP(8, 12), zbkern.nn.RMSNorm(8))
        zbkern.convert(model, defer=lambda name, module, kinds=kinds: not isinstance(module, kinds))
        queue = zbkern.WGradQueue()
        with queue.defer():
            model(torch.randn(2, 5, 8)).square().sum().backward()
        held.append((queue.bytes, queue.pending()))
        queue.discard()
    assert held == sorted(held, reverse=True)
    assert len({*held}) == 4
    assert held[-1] == (0, 0)


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
