"""A Pipeline whose passes run beside each other: order and failures. Gradients are in `test_differential.py`."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.chunks import assert_same, one_rank, results_on_threads
from tests.support.random_chunks import InFlight, Noise, _InFlight
from tests.support.schedules import schedule_of
from zbkern.pipeline import Pipeline, PipelineError, Schedule, schedules
from zbkern.pipeline.runtime.overlap.passes import Passes

WIDTH = 4


class Noted(nn.Module):
    """Notes when it runs, in F and in B, before and after it gives way."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes, self.fails = name, notes, ""
        self.linear = zbkern.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def note(self, what: str) -> None:
        self.notes.append(f"{self.name}{what}")
        if self.fails == what:
            raise ValueError(f"{what} of {self.name}")

    def forward(self, x: Tensor) -> Tensor:
        return _Notes.apply(self.linear(x), self)


class _Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Noted) -> Tensor:
        ctx.module = module
        module.note("F")
        zbkern.in_flight()
        module.note("f")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.note("B")
        zbkern.in_flight()
        ctx.module.note("b")
        return gradient, None


def noted_pipeline(schedule: Schedule | None = None) -> tuple[Pipeline, list[str], list[Noted]]:
    notes: list[str] = []
    modules = [Noted(str(chunk), notes) for chunk in range(2)]
    return one_rank(modules, schedule or schedules.dualpipe_v(1, 3), lambda y, _: y.sum()), notes, modules


def batch(count: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.ones(1, WIDTH, dtype=torch.float64) for _ in range(count)], [torch.zeros(1)] * count


def test_passes_take_turns_at_collectives() -> None:
    pipe, notes, _ = noted_pipeline()
    with pipe:
        before = threading.active_count()
        pipe.step(*batch())
        assert threading.active_count() == before
    assert pipe.schedule.to_csv(header=False).startswith(
        "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,(0F2;1B1)OVERLAP_F_B,(1F2;0B1)OVERLAP_F_B,"
    )
    assert " ".join(notes[8:20]) == "1F 0B 1f 0b 0F 1B 0f 1b 1F 0B 1f 0b"


