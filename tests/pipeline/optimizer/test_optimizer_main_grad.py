"""Gradients in a framework's flat buffer: views of it stay views, whatever happens before a step is validated."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.optimizer_cases import FlatBuffer, clip_in_float64
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.local import LocalTransport

STEPS = 20
FORCED = {(1, step): (3.0, math.inf, math.nan)[step % 3] for step in range(2, STEPS, 4)} | {(0, 5): 3.0, (0, 17): 3.0}


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step)).unbind()


def force(gradients: list[Tensor], rank: int, step: int) -> None:
    if (rank, step) in FORCED:
        gradients[0][0, 0] = FORCED[rank, step]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_pipeline_trains_into_a_flat_buffer(by_hand: bool) -> None:
    """Forwards run before a step is validated, and backwards fill the views while a framework zeroes the buffer."""
    stages = make_stages()

    def rank_loop(transport: LocalTransport) -> int:
        chunk = zbkern.convert(stages[transport.rank])
        weights = list(chunk.parameters())
        buffer = FlatBuffer(weights, detached=False)
        with Pipeline(chunk, schedules.zb_h1(2, 4), nn.functional.mse_loss, transport, timeout=20) as pipe:
            sgd = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
            optimizer = Optimizer(sgd, pipe, max_norm=2.0, adaptive=False)
            for step in range(STEPS):
                buffer.flat.zero_() if by_hand else optimizer.zero_grad()
                pipe.step(*batch(step))
                buffer.check()
                assert buffer.flat.any(), "weight gradients went elsewhere"
                force([weight.main_grad for weight in weights], transport.rank, step)
                optimizer.step()
                buffer.check()
        return optimizer.undone

    undone = results_on_threads(2, rank_loop)
    assert undone[0] >= 4
    model = nn.Sequential(*make_stages())
    weights = list(model.parameters())
    sgd = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    for step in range(STEPS):
        sgd.zero_grad()
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        for rank in range(2):
            force([weight.grad for weight in weights[4 * rank :]], rank, step)
        if math.isfinite(clip_in_float64(weights, 2.0)):
            sgd.step()
    ours = [weight for stage in stages for weight in stage.parameters()]
    torch.testing.assert_close(ours, weights, rtol=1e-4, atol=1e-5)


def test_nothing_is_copied_that_no_step_needs() -> None:
    """Without clipping a step stays or is taken back for good, which a snapshot does without its gradients."""

    def rank_loop(transport: LocalTransport) -> tuple[int, ...]:
        weight = nn.Parameter(torch.zeros(3))
        weight.main_grad = torch.ones(3)
        held = []
        for max_norm in (None, 100.0):
            sgd = torch.optim.SGD([weight], lr=0.1)
            optimizer = Optimizer(sgd, transport, max_norm=max_norm, timeout=20)
            optimizer.step()
            held.append(len(optimizer.boundary.pending.gradients) if optimizer.pending else 0)
            optimizer.validate()
        return tuple(held)

    assert results_on_threads(2, rank_loop) == [(0, 1), (0, 0)]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_are_views_stay_views(set_to_none: bool) -> None:
    def rank_loop(transport: LocalTransport) -> float:
        flat, weight = torch.zeros(1), nn.Parameter(torch.zeros(1))
        weight.grad = flat.view(1)
        flat.fill_(4.0 if transport.rank else 0.6)
        optimizer = Optimizer(torch.optim.SGD([weight], lr=1.0), transport, max_norm=1.0, timeout=20)
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        optimizer.validate()
        if not set_to_none:
            assert weight.grad.data_ptr() == flat.data_ptr()
            assert not flat.any()
        return weight.item()

    norm = math.hypot(0.6, 4.0)
    assert results_on_threads(2, rank_loop) == [pytest.approx(-g / norm) for g in (0.6, 4.0)]
