"""profile: the costs of a pipeline as its own steps show them, on clocks that count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.counted import counted_time as counted_time
from tests.support.counted import results_on_counted_ranks, sleep
from tests.support.parallel_stages import MICROBATCHES, Stages, loss_fn
from zbkern.pipeline import (
    Costs,
    Pipeline,
    ProfileOptions,
    Timeline,
    plan,
    profile,
    profile_layers,
    schedules,
    simulate,
)
from zbkern.pipeline.runtime.last_step import LastStep
from zbkern.pipeline.runtime.measure import probe_steps
from zbkern.pipeline.runtime.measure.clock import EventClock
from zbkern.pipeline.runtime.measure.measured_costs import SLICES, communication, overhead_and_attention
from zbkern.pipeline.runtime.slices.sliced_batch import edges
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.simulation import step_costs


class Slow(torch.autograd.Function):
    """Takes given times forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_time = backward
        sleep(forward)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sleep(ctx.backward_time)
        return dy, None, None


class SlowBlock(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.times, self.linear = (forward, backward), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(self.linear(x), *self.times)


def measure(blocks: list[nn.Module], **changes: Any) -> list[Costs]:
    """profile of one block per rank on threads; inputs of 4 microbatches of 2 rows."""
    data = torch.randn(8, 16)

    def rank(transport: LocalTransport) -> Costs:
        module = zbkern.convert(blocks[transport.rank])
        arguments = {"options": ProfileOptions(2), "group": transport, **changes}
        placement = range(len(blocks))
        return profile([module], placement, nn.functional.mse_loss, data, data, **arguments)

    return results_on_counted_ranks(len(blocks), rank)


@pytest.mark.usefixtures("counted_time")
def test_every_rank_gets_the_times_of_every_chunk() -> None:
    costs = measure([SlowBlock(0.02, 0.01), SlowBlock(0.01, 0.03)])
    assert costs[0] == costs[1]
    flat = costs[0].per_chunk(2)
    assert flat.forward == pytest.approx((20, 10))  # milliseconds
    assert flat.backward == pytest.approx((10, 30))
    assert flat.communication == pytest.approx((0,), abs=1e-9)


@pytest.mark.usefixtures("counted_time")
def test_memory_is_what_the_layers_keep() -> None:
    costs = measure([SlowBlock(0, 0)])[0]
    assert (costs.time_unit, costs.memory_unit) == ("ms", "bytes")
    flat = costs.per_chunk(1)
    rows = 2 * 16 * 4  # bytes of one microbatch's activation
    assert flat.held[0] == 2 * rows  # the linear's input and its output gradient
    assert flat.activation[0] >= rows


@pytest.mark.usefixtures("counted_time")
def test_gradients_buffers_and_random_state_stay_as_they_were() -> None:
    block = SlowBlock(0, 0)
    block.register_buffer("seen", torch.zeros(1))
    block.register_forward_pre_hook(lambda module, _: module.seen.add_(1) and None)
    block.linear.weight.grad = torch.ones(16, 16)
    torch.manual_seed(3)
    expected = torch.random.get_rng_state()
    torch.randn(8, 16)  # what measure() draws
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(expected)
    measure([block])
    assert torch.equal(torch.random.get_rng_state(), after)
    assert torch.equal(block.linear.weight.grad, torch.ones(16, 16))
    assert block.seen.item() == 0
    broken = block.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(PipelineError, match="ZeroDivisionError"):
        measure([block])
    broken.remove()
    assert torch.equal(block.linear.weight.grad, torch.ones(16, 16))


class Sliceable(nn.Sequential):
    def forward(self, x: torch.Tensor, carry: Any = None) -> torch.Tensor:
        return super().forward(x)


def test_every_step_runs_the_schedule_that_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """B and W, both as one pass, an R of a part, and slices."""
    found: set[tuple[frozenset[str], int]] = set()
    gather = LastStep.gather_timeline

    def noted(last: LastStep) -> Timeline:
        timeline = gather(last)
        actions = [event.action for row in timeline.events for event in row]
        found.add((frozenset(action.kind for action in actions), 1 + max(action.unit for action in actions)))
        return timeline

    monkeypatch.setattr(LastStep, "gather_timeline", noted)
    data, block = torch.randn(8, 16, 16), Sliceable(zbkern.nn.Linear(16, 16), nn.GELU())
    options = ProfileOptions(1, recompute=("1",), slices=True)
    costs = profile([block], [0], nn.functional.mse_loss, data, data, options=options)
    assert found == {(frozenset({*kinds}), 4) for kinds in ("FBW", ("F", "BW"), "FRBW")} | {(frozenset("FBW"), 12)}
    assert costs.checkpoint[0] < costs.activation[0]


def test_slices_tell_the_overhead_and_attention() -> None:
    """Also where slices are no whole number of tokens; noise that looks like less than none is none."""
    for tokens in (16, 100, 2048):
        places = [*edges("profile", tokens, SLICES), (0, tokens)]
        lengths = [(b - a) / tokens for a, b in places]
        pairs = [(b * b - a * a) / tokens**2 for a, b in places]
        times = [1.5 + 20 * length + 25 * pair for length, pair in zip(lengths, pairs, strict=True)]
        assert overhead_and_attention(places, times) == pytest.approx((1.5, 25))
        times = [20 * length - 1 - pair for length, pair in zip(lengths, pairs, strict=True)]
        assert overhead_and_attention(places, times) == (0, 0)


class Counted(torch.autograd.Function):
    """Lets a clock of its own go on, forward and backward."""

    seconds = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_time = backward
        Counted.seconds += forward
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        Counted.seconds += ctx.backward_time
        return dy, None, None


class LongPacks(nn.Module):
    """As long as its tokens, and longer by 30 in F and by 60 in B where they are a pack, as under a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, cu_seqlens: Any = None, carry: Any = None) -> torch.Tensor:
        more = cu_seqlens is not None
        return Counted.apply(self.linear(x), x.shape[1] + 30 * more, 2 * x.shape[1] + 60 * more)


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


total.reduction = "sum"  # type: ignore[attr-defined]


def test_what_packs_take_under_a_mask_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were of the pairs of tokens of different sequences, 3/4 of all in packs of four."""
    monkeypatch.setattr(EventClock, "now", lambda clock: Counted.seconds)
    data, ends = torch.randn(2, 32, 16), torch.arange(0, 33, 8)
    options = ProfileOptions(2, slices=True, packs=([*data[:, None]], [{"cu_seqlens": ends}] * 2))
    costs = profile([zbkern.convert(LongPacks())], [0], total, data, data, 2, options=options)
    assert costs.forward[0] == pytest.approx(32e3)
    assert costs.masked_forward[0] == pytest.approx(30e3 / 0.75)
    assert costs.masked_backward[0] == pytest.approx(60e3 / 0.75)


def test_packs_without_ends_are_refused() -> None:
    data = torch.randn(2, 32, 16)
    options = ProfileOptions(1, slices=True, packs=([*data[:, None]], None))
    with pytest.raises(ValueError, match="packs must have side inputs of each row, with the ends of its sequences"):
        profile([zbkern.convert(LongPacks())], [0], nn.functional.mse_loss, data, data, 2, options=options)
    with pytest.raises(TypeError, match="packs must be \\(inputs, side\\), beside slices=True; got tuple beside"):
        ProfileOptions(packs=([], []))


def steps_where_one_replica_is_noisy(kind: str) -> int:
    """How many steps a profile takes on this rank, of which the first replica alone finds that times differ."""
    ours, steps = Stages(kind, (2, 2, "zb_h1")), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "spread", lambda timelines: float(ours.data[0] == 0))
        step = Pipeline.step
        patch.setattr(Pipeline, "step", lambda *given, **named: steps.append(1) or step(*given, **named))
        given = ours.schedule.placement, loss_fn, *ours.batch(0), MICROBATCHES, ours.group
        profile(ours.modules, *given, options=ProfileOptions(repeats=1))
    return len(steps)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_replicas_take_as_many_steps(four_ranks: Any, kind: str) -> None:
    assert four_ranks.run(steps_where_one_replica_is_noisy, kind) == [1 + 3 * (1 + probe_steps.PATIENCE)] * 4


