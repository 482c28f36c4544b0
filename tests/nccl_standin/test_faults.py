"""A rank fails: all others end in time, with one name and cause, and go on where all are there."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
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
    "raise": ("F", "send", "recv", "connect"),
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
    Fault("raise", "connect", 3, 1),
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


def fail_beside_a_late_gpu(
    seconds: float, fail: Callable[[Run], None], first: str = "step", early: bool = True
) -> tuple[list[Any], list[float]]:
    """What each rank raises in a call after one in which a rank failed, and seconds from then till it has closed.

    Rank 1's GPU is busy for so many seconds in the call before, a `first`, whose messages all wait for, or in an
    evaluation the last rank. fail: called on rank 0 as its first forward begins. early: others begin that call, too,
    before they hear of it.
    """
    run, failed = Run(3), [0.0]
    for gpu in run.gpus:
        gpu.is_behind = True

    def rank(transport: Any) -> tuple[str | None, float]:
        passes = [0]

        def forward() -> None:
            passes[0] += 1
            if (transport.rank, passes[0]) == (1, 2):
                run.current_stream().compute(seconds)
            elif (transport.rank, passes[0]) == (0, 7):
                failed[0] = run.scheduler.now
                fail(run)

        chunk, told = zbkern.convert(Layer(forward)), None
        with Pipeline([chunk], schedules.zb_h1(3, 6), nn.functional.mse_loss, transport, timeout=TIMEOUT) as pipe:
            getattr(pipe, first)(*batch(0, 3))
            pause = 0.05 if transport.rank == 0 else 0.0 if early else 0.1  # the others have returned when it fails
            run.scheduler.wait_until([], lambda: False, pause)
            assert (transport.failure is not None) == (pause == 0.1)
            with pytest.raises(PipelineError, match=r"the cause|rank 0 exited"):
                pipe.step(*batch(1, 3))
            try:
                pipe.step(*batch(1, 3))
            except PipelineError as error:
                told = str(error)
        return told, run.scheduler.now - failed[0]

    found = [each for each in run.run(rank) if each is not None]
    return [error for error, _ in found], [after for _, after in found]


def raise_an_error(run: Run) -> None:
    raise ArithmeticError("the cause")


@pytest.mark.parametrize("first", ["step", "evaluate"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("seconds", "goes_on"), [(1.0, True), (30.0, False)])
def test_what_an_earlier_call_has_under_way_ends_or_all_ranks_know(
    seconds: float, goes_on: bool, first: str, early: bool
) -> None:
    told, _ = fail_beside_a_late_gpu(seconds, raise_an_error, first, early)
    wanted = r"cannot go on without a restart: rank \d had messages of an earlier call under way"
    assert len(told) == 3
    assert all(each is None if goes_on else re.search(wanted, each) for each in told), told


def test_nothing_is_waited_for_where_a_rank_is_gone() -> None:
    """Messages of earlier calls might never come."""
    told, after = fail_beside_a_late_gpu(30.0, lambda run: run.kill(0))
    assert len(told) == 2
    assert all("rank 0 exited unexpectedly" in each for each in told), told
    assert max(after) < 0.5


def test_ranks_connect_once() -> None:
    """For every schedule that has the same pairs."""
    run = Run(3)

    def rank(transport: Any) -> None:
        for _ in range(3):
            transport.connect([(0, 1), (1, 0), (1, 1), (2, 1)])
        transport.close()

    run.run(rank)
    assert [nccl.calls for nccl in sorted(run.communicators, key=lambda each: each.rank)] == [1, 1, 2, 2, 1, 1]


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
