"""Another schedule in every step of one Pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import results_on_threads, run_pipelines
from tests.support.saving import saved_in_turn, with_actions
from zbkern.pipeline import Carry, Optimizer, Pipeline, PipelineError, Schedule, ScheduleError, StepOptions, schedules
from zbkern.pipeline.transport.local import LocalTransport

WIDTH, TOKENS = 8, 12


class Chunk(nn.Module):
    """Takes sequences whole or in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = zbkern.nn.Attention(WIDTH, 2, causal=True)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        x = x + self.attention(x, carry=carry)
        return x + torch.tanh(self.up(self.norm(x)))


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Chunk().double() for _ in range(4)]


def batch(step: int, microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Microbatches of one to three rows."""
    generator = torch.Generator().manual_seed(step)
    shapes = [(1 + (step + i) % 3, TOKENS, WIDTH) for i in range(microbatches)]
    inputs, targets = ([torch.randn(shape, generator=generator).double() for shape in shapes] for _ in range(2))
    return inputs, targets


V = schedules.zb_v
STEPS: list[Schedule] = [
    V(2, 3),
    schedules.dualpipe_v(2, 5),
    V(2, 4, slices=3),
    with_actions(V(2, 4), saved_in_turn("recomputed", None)),
    V(2, 1),
    schedules.v_half(2, 6),
    with_actions(schedules.v_min(2, 3), saved_in_turn("copied", "recomputed", None)),
    V(2, 2, slices=(5, 7)),
    schedules.one_f_one_b_v(2, 7),
]


def trained_plainly(model: list[nn.Module], counts: list[int], max_norm: float) -> list[float]:
    """Losses of clipped steps of SGD in one process."""
    whole = nn.Sequential(*model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step, count in enumerate(counts):
        optimizer.zero_grad()
        total = torch.stack([nn.functional.mse_loss(whole(x), y) for x, y in zip(*batch(step, count), strict=True)])
        total.mean().backward()
        nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        optimizer.step()
        losses.append(total.mean().item())
    return losses


def trained(
    own: Schedule | Callable[[int], Schedule], steps: list[tuple[int, Schedule | None]], max_norm: float, **options: Any
) -> tuple[list[nn.Module], list[list[float | None]]]:
    """The same in one Pipeline; each step with its number of microbatches, and a schedule or None for its own."""
    chunks = [zbkern.convert(chunk) for chunk in model()]
    barrier = threading.Barrier(2)

    def rank_steps(transport: LocalTransport) -> list[float | None]:
        mine = [chunks[chunk] for chunk in V(2, 2).chunks_of(transport.rank)]
        with Pipeline(mine, own, nn.functional.mse_loss, transport, **options) as pipe:
            optimizer = Optimizer(
                torch.optim.SGD(nn.ModuleList(mine).parameters(), lr=0.3, momentum=0.9), pipe, max_norm=max_norm
            )
            losses = []
            for step, (count, schedule) in enumerate(steps):
                optimizer.zero_grad()
                loss = pipe.step(*batch(step, count), schedule=schedule)
                if schedule is not None:
                    assert pipe.schedule is schedule
                assert pipe.drift().measured.cost > 0
                optimizer.step()
                losses.append(None if loss is None else loss.item())
            optimizer.validate()
            barrier.wait(60)
            return losses

    return chunks, results_on_threads(2, rank_steps)


def check(
    own: Schedule | Callable[[int], Schedule],
    steps: list[tuple[int, Schedule | None]],
    max_norm: float = 100.0,
    exact: float = 1e-12,
    **options: Any,
) -> None:
    chunks, losses = trained(own, steps, max_norm, **options)
    one = model()
    expected = trained_plainly(one, [count for count, _ in steps], max_norm)
    assert losses[0] == pytest.approx(expected, rel=exact)
    assert losses[1] == [None] * len(steps)
    for chunk, other in zip(chunks, one, strict=True):
        for parameter, plain in zip(chunk.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter, plain, rtol=0, atol=10 * exact)


@pytest.mark.parametrize(("max_norm", "exact"), [(100.0, 1e-12), (0.5, 1e-6)])  # a clipping factor is float32
def test_every_step_may_have_a_schedule_of_its_own(max_norm: float, exact: float) -> None:
    check(V(2, 2), [*((schedule.microbatches, schedule) for schedule in STEPS), (2, None)], max_norm, exact)


def test_values_kept_by_reference_are_compared_in_every_schedule() -> None:
    check(STEPS[-1], [(schedule.microbatches, schedule) for schedule in STEPS], options=StepOptions(check_values=True))


@pytest.mark.parametrize("fill", ["planned", "eager"])
def test_a_function_makes_the_schedule_for_each_number_of_microbatches(fill: str) -> None:
    check(lambda count: V(2, count), [(count, None) for count in (3, 5, 4, 1, 5, 2)], fill=fill)


@pytest.mark.parametrize("own", [V(2, 4), V(2, 4, slices=3), schedules.v_half(2, 6)])
def test_a_published_schedule_is_its_own_rule(own: Schedule) -> None:
    check(own, [(count, None) for count in (4, 3, 5, 1, 5)])


def test_another_order_under_a_published_name_is_no_rule() -> None:
    rows = [sorted(row, key=lambda action: action.kind == "W") for row in V(2, 4).actions]
    with pytest.raises(ValueError, match=r"list of 3 microbatches and the schedule has 4; .* or schedule= for that"):
        check(Schedule.build(rows, V(2, 4).placement, 4, "zb_v"), [(3, None)])


def failing(function: Callable[[Pipeline], Any]) -> list[str]:
    """What each rank raises, which then still has a pipeline that trains."""

    def run(pipe: Pipeline) -> str:
        with pytest.raises((PipelineError, ScheduleError, TypeError, ValueError)) as raised:
            function(pipe)
        pipe.step(*batch(0, 2), schedule=V(2, 2))
        return str(raised.value)

    return run_pipelines(V(2, 2), [zbkern.convert(chunk) for chunk in model()], run, nn.functional.mse_loss)


def test_ranks_with_different_schedules_are_told_before_anything_runs() -> None:
    other = [V(2, 3), schedules.v_half(2, 3)]
    for message in failing(lambda pipe: pipe.step(*batch(0, 3), schedule=other[pipe.rank])):
        assert "step of zb_v with 3 microbatches" in message
        assert "step of v_half with 3 microbatches" in message


def test_a_rank_without_the_others_schedule_is_told() -> None:
    for message in failing(lambda pipe: pipe.step(*batch(0, 2), schedule=[None, schedules.v_half(2, 2)][pipe.rank])):
        assert "ranks make different calls" in message


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schedules.interleaved(2, 2, chunks=2), "schedule must have this pipeline's chunks in the same places"),
        (schedules.zb_h1(2, 2), "schedule must have this pipeline's chunks in the same places"),
        (V(2, 3), "inputs is a list of 2 microbatches and the schedule has 3"),
    ],
)
def test_a_schedule_that_does_not_fit_names_what_does_not(schedule: Any, expected: str) -> None:
    assert all(expected in message for message in failing(lambda pipe: pipe.step(*batch(0, 2), schedule=schedule)))


def test_a_function_needs_lists_or_a_schedule() -> None:
    def run(transport: LocalTransport) -> None:
        chunks = model()
        mine = [zbkern.convert(chunks[chunk]) for chunk in V(2, 2).chunks_of(transport.rank)]
        with Pipeline(mine, lambda count: V(2, count), nn.functional.mse_loss, transport) as pipe:
            x = torch.randn(6, TOKENS, WIDTH).double()
            with pytest.raises((ValueError, PipelineError), match="needs lists of microbatches"):
                pipe.step(x, x)
            pipe.step(x, x, schedule=V(2, 3))

    results_on_threads(2, run)


def test_an_evaluation_with_another_schedule_leaves_the_timeline_of_the_step() -> None:
    inputs, targets = batch(1, 5)
    plain = nn.Sequential(*model())
    expected = torch.stack([nn.functional.mse_loss(plain(x), y) for x, y in zip(inputs, targets, strict=True)]).mean()

    def run(pipe: Pipeline) -> Tensor | None:
        pipe.step(*batch(0, 2))
        before = pipe.last_timeline
        found = [pipe.evaluate(inputs, targets, schedule=schedule) for schedule in (V(2, 5), V(2, 5, slices=3))]
        assert pipe.last_timeline.events == before.events
        assert pipe.schedule.microbatches == 2
        if pipe.rank == 0:
            torch.testing.assert_close(torch.stack(found), expected.expand(2), rtol=1e-12, atol=0)

    run_pipelines(V(2, 2), [zbkern.convert(chunk) for chunk in model()], run)


def test_forward_returns_outputs_in_the_order_of_the_microbatches() -> None:
    inputs, _ = batch(1, 5)
    plain = nn.Sequential(*model())
    expected = [plain(x).detach() for x in inputs]

    def run(pipe: Pipeline) -> None:
        for schedule in (V(2, 5), V(2, 5, slices=3)):
            outputs = pipe.forward(inputs, schedule=schedule)
            assert (outputs is None) is (pipe.rank == 1)
            for output, own in zip(outputs or expected, expected, strict=True):
                torch.testing.assert_close(output, own, rtol=1e-12, atol=1e-12)

    run_pipelines(V(2, 2), [zbkern.convert(chunk) for chunk in model()], run)


def test_forward_gives_what_the_loss_function_gives_and_calls_it_once_for_each_microbatch() -> None:
    """A policy's log-probabilities: those of an evaluation and those of the step after it are the same bits."""
    inputs, _ = batch(2, 3)
    labels = [torch.randint(WIDTH, x.shape[:2]) for x in inputs]
    kept: list[Tensor] = []
    calls: list[int] = []

    def log_probabilities(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return output.log_softmax(-1).gather(-1, target[..., None])[..., 0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = log_probabilities(output, target)
        if not torch.is_grad_enabled():
            return found
        kept.append(found.detach())
        return -found.mean()

    def run(pipe: Pipeline) -> None:
        data = inputs, labels
        before = pipe.forward(*data, schedule=V(2, 3))
        if pipe.rank == 0:
            assert len(calls) == 3
        pipe.step(*data, schedule=V(2, 3))
        if before is not None:
            assert all(torch.equal(one, other) for one, other in zip(before, kept, strict=True))

    run_pipelines(V(2, 2), [zbkern.convert(chunk) for chunk in model()], run, loss)