def test_a_schedule_without_groups_takes_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread, no turn, and nothing to give way to."""
    started: list[Any] = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    monkeypatch.setattr(Passes, "run", lambda *_: started.append("turns"))
    pipe, notes, modules = noted_pipeline(schedule=replace(schedules.dualpipe_v(1, 3), beside=()))
    for module in modules:
        module.register_forward_pre_hook(lambda *_: started.append(zbkern.wgrad.queue.thread.give_way))
    with pipe:
        pipe.step(*batch())
    assert started == [None] * 6
    assert " ".join(notes[8:20]) == "1F 1f 0B 0b 0F 0f 1B 1b 1F 1f 0B 0b"


@pytest.mark.parametrize("what", ["F", "f", "B", "b"])
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_failure_names_the_pass_that_failed(what: str, chunk: int) -> None:
    pipe, notes, modules = noted_pipeline()
    before = threading.active_count()
    module = modules[chunk]
    module.note = lambda each, note=module.note: _fail_at(module, note, each, what, pipe)  # type: ignore[method-assign]
    expected = f"rank 0, action {chunk}{'F' if what in 'Ff' else 'BW'}"
    with pytest.raises(PipelineError, match=f"{expected}.: ValueError: {what} of {chunk}"):
        pipe.step(*batch())
    assert threading.active_count() == before
    del module.note
    notes.clear()
    pipe.step(*batch())  # and goes on
    assert len(notes) == 24


def _fail_at(module: Noted, note: Any, what: str, wanted: str, pipe: Pipeline) -> None:
    if what == wanted and zbkern.wgrad.queue.thread.give_way is not None:
        module.fails = wanted
    try:
        note(what)
    finally:
        module.fails = ""


def test_other_ranks_hear_of_a_failure_within_a_pair() -> None:
    schedule = schedules.dualpipe_v(2, 6)

    def run(transport: Any) -> str:
        modules = [nn.Sequential(InFlight(), InFlight()).double() for _ in range(2)]
        if transport.rank == 1:
            modules[1][0].register_full_backward_pre_hook(fail_beside)
        with pytest.raises(PipelineError) as error, Pipeline(modules, schedule, mse, transport) as pipe:
            pipe.step(*batch(6))
        return str(error.value)

    first, second = results_on_threads(2, run)
    assert first == second
    assert first.startswith("rank 1, action 2BW")
    assert "beside" in first


def mse(y: Tensor, _: Tensor) -> Tensor:
    return y.square().mean()


def fail_beside(*_: Any) -> None:
    if zbkern.wgrad.queue.thread.give_way is not None:
        raise RuntimeError("beside")


def test_a_message_that_never_comes_is_named_before_a_pair_begins() -> None:
    def run(transport: Any) -> str:
        modules = [InFlight().double() for _ in range(2)]
        if transport.rank == 1:
            modules[0].register_forward_pre_hook(lambda *_: time.sleep(1.5))
        with pytest.raises(PipelineError) as error, Pipeline(modules, schedule, mse, transport, timeout=0.5) as pipe:
            pipe.step(*batch(6))
        return str(error.value)

    schedule = schedules.dualpipe_v(2, 6)
    first, _ = results_on_threads(2, run)
    assert "was awaited for 0.5 s" in first


def test_profiler_ranges_and_timelines_have_every_pass() -> None:
    pipe, _, _ = noted_pipeline()
    with pipe, torch.profiler.profile() as profiler:
        pipe.step(*batch())
    names = {event.key for event in profiler.key_averages()}
    assert {"1F1+0BW0", "1F1", "0F0"} <= names  # threads of the profiler's caller alone are in a profile
    events = pipe.last.timeline.events[0]
    assert [event.action for event in events] == [*pipe.schedule.actions[0]]
    forward, backward = events[4:6]
    assert forward.start <= backward.start < forward.end


def test_w_runs_beside_passes_one_task_at_a_turn() -> None:
    notes: list[str] = []
    made = schedule_of("0F0 0B0 0W0 0F1 0B1 0W1 0F2 0B2 0W2", microbatches=3)
    schedule = Schedule.build(made.actions, [0], 3, beside=[[(2, 4), (5, 7)]])
    module = nn.Sequential(Noted("0", notes), Noted("1", notes))
    with one_rank([module], schedule, mse) as pipe:
        pipe.queue.listeners.append(lambda tasks: notes.append("W"))
        pipe.step(*batch())
    assert " ".join(notes[8:16]) == "W 0F W 0f 1F 1f 1B 1b"
    got = [p.grad for p in module.parameters()]
    for p in module.parameters():
        p.grad = None
    sum(mse(module(x), x) / 3 for x in batch()[0]).backward()
    for mine, parameter in zip(got, module.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", ["0R0 1F1", "1F1 0R0", "0R0 1F1 1W0", "0R0 1W0"])
def test_a_recomputation_runs_beside_passes_and_draws_what_its_forward_drew(row: str) -> None:
    """Torch's numbers and Python's; what those beside it draw is what they draw after or before it."""
    passes = row.split()
    left = " ".join(each for each in ("1F1", "1W0") if each not in passes)
    line = f"0F0 1F0 1B0 0F1 {row} {left} 0B0 0W0 1B1 1W1 0B1 0W1"
    plain = schedule_of(line, microbatches=2, placement=[0, 0])
    groups = Schedule.build(plain.actions, [0, 0], 2, beside=[[(4, 4 + len(passes))]])
    torch.manual_seed(0)
    first = [nn.Sequential(Noise(), InFlight(), Noise(), InFlight(), Noise()).double() for _ in range(2)]
    results = []
    for schedule in (plain, groups):
        modules = copy.deepcopy(first)
        torch.manual_seed(1)
        random.seed(1)
        turns = 0

        def count(*_: Any) -> None:
            nonlocal turns
            turns += zbkern.wgrad.queue.thread.give_way is not None

        modules[0][1].register_forward_pre_hook(count)
        xs = [torch.randn(8, WIDTH, dtype=torch.float64) for _ in range(2)]
        zbkern.convert(nn.ModuleList(modules))
        with one_rank(modules, schedule, mse) as pipe:
            losses = [pipe.step(xs, xs) for _ in range(2)]
        gradients = [p.grad for module in modules for p in module.parameters()]
        results.append((*losses, gradients, torch.rand(3), random.random()))
        assert turns == 2 * (schedule is groups)
    assert_same(*results)


def test_collectives_cover_no_w_whose_tensors_are_offloaded() -> None:
    schedule = schedule_of("0F0 0B0 0O0 0F1 0L0 0B1 0W0 0W1", microbatches=2)
    module = nn.Sequential(InFlight(), InFlight()).double()
    zbkern.convert(module)
    xs = [torch.randn(8, WIDTH, dtype=torch.float64) for _ in range(2)]
    with one_rank([module], schedule, mse) as pipe:
        pipe.queue.wgrads_per_collective = 3
        pipe.step(xs, xs)
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    sum(mse(module(x), x) / 2 for x in xs).backward()
    for mine, parameter in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-12)


class Keeps(nn.Module):
    """Keeps what belongs to a forward while a collective is in flight."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def inner(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.linear(x))
        return _InFlight.apply(x) * self.kept

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


