"""Offload, load and recompute in the engine: the same gradients bit for bit, and memory given back."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import make_data, make_model, results_on_threads
from tests.support.saving import Wide, with_actions
from zbkern.pipeline import (
    Action,
    Costs,
    Optimizer,
    Pipeline,
    PipelineError,
    Replanner,
    Schedule,
    StepOptions,
    Timeline,
    plan,
    schedules,
    simulate,
)
from zbkern.pipeline.planner.offload import fit
from zbkern.pipeline.runtime import host_copies
from zbkern.pipeline.simulation.costs import COPY_SIZE
from zbkern.pipeline.transport.local import LocalTransport


def run(
    schedule: Schedule,
    model: Sequence[nn.Module],
    data: tuple[torch.Tensor, torch.Tensor],
    steps: int = 2,
    loss_fn: Any = nn.functional.mse_loss,
    copy_size: int = COPY_SIZE,
) -> tuple[list[torch.Tensor], Timeline]:
    """Losses and gradients of the last step of a copy of the model, on threads, and its timeline."""
    options = StepOptions(copy_size=copy_size)
    model = [zbkern.convert(module) for module in copy.deepcopy(list(model))]
    inputs, targets = data

    def rank_steps(transport: LocalTransport) -> Any:
        chunks = schedule.chunks_of(transport.rank)
        with Pipeline([model[c] for c in chunks], schedule, loss_fn, transport, options=options) as pipe:
            pipe.queue.merge = "exact"  # however copies part neighbouring W
            for _ in range(steps):
                for module in pipe.modules.values():
                    module.zero_grad()
                loss = pipe.step(inputs if 0 in chunks else None, targets if len(model) - 1 in chunks else None)
            assert pipe.queue.pending() == pipe.queue.bytes == 0
            return loss, pipe.gather_timeline()

    results = results_on_threads(schedule.stages, rank_steps)
    losses = [loss for loss, _ in results if loss is not None]
    gradients = [p.grad for module in model for p in module.parameters() if p.grad is not None]
    return [*losses, *gradients], results[0][1]


def check_equal(schedule: Schedule, saving: Schedule, **more: Any) -> Timeline:
    model, data = make_model(len(schedule.placement)), make_data(schedule.microbatches)
    expected, _ = run(schedule, model, data, **more)
    found, timeline = run(saving, model, data, **more)
    assert len(expected) == len(found) > 1
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    return timeline


@pytest.mark.parametrize("copy_size", [COPY_SIZE, 1, 600])  # of one transfer, one per storage, and a few of them
@pytest.mark.parametrize(
    ("name", "stages", "kinds"),
    [("one_f_one_b", 2, "F"), ("zb_h1", 1, "FB"), ("zb_h1", 2, "B"), ("zb_v", 2, "F"), ("zb_v", 4, "FB")],
)
def test_offloaded_tensors_give_the_same_gradients(name: str, stages: int, kinds: str, copy_size: int) -> None:
    schedule = getattr(schedules, name)(stages, 5)
    saving = with_actions(
        schedule, lambda action: "copied" if action.kind in kinds and action.microbatch != 3 else None
    )
    timeline = check_equal(schedule, saving, copy_size=copy_size)
    assert [event.action for event in timeline.events[0]] == [
        action for action in saving.actions[0] if action.kind not in ("O", "L")
    ]
    copied = [event.action for event in timeline.copies[0]]
    assert sorted(copied) == sorted(action for action in saving.actions[0] if action.kind in ("O", "L"))


@pytest.mark.parametrize(("name", "stages"), [("one_f_one_b", 2), ("zb_h1", 1), ("zb_v", 4)])
def test_recomputed_activations_give_the_same_gradients(name: str, stages: int) -> None:
    schedule = getattr(schedules, name)(stages, 7)
    kinds = ("recomputed", "copied", None)
    check_equal(schedule, with_actions(schedule, lambda a: kinds[a.microbatch % 3] if a.kind == "F" else None))


@pytest.mark.parametrize("seconds", [(0.02, 0.0), (0.0, 0.02), (0.02, 0.02)])
@pytest.mark.parametrize("how", ["after", "streamed", "late"])
def test_late_transfers_delay_and_change_nothing(
    seconds: tuple[float, float], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several transfers of an O and L: where F waits for them, and where other passes run meanwhile."""
    rows = {
        "after": "0F0 0F1 0O0 0F2 0O2 0L0 0BW0 0BW1 0L2 0BW2",
        "streamed": "0F0 0O0 0F1 0O1 0L0 0BW0 0F2 0O2 0L1 0BW1 0L2 0BW2",
        "late": "0F0 0F1 0O0 0O1 0F2 0L1 0L0 0B1 0B0 0O1 0O0 0B2 0L0 0L1 0W0 0W1 0W2",
    }
    delay(monkeypatch, *(each / 4 for each in seconds))
    found = []
    for row in ("0F0 0F1 0F2 0BW0 0BW1 0BW2" if how != "late" else "0F0 0F1 0F2 0B1 0B0 0B2 0W0 0W1 0W2", rows[how]):
        module = deep(5)
        with step([module], row, microbatches=3, options=StepOptions(copy_size=1)) as pipe:
            found.append([p.grad for p in module.parameters()])
            copies = pipe.last_timeline.copies
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert all(event.end - event.start > 5 * sum(seconds) / 4 for event in copies[0])


