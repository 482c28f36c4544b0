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
from tests.support.chunks import make_data, make_model, one_rank, plain, run_pipelines
from tests.support.random_schedules import is_valid, random_rows
from tests.support.same import assert_same
from tests.support.saving import Wide, schedule_of
from zbkern.pipeline import (
    Pipeline,
    PipelineError,
    Schedule,
    StepOptions,
    Timeline,
)
from zbkern.pipeline.runtime.memory import host_copies
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.simulation.costs import COPY_SIZE

# ---- the same gradients


def run(
    schedule: Schedule, model: Sequence[nn.Module], data: tuple[torch.Tensor, torch.Tensor], copy_size: int, steps: int
) -> tuple[list[torch.Tensor], Timeline]:
    """Losses and gradients of the last step of a copy of the model, on threads, and its timeline."""
    options = StepOptions(copy_size=copy_size)
    model = [zbkern.convert(module) for module in copy.deepcopy(list(model))]

    def rank_steps(pipe: Pipeline) -> Any:
        pipe.queue.merge = False  # however copies part neighbouring W
        for _ in range(steps):
            for chunk in schedule.chunks_of(pipe.rank):
                model[chunk].zero_grad()
            loss = pipe.step(*data)
        assert pipe.queue.pending() == pipe.queue.bytes == 0
        return loss, pipe.gather_timeline()

    results = run_pipelines(schedule, model, rank_steps, options=options)
    losses = [loss for loss, _ in results if loss is not None]
    gradients = [p.grad for module in model for p in module.parameters() if p.grad is not None]
    return [*losses, *gradients], results[0][1]


def check_equal(schedule: Schedule, saving: Schedule, copy_size: int = COPY_SIZE, steps: int = 2) -> Timeline:
    model, data = make_model(len(schedule.placement)), make_data(schedule.microbatches)
    expected, _ = run(schedule, model, data, copy_size, steps)
    found, timeline = run(saving, model, data, copy_size, steps)
    # W of one chunk that follow each other are added in the order in which what they need is loaded
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-16)
    reference = [plain(model, *data), *(p.grad for module in model for p in module.parameters())]
    torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-12)
    return timeline


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 160))])
def test_any_schedule_gives_the_gradients_of_one_without_copies_and_of_plain_backward(seed: int) -> None:
    """With copies of one transfer, of one per storage, and of a few of them."""
    rng, saving = random.Random(seed), None
    while saving is None:
        rows, placement, microbatches = random_rows(rng)
        if is_valid(rows, placement, microbatches):
            saving = Schedule.build(rows, placement, microbatches)
    rows = [[action for action in row if action.kind not in "ROL"] for row in saving.actions]
    timeline = check_equal(Schedule.build(rows, placement, microbatches), saving, rng.choice([COPY_SIZE, 1, 600]))
    for row, ran, copies in zip(saving.actions, timeline.events, timeline.copies or [()] * len(rows), strict=True):
        assert [event.action for event in ran] == [action for action in row if action.kind not in ("O", "L")]
        assert sorted(event.action for event in copies) == sorted(action for action in row if action.kind in ("O", "L"))


def replicated_gradients(row: str) -> list[torch.Tensor]:
    """Gradients of a chunk under DistributedDataParallel, whose pipelines have one rank each."""
    torch.manual_seed(5)
    module = zbkern.convert(Wide())
    replica = nn.parallel.DistributedDataParallel(module)
    data = torch.randn(4, 32) + torch.distributed.get_rank()
    with one_rank(replica, schedule_of(row, microbatches=2)) as pipe:
        pipe.step(data, data)
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.dist
def test_replicas_are_reduced_as_without(two_ranks: Any) -> None:
    expected = two_ranks.run(replicated_gradients, "0F0 0F1 0B0 0W0 0B1 0W1")[0]
    found = two_ranks.run(replicated_gradients, "0F0 0F1 0O0 0R1 0B1 0O1 0L0 0B0 0L1 0W0 0W1")
    plain = two_ranks.run(replicated_gradients, "0F0 0F1 0B1 0B0 0W0 0W1")[0]
    assert len(expected) == 6
    assert_same(plain, *found)
    torch.testing.assert_close(plain, expected)