class Part(nn.Module):
    """As a chunk of a model: 20 ms of its own around a layer of 10 ms, which it names."""

    layer_names = ("layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = SlowBlock(0.01, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(0.012)
        x = self.layer(x)
        sleep(0.008)
        return x


@pytest.mark.usefixtures("counted_time")
def test_what_a_forward_does_besides_its_layers_is_counted_once_per_chunk() -> None:
    layers = {f"layer {n}": zbkern.convert(Part()) for n in range(2)}
    data = torch.randn(8, 16)
    costs = profile_layers(layers, nn.functional.mse_loss, data, data, options=ProfileOptions(1))
    assert costs.forward_overhead == pytest.approx(20)
    assert [layer.forward for layer in costs.layers] == pytest.approx([10, 10])
    assert costs.chunk_costs([0]).forward[0] == pytest.approx(40)  # and not 60, twice all that a part does
    assert not any(part.layer._forward_hooks or part.layer._forward_pre_hooks for part in layers.values())


def test_chunks_of_one_process_need_no_group() -> None:
    chunks = [zbkern.convert(nn.Linear(4, 4)) for _ in range(2)]
    costs = profile(chunks, [0, 0], nn.functional.mse_loss, *torch.randn(2, 8, 4), options=ProfileOptions(1))
    assert len(costs.per_chunk(2).forward) == 2
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        profile(chunks[:1], [0, 1], nn.functional.mse_loss, torch.randn(8, 4), torch.randn(8, 4))


@pytest.mark.usefixtures("counted_time")
def test_merged_w_and_a_fused_backward_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeps stand for kernels: a W takes 8 ms, a merged one the same for all; a B 4 ms more where W is apart."""
    weight, backward_input = Stage.weight, Stage.backward_input

    def slow_weight(self: Stage, *microbatches: int, **keywords: Any) -> None:
        sleep(0.008 * (1 if self.queue.merge else len(microbatches)))
        weight(self, *microbatches, **keywords)

    def slow_backward(self: Stage, *arguments: Any) -> Any:
        sleep(0.004)
        return backward_input(self, *arguments)

    monkeypatch.setattr(Stage, "weight", slow_weight)
    monkeypatch.setattr(Stage, "backward_input", slow_backward)
    costs = measure([SlowBlock(0, 0)])[0].per_chunk(1)
    assert costs.weight[0] == pytest.approx(8)
    assert costs.merge_saving[0] == pytest.approx(8)
    assert costs.merge_saving[0] <= costs.weight[0]
    assert costs.fused[0] == pytest.approx(12)


class Ticking:
    """In the place of every clock: each look at it is a second later; in noisy steps one to four seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, noisy_steps: int) -> None:
        self.steps, self._noisy_steps, self._now = 0, noisy_steps, 0.0
        step = Pipeline.step

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.steps += 1
            return step(*arguments, **keywords)

        monkeypatch.setattr(Pipeline, "step", counted)
        monkeypatch.setattr(EventClock, "now", lambda clock: self.now())

    def now(self) -> float:
        self._now += 1 + self.steps % 4 if self.steps <= self._noisy_steps else 1
        return self._now


