"""A rank that raises, hangs, freezes or dies: every other rank ends soon, with one message that says who and where."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import make_data, make_model, on_threads, plain, results_on_threads
from tests.support.saving import saved_in_turn, with_actions
from zbkern.pipeline import Optimizer, Pipeline, Schedule, StepOptions, checkpoint, schedules
from zbkern.pipeline.simulation.timeline import Timeline
from zbkern.pipeline.transport import distributed
from zbkern.pipeline.transport.base import PipelineError, Tag
from zbkern.pipeline.transport.local import LocalTransport


def failing_then_working(transport: Any, rank: int, broken: set[int]) -> tuple[str, Any]:
    """The message of a step whose third loss raises, and the gradients of the next step of the same pipeline."""
    model, (inputs, targets) = make_model(2), make_data(4)
    calls = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) in broken:
            raise ArithmeticError("this loss is wrong")
        return nn.functional.mse_loss(output, target)

    arguments = inputs if rank == 0 else None, targets if rank == 1 else None
    with Pipeline([zbkern.convert(model[rank])], schedules.zb_h1(2, 4), loss_fn, transport, timeout=30) as pipe:
        with pytest.raises(PipelineError) as caught:
            pipe.step(*arguments)
        model[rank].zero_grad()
        pipe.step(*arguments)
    return str(caught.value), [p.grad for p in model[rank].parameters()]


def check_failing_then_working(results: list[Any]) -> None:
    expected = make_model(2)
    plain(expected, *make_data(4))
    for module, (message, gradients) in zip(expected, results, strict=True):
        assert message == "rank 1, action 1F2: ArithmeticError: this loss is wrong"
        for found, parameter in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_every_rank_hears_of_it_and_the_pipeline_goes_on() -> None:
    check_failing_then_working(on_threads(2, lambda transport: failing_then_working(transport, transport.rank, {3})))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_of_one_rank_is_known_to_all_and_the_pipeline_goes_on(kind: type[BaseException]) -> None:
    def rank_steps(transport: LocalTransport) -> str:
        model, (inputs, targets), pressed = make_model(2), make_data(4), []

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            pressed.append(1)
            if len(pressed) == 3:
                raise kind("by hand")
            return nn.functional.mse_loss(output, target)

        module = zbkern.convert(model[transport.rank])
        with Pipeline(module, schedules.zb_h1(2, 4), loss_fn, transport, timeout=30) as pipe:
            with pytest.raises((PipelineError, kind)) as caught:
                pipe.step(inputs, targets)
            pipe.step(inputs, targets)
        return f"{type(caught.value).__name__}: {caught.value}"

    first, last = on_threads(2, rank_steps)
    assert last == f"{kind.__name__}: by hand"
    assert first == f"PipelineError: rank 1, action 1F2: {kind.__name__}: by hand"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda targets: targets[:-1],
            "Pipeline.step: dimension 0 of targets must be a multiple of the 4 microbatches; got [7, 5, 3]",
        ),
        (
            lambda targets: targets.to_sparse(),
            "Pipeline.step: targets must hold dense tensors to be split; got torch.sparse_coo; pass a list with one "
            "entry per microbatch",
        ),
    ],
)
def test_a_batch_that_is_refused_on_one_rank_is_known_to_all_and_the_pipeline_goes_on(spoil: Any, reason: str) -> None:
    def rank_steps(transport: LocalTransport) -> str:
        model, (inputs, targets) = make_model(2), make_data(4)
        module = zbkern.convert(model[transport.rank])
        with Pipeline(module, schedules.zb_h1(2, 4), nn.functional.mse_loss, transport, timeout=30) as pipe:
            with pytest.raises((PipelineError, ValueError, TypeError)) as caught:
                pipe.step(inputs, spoil(targets))
            pipe.step(inputs, targets)
        return f"{type(caught.value).__name__}: {caught.value}"

    first, last = on_threads(2, rank_steps)
    assert re.match(rf"(Value|Type)Error: {re.escape(reason)}", last)
    assert first.startswith(f"PipelineError: rank 1: {reason}")


class Proposing:
    """A replanner that proposes what it is given, or raises it."""

    every = 1

    def __init__(self, proposal: Any) -> None:
        self.proposal = proposal

    def memory_limits(self, schedule: Schedule) -> list[float]:
        return [1.0] * schedule.stages

    def propose(self, timeline: Timeline, limits: Sequence[float]) -> Any:
        if isinstance(self.proposal, Exception):
            raise self.proposal
        return self.proposal


_RUNS = r"must have the placement \(0, 1\) and 4 microbatches of the schedule that runs, <Schedule zb_h1: .*>; got "
_CANNOT_RUN = Schedule(((), ()), (0, 1), 4)
_RECOMPUTING = with_actions(schedules.zb_h1(2, 4), saved_in_turn("recomputed"))


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (ArithmeticError("no plan"), "ArithmeticError: no plan"),
        ("1F1B", "TypeError: .*propose: must return a zbkern.pipeline.Schedule or None; got str"),
        (schedules.zb_h1(2, 8), f"ValueError: .*{_RUNS}.* 8 microbatches>.*"),
        (schedules.zb_v(2, 4), rf"ValueError: .*{_RUNS}.*\(0, 1, 1, 0\).*"),
        (schedules.zb_h1(2, 2, slices=2), rf"ValueError: .*{_RUNS}.* 2 microbatches, 2 slices of a sequence each>.*"),
        (schedules.zb_h1(3, 4), rf"ValueError: .*{_RUNS}.*\(0, 1, 2\).*"),
        (_CANNOT_RUN, "ScheduleError: .*"),
        (_RECOMPUTING, r"ValueError: .*must not offload or recompute \(R, O, L\).*"),
    ],
)
def test_a_replanner_that_raises_or_is_wrong_is_known_to_all_at_once(proposal: Any, message: str) -> None:
    def rank_steps(transport: LocalTransport) -> tuple[str, float]:
        module = zbkern.convert(make_model(2)[transport.rank])
        first = schedules.zb_h1(2, 4)
        with Pipeline(
            module, first, nn.functional.mse_loss, transport, timeout=20, replanner=Proposing(proposal)
        ) as pipe:
            start = time.monotonic()
            with pytest.raises(PipelineError) as caught:
                pipe.step(*make_data(4))
            assert pipe.schedule is first
            return str(caught.value), time.monotonic() - start

    for found, seconds in results_on_threads(2, rank_steps):
        assert re.fullmatch(f"rank 0, action replanning: {message}", found, re.DOTALL), found
        assert seconds < 10


@pytest.mark.parametrize("loads", [False, True])
def test_ranks_that_had_completed_what_failed_elsewhere_are_told(loads: bool, tmp_path: Path) -> None:
    """Another batch, and weights of another step, would go on with the others' in silence."""
    finished, failed = threading.Event(), []

    def hook(rank: int) -> None:
        if rank == 0 and finished.wait(0 if failed else 20) and not failed:
            failed.append(rank)
            raise ArithmeticError("a broken hook")

    def rank_steps(transport: LocalTransport) -> list[str]:
        rank, (inputs, targets), errors = transport.rank, make_data(1), []
        module = zbkern.convert(make_model(2)[rank])
        module.linear.bias.register_post_accumulate_grad_hook(lambda _: hook(rank))
        with Pipeline(module, schedules.zb_h1(2, 1), nn.functional.mse_loss, transport, timeout=30) as pipe:
            checkpoint.save(tmp_path / str(rank), 0, pipe)
            for _ in range(4):
                try:
                    pipe.step(inputs, targets)
                    finished.set()  # the last rank, while the first is in its last W
                except PipelineError as error:
                    errors.append(str(error))
                    if loads and len(errors) == 1:
                        checkpoint.load(tmp_path / str(rank), pipe)
                if len(errors) == (1 if loads else 2):
                    break
            pipe.step(inputs, targets)
        return errors

    for errors in on_threads(2, rank_steps):
        assert "rank 0, action 0" in errors[0]
        assert loads or "not at the same step after a failure" in errors[1]
        assert loads or "step after 0, step after 1" in errors[1]