ONE_CHUNK = ["0F0 0F1+0B0 0W0 0F2+0B1 0W1 0B2 0W2", "0F0 0B0+0F1 0W0 0B1+0F2 0W1 0B2 0W2"]


def steps_of_one_chunk(module: nn.Module, row: str, steps: int = 2) -> tuple[list[Tensor], int]:
    """The gradients of these steps, and how many forwards ran beside a backward."""
    first = [at for at, each in enumerate(row.replace("+", " + ").split()) if each == "+"]
    ranges = [(at - 1 - number, at + 1 - number) for number, at in enumerate(first)]
    made, turns = schedule_of(row.replace("+", " "), microbatches=3), 0
    xs = [torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(3)]

    def count(*_: Any) -> None:
        nonlocal turns
        turns += zbkern.wgrad.queue.thread.give_way is not None

    handle = module.register_forward_pre_hook(count)
    with one_rank([module], Schedule.build(made.actions, [0], 3, beside=[ranges]), mse) as pipe:
        for _ in range(steps):
            pipe.step(xs, xs)
    handle.remove()
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    for _ in range(steps):
        sum(mse(module(x), x) / 3 for x in xs).backward()
    for mine, parameter in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-12)
    return found, turns


@pytest.mark.parametrize("row", ONE_CHUNK)
def test_modules_keep_what_belongs_to_a_forward_also_where_a_backward_runs_it_again(row: str) -> None:
    """A checkpoint in B is a forward of the chunk, which runs one at a time. Without, F and B run beside each other."""
    assert steps_of_one_chunk(nn.Sequential(Keeps(True), Keeps(True)), row)[1] == 0
    assert steps_of_one_chunk(nn.Sequential(Keeps(False), Keeps(False)), row)[1] == 3  # but for the first B


def test_a_checkpoint_that_comes_later_is_refused() -> None:
    """Then, and not in the step after it, which runs them one after the other: what failed has forgotten the first."""
    module = Keeps(False)
    made = schedule_of("0F0 0B0 0F1 0B1 0F2 0B2 0W0 0W1 0W2", microbatches=3)
    schedule = Schedule.build(made.actions, [0], 3, beside=[[(1, 3), (3, 5)]])
    with one_rank([module], schedule, mse) as pipe:
        pipe.step(*batch(3))
        module.checkpointed = True
        with pytest.raises(PipelineError, match="the backward of chunk 0 runs a part of its forward again"):
            pipe.step(*batch(3))
        module.zero_grad()
        pipe.step(*batch(3))  # one after the other


class Exchanges(nn.Module):
    """Its backward calls an autograd function, as torch.distributed.nn's all-to-alls do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return _Exchange.apply(torch.tanh(self.linear(x)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        zbkern.in_flight()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Exchange.apply(gradient)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("row", ONE_CHUNK)
def test_an_autograd_function_in_a_backward_is_no_forward_that_runs_again(row: str, is_split: bool) -> None:
    module = nn.Sequential(Exchanges(), Exchanges())
    if is_split:
        zbkern.convert(module)
    assert steps_of_one_chunk(module, row)[1] == 3  # but for the first B


class InTurns(nn.Module):
    """A layer that another chunk has, too, whose backward gives way as often as it is told behind its weight's."""

    def __init__(self, layer: nn.Module, turns: int) -> None:
        super().__init__()
        self.layer, self.turns = layer, turns

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(_GivesWay.apply(x * 1.0, self.turns))