def delay(monkeypatch: pytest.MonkeyPatch, before: float, after: float) -> None:
    """Copies that take so many seconds longer; meanwhile their destinations hold garbage."""
    copy_now = host_copies.copy

    def copy_late(pairs: host_copies.Pairs) -> None:
        for destination, _ in pairs:
            destination.fill_(0xAB)
        time.sleep(before)
        copy_now(pairs)
        time.sleep(after)

    monkeypatch.setattr(host_copies, "copy", copy_late)


class Deep(nn.Module):
    """A layer whose forward and backward tell that they begin."""

    def __init__(self, index: int, told: Callable[[str], object]) -> None:
        super().__init__()
        self.linear = zbkern.convert(nn.Linear(8, 8))
        self.index, self.told = index, told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.told(f"F{self.index}")
        y = self.linear(x).sigmoid()
        y.register_hook(lambda gradient: self.told(f"B{self.index}") and None)
        return y


def deep(layers: int, told: Callable[[str], object] = lambda name: None) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Deep(index, told) for index in range(layers)))


def test_layers_leave_while_later_ones_run_and_a_backward_waits_for_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last forward waits for the first copy out; the last copy back waits for the first backward."""
    events = {name: threading.Event() for name in ("out", "B4")}
    order: list[str] = []
    copy_now = host_copies.copy

    def told(name: str) -> None:
        order.append(name)
        if name == "F4":
            assert events["out"].wait(10)
        if name in events:
            events[name].set()

    on_host: list[torch.Tensor] = []

    def watched(pairs: host_copies.Pairs) -> None:
        out = not any(source is host for _, source in pairs for host in on_host)
        on_host.extend(destination for destination, _ in pairs if out)
        loads = sum(name == "copied back" for name in order)
        if not out and loads == 2:
            assert events["B4"].wait(10)
        copy_now(pairs)
        if out:
            events["out"].set()
        else:
            order.append("copied back")

    monkeypatch.setattr(host_copies, "copy", watched)
    with step([deep(5, told)], "0F0 0O0 0L0 0BW0", microbatches=1, options=StepOptions(copy_size=1)):
        assert order.index("B4") < len(order) - 1 - order[::-1].index("copied back")


@pytest.mark.parametrize(
    "row", ["0F0 0B0 0O0 0F1 0B1 0W1 0F2 0L0 0W0 0BW2", "0F0 0F1 0B0 0O0 0B1 0O1 0F2 0L0 0L1 0W0 0W1 0BW2"]
)
def test_a_weight_gradient_waits_for_its_own_transfer_alone(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last copy back waits for the first W; alone, and of two microbatches at once."""
    begun, last = [], 5 * row.count("L")
    ran, copy_now = threading.Event(), host_copies.copy
    on_host: list[torch.Tensor] = []

    def watched(pairs: host_copies.Pairs) -> None:
        if any(source is host for _, source in pairs for host in on_host):
            begun.append(0)
            assert len(begun) < last or ran.wait(10)
        else:
            on_host.extend(destination for destination, _ in pairs)
        copy_now(pairs)

    monkeypatch.setattr(host_copies, "copy", watched)
    data = torch.ones(6, 8) * torch.linspace(0, 1, 8)
    gradients = []
    for actions in (row, " ".join(text for text in row.split() if text[1] not in "OL")):
        schedule = Schedule.build([[Action.parse(text) for text in actions.split()]], [0], 3)
        module, local, options = deep(5), LocalTransport.ring(1)[0], StepOptions(copy_size=1)
        with Pipeline([module], schedule, nn.functional.mse_loss, local, options=options) as pipe:
            pipe.queue.listeners.append(lambda tasks: ran.set() if begun else None)
            pipe.step(data, data)
        gradients.append([p.grad for p in module.parameters()])
    assert len(begun) == last
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("row", "most"), [("0F0 0O0 0L0 0BW0", 2), ("0F0 0F1 0O0 0L0 0BW0 0BW1", 5)])
def test_a_forward_whose_offload_follows_holds_two_transfers(row: str, most: int) -> None:
    """Of the outputs of six layers, each a transfer of its own, those that are in memory as a layer begins."""
    alive: list[int] = []
    saved: list[Callable[[], torch.UntypedStorage | None]] = []

    class Layer(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            saved.append(weakref.ref(x.untyped_storage()))
            alive.append(sum(storage() is not None for storage in saved[1:]))
            return super().forward(x)

    module = nn.Sequential(*(Layer(index, lambda name: None) for index in range(6)))
    with step([module], row, microbatches=1 + ("F1" in row), options=StepOptions(copy_size=1)):
        assert max(alive[:6]) == alive[5] == most


@pytest.mark.parametrize("seconds", [(0.02, 0.0), (0.0, 0.02), (0.02, 0.02)])
def test_a_late_copy_delays_and_changes_nothing(seconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take long, or begin late: what has not come is garbage, and what has not gone must not be lost."""
    schedule = schedules.zb_h1(2, 4)
    saving = with_actions(schedule, lambda action: "copied" if action.microbatch % 2 == 0 else None)
    delay(monkeypatch, *seconds)
    timeline = check_equal(schedule, saving, steps=1)
    for rank, row in enumerate(timeline.copies):
        ends: dict[tuple[int, int], list[float]] = {}  # of an activation's load, and of its W's
        for event in row:
            if event.action.kind == "L":
                ends.setdefault(event.action[1:3], []).append(event.end)
        starts = {e.action[:3]: e.start for e in timeline.events[rank]}
        for key, (before_b, before_w) in ends.items():
            assert starts[("B", *key)] >= before_b
            assert starts[("W", *key)] >= before_w


def test_a_fitted_schedule_gives_the_same_gradients() -> None:
    costs = Costs(held=1.1, offload_bandwidth=1, reload_bandwidth=1)
    schedule = schedules.zb_h1(4, 8)
    fitted = fit(schedule, costs, 0.7 * max(simulate(schedule, costs).peak_memory)).schedule
    assert any(action.kind == "O" for action in fitted.actions[0])
    check_equal(schedule, fitted, steps=1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 5, 6, 7, 9))])
def test_searched_plans_give_the_same_gradients(seed: int) -> None:
    generator = random.Random(seed)
    stages, chunks = (2, 4)[seed % 2], (1, 2)[seed // 2 % 2]

    def times() -> list[float]:
        return [generator.uniform(0.5, 2) for _ in range(stages * chunks)]

    costs = Costs(times(), times(), times(), held=1.1, checkpoint=0.2, offload_bandwidth=2, reload_bandwidth=1)
    limit = (0.55, 0.35)[chunks - 1] * stages * chunks
    offload, recompute = ((True, True), (True, False), (False, True))[seed % 3]
    found = plan(costs, stages, 7, chunks, memory_limit=limit, effort=1, offload=offload, recompute=recompute)
    rows = [[action for action in row if action.kind not in "ROL"] for row in found.schedule.actions]
    assert rows != [*map(list, found.schedule.actions)]
    check_equal(Schedule.build(rows, found.schedule.placement, 7), found.schedule, copy_size=600)


def test_a_scaled_half_precision_run_is_as_without() -> None:
    """Four steps under autocast to fp16, one of which overflows and is skipped."""
    schedule = schedules.zb_h1(2, 5)
    saving = with_actions(schedule, lambda a: ("copied", "recomputed")[a.microbatch % 2] if a.kind == "F" else None)
    data = torch.randn(10, 4, 32)

    def weights(schedule: Schedule) -> list[Any]:
        torch.manual_seed(3)
        model = [zbkern.convert(Wide()) for _ in range(2)]

        def train(transport: LocalTransport) -> tuple[int, float]:
            module, scaler = model[transport.rank], torch.amp.GradScaler("cpu", init_scale=2.0**10)
            scaler.scale(torch.ones(()))

            def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return scaler.scale(nn.functional.mse_loss(output.float(), target))

            with Pipeline([module], schedule, loss_fn, transport) as pipe:
                pipe.queue.merge = "exact"  # however copies part neighbouring W
                optimizer = Optimizer(torch.optim.AdamW(module.parameters()), pipe, max_norm=1.0, scaler=scaler)
                for factor in (1, 1e6, 1, 1):
                    optimizer.zero_grad()
                    with torch.autocast("cpu", torch.float16):
                        pipe.step(data, data * factor)
                    optimizer.step()
                optimizer.validate()
            return optimizer.skipped, scaler.get_scale()

        assert results_on_threads(2, train) == [(1, 2.0**9)] * 2
        return [parameter.detach() for module in model for parameter in module.parameters()]

    for a, b in zip(weights(schedule), weights(saving), strict=True):
        assert torch.equal(a, b)


def replicated_gradients(row: str) -> list[torch.Tensor]:
    """Gradients of a chunk under DistributedDataParallel, whose pipelines have one rank each."""
    torch.manual_seed(5)
    module = zbkern.convert(Wide())
    replica = nn.parallel.DistributedDataParallel(module)
    schedule = Schedule.build([[Action.parse(text) for text in row.split()]], [0], 2)
    data = torch.randn(4, 32) + torch.distributed.get_rank()
    with Pipeline([replica], schedule, nn.functional.mse_loss, LocalTransport.ring(1)[0]) as pipe:
        pipe.step(data, data)
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.dist
def test_replicas_are_reduced_as_without(two_ranks: Any) -> None:
    expected = two_ranks.run(replicated_gradients, "0F0 0F1 0B0 0W0 0B1 0W1")[0]
    found = two_ranks.run(replicated_gradients, "0F0 0F1 0O0 0R1 0B1 0O1 0L0 0B0 0L1 0W0 0W1")
    plain = two_ranks.run(replicated_gradients, "0F0 0F1 0B1 0B0 0W0 0W1")[0]
    assert len(expected) == 6
    for gradients in found:
        for a, b, c in zip(gradients, plain, expected, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c)


def step(modules: Sequence[nn.Module], row: str, *, microbatches: int = 2, steps: int = 1, **more: Any) -> Any:
    """Runs a row on one rank; the pipeline, still open to be looked at."""
    schedule = Schedule.build([[Action.parse(text) for text in row.split()]], [0] * len(modules), microbatches)
    pipe = Pipeline(modules, schedule, nn.functional.mse_loss, LocalTransport.ring(1)[0], **more)
    data = torch.ones(2 * microbatches, 8) * torch.linspace(0, 1, 8)
    for _ in range(steps):
        pipe.step(data, data)
    return pipe


class Watched(nn.Module):
    """Saves a tensor in three places; `seen` says at every forward how many of them are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = zbkern.convert(nn.Linear(8, 8))
        self.saved: list[Callable[[], torch.UntypedStorage | None]] = []
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(sum(storage() is not None for storage in self.saved))
        hidden = self.linear(x).sigmoid()
        self.saved.append(weakref.ref(hidden.untyped_storage()))
        return hidden * hidden


@pytest.mark.parametrize(
    ("row", "seen"),
    [
        ("0F0 0F1 0F2 0BW0 0BW1 0BW2", [0, 1, 2]),
        ("0F0 0O0 0F1 0F2 0L0 0BW0 0BW1 0BW2", [0, 0, 1]),
        ("0F0 0F1 0O0 0O1 0F2 0L0 0BW0 0L1 0BW1 0BW2", [0, 1, 0]),
        ("0F0 0F1 0F2 0R0 0BW0 0R1 0BW1 0BW2", [0, 0, 0, 1, 1]),
    ],
)
def test_memory_is_really_given_back(row: str, seen: list[int]) -> None:
    module = Watched()
    with step([module], row, microbatches=3):
        assert module.seen == seen


def test_a_chunk_input_is_given_back_too() -> None:
    """The graph ends in a leaf, which would keep it, and a message's tensor is nobody's but the chunk's."""
    first, second = Watched(), Watched()
    arrived: list[Callable[[], torch.UntypedStorage | None]] = []
    alive: list[int] = []

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        alive.append(sum(storage() is not None for storage in arrived))
        arrived.append(weakref.ref(inputs[0].untyped_storage()))

    second.register_forward_pre_hook(look)
    with step([first, second], "0F0 1F0 1O0 0O0 0F1 1F1 1BW1 0BW1 1L0 1BW0 0L0 0BW0"):
        assert alive == [0, 0]


def test_a_tensor_that_is_saved_several_times_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy_now = host_copies.copy

    def count(pairs: host_copies.Pairs) -> None:
        copied.extend(source.nbytes for _, source in pairs)
        copy_now(pairs)

    monkeypatch.setattr(host_copies, "copy", count)
    with step([Watched()], "0F0 0O0 0F1 0L0 0BW0 0BW1"):
        size = 2 * 8 * 4  # of what three functions save, and of the output, for the loss; not the batch, nor weights
        assert copied == [size, size, size, size]


class Random(nn.Module):
    """Depends on random numbers of torch and of Python, and counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = zbkern.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x * random.choice([1.0, 2.0, 3.0]))
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y


def test_what_parts_of_w_leave_is_not_copied_again() -> None:
    found = []
    for row in ("0F0 0F1 0B0 0B1 0W0:0/2 0W0:1/2 0W1", "0F0 0F1 0B0 0O0 0B1 0L0 0W0:0/2 0W0:1/2 0W1"):
        module = deep(3)
        with step([module], row) as pipe:
            found.append([p.grad for p in module.parameters()])
            copies = pipe.last_timeline.copies
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert [str(event.action) for event in copies[0]] == ["0O0", "0L0"]


def test_parts_of_w_leave_nothing_for_the_next_step() -> None:
    found = []
    for row in ("0F0 0F1 0B0 0W0 0B1 0W1", "0F0 0O0 0F1 0L0 0B0 0W0:0/2 0W0:1/2 0B1 0W1"):
        module = deep(3)
        with step([module], row, steps=2):
            found.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("saving", ["0F0 0F1 0R0 0BW0 0R1 0BW1", "0F0 0O0 0F1 0O1 0L0 0BW0 0L1 0BW1"])
def test_random_numbers_and_buffers_are_as_without(saving: str) -> None:
    found = []
    for row in ("0F0 0F1 0BW0 0BW1", saving):
        torch.manual_seed(3)
        random.seed(3)
        module = Random()
        with step([module], row, steps=2):
            found.append([*module.buffers(), *(p.grad for p in module.parameters()), torch.rand(4)])
        found[-1].append(torch.tensor(random.random()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recompute", [(), (nn.BatchNorm1d, nn.Linear)])
def test_a_recomputation_reads_and_leaves_buffers_as_without(recompute: Sequence[type]) -> None:
    """Batch norm writes statistics without a sign; spectral norm computes with vectors that every forward changes."""
    spectral = nn.utils.parametrizations.spectral_norm
    found = []
    for row in ("0F0 0F1 0F2 0BW0 0BW1 0BW2", "0F0 0F1 0F2 0R0 0BW0 0R1 0BW1 0BW2"):
        torch.manual_seed(4)
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), spectral(nn.Linear(8, 8)), nn.Tanh())
        with step([module], row, microbatches=3, steps=2, options=StepOptions(recompute=recompute)):
            found.append([*module.buffers(), *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("row", ["0F0 0F1 0BW0 0BW1", "0F0 0O0 0F1 0L0 0BW0 0BW1", "0F0 0F1 0R0 0BW0 0BW1"])
def test_inputs_that_ask_for_a_gradient_get_it(row: str) -> None:
    module, data = deep(1), torch.ones(4, 8, requires_grad=True)
    schedule = Schedule.build([[Action.parse(text) for text in row.split()]], [0], 2)
    with Pipeline([module], schedule, nn.functional.mse_loss, LocalTransport.ring(1)[0]) as pipe:
        pipe.step([data[:2], 2 * data[2:]], list(data.detach().split(2)))
    found, data.grad = data.grad, None
    loss = nn.functional.mse_loss(module(torch.cat([data[:2], 2 * data[2:]])), data.detach())
    torch.testing.assert_close(found, *torch.autograd.grad(loss, [data]))


def test_gradients_of_transposed_inputs_are_transposed() -> None:
    """Sums of the chunk before would be rounded otherwise if they were not."""
    strides: list[tuple[int, ...]] = []

    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).t().contiguous().t()
            y.register_hook(lambda gradient: strides.append(gradient.stride()))
            return y

    for rows in ("0F0 1F0 1BW0 0BW0", "0F0 1F0 1O0 1L0 1BW0 0BW0"):
        with step([First(8, 8), nn.Linear(8, 8)], rows, microbatches=1):
            pass
    assert strides == [(1, 2), (1, 2)]


def break_copy(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This copy, counted from 1, fails."""
    copy_now, begun = host_copies.copy, itertools.count(1)

    def copy_or_fail(pairs: host_copies.Pairs) -> None:
        if next(begun) == broken:
            raise MemoryError("the host has no more")
        copy_now(pairs)

    monkeypatch.setattr(host_copies, "copy", copy_or_fail)


def copying_rank_0() -> Schedule:
    rows = "0F0 0O0 0L0 0BW0 0F1 0BW1", "1F0 1BW0 1F1 1BW1"
    return Schedule.build([[Action.parse(text) for text in row.split()] for row in rows], [0, 1], 2)


@pytest.mark.parametrize("broken", [1, 2])  # the copy out, and back
def test_a_copy_that_fails_is_known_to_all_and_the_pipeline_goes_on(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_copy(broken, monkeypatch)
    data = torch.ones(4, 8)

    def steps(transport: LocalTransport) -> list[str]:
        with Pipeline([deep(1)], copying_rank_0(), nn.functional.mse_loss, transport, timeout=5) as pipe:
            with pytest.raises(PipelineError) as raised:
                pipe.step(data, data)
            pipe.step(data, data)
        return [str(raised.value)]

    first, second = results_on_threads(2, steps)
    assert first == second
    assert re.match(r"rank 0, action 0.*MemoryError: the host has no more", first[0])


@pytest.mark.parametrize("fails", [False, True])
def test_close_ends_the_threads_of_copies(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("zbkern copies")}

    before = copying()
    pipe = step([deep(1)], "0F0 0O0 0L0 0BW0", microbatches=1)
    assert len(copying() - before) == 2
    if fails:
        monkeypatch.setattr(host_copies, "copy", lambda pairs: 1 / 0)
        with pytest.raises(PipelineError, match="ZeroDivisionError"):
            pipe.step(torch.ones(2, 8), torch.ones(2, 8))
    pipe.close()
    assert copying() <= before
    assert sum(map(len, pipe.last_timeline.copies)) == (0 if fails else 2)
    pipe.close()


@pytest.mark.parametrize("broken", [1, 2])
def test_a_timeline_after_a_copy_that_failed_is_that_of_what_ran(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an evaluation in between, after which ranks are connected again."""
    break_copy(broken, monkeypatch)
    data = torch.ones(4, 8)

    def steps(transport: LocalTransport) -> Timeline:
        with Pipeline([nn.Linear(8, 8)], copying_rank_0(), nn.functional.mse_loss, transport, timeout=5) as pipe:
            with pytest.raises(PipelineError, match="the host has no more"):
                pipe.step(data, data)
            pipe.evaluate(data, data)
            return pipe.gather_timeline()

    first, second = results_on_threads(2, steps)
    assert [str(event.action) for row in first.copies for event in row] == [[], ["0O0"]][broken - 1]
    assert str(first.events[0][0].action) == "0F0"
    assert first.events == second.events


def test_a_forward_that_is_not_repeatable_is_told() -> None:
    calls: list[int] = []

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(0)
            y = self.linear(x)
            return y if len(calls) == 1 else y.tanh()

    with pytest.raises(PipelineError, match=r"action 0R0: RuntimeError: the forward saved \d tensors .* be recomputed"):
        step([Changing()], "0F0 0R0 0BW0", microbatches=1)


@pytest.mark.parametrize("row", ["0F0 0O0 0L0 0BW0", "0F0 0F1 0O1 0BW0 0L1 0BW1"])
def test_a_saved_tensor_that_is_modified_is_told(row: str) -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).sigmoid()
            z = y * 2
            y.add_(1)
            return z

    with pytest.raises(PipelineError, match=r"RuntimeError: a tensor of shape .* was modified in place"):
        step([Careless()], row, microbatches=1 + ("F1" in row))


def test_a_step_that_fails_leaves_no_copies_behind() -> None:
    class Failing(Watched):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails and self.seen:
                raise ValueError("now")
            return super().forward(x)

    module = Failing()
    pipe = step([module], "0F0 0F1 0O0 0L0 0BW0 0BW1")
    expected = [p.grad.clone() for p in module.parameters()]
    module.seen.clear()
    module.fails = True
    with pytest.raises(PipelineError, match="now"):
        pipe.step(torch.ones(4, 8), torch.ones(4, 8))
    module.fails = False
    module.zero_grad()
    gc.collect()
    assert all(storage() is None for storage in module.saved)
    data = torch.ones(4, 8) * torch.linspace(0, 1, 8)
    pipe.step(data, data)
    assert all(torch.equal(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True))
    pipe.close()


def test_a_step_that_fails_before_its_first_copy_has_a_timeline() -> None:
    module = deep(1)
    with step([module], "0F0 0O0 0L0 0BW0", microbatches=1) as pipe:
        module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(PipelineError, match="ZeroDivisionError"):
            pipe.step(torch.ones(2, 8), torch.ones(2, 8))
        assert not any(pipe.last_timeline.copies)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fill": "eager"}, "fill must be \"planned\" with a schedule that offloads or recomputes .*; got 'eager'"),
        ({"max_wgrad_bytes": 5}, "max_wgrad_bytes must be None with a schedule that offloads or recomputes"),
        ({"replanner": Replanner(every=10)}, "replanner must be None with a schedule that offloads or recomputes"),
    ],
)
def test_what_would_change_the_order_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step([Watched()], "0F0 0R0 0BW0", microbatches=1, **arguments)


def test_evaluation_saves_nothing() -> None:
    module = Watched()
    with step([module], "0F0 0F1 0O0 0L0 0BW0 0R1 0BW1") as pipe:
        data = torch.ones(4, 8) * torch.linspace(0, 1, 8)
        assert pipe.evaluate(data, data) == pipe.step(data, data)
        peak = pipe.gather_timeline().peak_memory
        pipe.evaluate(data, data)
        assert pipe.gather_timeline().peak_memory == peak