def constructing_late() -> list[Any]:
    """The error of a rank that waits a second for one that comes later, and of that one; what both gather after it."""
    rank = torch.distributed.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    usual = store.timeout
    arguments = [zbkern.convert(make_model(2)[rank])], schedules.zb_h1(2, 2), nn.functional.mse_loss
    try:
        store.set_timeout(timedelta(seconds=1))
        if rank == 1:
            time.sleep(2.5)
        with pytest.raises(PipelineError) as caught:
            Pipeline(*arguments)
    finally:
        store.set_timeout(usual)
    with Pipeline(*arguments) as pipe:
        return [str(caught.value), pipe.gather({"rank": rank})]


@pytest.mark.dist
def test_a_rank_that_does_not_construct_its_pipeline_is_named(two_ranks: Any) -> None:
    for message, gathered in two_ranks.run(constructing_late, timeout=30):
        assert message.startswith("Pipeline: rank 1 did not come to 'connect' in 1 s"), message
        assert gathered == [{"rank": 0}, {"rank": 1}]


def failing_over_gloo() -> tuple[str, Any]:
    return failing_then_working(None, torch.distributed.get_rank(), {3})


@pytest.mark.dist
def test_every_rank_hears_of_it_and_the_pipeline_goes_on_over_gloo(two_ranks: Any) -> None:
    check_failing_then_working(two_ranks.run(failing_over_gloo, timeout=30))