# ---- one rank, with rows that say what is meant


def step(modules: Sequence[nn.Module], row: str, *, microbatches: int = 2, steps: int = 1, **more: Any) -> Any:
    """Runs a row on one rank; the pipeline, still open to be looked at."""
    schedule = schedule_of(row, microbatches=microbatches, placement=[0] * len(modules))
    pipe = one_rank(modules, schedule, **more)
    pipe.queue.merge = False  # however copies part neighbouring W
    data = batch(microbatches)
    for _ in range(steps):
        pipe.step(data, data)
    return pipe


def batch(microbatches: int) -> torch.Tensor:
    return torch.ones(2 * microbatches, 8) * torch.linspace(0, 1, 8)


def results_of(rows: Sequence[str], make: Callable[[], nn.Module], **more: Any) -> list[list[torch.Tensor]]:
    """By row, what a step of it leaves: buffers and gradients of a module, and the random numbers that come next."""
    found = []
    for row in rows:
        torch.manual_seed(3)
        random.seed(3)
        module = make()
        with step([module], row, **more):
            found.append([*module.buffers(), *(p.grad for p in module.parameters()), torch.rand(4)])
        found[-1].append(torch.tensor(random.random()))
    return found


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


def normed() -> nn.Module:
    """Batch norm writes statistics without a sign; spectral norm computes with vectors that every forward changes."""
    spectral = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), spectral(nn.Linear(8, 8)), nn.Tanh())


@pytest.mark.parametrize("saving", ["0F0 0F1 0F2 0R0 0BW0 0R1 0BW1 0BW2", "0F0 0O0 0F1 0O1 0F2 0L0 0BW0 0L1 0BW1 0BW2"])
@pytest.mark.parametrize(("make", "recompute"), [(Random, ()), (normed, ()), (normed, (nn.BatchNorm1d, nn.Linear))])
def test_random_numbers_and_buffers_are_as_without(saving: str, make: Any, recompute: Sequence[type]) -> None:
    rows, options = ("0F0 0F1 0F2 0BW0 0BW1 0BW2", saving), StepOptions(recompute=recompute)
    assert_same(*results_of(rows, make, microbatches=3, steps=2, options=options))


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("row", ["0F0 0F1 0BW0 0BW1", "0F0 0O0 0F1 0L0 0BW0 0BW1", "0F0 0F1 0R0 0BW0 0BW1"])
def test_inputs_that_ask_for_a_gradient_get_it(row: str, parts: bool) -> None:
    module, data = deep(1), torch.ones(4, 8, requires_grad=True)
    local = LocalTransport.ring(1)[0]
    with Pipeline([module], schedule_of(row, microbatches=2), nn.functional.mse_loss, local) as pipe:
        targets = data.detach()
        pipe.step([data[:2], 2 * data[2:]] if parts else data, list(targets.split(2)) if parts else targets)
    found, data.grad = data.grad, None
    loss = nn.functional.mse_loss(module(torch.cat([data[:2], (1 + parts) * data[2:]])), data.detach())
    torch.testing.assert_close(found, *torch.autograd.grad(loss, [data]))


# ---- when copies run


def before_copies(monkeypatch: pytest.MonkeyPatch, function: Callable[[host_copies.Pairs], object]) -> None:
    """Calls the function with what is copied before every copy."""
    copy_now = host_copies.copy
    monkeypatch.setattr(host_copies, "copy", lambda pairs: (function(pairs), copy_now(pairs)))


def delay(monkeypatch: pytest.MonkeyPatch, before: float, after: float) -> None:
    """Copies that take so many seconds longer; meanwhile their destinations hold garbage."""

    def wait(pairs: host_copies.Pairs) -> None:
        for destination, _ in pairs:
            destination.fill_(0xAB)
        time.sleep(before)

    before_copies(monkeypatch, wait)
    late = host_copies.copy
    monkeypatch.setattr(host_copies, "copy", lambda pairs: (late(pairs), time.sleep(after)))


