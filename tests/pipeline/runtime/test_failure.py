"""A rank that raises, hangs, freezes or dies: every other rank ends soon, with one message that says who and where."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbkern
from tests.support.chunks import make_data, make_model, needed, on_threads, plain, run_pipelines
from tests.support.patience import patiently
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, schedules
from zbkern.pipeline.transport import distributed
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.distributed import DistributedTransport
from zbkern.pipeline.transport.framing import Incoming
from zbkern.pipeline.transport.local import LocalTransport


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def failing_then_working(
    transport: Any, error: BaseException | None = None, spoil: Any = None, call: int = 3
) -> tuple[str, Any]:
    """The error of a step whose loss raises in its third call, or whose targets are spoiled on the last rank; and the
    gradients of the next step of the same pipeline."""
    model, (inputs, targets), calls = make_model(2), make_data(4), []
    rank = torch.distributed.get_rank() if transport is None else transport.rank

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if error is not None and len(calls) == call:
            raise error
        return nn.functional.mse_loss(output, target)

    with Pipeline([zbkern.convert(model[rank])], schedules.zb_h1(2, 4), loss_fn, transport, timeout=60) as pipe:
        with pytest.raises((PipelineError, ValueError, TypeError, KeyboardInterrupt, SystemExit)) as caught:
            pipe.step(inputs, spoil(targets) if spoil else targets)
        model[rank].zero_grad()
        pipe.step(inputs if rank == 0 else None, targets if rank == 1 else None)
    return f"{type(caught.value).__name__}: {caught.value}", [p.grad for p in model[rank].parameters()]


def check_failing_then_working(results: list[Any], first: str, last: str) -> None:
    """first, last: how the errors of the two ranks begin."""
    expected = make_model(2)
    plain(expected, *make_data(4))
    for module, (message, gradients), said in zip(expected, results, (first, last), strict=True):
        assert message.startswith(said)
        for found, parameter in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


SAID = "PipelineError: rank 1, action 1F2: "
BATCH = "Pipeline.step: dimension 0 of targets must be a multiple of the 4 microbatches; got [7, 5, 3]"


@pytest.mark.parametrize(
    ("trouble", "first", "last"),
    [
        ({"error": ArithmeticError("wrong")}, f"{SAID}ArithmeticError: wrong", f"{SAID}ArithmeticError: wrong"),
        ({"error": NoText()}, f"{SAID}NoText: ", f"{SAID}NoText: "),
        ({"error": StopIteration()}, f"{SAID}StopIteration: ", f"{SAID}StopIteration: "),  # as generators end
        ({"error": KeyboardInterrupt("by hand")}, f"{SAID}KeyboardInterrupt: by hand", "KeyboardInterrupt: by hand"),
        ({"error": SystemExit("by hand")}, f"{SAID}SystemExit: by hand", "SystemExit: by hand"),
        (
            {"spoil": lambda targets: targets[:-1]},
            f"PipelineError: rank 1: ValueError: {BATCH}",
            f"ValueError: {BATCH}",
        ),
    ],
)
def test_every_rank_hears_of_it_and_the_pipeline_goes_on(trouble: dict[str, Any], first: str, last: str) -> None:
    def rank_steps(transport: LocalTransport) -> tuple[str, Any]:
        return failing_then_working(transport, **(trouble if "error" in trouble or transport.rank else {"spoil": None}))

    check_failing_then_working(on_threads(2, rank_steps), first, last)


@pytest.mark.parametrize("loads", [False, True])
def test_ranks_that_had_completed_what_failed_elsewhere_are_told(loads: bool, tmp_path: Path) -> None:
    """Another batch, and weights of another step, would go on with the others' in silence."""
    finished, failed = threading.Event(), []

    def hook(rank: int) -> None:
        if rank == 0 and finished.wait(0 if failed else 60) and not failed:
            failed.append(rank)
            raise ArithmeticError("a broken hook")

    def rank_steps(transport: LocalTransport) -> list[str]:
        rank, (inputs, targets), errors = transport.rank, make_data(1), []
        module = zbkern.convert(make_model(2)[rank])
        module.linear.bias.register_post_accumulate_grad_hook(lambda _: hook(rank))
        with Pipeline(module, schedules.zb_h1(2, 1), nn.functional.mse_loss, transport, timeout=60) as pipe:
            checkpoint.save(tmp_path, 0, pipe, rename=lambda chunk, key: f"{chunk}.{key}")
            for _ in range(4):
                try:
                    pipe.step(inputs, targets)
                    finished.set()  # the last rank, while the first is in its last W
                except PipelineError as error:
                    errors.append(str(error))
                    if loads and len(errors) == 1:
                        checkpoint.load(tmp_path, pipe, rename=lambda chunk, key: f"{chunk}.{key}")
                if len(errors) == (1 if loads else 2):
                    break
            pipe.step(inputs, targets)
        return errors

    for errors in on_threads(2, rank_steps):
        assert "rank 0, action 0" in errors[0]
        assert loads or "not at the same step after a failure" in errors[1]
        assert loads or "step after 0, step after 1" in errors[1]


