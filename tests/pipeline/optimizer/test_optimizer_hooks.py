"""Hooks on the optimizer's step: once per step that counts, in order, with what a synchronous step would show them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import assert_same, results_on_threads
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.local import LocalTransport


def test_hooks_may_be_removed_and_added_while_a_step_is_pending() -> None:
    calls: list[str] = []

    def rank_loop(transport: LocalTransport) -> None:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = Optimizer(torch.optim.SGD([weight], lr=0.1), transport, timeout=20)
        if transport.rank == 0:
            handle = optimizer.register_step_post_hook(lambda *_: calls.append("first"))
        for _ in range(3):
            weight.grad = torch.ones(2)
            optimizer.step()
            if transport.rank == 0:
                handle.remove()
                optimizer.register_step_post_hook(lambda *_: calls.append("later"))
            optimizer.validate()

    results_on_threads(2, rank_loop)
    assert calls == ["later"] * (1 + 2 + 3)


def project(weights: list[nn.Parameter]) -> Any:
    @torch.no_grad()
    def hook(*_: Any) -> None:
        for weight in weights:
            weight.clamp_(-0.5, 0.5)

    return hook


def test_a_hook_may_change_weights() -> None:
    """No forward begins with the weights before it."""

    def rank_loop(transport: LocalTransport) -> list[Tensor]:
        weights = [nn.Parameter(torch.ones(2))]
        optimizer = Optimizer(torch.optim.SGD(weights, lr=0.1), transport, timeout=20)
        optimizer.register_step_post_hook(project(weights))
        weights[0].grad = torch.ones(2)
        optimizer.step()
        assert optimizer.boundary.state != "early"
        optimizer.validate()
        return weights[0].tolist()

    assert results_on_threads(2, rank_loop) == [[0.5, 0.5]] * 2


def test_what_a_hook_writes_into_masters_reaches_the_weights() -> None:
    weight = nn.Parameter(torch.ones(2).bfloat16())
    inner = torch.optim.SGD([weight], lr=0.1)
    optimizer = Optimizer(inner, LocalTransport.ring(1)[0], master_weights=True)
    inner.register_step_post_hook(project([master for _, master in optimizer.masters]))
    weight.grad = torch.ones(2).bfloat16()
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an optimizer by its type, whose state and step are those of another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


@pytest.mark.parametrize("undo", ["snapshot", None])
def test_a_wrapped_optimizer_steps_as_the_one_inside(undo: str | None) -> None:
    def train(wrap: Any) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        layer, seen = nn.Linear(4, 4), []
        inner = torch.optim.AdamW(layer.parameters(), lr=0.1)
        inner.register_step_post_hook(lambda *_: seen.append(layer.weight.detach().clone()))
        optimizer = Optimizer(wrap(inner), LocalTransport.ring(1)[0], max_norm=0.5, undo=undo)
        for _ in range(4):
            optimizer.zero_grad()
            layer(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        optimizer.validate()
        return layer.weight.detach(), seen

    (weight, seen), (expected, wanted) = train(Wrapper), train(lambda inner: inner)
    assert_same(weight, expected)
    assert len(seen) == len(wanted) == 4
    assert_same(seen, wanted)