def failing_with_a_slow_receiver() -> tuple[str, Any]:
    receive = distributed.receive_message
    kept: list[Any] = []
    alive: list[str] = []

    def receive_late(group: Any, peer: int) -> Any:
        time.sleep(0.05 if peer == 0 else 0)
        return receive(group, peer)

    def keep_open(groups: list[Any]) -> None:  # as what else is under way may do
        alive.extend(thread.name for thread in threading.enumerate() if thread.name.startswith("zbkern-"))
        kept.extend(groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "receive_message", receive_late)
        patch.setattr(distributed, "close_groups", keep_open)
        found = failing_over_gloo()
    assert not alive, "these waited in vain for the last message of a peer"
    return found


@pytest.mark.dist
def test_a_rank_whose_receiver_is_slow_hears_of_it_too(two_ranks: Any) -> None:
    check_failing_then_working(two_ranks.run(failing_with_a_slow_receiver, timeout=60))


class Broken(nn.Module):
    def __init__(self, action: Any) -> None:
        super().__init__()
        self.action = action

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.action()


def raise_key_error() -> None:
    raise KeyError("broken")


def steps_with_broken_rank(broken: int, action: Any, timeout: float, stages: int = 4) -> list[Any]:
    schedule, model, (inputs, targets) = schedules.zb_h1(stages, stages), make_model(stages), make_data(stages)

    def rank_step(transport: LocalTransport) -> None:
        module = Broken(action) if transport.rank == broken else model[transport.rank]
        with Pipeline([module], schedule, nn.functional.mse_loss, transport, timeout=timeout) as pipe:
            pipe.step(inputs if transport.rank == 0 else None, targets if transport.rank == stages - 1 else None)

    return on_threads(stages, rank_step)


def test_ranks_that_are_no_neighbours_hear_of_it() -> None:
    for error in steps_with_broken_rank(3, raise_key_error, 30):
        assert isinstance(error, PipelineError)
        assert "rank 3, action 3F0: KeyError: 'broken'" in str(error)


def test_the_rank_that_hangs_is_named_by_those_that_wait_for_others() -> None:
    def hang() -> torch.Tensor:
        time.sleep(4)
        raise RuntimeError("too late to matter")

    start = time.monotonic()
    errors = steps_with_broken_rank(2, hang, 1)
    assert time.monotonic() - start < 10
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], PipelineError)
        assert "rank 2, action 2F0: stuck for" in str(errors[rank])
        assert "was awaited for 1 s" in str(errors[rank])


