"""A rank fails: all others end in time, with one name and cause, and go on where all are there."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.nccl_standin.faults import TIMEOUT, WIDTH, Fault, Layer, batch, run_with
from tests.nccl_standin.ranks import Run
from tests.support.seeds import seed as seed_of
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, schedules

BOUND = 3.0  # seconds after which others end; 2 for what is under way, 2 for questions that a frozen rank never answers

PLACES = {
    "kill": ("connect", "F", "send", "connected send", "recv", "optimizer"),
    "freeze": ("F", "send", "connected send", "recv", "optimizer"),
    "raise": ("F", "send", "recv"),
    "interrupt": ("F", "send"),
    "memory": ("F", "recv"),
}


def cases(kind: str) -> Iterator[Fault]:
    """The first, a middle and the last of five ranks, whose others are near and far; and one of two."""
    for number, place in enumerate(PLACES[kind]):
        for size, victim in ((2, number % 2), (5, 0), (5, 2), (5, 4)):
            yield Fault(kind, place, size, victim)


def check(fault: Fault, seed: int) -> None:
    run, told = run_with(fault, seed)
    bound = BOUND + (TIMEOUT + 2 if fault.kind == "freeze" else 0)
    name = f"rank {fault.victim}"
    for rank, each in enumerate(told):
        if each is None:
            assert rank == fault.victim
            continue
        assert each.after < bound, (rank, each)
        if fault.kind == "kill":
            gone = f"{name} exited unexpectedly: its connection closed without notice"
            assert each.text == f"{gone}; start all ranks again, from a checkpoint", (rank, each)
        elif fault.kind == "freeze":
            assert re.search(rf"{name}, which does not answer|{name}, action .*: stuck", each.text), (rank, each)
        elif rank != fault.victim or fault.place == "recv":
            cause = "KeyboardInterrupt" if fault.kind == "interrupt" else "the cause"
            assert name in each.text, (rank, each)
            assert cause in each.text, (rank, each)
    if fault.kind not in ("kill", "freeze"):
        assert len({each.goes_on for each in told if each}) == 1, told
    left = [nccl for nccl in run.communicators if not nccl.closed and told[nccl.rank] is not None]
    assert not left, "communicators that nobody ended"
    assert not run.errors()


QUICK = [
    Fault("kill", "connected send", 3, 1),
    Fault("kill", "connect", 3, 0),
    Fault("freeze", "send", 2, 0),
    Fault("freeze", "connected send", 3, 1),
    Fault("raise", "F", 3, 2),
    Fault("interrupt", "send", 2, 0),
    Fault("memory", "recv", 3, 1),
]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: "-".join(map(str, fault)))
def test_others_end_in_time_with_one_name(fault: Fault) -> None:
    check(fault, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLACES])
def test_everywhere_others_end_in_time_with_one_name(kind: str) -> None:
    rng = random.Random(seed_of(0))
    for fault in cases(kind):
        seed = rng.randrange(10**6)
        print(fault, seed)
        check(fault, seed)


@pytest.mark.parametrize(("seconds", "goes_on"), [(1.0, True), (30.0, False)])
def test_what_an_earlier_call_has_under_way_ends_or_all_ranks_know(seconds: float, goes_on: bool) -> None:
    """When rank 0 fails, rank 1's GPU has so much to do before it has all of the step before."""
    run, failed = Run(3), False
    for gpu in run.gpus:
        gpu.is_behind = True

    def rank(transport: Any) -> str | None:
        def fail_once() -> None:
            nonlocal failed
            if steps == 1 and transport.rank == 0 and not failed:
                failed = True
                raise ArithmeticError("the cause")

        steps, chunk = 0, zbkern.convert(Layer(fail_once))
        with Pipeline([chunk], schedules.zb_h1(3, 6), nn.functional.mse_loss, transport, timeout=TIMEOUT) as pipe:
            pipe.step(*batch(0, 3))
            if transport.rank == 1:
                run.current_stream().compute(seconds)
            steps = 1
            with pytest.raises(PipelineError, match="the cause"):
                pipe.step(*batch(1, 3))
            try:
                pipe.step(*batch(1, 3))
            except PipelineError as error:
                return str(error)
            return None

    told = run.run(rank)
    wanted = None if goes_on else "cannot go on without a restart: rank 1 had messages of an earlier call under way"
    assert all(each is None if wanted is None else wanted in each for each in told), told


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_of_squares_that_did_not_come_concludes_no_step(seed: int) -> None:
    """Rank 1 fails when it has announced its sum to rank 2, where the chain ends and the GPU waits for it."""
    run = Run(3, seed=seed, on_call=lambda rank, what: fail(rank, what))
    sends = False

    def fail(rank: int, what: str) -> None:
        nonlocal sends
        if sends and (rank, what) == (1, "send"):
            sends = False
            raise ArithmeticError("the cause")

    def rank(transport: Any) -> tuple[int, str]:
        nonlocal sends
        chunk = zbkern.convert(nn.Linear(WIDTH, WIDTH))
        with Pipeline([chunk], schedules.zb_h1(3, 6), nn.functional.mse_loss, transport, timeout=TIMEOUT) as pipe:
            optimizer = Optimizer(torch.optim.SGD(chunk.parameters(), lr=0.1), pipe)
            pipe.step(*batch(0, 3))
            sends = sends or transport.rank == 1
            with pytest.raises(PipelineError, match="the cause"):
                _ = optimizer.step(), optimizer.validate()
            with pytest.raises(PipelineError) as caught:
                pipe.step(*batch(1, 3))
            return optimizer.skipped, str(caught.value)

    for skipped, told in run.run(rank):
        assert skipped == 0
        assert "may have been done on some ranks only" in told, told
