from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import make_data, make_model, needed, on_threads, one_rank, plain, run_pipelines
from zbkern import testing
from zbkern.pipeline import Pipeline, PipelineError, ScheduleError, StepOptions, schedules
from zbkern.pipeline.runtime.loop import Loop
from zbkern.pipeline.runtime.measure.clock import EventClock
from zbkern.pipeline.transport.base import LONGEST_TIMEOUT, Tag
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.schedules.actions import Action
from zbkern.schedules.program import merge_neighbours
from zbkern.schedules.schedule import Schedule


@pytest.mark.slow
def test_many_virtual_ranks() -> None:
    schedule, model, data = schedules.zb_h2(48, 50), make_model(48), make_data(50)
    expected = copy.deepcopy(model)
    plain(expected, *data)
    run_pipelines(schedule, [*map(zbkern.convert, model)], lambda pipe: pipe.step(*needed(pipe, *data)))
    testing.assert_same_gradients(nn.ModuleList(model), nn.ModuleList(expected), 1e-12)


def test_a_fused_backward_holds_nothing_for_w() -> None:
    (model,), (inputs, targets), seen = make_model(1), make_data(4), []
    expected = copy.deepcopy(model)
    plain([expected], inputs, targets)
    model.linear.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    with one_rank(zbkern.convert(model), schedules.one_f_one_b(1, 4)) as pipe:
        pipe.step(inputs, targets)
    assert pipe.queue.peak_bytes == 0
    assert len(seen) == 4  # hooks run once per backward
    testing.assert_same_gradients(model, expected, 1e-12)


def test_an_evaluation_leaves_every_module_in_its_mode() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Dropout().eval())
    seen = []
    module[2].register_forward_pre_hook(lambda part, _: seen.append((module.training, module[1].training)))
    with one_layer(modules=module) as pipe:
        pipe.evaluate(torch.ones(2, 2), torch.ones(2, 2))
    assert set(seen) == {(False, False)}
    assert [part.training for part in module.modules()] == [True, True, True, False]


def one_layer(modules: Any = None, **changes: Any) -> Pipeline:
    return one_rank(modules or [nn.Linear(2, 2)], schedules.one_f_one_b(1, 2), **changes)


def test_the_longest_timeout_can_be_waited() -> None:
    with one_layer(timeout=LONGEST_TIMEOUT) as pipe:
        assert pipe.step(torch.ones(2, 2), torch.ones(2, 2)) is not None
    first, second = LocalTransport.ring(2)
    threading.Timer(0.05, lambda: second.send(0, Tag(1, "B", 0, 0), "late")).start()
    assert first.receive(1, Tag(1, "B", 0, 0), LONGEST_TIMEOUT) == "late"


def test_ranks_with_different_schedules_are_refused_at_once() -> None:
    def errors(other: Schedule) -> list[Any]:
        def construct(transport: LocalTransport) -> None:
            schedule = other if transport.rank == 1 else schedules.zb_h1(3, 4)
            Pipeline(nn.Linear(2, 2), schedule, nn.functional.mse_loss, transport)

        return on_threads(3, construct)

    assert errors(replace(schedules.zb_h1(3, 4), name="the same")) == [None] * 3
    for other in (schedules.gpipe(3, 4), schedules.zb_h1(3, 8)):
        for error in errors(other):
            assert isinstance(error, ScheduleError)
            assert "rank 0 has <Schedule zb_h1: 3 ranks, 1 chunk each, 4 microbatches>, rank 1 another" in str(error)


@pytest.mark.parametrize("fill", ["planned", "eager"])
def test_a_chunk_that_was_not_converted_is_told_once(caplog: pytest.LogCaptureFixture, fill: str) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    modules = [frozen, nn.Linear(2, 2), zbkern.convert(nn.Linear(2, 2)), nn.Linear(2, 2)]
    data = torch.ones(4, 2), torch.ones(4, 2)
    run_pipelines(schedules.zb_v(2, 4), modules, lambda pipe: [pipe.step(*data) for _ in range(2)], fill=fill)
    told = sorted(record.getMessage().split(",")[0] for record in caplog.records)
    assert told == ["chunk 1: no W waits", "chunk 3: no W waits"]


def test_a_chunk_may_be_torchscript() -> None:
    layer = nn.Linear(2, 2)
    data = torch.ones(2, 2), torch.zeros(2, 2)
    with one_layer(modules=[torch.jit.trace(layer, data[0])]) as pipe:
        torch.testing.assert_close(pipe.step(*data), nn.functional.mse_loss(layer(data[0]), data[1]))
    expected = torch.autograd.grad(nn.functional.mse_loss(layer(data[0]), data[1]), [*layer.parameters()])
    torch.testing.assert_close([p.grad for p in layer.parameters()], [*expected])


def test_a_step_without_gradients_is_refused() -> None:
    with one_layer() as pipe:
        with torch.no_grad(), pytest.raises(RuntimeError, match="call evaluate for the loss alone"):
            pipe.step(torch.ones(2, 2), torch.ones(2, 2))
        assert pipe.step(torch.ones(2, 2), torch.ones(2, 2)) is not None


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda pipe: pipe.step(torch.ones(2, 2), torch.ones(2, 2)), "Pipeline.step: a call of this pipeline is runn"),
        (lambda pipe: pipe.evaluate(torch.ones(2, 2), torch.ones(2, 2)), "Pipeline.evaluate: a call of this pipelin"),
    ],
)
def test_what_a_loss_must_not_do_is_told(act: Callable[[Pipeline], object], message: str) -> None:
    wrong = [True]

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if wrong:
            act(pipe)
        return nn.functional.mse_loss(output, target)

    with one_layer(loss_fn=loss_fn) as pipe:
        with pytest.raises(PipelineError, match=message):
            pipe.step(torch.ones(2, 2), torch.ones(2, 2))
        wrong.clear()
        assert pipe.step(torch.ones(2, 2), torch.ones(2, 2)) is not None