class _GivesWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: int) -> Tensor:
        ctx.turns = turns
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for _ in range(ctx.turns):
            zbkern.in_flight()
        return gradient, None


def copied(gradient: Tensor) -> Callable[[], Any]:
    """What a collective of equal ranks does: the mean of what was sent comes in its place, once it is waited for."""
    sent = gradient.clone()
    return lambda: gradient.copy_(sent)


def reduced(gradient: Tensor) -> Callable[[], Any]:
    work = torch.distributed.all_reduce(gradient, async_op=True)
    return lambda: (work.wait(), gradient.div_(torch.distributed.get_world_size()))


def averaged_in_every_backward(
    row: str, waits_in_hook: bool, start: Callable[[Tensor], Callable[[], Any]], rank: int = 0
) -> list[list[Tensor]]:
    """Gradients of a layer of two chunks, which a hook averages in place: without groups, and with this row's. What has
    been started is waited for in the hook, or when a backward ends."""
    torch.manual_seed(0)
    layer, started = zbkern.nn.Linear(WIDTH, WIDTH, dtype=torch.float64), []

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        wait = start(parameter.grad)
        if waits_in_hook:
            zbkern.in_flight()
            wait()
            return
        if not started:
            torch.autograd.Variable._execution_engine.queue_callback(wait_for_all)  # type: ignore[attr-defined]
        started.append(wait)

    def wait_for_all() -> None:
        while started:
            started.pop()()

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    plain = schedule_of(row.replace("+", " "), microbatches=2, placement=(0, 0))
    first = row[: row.index("+")].count(" ")
    found = []
    for beside in [()], [[(first, first + 2)]]:
        schedule = Schedule.build(plain.actions, plain.placement, 2, beside=beside)
        layer.zero_grad()
        with one_rank([InTurns(layer, 2), InTurns(layer, 1)], schedule, lambda y, _: y.square().sum()) as pipe:
            torch.manual_seed(rank)
            pipe.step([torch.randn(1, WIDTH, dtype=torch.float64) for _ in range(2)], [torch.zeros(1)] * 2)
        found.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None])
    return found


BACKWARDS = ["0F0 1F0 1BW0 0F1 1F1 0BW0+1BW1 0BW1", "0F0 1F0 1BW0 0F1 1F1 1BW1+0BW0 0BW1"]
WEIGHTS = ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 1W0 1W1 0W0+0W1", "0F0 1F0 1B0 0F1 1F1 1W0+1B1 0B0 0B1 0W0 0W1 1W1"]


@pytest.mark.parametrize("waits_in_hook", [False, True])
@pytest.mark.parametrize("row", [*BACKWARDS, *WEIGHTS])
def test_no_other_pass_adds_to_a_gradient_that_a_hook_has_in_flight(row: str, waits_in_hook: bool) -> None:
    one, other = averaged_in_every_backward(row, waits_in_hook, copied)
    assert all(map(torch.equal, one, other))


def averaged_by_gloo(row: str, waits_in_hook: bool) -> list[list[Tensor]]:
    import torch.distributed as dist

    return averaged_in_every_backward(row, waits_in_hook, reduced, dist.get_rank())


@pytest.mark.dist
@pytest.mark.parametrize("waits_in_hook", [False, True])
def test_an_all_reduce_in_flight_is_of_one_pass(waits_in_hook: bool, two_ranks: Any) -> None:
    for row in (BACKWARDS[1], WEIGHTS[0]):
        (one, other), (first, second) = two_ranks.run(averaged_by_gloo, row, waits_in_hook)
        assert all(map(torch.equal, one, other))
        assert all(map(torch.equal, one, first))
        assert all(map(torch.equal, one, second))