def hanging_step() -> str:
    rank = torch.distributed.get_rank()
    model, (inputs, targets) = make_model(2), make_data(4)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(5)
        return nn.functional.mse_loss(output, target)

    with (
        pytest.raises(PipelineError) as caught,
        Pipeline([zbkern.convert(model[rank])], schedules.zb_h1(2, 4), loss_fn, timeout=2) as pipe,
    ):
        pipe.step(inputs if rank == 0 else None, targets if rank == 1 else None)
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_that_hangs_says_so_itself(two_ranks: Any) -> None:
    for message in two_ranks.run(hanging_step, timeout=30):
        assert message.startswith("rank 1, action 1F0: stuck for"), message
        assert message.endswith("the output gradient of chunk 0, microbatch 0 was awaited for 2 s"), message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_every_rank(value: float) -> None:
    schedule, model, (inputs, targets) = schedules.zb_h1(2, 4), make_model(2), make_data(4)
    targets[4] = value  # of microbatch 2

    def rank_step(transport: LocalTransport) -> None:
        rank = transport.rank
        arguments = [model[rank]], schedule, nn.functional.mse_loss, transport
        with Pipeline(*arguments, options=StepOptions(nonfinite="raise")) as pipe:
            pipe.step(inputs if rank == 0 else None, targets if rank == 1 else None)

    for error in on_threads(2, rank_step):
        assert isinstance(error, PipelineError)
        assert str(error) == f"rank 1, action 1F2: FloatingPointError: the loss of microbatch 2 is {value}"


def run_out_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("no more")


@pytest.mark.parametrize(
    ("run_out", "expected"),
    [(run_out_on_a_gpu, "OutOfMemoryError: no more"), (lambda: torch.empty(1 << 52), "RuntimeError: .*allocate")],
)
def test_out_of_memory_tells_what_was_planned(run_out: Any, expected: str) -> None:
    for error in steps_with_broken_rank(1, run_out, 30, stages=2):
        message = f"rank 1, action 1F0: {expected}.*; the schedule holds 2 microbatches at its peak on this rank"
        assert re.search(message, str(error)), str(error)
        assert "a plan with a lower memory_limit" in str(error)


def test_what_is_awaited_from_a_rank_that_closed() -> None:
    first, second = LocalTransport.ring(2)
    first.close()
    with pytest.raises(PipelineError, match="rank 0 closed its pipeline while rank 1 awaited the output gradient"):
        second.receive(0, Tag(1, "B", 0, 2), timeout=10)


def calling(transport: Any, calls: tuple[str, ...]) -> None:
    """Makes these calls of a Pipeline of as many stages as there are ranks, none of which would fail by itself."""
    inputs, targets = make_data(4)
    size = torch.distributed.get_world_size() if transport is None else transport.size
    rank = torch.distributed.get_rank() if transport is None else transport.rank
    with Pipeline(
        make_model(size)[rank], schedules.zb_h1(size, 4), nn.functional.mse_loss, transport, timeout=9
    ) as pipe:
        for call in calls:
            getattr(pipe, call)(*((inputs, targets) if call != "gather" else (rank,)))


def calls_of(rank: int, odd: int, other: str) -> tuple[str, ...]:
    """The first rank's part of an evaluation waits for nobody: it hears of the others at its next call."""
    return ("step", other, "step") if rank == odd else ("step", "step")