@pytest.mark.parametrize(("noisy_steps", "steps", "warnings"), [(0, 13, 0), (5, 19, 0), (1000, 40, 1)])
def test_steps_are_repeated_while_their_times_differ(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, noisy_steps: int, steps: int, warnings: int
) -> None:
    """One step, and then three kinds in turn, each with one step to warm up and three others: no more, two, and nine.
    Of one noisy step and four others, which is where the second case ends, three quarters are 1."""
    clock = Ticking(monkeypatch, noisy_steps)
    layers = {f"layer {n}": zbkern.convert(nn.Linear(4, 4)) for n in range(2)}
    profile_layers(layers, nn.functional.mse_loss, *torch.randn(2, 8, 4), options=ProfileOptions(repeats=3))
    assert clock.steps == steps
    found = [record.getMessage() for record in caplog.records if "spreads over" in record.getMessage()]
    assert len(found) == warnings
    assert all("Close other programs" in text and "ProfileOptions(repeats=24)" in text for text in found)


def test_edges_that_differ_have_a_time_each() -> None:
    def timeline(times: list[float]) -> Timeline:
        return simulate(schedules.gpipe(3, 2), Costs(communication=times))

    assert communication([timeline([1, 1.5])], 3) == 1
    assert communication([timeline([1, 5])], 3) == [1, 5]


class Waiting(torch.autograd.Function):
    """Waits for two collectives forward, and for one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            zbkern.in_flight(lambda: sleep(0.004))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        sleep(0.002)
        assert zbkern.in_flight(lambda: sleep(0.006) or 7) == 7
        return dy


class Communicating(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Waiting.apply(super().forward(x))


@pytest.mark.usefixtures("counted_time")
def test_the_time_in_which_a_pass_waits_for_collectives_is_measured() -> None:
    chunks = [zbkern.convert(nn.Linear(4, 4)), zbkern.convert(nn.Sequential(Communicating(4, 4), nn.Tanh()))]
    x = torch.randn(MICROBATCHES, 4)
    costs = profile(chunks, [0, 0], lambda y, _: y.sum(), x, x, MICROBATCHES)
    assert costs.network_forward[0] == costs.network_backward[0] == costs.collectives[0] == 0
    assert costs.network_forward[1] == pytest.approx(8)
    assert (costs.network_backward[1], costs.backward[1]) == pytest.approx((6, 8))
    assert costs.collectives[1] == 2
    layers = dict(zip(["a", "b"], chunks, strict=True))
    of_layers = profile_layers(layers, lambda y, _: y.sum(), x, x, MICROBATCHES).layers
    assert of_layers[1].network_forward == pytest.approx(8)
    assert plan(costs, 1, 8, 2, effort=0).schedule.beside
