"""Between steps, beside what test_differential.py draws: who waits for whom, and what is said of other Pipelines."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

import zbkern
from tests.support.chunks import results_on_threads, run_pipelines
from zbkern.pipeline import Optimizer, Pipeline, schedules
from zbkern.pipeline.transport.local import LocalTransport

WIDTH, MAX_NORM = 6, 0.5


def make_chunks(tied: bool = False) -> list[nn.Module]:
    """The first has the small gradients, by which its rank does not see that the step is to be clipped."""
    torch.manual_seed(0)
    chunks: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    chunks[0].weight.data *= 10
    if tied:
        chunks[1].weight.data.copy_(chunks[0].weight.data)
        for chunk in chunks:
            chunk.tied_parameters = {"weight": chunk.weight}
    return chunks


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.double).unbind()


def sgd(modules: list[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.5, momentum=0.5)


def values(modules: Any) -> list[Tensor]:
    return [p.detach().clone() for module in modules for p in module.parameters()]


@pytest.mark.parametrize(("hooks", "late"), [(None, 0), (0, 1), (1, 0), (1, 2)])
def test_forwards_ahead_are_given_up_wherever_a_rank_is(hooks: int | None, late: int) -> None:
    """A rank with a hook waits for the norm, and others are in forwards whose inputs may never come."""
    torch.manual_seed(0)
    chunks = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(chunks))
    trained = sgd([plain])
    batches = [(inputs, targets * (100 if step % 2 else 1)) for step in range(6) for inputs, targets in [batch(step)]]
    for inputs, targets in batches:
        trained.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        trained.step()

    def train(pipe: Pipeline) -> Optimizer:
        inner = sgd([*pipe.modules.values()])
        if pipe.rank == hooks:
            inner.register_step_post_hook(lambda *_: None)
        optimizer = Optimizer(inner, pipe, max_norm=1.0, adaptive=False)
        for inputs, targets in batches:
            optimizer.zero_grad()
            pipe.step(inputs, targets)
            if pipe.rank == late:
                time.sleep(0.02)
            optimizer.step()
        optimizer.validate()
        pipe.gather(None)
        assert not pipe._calls.transport._mailbox._messages, "what was given up is kept"
        return optimizer

    first, *_ = run_pipelines(schedules.zb_h2(3, 8), [*map(zbkern.convert, chunks)], train, timeout=60)
    assert (first.undone > 0) is (hooks != 0)
    assert 0 < first.clipped < len(batches)
    torch.testing.assert_close(values(chunks), values([plain]), rtol=1e-5, atol=1e-8)


class Mode(TorchFunctionMode):
    """Somebody else's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: torch.device("cpu"), Mode])
def test_what_reads_no_weight_does_not_wait(around: Callable[[], Any]) -> None:
    """Gradients are cleared while the norm is under way; where somebody's mode is on, which the own one's end could be
    taken for, the step itself waits. Modes are left as they were.
    """
    goes_on, waits = threading.Event(), around is Mode

    def steps(pipe: Pipeline) -> None:
        chunk = pipe.modules[pipe.rank]
        with around():
            before = _get_current_function_mode()
            optimizer = Optimizer(sgd([chunk]), pipe, max_norm=100.0)
            pipe.step(*batch(0))
            if pipe.rank == 1 and not waits:
                assert goes_on.wait(60)  # the norm is known on this rank, and comes when the other is through
            optimizer.step()
            if pipe.rank == 0:
                assert (optimizer._boundary.state == "validated") is waits
                optimizer.zero_grad()
                chunk.zero_grad()
                assert chunk.weight.shape == (WIDTH, WIDTH)
                assert (torch.ones(3) + 1).sum() == 6
                assert (optimizer._boundary.state == "validated") is waits
                goes_on.set()
                chunk.weight.sum()
                assert optimizer._boundary.state == "validated"
            pipe.evaluate(*batch(0))
            assert _get_current_function_mode() is before

    run_pipelines(schedules.zb_h1(2, 4), [*map(zbkern.convert, make_chunks())], steps, timeout=60)


