"""A failure beside an optimizer step that is not validated: it is settled, or a checkpoint is asked for."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.ahead import (
    MAX_NORM,
    MICROBATCHES,
    batch,
    force,
    make_model,
    make_optimizer,
    plain_loop,
)
from tests.support.chunks import on_threads, results_on_threads
from zbkern.pipeline import Optimizer, Pipeline, schedules
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.pipeline.transport.mailbox import Values


def nothing(*_: Any) -> None: ...


def train_through_failures(
    before_forward: Callable[[int, int], None],
    before_update: Callable[[int, int, Optimizer], None] = nothing,
    after_update: Callable[[int, int], None] = nothing,
    forced: dict[tuple[int, int], float] | None = None,
) -> tuple[list[nn.Module], list[list[str]]]:
    """Four ranks, four steps; after a failure every rank tries its step again, after two it begins from the start.

    The functions are called with rank and step where they say, and may raise. Returns every rank's errors, too.
    """
    model = make_model(4)

    def rank_loop(transport: LocalTransport) -> list[str]:
        rank, module, step, errors = transport.rank, zbkern.convert(model[transport.rank]), 0, []
        module.register_forward_pre_hook(lambda *_: before_forward(rank, step))
        with Pipeline(module, schedules.zb_h2(4, MICROBATCHES), nn.functional.mse_loss, transport, timeout=60) as pipe:
            optimizer = Optimizer(make_optimizer([module]), pipe, max_norm=MAX_NORM)
            start = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
            while step < 4:
                inputs, targets = batch(step)
                seen = module.seen.clone()
                optimizer.zero_grad()
                try:
                    pipe.step(inputs if rank == 0 else None, targets if rank == 3 else None)
                    force(module, (forced or {}).get((rank, step)))
                    before_update(rank, step, optimizer)
                    optimizer.step()
                    after_update(rank, step)
                    step += 1
                except PipelineError as error:
                    pipe._calls.fail()
                    errors.append(str(error))
                    module.seen.copy_(seen)
                    if len(errors) == 2:
                        with pytest.raises(PipelineError, match="load a checkpoint"):
                            optimizer.step()  # at once, and not when a time-out is over
                        module.load_state_dict(start[0])
                        optimizer.load_state_dict(start[1])
                        step = 0
            optimizer.validate()
        return errors

    return model, results_on_threads(4, rank_loop)


def assert_trained(model: list[nn.Module], steps: int = 4, forced: dict[tuple[int, int], float] | None = None) -> None:
    expected, _ = plain_loop(len(model), steps, forced or {})
    weights = ([module.linear.weight for module in each] for each in (model, expected))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forced", [{}, {(3, 0): 100.0}])
def test_a_step_not_yet_validated_is_settled_after_a_failure(forced: dict[tuple[int, int], float]) -> None:
    """Rank 0 fails in its second forward that runs ahead; rank 3 knows the global norm, others may not yet."""
    begun, known, failed = threading.Event(), threading.Event(), []

    def before_forward(rank: int, step: int) -> None:
        if rank != 0 or step != 1 or failed:
            return
        if not begun.is_set():
            begun.set()
            return
        assert known.wait(60)
        failed.append(rank)
        raise ArithmeticError("a broken forward")

    def after_update(rank: int, step: int) -> None:
        if rank == 3:
            known.set()

    model, errors = train_through_failures(before_forward, after_update=after_update, forced=forced)
    assert [len(found) for found in errors] == [1] * 4
    assert "ArithmeticError: a broken forward" in errors[0][0]
    assert_trained(model, forced=forced)


@pytest.mark.parametrize("slow", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("within", [False, True])
def test_a_step_that_only_some_ranks_have_done_needs_a_checkpoint(within: bool, slow: int | None) -> None:
    """Rank 3 fails before or within its optimizer step, when rank 0 has done it and begun the next forwards.

    Rank 0 fails right after the load, where ranks have counted different steps: that is got over. What the others give
    reaches a slow rank when the others have read it, and gone on.
    """
    ahead, stepped, failed, again = threading.Event(), threading.Event(), [], []
    optimizers: dict[int, Optimizer] = {}

    def before_forward(rank: int, step: int) -> None:
        if rank == 0 and step == 2:
            ahead.set()
        if rank == 0 and step == 0 and failed and not again:
            again.append(rank)
            raise ArithmeticError("a broken forward")

    def update(*_: Any) -> None:
        if len(failed) == 1:
            failed.append("within")
            assert stepped.wait(60)
            deadline = time.monotonic() + 60
            while optimizers[2]._boundary.pending and time.monotonic() < deadline:  # until a rank knows the global norm
                time.sleep(0.001)
            raise ArithmeticError("a broken update")

    def after_update(rank: int, step: int) -> None:
        if rank == 2 and step == 1:
            stepped.set()

    def before_update(rank: int, step: int, optimizer: Optimizer) -> None:
        optimizers[rank] = optimizer
        if rank == 3 and step == 1 and not failed:
            failed.append("before")
            assert ahead.wait(60)
            if within:
                optimizer.register_step_pre_hook(update)
                return
            transports[3].fail("rank 3: a broken W")
            raise PipelineError("rank 3: a broken W")

    transports: list[LocalTransport] = []
    ring = LocalTransport.ring

    def keep(size: int) -> list[LocalTransport]:
        transports[:] = ring(size)
        for transport in transports:
            patch.setattr(transport, "send", functools.partial(send, transport.send))
        return transports

    def send(usual: Callable[..., None], peer: int, tag: Any, message: Any) -> None:
        if failed and peer == slow and isinstance(tag, Values):
            time.sleep(0.1)
        usual(peer, tag, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTransport, "ring", keep)
        model, errors = train_through_failures(before_forward, before_update, after_update)
    for found in errors:
        assert found == [
            "rank 3, optimizer step 2: ArithmeticError: a broken update" if within else "rank 3: a broken W",
            "optimizer step 2 may have been done on some ranks only when a rank failed; load a checkpoint, "
            "or start again where there is none yet",
            "rank 0, action 0F0: ArithmeticError: a broken forward",
        ]
    assert_trained(model)


def test_a_step_that_no_rank_could_begin_after_a_failure_needs_no_checkpoint() -> None:
    def rank_loop(transport: LocalTransport) -> None:
        module, failed, errors = zbkern.convert(nn.Linear(3, 3)), [], []

        def fail_once(*_: Any) -> None:
            if transport.rank == 1 and not failed:
                failed.append(1)
                raise ArithmeticError

        module.register_forward_pre_hook(fail_once)
        with Pipeline(module, schedules.zb_h1(2, 2), nn.functional.mse_loss, transport, timeout=60) as pipe:
            optimizer = Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), pipe, max_norm=1.0)
            for call in (pipe.step, lambda *_: optimizer.step(), lambda *_: optimizer.step(), pipe.step):
                optimizer.zero_grad()
                try:
                    call(torch.ones(2, 3), torch.ones(2, 3))
                except PipelineError as error:
                    errors.append(str(error))
            assert ["rank 1, action 1F0: ArithmeticError" in error for error in errors] == [True] * 3
            optimizer.step()
            optimizer.validate()
            assert optimizer.last_norm is not None

    results_on_threads(2, rank_loop)


def test_a_step_after_all_pipelines_were_closed_says_how_to_go_on() -> None:
    again = LocalTransport.ring(2)

    def rank_loop(transport: LocalTransport) -> None:
        module = zbkern.convert(nn.Linear(3, 3))
        rest: Any = schedules.zb_h1(2, 2), nn.functional.mse_loss
        with Pipeline(module, *rest, transport, timeout=60) as pipe:
            optimizer = Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), pipe)
        with Pipeline(module, *rest, again[transport.rank], timeout=60) as pipe:
            pipe.step(torch.ones(2, 3), torch.ones(2, 3))
            with pytest.raises(RuntimeError, match=r"all Pipelines of this Optimizer were closed; call pipe.attach"):
                optimizer.step()
            pipe.attach(optimizer)
            pipe.step(torch.ones(2, 3), torch.ones(2, 3))
            optimizer.step()

    results_on_threads(2, rank_loop)


def test_a_max_norm_that_is_not_that_of_all_ranks_is_refused() -> None:
    def make(transport: LocalTransport) -> None:
        weight = nn.Parameter(torch.ones(1))
        Optimizer(torch.optim.SGD([weight]), transport, max_norm=[1, None][transport.rank], timeout=60)

    for error in on_threads(2, make):
        assert "max_norm must be the same on all ranks; got [1.0, None] (by rank)" in str(error)


@pytest.mark.parametrize("max_norm", [None, 1e-9])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_leaves_out_a_step_is_told_at_once(ranks: int, rank: int, max_norm: float | None) -> None:
    """Not when a time-out is over; also where no rank may step early, and none begins forwards."""

    def rank_loop(transport: LocalTransport) -> None:
        module = zbkern.convert(nn.Linear(3, 3))
        with Pipeline(module, schedules.zb_h1(ranks, 2), nn.functional.mse_loss, transport, timeout=600) as pipe:
            optimizer = Optimizer(torch.optim.SGD(module.parameters()), pipe, max_norm=max_norm)
            for step in range(3):
                pipe.step(torch.ones(2, 3), torch.ones(2, 3))
                if (transport.rank, step) != (rank % ranks, 1):
                    optimizer.step()

    for error in on_threads(ranks, rank_loop):
        assert "ranks make different calls: call " in str(error)
        assert "optimizer step 2 on rank" in str(error)
        assert " step on rank" in str(error)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_error_without_a_text_reaches_all() -> None:
    def refuse(*_: Any) -> None:
        raise Wordless

    def rank_loop(transport: LocalTransport) -> str:
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        optimizer = Optimizer(torch.optim.SGD([weight]), transport, timeout=60)
        if transport.rank == 1:
            optimizer.register_step_pre_hook(refuse)
        try:
            for _ in range(2):  # rank 0 may have had the total before the hook ran, and hears of it then
                optimizer.step()
                optimizer.validate()
        except PipelineError as error:
            return str(error)
        return "nothing is raised"

    assert set(results_on_threads(2, rank_loop)) == {"rank 1, optimizer step 1: Wordless: (its text cannot be made)"}
