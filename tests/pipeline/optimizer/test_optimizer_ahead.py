"""An Optimizer and its Pipeline: forwards that run before the step whose weights they read is validated."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.ahead import (
    MAX_NORM,
    MICROBATCHES,
    WIDTH,
    Block,
    batch,
    force,
    make_model,
    make_optimizer,
)
from tests.support.chunks import assert_same, results_on_threads
from tests.support.patience import patiently
from zbkern.pipeline import Optimizer, Pipeline, schedules
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.schedules.warmup import speculative_forwards


def train(
    name: str,
    stages: int,
    steps: int,
    forced: dict[tuple[int, int], float],
    hold: Callable[[int, int], Any] = lambda rank, step: None,
    **options: Any,
) -> tuple[list[nn.Module], list[float], list[Optimizer]]:
    """The same on virtual ranks. hold(rank, step) is called before each optimizer step."""
    schedule = getattr(schedules, name)(stages, MICROBATCHES)
    model = make_model(len(schedule.placement))
    last = len(schedule.placement) - 1
    autocast = options.pop("autocast", False)  # with torch's layers, whose casts of weights it keeps

    def rank_loop(transport: LocalTransport) -> tuple[list[float], Optimizer]:
        mine = schedule.chunks_of(transport.rank)
        modules = [model[chunk] if autocast else zbkern.convert(model[chunk]) for chunk in mine]
        losses = []
        with Pipeline(modules, schedule, nn.functional.mse_loss, transport, timeout=60) as pipe:
            optimizer = Optimizer(make_optimizer(modules), pipe, max_norm=MAX_NORM, **options)
            for step in range(steps):
                inputs, targets = batch(step)
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, autocast):
                    loss = pipe.step(inputs if 0 in mine else None, targets if last in mine else None)
                losses.append(None if loss is None else loss.item())
                ran = [event.action for event in pipe.last.timeline.events[transport.rank]]
                planned = schedule.actions[transport.rank]
                assert [a for a in ran if a.kind != "W"] == [a for a in planned if a.kind != "W"], "discarded ones"
                assert pipe._calls.loop.in_flight == 0, "counts discarded forwards"
                for chunk in mine:
                    force(model[chunk], forced.get((chunk, step)))
                hold(transport.rank, step)
                optimizer.step()
            optimizer.validate()
            assert not transport._mailbox._messages, "messages are left over"
        return losses, optimizer

    results = results_on_threads(stages, rank_loop)
    return model, results[schedule.placement[-1]][0], [optimizer for _, optimizer in results]


BAD = {(3, 1): 100.0, (2, 3): math.nan, (3, 4): 50.0, (1, 5): math.inf}


def test_bit_for_bit_with_a_step_that_waits_under_autocast() -> None:
    """Nothing but the wait differs: every weight, every buffer and every loss is the same."""
    at_once, losses, optimizers = train("zb_v", 4, 8, BAD, adaptive=False, autocast=True)
    waited, waited_losses, others = train("zb_v", 4, 8, BAD, undo=None, autocast=True)
    assert optimizers[0].undone == 4
    assert others[0].undone == 0
    assert losses == waited_losses
    assert_same(*([module.state_dict() for module in model] for model in (at_once, waited)))


@pytest.mark.parametrize(("name", "good"), [("one_f_one_b", True), ("zb_h2", False), ("zb_v", True)])
def test_forwards_run_before_the_step_is_validated(name: str, good: bool) -> None:
    """The last rank does not step before the first has begun all forwards that may run ahead; nobody waits for it."""
    schedule = getattr(schedules, name)(4, MICROBATCHES)
    ahead = speculative_forwards(schedule)[0]
    begun = threading.Event()
    forward = Block.forward

    def counting(module: Block, x: Tensor) -> Tensor:
        out = forward(module, x)
        if module.first and module.forwards[0] == MICROBATCHES + ahead:
            begun.set()
        return out

    def hold(rank: int, step: int) -> None:
        if rank == 3 and step == 0:
            assert begun.wait(60), "rank 0 waits for the global check"

    class Held(Block):
        first = False
        forward = counting

    held = [Held() for _ in schedule.placement]
    held[0].first = True
    reference = make_model(len(held))
    for module, other in zip(held, reference, strict=True):
        module.load_state_dict(other.state_dict())
    forced = {} if good else {(3, 0): 100.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "make_model", lambda chunks: held)
        train(name, 4, 2, forced, hold)
    assert held[0].forwards[0] == 2 * MICROBATCHES + (0 if good else ahead)


def test_closing_sees_the_last_step_done() -> None:
    model = make_model(2)
    before = [module.linear.weight.detach().clone() for module in model]

    def train(transport: Any) -> tuple[Tensor, float]:
        chunk = model[transport.rank]
        schedule = schedules.one_f_one_b(2, MICROBATCHES)
        with Pipeline(zbkern.convert(chunk), schedule, nn.functional.mse_loss, transport, timeout=60) as pipe:
            optimizer = Optimizer(torch.optim.SGD(chunk.parameters(), lr=1.0), pipe, max_norm=1e-3)  # never done ahead
            pipe.step(*batch(0))
            optimizer.step()
        return (chunk.linear.weight - before[transport.rank]).abs().max(), optimizer.last_norm

    changes, norms = zip(*results_on_threads(2, train), strict=True)
    assert all(0 < change <= 1e-3 for change in changes)
    assert norms[0] == norms[1]


def test_an_optimizer_waits_as_long_as_its_pipeline() -> None:
    def check(scale: float) -> None:
        heard, timeout = threading.Event(), 0.5 * scale

        def rank_loop(transport: LocalTransport) -> None:
            rank, module, schedule = transport.rank, zbkern.convert(Block()), schedules.zb_h1(2, MICROBATCHES)
            with Pipeline(module, schedule, nn.functional.mse_loss, transport, timeout=timeout) as pipe:
                optimizer = Optimizer(make_optimizer([module]), pipe)
                pipe.step(*batch(0))
                if rank == 1:
                    assert heard.wait(60)
                    with pytest.raises(PipelineError, match="rank 1, action none: stuck"):
                        pipe.close()
                    return
                optimizer.step()
                with pytest.raises(
                    PipelineError, match=f"of all stages, optimizer step 1 was awaited for {timeout:g} s"
                ):
                    optimizer.validate()
                heard.set()

        results_on_threads(2, rank_loop)

    patiently(check)


def test_a_second_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    with Pipeline(model, schedules.zb_h1(1, 1), nn.functional.mse_loss, LocalTransport.ring(1)[0]) as pipe:
        Optimizer(torch.optim.SGD(model.parameters()), pipe)
        with pytest.raises(ValueError, match=r"this Pipeline has an Optimizer already.*call pipe.detach\(\)"):
            Optimizer(torch.optim.SGD(model.parameters()), pipe)
        pipe.attach(pipe.optimizer)  # the same one again, as a loop that changes between two pipelines may do
        another = Optimizer(torch.optim.SGD(model.parameters()), LocalTransport.ring(1)[0])
        with pytest.raises(ValueError, match=r"Pipeline.attach: this Pipeline has another Optimizer.*detach\(\)"):
            pipe.attach(another)
        pipe.detach()
        assert pipe.optimizer is None
        other = Optimizer(torch.optim.SGD(model.parameters()), pipe)
        assert pipe.optimizer is other


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_weight_that_two_chunks_share_is_named_once() -> None:
    """Torch only warns, and its optimizers update it twice per step."""
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    chunks[1].weight = chunks[0].weight
    twice = torch.optim.SGD([parameter for chunk in chunks for parameter in chunk.parameters()])
    with pytest.raises(ValueError, match=r"Optimizer: .* has a parameter of shape \[2, 2\] twice.*ModuleList"):
        Optimizer(twice, LocalTransport.ring(1)[0])
    Optimizer(torch.optim.SGD(nn.ModuleList(chunks).parameters()), LocalTransport.ring(1)[0])


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def dropout_loop(undo: str | None) -> tuple[list[Tensor], list[float | None], int]:
    """Random numbers of forwards that had to be repeated are drawn again."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Scaled(), nn.Linear(WIDTH, WIDTH))
    losses = []
    with Pipeline(zbkern.convert(module), schedules.zb_h2(2, 4), nn.functional.mse_loss, timeout=60) as pipe:
        optimizer = Optimizer(make_optimizer([module]), pipe, max_norm=MAX_NORM, undo=undo, adaptive=False)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            inputs, targets = torch.randn(2, 8, WIDTH, generator=generator).unbind()
            optimizer.zero_grad()
            loss = pipe.step(inputs if rank == 0 else None, targets if rank == 1 else None)
            losses.append(None if loss is None else loss.item())
            if rank == 1 and step in (1, 2, 3):
                module[0].weight.grad[0, 0] = math.nan if step == 2 else 50.0
            optimizer.step()
        optimizer.validate()
    return [p.detach() for p in module.parameters()], losses, optimizer.undone


@pytest.mark.dist
def test_random_numbers_over_gloo(two_ranks: Any) -> None:
    at_once = two_ranks.run(dropout_loop, "snapshot")
    waited = two_ranks.run(dropout_loop, None)
    assert [undone for _, _, undone in at_once] == [3, 0]
    for (weights, losses, _), (others, other_losses, _) in zip(at_once, waited, strict=True):
        assert losses == other_losses
        assert_same(weights, others)