class TurnsGradientsOff(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return super().forward(x)


def test_a_chunk_that_turns_gradients_off_is_told() -> None:
    with one_layer(modules=[TurnsGradientsOff(2, 2)]) as pipe:
        with pytest.raises(PipelineError, match="chunk 0 must leave torch's grad mode as it was"):
            pipe.step(torch.ones(2, 2), torch.ones(2, 2))
        assert torch.is_grad_enabled()


def test_a_pipeline_that_was_closed_says_so() -> None:
    with one_layer() as pipe:
        pass
    for name in ("step", "evaluate"):
        with pytest.raises(RuntimeError, match=f"Pipeline.{name}: this pipeline was closed; construct another"):
            getattr(pipe, name)(torch.ones(2, 2), torch.ones(2, 2))
    pipe.close()


def test_a_pipeline_is_usable_after_an_error_in_its_arguments() -> None:
    with one_layer() as pipe:
        with pytest.raises(ValueError, match="targets must be given"):
            pipe.step(torch.ones(2, 2))
        assert pipe.step(torch.ones(2, 2), torch.ones(2, 2)) is not None


def test_neighbouring_w_of_one_chunk_run_together() -> None:
    actions = [Action.parse(text) for text in ("0B0", "0W0", "0W1", "2W0", "0F3", "0W2")]
    groups = [[str(action) for action in group] for group in merge_neighbours(actions)]
    assert groups == [["0B0"], ["0W0", "0W1"], ["2W0"], ["0F3"], ["0W2"]]


def test_w_is_filled_in_by_the_clock_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has launched everything ahead would see no message yet, and launch all W before the next B."""
    calls: dict[int, list[str]] = {}

    def logged(name: str, function: Any) -> Any:
        def wrapper(self: Any, *arguments: Any) -> Any:
            calls.setdefault(threading.get_ident(), []).append(name)
            return function(self, *arguments)

        return wrapper

    monkeypatch.setattr(EventClock, "wait", logged("wait", EventClock.wait))
    monkeypatch.setattr(Loop, "_await", logged("await", Loop._await))
    monkeypatch.setattr(LocalTransport, "receive", logged("receive", LocalTransport.receive))
    monkeypatch.setattr(Loop, "_run_oldest", logged("W", Loop._run_oldest))
    chunks = [*map(zbkern.convert, make_model(2))]
    step = lambda pipe: pipe.step(*needed(pipe, *make_data(4)))  # noqa: E731
    run_pipelines(schedules.zb_h1(2, 4), chunks, step, delay=lambda *_: 0.02, fill="eager")
    pairs = [pair for names in calls.values() for pair in pairwise(names)]
    assert ("wait", "W") in pairs
    assert ("await", "W") not in pairs


def test_samples_of_the_queue() -> None:
    def check(pipe: Pipeline, record: bool) -> None:
        pipe.step(*needed(pipe, *make_data(4)))
        if not record:
            assert pipe.last.samples == []
            return
        pending = [sample.pending for sample in pipe.last.samples]
        assert len(pending) == len(list(merge_neighbours(pipe.schedule.actions[pipe.rank])))
        assert max(pending) > 0
        assert pending[-1] == 0
        assert all((sample.pinned > 0) == (sample.pending > 0) for sample in pipe.last.samples)
        assert [s.seconds for s in pipe.last.samples] == sorted(s.seconds for s in pipe.last.samples)

    for record in (True, False):
        chunks, options = [*map(zbkern.convert, make_model(2))], StepOptions(record=record)
        run_pipelines(schedules.zb_h1(2, 4), chunks, lambda pipe, r=record: check(pipe, r), options=options)


def test_profilers_see_the_names_of_the_actions() -> None:
    with one_layer() as pipe:
        with torch.profiler.profile() as profiler:
            pipe.step(torch.ones(2, 2), torch.ones(2, 2))
        names = {event.name for event in profiler.events()}
    assert {str(action) for action in pipe.schedule.actions[0]} <= names


def profiled_steps() -> None:
    schedule = schedules.one_f_one_b(2, 2)
    with Pipeline(nn.Linear(2, 2), schedule, nn.functional.mse_loss) as pipe:
        for _ in range(10):
            with torch.profiler.profile() as profiler:
                pipe.step(torch.ones(2, 2), torch.ones(2, 2))
            names = {event.name for event in profiler.events()}
            assert {str(action) for action in pipe.schedule.actions[pipe.rank]} <= names
            del profiler
            gc.collect()  # what still writes into the profile now writes into freed memory


@pytest.mark.dist
def test_messages_may_outlive_a_profile(two_ranks: Any) -> None:
    two_ranks.run(profiled_steps)


def test_w_that_communicates_needs_a_planned_order() -> None:
    data = make_data(2)
    with one_rank(make_model(1), schedules.gpipe(1, 2), fill="eager") as pipe:
        pipe.queue.regather_inputs = True
        with pytest.raises(ValueError, match='fill="planned"'):
            pipe.step(*data)
        pipe.queue.regather_inputs = False
        assert pipe.step(*data) is not None