def test_a_new_pipeline_compares_ties_when_their_weights_are_final(caplog: pytest.LogCaptureFixture) -> None:
    others = LocalTransport.ring(2)

    def steps(pipe: Pipeline) -> None:
        modules = [*pipe.modules.values()]
        optimizer = Optimizer(sgd(modules), pipe, max_norm=1e-3, adaptive=False)
        pipe.step(*batch(0))
        optimizer.step()
        Pipeline(modules, schedules.zb_h1(2, 2), nn.functional.mse_loss, others[pipe.rank], timeout=60).close()

    run_pipelines(schedules.zb_h1(2, 4), [*map(zbkern.convert, make_chunks(tied=True))], steps, timeout=60)
    assert caplog.records == []


def test_an_optimizer_of_a_group_is_not_overtaken() -> None:
    """It takes no part in steps, and both it and the Pipeline may come first."""
    chunks, groups = make_chunks(), [LocalTransport.ring(2) for _ in range(3)]

    def rank_loop(transport: LocalTransport) -> str:
        rank, chunk = transport.rank, zbkern.convert(chunks[transport.rank])
        pipes = [Pipeline(chunk, schedules.zb_h1(2, 4), nn.functional.mse_loss, transport, timeout=60)]
        optimizer = Optimizer(sgd([chunk]), groups[0][rank], max_norm=MAX_NORM, timeout=60)
        pipes.append(Pipeline(chunk, schedules.zb_h1(2, 2), nn.functional.mse_loss, groups[1][rank], timeout=60))
        pipes[0].step(*batch(0))
        optimizer.step()
        told = []
        for pipe in pipes:
            with pytest.raises(RuntimeError, match="made without this Pipeline has a step") as caught:
                pipe.step(*batch(0))
            told.append(str(caught.value))
        optimizer.validate()
        for pipe in pipes:
            pipe.step(*batch(0))
            pipe.close()
        return told[0]

    assert len({*results_on_threads(2, rank_loop)}) == 2  # the rank where the norm ends hears of the other


def test_chunks_of_a_pipeline_that_is_closed_get_another_optimizer() -> None:
    chunk = make_chunks()[0]
    pipes = [Pipeline(chunk, schedules.zb_h1(1, 2), nn.functional.mse_loss, LocalTransport.ring(1)[0])]
    for _ in range(2):
        first = Optimizer(sgd([chunk]), pipes[-1])
        pipes[-1].step(*batch(0))
        first.step()
        pipes[-1].close()
        pipes.append(Pipeline(chunk, schedules.zb_h1(1, 2), nn.functional.mse_loss, LocalTransport.ring(1)[0]))
        assert pipes[-1].optimizer is None
    pipes[-1].close()


def test_a_pipeline_of_the_chunks_of_two_is_refused() -> None:
    chunks, ring = make_chunks(), LocalTransport.ring(1)[0]
    single, double = schedules.zb_h1(1, 2), schedules.interleaved(1, 2, 2)
    pipes = [Pipeline(chunk, single, nn.functional.mse_loss, LocalTransport.ring(1)[0]) for chunk in chunks]
    with pytest.raises(ValueError, match="Pipeline: 2 other Pipelines have some of these chunks each"):
        Pipeline(chunks, double, nn.functional.mse_loss, ring)
    for pipe in pipes:
        pipe.close()
    Pipeline(chunks, double, nn.functional.mse_loss, LocalTransport.ring(1)[0]).close()


def test_a_close_with_a_step_that_some_ranks_may_have_done_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def steps(pipe: Pipeline) -> None:
        optimizer = Optimizer(sgd([*pipe.modules.values()]), pipe, max_norm=MAX_NORM, adaptive=False)
        pipe.step(*batch(0))
        optimizer.step()
        if pipe.rank == 0:
            raise ArithmeticError
        pipe.step(*batch(0))

    chunks = [*map(zbkern.convert, make_chunks())]
    run_pipelines(schedules.zb_h1(2, 4), chunks, steps, keep_errors=True, timeout=60)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("optimizer step 1 was not validated: some ranks may have done it" in said for said in warnings)