@pytest.mark.parametrize("other", ["evaluate", "gather"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_that_makes_another_call_is_told_and_all_with_it(odd: int, other: str) -> None:
    start = time.monotonic()
    errors = on_threads(3, lambda t: calling(t, calls_of(t.rank, odd, other)))
    assert time.monotonic() - start < 8  # seconds: without a time-out
    for error in errors:
        assert isinstance(error, PipelineError)
        assert "ranks make different calls: call 5 of this pipeline is" in str(error)
        assert re.search(rf"{other} on rank {odd}\b", str(error)), str(error)


def calling_over_gloo(odd: int, other: str) -> str:
    with pytest.raises(PipelineError) as caught:
        calling(None, calls_of(torch.distributed.get_rank(), odd, other))
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("other", ["evaluate", "gather"])
def test_a_rank_that_makes_another_call_is_told_over_gloo(two_ranks: Any, odd: int, other: str) -> None:
    for message in two_ranks.run(calling_over_gloo, odd, other, timeout=30):
        assert re.search(rf"different calls: call \d+ .*{other} on rank {odd}\b", message), message


def test_a_rank_that_closes_early_is_named_by_those_that_are_no_neighbours() -> None:
    for error in on_threads(4, lambda t: calling(t, ("step",) if t.rank == 3 else ("step", "step")))[:3]:
        assert isinstance(error, PipelineError)
        assert "rank 3 closed its pipeline" in str(error)


def test_a_chunk_of_another_width_says_what_arrived_and_from_where() -> None:
    modules = [nn.Linear(6, 5), nn.Linear(6, 3)]

    def rank_steps(transport: LocalTransport) -> None:
        with Pipeline(modules[transport.rank], schedules.zb_h1(2, 2), nn.functional.mse_loss, transport) as pipe:
            pipe.step(torch.ones(4, 6), torch.ones(4, 3))

    for error in on_threads(2, rank_steps):
        assert "rank 1, action 1F0: RuntimeError: " in str(error)
        assert str(error).endswith("; its input, of chunk 0 on rank 0, was float32 [2, 5]")


RANK = """
import os, signal, sys, time
import torch
torch.distributed.init_process_group("gloo")
from torch import nn
import zbkern
from tests.support.chunks import make_data, make_model
from zbkern.pipeline import Pipeline, StepOptions, checkpoint, schedules
rank = torch.distributed.get_rank()
model, (inputs, targets) = make_model(3), make_data(6)
with Pipeline([zbkern.convert(model[rank])], schedules.zb_h1(3, 6), nn.functional.mse_loss, timeout=2) as pipe:
    for step in range(1000):
        pipe.step(inputs if rank == 0 else None, targets if rank == 2 else None)
        if step == 3:
            print("running", flush=True)
        if step == 4 and [str(rank)] == sys.argv[1:]:
            os.kill(os.getpid(), signal.SIGSTOP)
        if step >= 4 and sys.argv[1:]:
            zbkern.pipeline.clip_grad_norm_(model[rank].parameters(), 1.0, pipe)
"""


FROZEN = r"rank 0 did not send|rank 1, action \w+: waits for rank 0, which does not answer"


@pytest.mark.slow  # each starts three interpreters; test_fault_matrix.py kills ranks, and stops one that is waited for
@pytest.mark.dist
@pytest.mark.parametrize("itself", [False, True])
def test_a_first_rank_that_is_frozen_in_a_step_or_before_it_clips_ends_the_others(itself: bool) -> None:
    """Rank 2 waits for rank 1, and both name rank 0, which hosts the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(__file__).parents[3])
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="3", PYTHONPATH=root)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *(["0"] if itself else [])],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        output = ranks[0].stdout
        assert output is not None
        assert "running\n" in iter(output.readline, "")  # older gloo prints lines of its own before
        if not itself:
            ranks[0].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        messages = [rank.communicate(timeout=30)[1] for rank in ranks[1:]]
        assert time.monotonic() - start < 12  # 10 s, and the 2 s of the time-out
        for rank, message in zip(ranks[1:], messages, strict=True):
            assert rank.returncode not in (0, None)
            assert re.search(FROZEN, message), message
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("kind", [NoText, StopIteration])
def test_an_error_of_any_kind_is_known_to_all(kind: type[Exception]) -> None:
    """Whatever its text is, and also one that generators take for their end."""

    def broken() -> torch.Tensor:
        raise kind()

    for error in steps_with_broken_rank(1, broken, 20, stages=2):
        assert type(error) is PipelineError
        assert str(error).startswith(f"rank 1, action 1F0: {kind.__name__}: ")


def step_beside_a_forked_child() -> int:
    """The exit functions of a process that was forked between steps, and a failure in it, tell the others nothing."""
    rank, (inputs, targets) = torch.distributed.get_rank(), make_data(4)
    module = zbkern.convert(make_model(2)[rank])
    with Pipeline(module, schedules.zb_h1(2, 4), nn.functional.mse_loss, timeout=20) as pipe:
        optimizer = Optimizer(torch.optim.SGD(module.parameters(), 0.1), pipe)
        pipe.step(inputs, targets)
        optimizer.step()
        child = os.fork() if rank == 0 else 0
        if rank == 0 and child == 0:
            with contextlib.suppress(BaseException):
                pipe.transport.fail("of the child")
                pipe.close()
                atexit._run_exitfuncs()
            os._exit(0)
        if child:
            os.waitpid(child, 0)
        pipe.step(inputs, targets)
    return pipe.completed


@pytest.mark.dist
def test_a_forked_child_ends_alone(two_ranks: Any) -> None:
    assert two_ranks.run(step_beside_a_forked_child, timeout=40) == [2, 2]