def watch_copies(monkeypatch: pytest.MonkeyPatch, began: Callable[[bool], object]) -> None:
    """Calls began(whether it goes to the host) as every copy begins."""
    on_host: list[torch.Tensor] = []

    def watch(pairs: host_copies.Pairs) -> None:
        out = not any(source is host for _, source in pairs for host in on_host)
        on_host.extend(destination for destination, _ in pairs if out)
        began(out)

    before_copies(monkeypatch, watch)


LATE = [(0.02, 0.0), (0.0, 0.02), (0.02, 0.02)]  # seconds before and after a copy


@pytest.mark.parametrize("seconds", LATE)
@pytest.mark.parametrize(
    "row",
    [
        "0F0 0F1 0O0 0F2 0O2 0L0 0BW0 0BW1 0L2 0BW2",
        "0F0 0O0 0F1 0O1 0L0 0BW0 0F2 0O2 0L1 0BW1 0L2 0BW2",  # streamed
        "0F0 0F1 0O0 0O1 0F2 0L1 0L0 0B1 0B0 0O1 0O0 0B2 0L0 0L1 0W0 0W1 0W2",
        "0F0 0F1 0B0 0O0 0F2 0B1 0L0 0W0:0/2 0W0:1/2 0W1 0BW2",
    ],
)
def test_late_transfers_delay_and_change_nothing(
    seconds: tuple[float, float], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several transfers of an O and L: where F waits for them, and where other passes run meanwhile."""
    delay(monkeypatch, *(each / 4 for each in seconds))
    found = []
    for actions in (" ".join(text for text in row.split() if text[1] not in "OL"), row):
        module = deep(5)
        with step([module], actions, microbatches=3, options=StepOptions(copy_size=1)) as pipe:
            found.append([p.grad for p in module.parameters()])
            copies = pipe.last_timeline.copies
    assert all(map(torch.equal, *found))
    assert all(event.end - event.start > 5 * sum(seconds) / 4 for event in copies[0])


def test_layers_leave_while_later_ones_run_and_a_backward_waits_for_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last forward waits for the first copy out; the last copy back waits for the first backward."""
    events = {name: threading.Event() for name in ("out", "B4")}
    loads = itertools.count()

    def told(name: str) -> None:
        if name == "F4":
            assert events["out"].wait(10)
        if name in events:
            events[name].set()

    def began(out: bool) -> None:
        if out:
            events["out"].set()
        elif next(loads) == 2:
            assert events["B4"].wait(10)

    watch_copies(monkeypatch, began)
    step([deep(5, told)], "0F0 0O0 0L0 0BW0", microbatches=1, options=StepOptions(copy_size=1)).close()
    assert next(loads) > 2


@pytest.mark.parametrize(
    "row", ["0F0 0B0 0O0 0F1 0B1 0W1 0F2 0L0 0W0 0BW2", "0F0 0F1 0B0 0O0 0B1 0O1 0F2 0L0 0L1 0W0 0W1 0BW2"]
)
def test_a_weight_gradient_waits_for_its_own_transfer_alone(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last copy back waits for the first W; alone, and of two microbatches at once."""
    begun, last = itertools.count(1), 5 * row.count("L")
    loading, ran = threading.Event(), threading.Event()

    def began(out: bool) -> None:
        if not out:
            loading.set()
            assert next(begun) < last or ran.wait(10)

    watch_copies(monkeypatch, began)
    module, data = deep(5), batch(3)
    with one_rank(module, schedule_of(row, microbatches=3), options=StepOptions(copy_size=1)) as pipe:
        pipe.queue.listeners.append(lambda tasks: ran.set() if loading.is_set() else None)
        pipe.step(data, data)
    assert next(begun) == last + 1


# ---- memory


class Watched(nn.Module):
    """Saves a tensor in three places; `seen` says at every forward how many of them are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = zbkern.convert(nn.Linear(8, 8))
        self.saved: list[Callable[[], torch.UntypedStorage | None]] = []
        self.seen: list[int] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and self.seen:
            raise ValueError("now")
        self.seen.append(in_memory(self.saved))
        hidden = self.linear(x).sigmoid()
        self.saved.append(weakref.ref(hidden.untyped_storage()))
        return hidden * hidden


def in_memory(storages: Sequence[Callable[[], torch.UntypedStorage | None]]) -> int:
    """How many of these storages have memory on the device."""
    return sum(bool(found) and found.nbytes() > 0 for found in (storage() for storage in storages))


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


@pytest.mark.parametrize("row", ["0F0 0O0 0F1 0L0 0BW0 0BW1", "0F0 0F1 0B0 0O0 0B1 0L0 0W0 0W1"])
def test_what_others_hold_stays_for_them(row: str) -> None:
    """Outputs and gradients that the user's hooks keep can be read while their microbatch is on the host."""
    module, kept = deep(2), []

    def keep(part: nn.Module, given: Any, y: torch.Tensor) -> None:
        kept.append((y.detach(), y.detach().clone()))
        y.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))

    def look(*_: Any) -> None:
        for tensor, copied in kept:
            assert torch.equal(tensor, copied)

    module[0].register_forward_hook(keep)
    module.register_forward_pre_hook(look)
    with step([module], row) as pipe:
        pipe.queue.listeners.append(look)
        pipe.step(batch(2), batch(2))
    look()
    assert len(kept) == 8


