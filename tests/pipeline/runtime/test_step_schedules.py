"""Another schedule in every step of one Pipeline: what does not fit is told, and what a timeline and a loss see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zbkern
from tests.support.chunks import make_data, make_model, run_pipelines
from zbkern.pipeline import Pipeline, PipelineError, Schedule, ScheduleError, schedules

V = schedules.zb_v


def batch(microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    inputs, targets = make_data(microbatches)
    return [*inputs.chunk(microbatches)], [*targets.chunk(microbatches)]


def failing(function: Callable[[Pipeline], Any]) -> list[str]:
    """What each rank raises, which then still has a pipeline that trains."""

    def run(pipe: Pipeline) -> str:
        with pytest.raises((PipelineError, ScheduleError, TypeError, ValueError)) as raised:
            function(pipe)
        pipe.step(*batch(2), schedule=V(2, 2))
        return str(raised.value)

    return run_pipelines(V(2, 2), [*map(zbkern.convert, make_model(4))], run)


HALF = schedules.v_half


@pytest.mark.parametrize(
    ("count", "by_rank", "messages"),
    [
        (3, [V(2, 3), HALF(2, 3)], ["step of zb_v with 3 microbatches", "step of v_half with 3 microbatches"]),
        (2, [None, HALF(2, 2)], ["ranks make different calls"]),
        (2, [schedules.interleaved(2, 2, chunks=2)] * 2, ["schedule must have this pipeline's chunks in the same pl"]),
        (2, [schedules.zb_h1(2, 2)] * 2, ["schedule must have this pipeline's chunks in the same places"]),
        (2, ["zb_v"] * 2, ["Pipeline.step: schedule must be a Schedule, such as", "that makes one; got 'zb_v'"]),
        (2, [V(2, 3)] * 2, ["inputs is a list of 2 microbatches and the schedule has 3"]),
    ],
)
def test_a_schedule_that_does_not_fit_is_told(count: int, by_rank: list[Any], messages: list[str]) -> None:
    for said in failing(lambda pipe: pipe.step(*batch(count), schedule=by_rank[pipe.rank])):
        assert all(message in said for message in messages)


REORDERED = [sorted(row, key=lambda action: action.kind == "W") for row in V(2, 4).actions]


@pytest.mark.parametrize(
    ("own", "given", "message"),
    [
        (
            Schedule.build(REORDERED, V(2, 4).placement, 4, "zb_v"),  # another order under a published name
            batch(3),
            r"list of 3 microbatches and the schedule has 4; .* or schedule= for that",
        ),
        (lambda count: V(2, count), make_data(3), "needs lists of microbatches"),
    ],
)
def test_what_is_no_rule_for_a_batch_is_told(own: Any, given: Any, message: str) -> None:
    def run(pipe: Pipeline) -> None:
        with pytest.raises((ValueError, PipelineError), match=message):
            pipe.step(*given)
        pipe.step(*given, schedule=V(2, 3))

    schedule = own if isinstance(own, Schedule) else V(2, 2)
    run_pipelines(schedule, [*map(zbkern.convert, make_model(4))], run, own=own)


def test_an_evaluation_with_another_schedule_leaves_the_timeline_of_the_step() -> None:
    def run(pipe: Pipeline) -> None:
        pipe.step(*batch(2))
        before = pipe.last.timeline
        pipe.evaluate(*batch(5), schedule=V(2, 5))
        assert pipe.last.timeline.events == before.events
        assert pipe.schedule.microbatches == 2

    run_pipelines(V(2, 2), [*map(zbkern.convert, make_model(4))], run)


def test_forward_gives_what_the_loss_function_gives_and_calls_it_once_for_each_microbatch() -> None:
    """A policy's log-probabilities: those of an evaluation and those of the step after it are the same bits."""
    inputs, targets = batch(3)
    labels = [target.argmax(-1) for target in targets]
    kept: list[Tensor] = []
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        found = output.log_softmax(-1).gather(-1, target[..., None])[..., 0]
        if not torch.is_grad_enabled():
            return found
        kept.append(found.detach())
        return -found.mean()

    def run(pipe: Pipeline) -> None:
        before = pipe.forward(inputs, labels, schedule=V(2, 3))
        if pipe.rank == 0:
            assert len(calls) == 3
        pipe.step(inputs, labels, schedule=V(2, 3))
        if before is not None:
            assert all(torch.equal(one, other) for one, other in zip(before, kept, strict=True))

    run_pipelines(V(2, 2), [*map(zbkern.convert, make_model(4))], run, loss)