def test_a_second_mistake_in_a_row_is_named_as_the_first_was() -> None:
    class WithSide(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def split_batch(self, batch: Any) -> Any:
            return {"x": batch["x"]}, {"mask": batch["mask"]}

        def forward(self, *received: torch.Tensor, mask: torch.Tensor, **first: torch.Tensor) -> Any:
            return self.module(*received, **first)

    inputs, targets = make_data(2)
    batch = {"x": inputs, "mask": torch.ones(len(targets))}

    def steps(pipe: Pipeline) -> list[str]:
        errors = []
        for wrong in (True, True, False, True):
            time.sleep(0.1 * pipe.rank)  # messages of the first rank may be there
            with pytest.raises((PipelineError, ValueError)) if wrong else contextlib.nullcontext() as caught:
                pipe.step(batch, None if wrong else targets)
            errors += [str(caught.value)] if wrong else []
        return errors

    for errors in run_pipelines(schedules.zb_h1(2, 2), [*map(WithSide, make_model(2))], steps, timeout=60):
        assert all("Pipeline.step: targets must be given on this rank; got None; a loss" in error for error in errors)


def constructing_apart(wrong: bool, scale: float) -> list[Any]:
    """The error of a rank that waits for one that comes too late, or whose arguments are wrong, and of that one; what
    both gather after it."""
    rank = torch.distributed.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    usual = store.timeout
    module, *arguments = zbkern.convert(make_model(2)[rank]), schedules.zb_h1(2, 2), nn.functional.mse_loss
    try:
        store.set_timeout(usual if wrong else timedelta(seconds=scale))
        if rank == 1 and not wrong:
            time.sleep(2.5 * scale)
        with pytest.raises(ValueError if wrong and rank == 1 else PipelineError) as caught:
            Pipeline([module] * (1 + rank * wrong), *arguments)
    finally:
        store.set_timeout(usual)
    with Pipeline(module, *arguments) as pipe:
        return [str(caught.value), pipe.gather({"rank": rank})]


@pytest.mark.dist
@pytest.mark.parametrize("wrong", [False, True])
def test_a_rank_that_does_not_construct_its_pipeline_is_named(two_ranks: Any, wrong: bool) -> None:
    def check(scale: float) -> None:
        said = "rank 1 holds chunks [1]" if wrong else f"Pipeline: rank 1 did not come to 'connect' in {scale:g} s"
        for message, gathered in two_ranks.run(constructing_apart, wrong, scale):
            assert said in message, message
            assert gathered == [{"rank": 0}, {"rank": 1}]

    patiently(check)


def own_threads() -> set[threading.Thread]:
    """Those of pipelines in this process, also of earlier tests that have not closed theirs."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("zbkern-")}


def failing_over_gloo(slow_receiver: bool) -> tuple[str, Any]:
    if not slow_receiver:
        return failing_then_working(None, ArithmeticError("wrong"))
    receive, kept, alive, others = Incoming.receive, [], [], own_threads()

    def receive_late(incoming: Incoming) -> Any:
        time.sleep(0.05 if incoming._peer == 0 else 0)
        return receive(incoming)

    def keep_open(transport: DistributedTransport) -> None:  # as what else is under way may do
        alive.extend(thread.name for thread in own_threads() - others)
        kept.extend([transport._up, transport._down])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Incoming, "receive", receive_late)
        patch.setattr(DistributedTransport, "_close_communicators", keep_open)
        found = failing_over_gloo(False)
    assert not alive, "these waited in vain for the last message of a peer"
    return found


@pytest.mark.dist
@pytest.mark.parametrize("slow_receiver", [False, True])
def test_every_rank_hears_of_it_and_the_pipeline_goes_on_over_gloo(two_ranks: Any, slow_receiver: bool) -> None:
    said = f"{SAID}ArithmeticError: wrong"
    check_failing_then_working(two_ranks.run(failing_over_gloo, slow_receiver), said, said)


def closing_before_all_is_read() -> list[str]:
    """Names of threads that have not ended long after, where no rank waits for the others."""
    kept, receive, others = [], Incoming.receive, own_threads()

    def keep_open(transport: DistributedTransport) -> None:  # as where others use the connections
        kept.extend([transport._up, transport._down])

    def receive_late(incoming: Incoming) -> Any:
        time.sleep(0.05 if incoming._peer == 0 else 0)
        return receive(incoming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Incoming, "receive", receive_late)
        patch.setattr(DistributedTransport, "_close_communicators", keep_open)
        patch.setattr(distributed, "_TOGETHER", 0.0)
        failing_then_working(None, ArithmeticError("wrong"))
        deadline = time.monotonic() + 60
        while names := [each.name for each in own_threads() - others]:
            if time.monotonic() > deadline:
                return names
            time.sleep(0.01)
    return []


@pytest.mark.dist
def test_threads_end_though_a_rank_closes_before_it_has_read_all(two_ranks: Any) -> None:
    assert two_ranks.run(closing_before_all_is_read) == [[], []]


class Broken(nn.Module):
    def __init__(self, action: Any) -> None:
        super().__init__()
        self.action = action

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.action()


def steps_with_broken_rank(broken: int, action: Any, timeout: float, stages: int = 4) -> list[Any]:
    model, data = make_model(stages), make_data(stages)
    model[broken] = Broken(action)
    step = lambda pipe: pipe.step(*needed(pipe, *data))  # noqa: E731
    return run_pipelines(schedules.zb_h1(stages, stages), model, step, keep_errors=True, timeout=timeout)


def test_the_rank_that_hangs_is_named_by_those_that_wait_for_others() -> None:
    def check(scale: float) -> None:
        def hang() -> torch.Tensor:
            time.sleep(2 * scale)
            raise RuntimeError("too late to matter")

        line = hang.__code__.co_firstlineno + 1
        errors = steps_with_broken_rank(2, hang, 0.5 * scale)
        for rank in (0, 1, 3):
            assert isinstance(errors[rank], PipelineError)
            stuck = rf"rank 2, action 2F0: stuck for .* s, at runtime/test_failure.py:{line};"
            assert re.search(stuck, str(errors[rank])), errors[rank]
            assert f"was awaited for {0.5 * scale:g} s" in str(errors[rank])

    patiently(check)


def gather_on_the_last_rank_alone(scale: float) -> str:
    """As a metric does that is computed where the logits are."""
    chunk, x = nn.Linear(2, 2), torch.ones(2, 2)
    with Pipeline([chunk], schedules.zb_h1(2, 2), nn.functional.mse_loss, timeout=2 * scale) as pipe:
        pipe.step(x, x)
        if pipe.rank == 1:
            dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))
        with pytest.raises(PipelineError) as caught:
            pipe.step(x, x)
        if pipe.rank == 0:
            dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))  # for the other to go on
        pipe.step(x, x)
    return str(caught.value)


@pytest.mark.dist
def test_a_collective_that_one_rank_is_in_alone_is_named(two_ranks: Any) -> None:
    def check(scale: float) -> None:
        stuck = r"rank 1, action none: stuck for .* s in torch\.distributed\.\w+\.all_gather, at runtime/"
        for error in two_ranks.run(gather_on_the_last_rank_alone, scale):
            assert re.search(stuck, error), error

    patiently(check)


def run_out_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("no more")


@pytest.mark.parametrize(
    ("run_out", "expected"),
    [(run_out_on_a_gpu, "OutOfMemoryError: no more"), (lambda: torch.empty(1 << 52), "RuntimeError: .*allocate")],
)
def test_out_of_memory_tells_what_was_planned(run_out: Any, expected: str) -> None:
    for error in steps_with_broken_rank(1, run_out, 30, stages=2):
        message = f"rank 1, action 1F0: {expected}.*; the schedule holds 2 units at its peak on this rank"
        assert re.search(message, str(error)), str(error)
        assert "a plan with a lower memory_limit" in str(error)


def calling(transport: Any, calls: tuple[str, ...]) -> None:
    """Makes these calls of a Pipeline of as many stages as there are ranks, none of which would fail by itself."""
    inputs, targets = make_data(4)
    size = torch.distributed.get_world_size() if transport is None else transport.size
    rank = torch.distributed.get_rank() if transport is None else transport.rank
    with Pipeline(make_model(size)[rank], schedules.zb_h1(size, 4), nn.functional.mse_loss, transport) as pipe:
        for call in calls:
            getattr(pipe, call)(*((inputs, targets) if call != "gather" else (rank,)))


def calls_of(rank: int, odd: int, other: str) -> tuple[str, ...]:
    """The first rank's part of an evaluation waits for nobody: it hears of the others at its next call."""
    return ("step", other, "step") if rank == odd else ("step", "step")


@pytest.mark.parametrize("other", ["evaluate", "gather"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_that_makes_another_call_is_told_and_all_with_it(odd: int, other: str) -> None:
    errors = on_threads(3, lambda t: calling(t, calls_of(t.rank, odd, other)))  # without a time-out
    for error in errors:
        assert isinstance(error, PipelineError)
        assert "ranks make different calls: call 5 of this pipeline is" in str(error)
        assert re.search(rf"{other} on rank {odd}\b", str(error)), str(error)


def calling_over_gloo(odd: int, other: str) -> str:
    with pytest.raises(PipelineError) as caught:
        calling(None, calls_of(torch.distributed.get_rank(), odd, other))
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_that_makes_another_call_is_told_over_gloo(two_ranks: Any) -> None:
    for message in two_ranks.run(calling_over_gloo, 1, "evaluate"):
        assert re.search(r"different calls: call \d+ .*evaluate on rank 1\b", message), message


def test_a_rank_that_closes_early_is_named_by_those_that_are_no_neighbours() -> None:
    for error in on_threads(4, lambda t: calling(t, ("step",) if t.rank == 3 else ("step", "step")))[:3]:
        assert isinstance(error, PipelineError)
        assert re.search("rank 3 closed its pipeline|close on rank 3", str(error))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("undo", ["snapshot", None])
def test_a_rank_that_catches_an_error_and_closes_is_not_waited_for(ranks: int, odd: int, undo: str | None) -> None:
    """Its last optimizer step waits for ranks that wait for it: nobody would see the end of a long time-out."""

    def rank_loop(transport: LocalTransport) -> None:
        module = nn.Linear(6, 6)
        pipe = Pipeline(module, schedules.zb_h2(ranks, 4), nn.functional.mse_loss, transport, timeout=600)
        optimizer = Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), pipe, undo=undo)
        for _ in range(2):
            pipe.step(torch.ones(8, 6), torch.ones(8, 6))
            optimizer.step()
        if transport.rank != odd % ranks:
            pipe.step(torch.ones(8, 6), torch.ones(8, 6))
        pipe.close()

    for rank, error in enumerate(on_threads(ranks, rank_loop)):
        assert (rank == odd % ranks and error is None) or (isinstance(error, PipelineError) and "close" in str(error))


def test_a_first_step_beside_another_call_is_named_as_a_step() -> None:
    def call(pipe: Pipeline) -> Any:
        return (
            pipe.step(torch.ones(4, 6), torch.ones(4, 6)) if pipe.rank == 0 else pipe.evaluate(None, torch.ones(4, 6))
        )

    for error in run_pipelines(schedules.zb_h1(2, 2), [nn.Linear(6, 6), nn.Linear(6, 6)], call, keep_errors=True):
        assert "is step on rank 0 and evaluate on rank 1" in str(error)


def step_beside_a_forked_child() -> int:
    """The exit functions of a process that was forked between steps, and a failure in it, tell the others nothing."""
    rank, (inputs, targets) = torch.distributed.get_rank(), make_data(4)
    module = zbkern.convert(make_model(2)[rank])
    with Pipeline(module, schedules.zb_h1(2, 4), nn.functional.mse_loss, timeout=60) as pipe:
        optimizer = Optimizer(torch.optim.SGD(module.parameters(), 0.1), pipe)
        pipe.step(inputs, targets)
        optimizer.step()
        child = os.fork() if rank == 0 else 0
        if rank == 0 and child == 0:
            with contextlib.suppress(BaseException):
                pipe._calls.transport.fail("of the child")
                pipe.close()
                atexit._run_exitfuncs()
            os._exit(0)
        if child:
            os.waitpid(child, 0)
        pipe.step(inputs, targets)
    return pipe._calls.completed


@pytest.mark.dist
def test_a_forked_child_ends_alone(two_ranks: Any) -> None:
    assert two_ranks.run(step_beside_a_forked_child) == [2, 2]