@pytest.mark.parametrize(("row", "most"), [("0F0 0O0 0L0 0BW0", 2), ("0F0 0F1 0O0 0L0 0BW0 0BW1", 5)])
def test_a_forward_whose_offload_follows_holds_two_transfers(row: str, most: int) -> None:
    """Of the outputs of six layers, each a transfer of its own, those that are in memory as a layer begins."""
    alive: list[int] = []
    saved: list[Callable[[], torch.UntypedStorage | None]] = []

    class Layer(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            saved.append(weakref.ref(x.untyped_storage()))
            alive.append(in_memory(saved[1:]))
            return super().forward(x)

    module = nn.Sequential(*(Layer(index, lambda name: None) for index in range(6)))
    with step([module], row, microbatches=1 + ("F1" in row), options=StepOptions(copy_size=1)):
        assert max(alive[:6]) == alive[5] == most


def test_a_chunk_input_is_given_back_too() -> None:
    """The graph ends in a leaf, which would keep it, and a message's tensor is nobody's but the chunk's."""
    first, second = Watched(), Watched()
    arrived: list[Callable[[], torch.UntypedStorage | None]] = []
    alive: list[int] = []

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        alive.append(in_memory(arrived))
        arrived.append(weakref.ref(inputs[0].untyped_storage()))

    second.register_forward_pre_hook(look)
    with step([first, second], "0F0 1F0 1O0 0O0 0F1 1F1 1BW1 0BW1 1L0 1BW0 0L0 0BW0"):
        assert alive == [0, 0]


def test_a_tensor_that_is_saved_several_times_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    before_copies(monkeypatch, lambda pairs: copied.extend(source.nbytes for _, source in pairs))
    with step([Watched()], "0F0 0O0 0F1 0L0 0BW0 0BW1"):
        size = 2 * 8 * 4  # of what three functions save, and of the output, for the loss; not the batch, nor weights
        assert copied == [size, size, size, size]


def test_evaluation_saves_nothing() -> None:
    with step([Watched()], "0F0 0F1 0O0 0L0 0BW0 0R1 0BW1") as pipe:
        assert pipe.evaluate(batch(2), batch(2)) == pipe.step(batch(2), batch(2))
        peak = pipe.gather_timeline().peak_memory
        pipe.evaluate(batch(2), batch(2))
        assert pipe.gather_timeline().peak_memory == peak


def test_a_schedule_that_saves_memory_may_come_first_in_an_evaluation() -> None:
    plain = schedule_of("0F0 0F1 0B0 0B1 0W0 0W1", microbatches=2)
    saving = schedule_of("0F0 0O0 0F1 0L0 0BW0 0R1 0BW1", microbatches=2)
    with one_rank([Watched()], plain) as pipe:
        loss = pipe.evaluate(batch(2), batch(2), schedule=saving)
        assert loss == pipe.step(batch(2), batch(2), schedule=saving)
        timeline = pipe.gather_timeline()
        assert [event.action.kind for event in timeline.copies[0]] == ["O", "L"]
        assert timeline.peak_memory[0] > 0


# ---- failures


@pytest.mark.parametrize("broken", [1, 2])  # the copy out, and back
def test_a_copy_that_fails_is_known_to_all_and_the_pipeline_goes_on(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeline of the failed step is that of what ran, also after an evaluation; then comes a step."""
    begun = itertools.count(1)

    def fail(pairs: host_copies.Pairs) -> None:
        if next(begun) == broken:
            raise MemoryError("the host has no more")

    before_copies(monkeypatch, fail)
    schedule = schedule_of("0F0 0O0 0L0 0BW0 0F1 0BW1", "1F0 1BW0 1F1 1BW1", microbatches=2)
    data = torch.ones(4, 8)

    def steps(pipe: Pipeline) -> tuple[str, Timeline]:
        with pytest.raises(PipelineError) as raised:
            pipe.step(data, data)
        pipe.evaluate(data, data)
        timeline = pipe.gather_timeline()
        pipe.step(data, data)
        return str(raised.value), timeline

    (message, first), (same, second) = run_pipelines(schedule, [Watched(), Watched()], steps, timeout=5)
    assert message == same
    assert re.match(r"rank 0, action 0.*MemoryError: the host has no more", message)
    assert [str(event.action) for row in first.copies for event in row] == [[], ["0O0"]][broken - 1]
    assert str(first.events[0][0].action) == "0F0"
    assert first.events == second.events


@pytest.mark.parametrize("fails", ["", "copy", "forward"])
def test_close_ends_the_threads_of_copies(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("zbkern copies")}

    before, module = copying(), deep(1)
    pipe = step([module], "0F0 0O0 0L0 0BW0", microbatches=1)
    assert len(copying() - before) == 2
    if fails:
        monkeypatch.setattr(host_copies, "copy", lambda pairs: 1 / 0)
        module.register_forward_pre_hook(lambda *_: 1 / 0 if fails == "forward" else None)
        with pytest.raises(PipelineError, match="ZeroDivisionError"):
            pipe.step(torch.ones(2, 8), torch.ones(2, 8))
    pipe.close()
    assert copying() <= before
    assert sum(map(len, pipe.last_timeline.copies)) == (0 if fails else 2)
    pipe.close()


def test_a_step_that_fails_leaves_no_copies_behind() -> None:
    module = Watched()
    pipe = step([module], "0F0 0F1 0O0 0L0 0BW0 0BW1")
    expected = [p.grad.clone() for p in module.parameters()]
    module.seen.clear()
    module.fails = True
    with pytest.raises(PipelineError, match="now"):
        pipe.step(torch.ones(4, 8), torch.ones(4, 8))
    module.fails = False
    module.zero_grad()
    gc.collect()
    assert in_memory(module.saved) == 0
    pipe.step(batch(2), batch(2))
    assert_same([p.grad for p in module.parameters()], expected)
    pipe.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fill": "eager"}, "fill must be \"planned\" .* with a schedule that offloads or recomputes .*; got 'eager'"),
        ({"options": StepOptions(max_wgrad_bytes=5)}, "max_wgrad_bytes None with a schedule .*; got 'planned' and 5"),
    ],
)
def test_what_would_change_the_order_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step([Watched()], "0F0 0R0 0BW0", microbatches=1, **arguments)
