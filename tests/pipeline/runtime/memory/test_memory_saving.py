"""Offload, load and recompute in the engine: when copies run, memory that is given back, and failures."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import assert_same, one_rank, run_pipelines
from tests.support.schedules import schedule_of
from zbkern.pipeline import (
    Action,
    Pipeline,
    PipelineError,
    Schedule,
    StepOptions,
    Timeline,
)
from zbkern.pipeline.runtime.memory import host_copies

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


# ---- when copies run


def before_copies(monkeypatch: pytest.MonkeyPatch, function: Callable[[host_copies.Pairs], object]) -> None:
    """Calls the function with what is copied before every copy."""
    copy_now = host_copies.copy
    monkeypatch.setattr(host_copies, "copy", lambda pairs: (function(pairs), copy_now(pairs)))


def watch_copies(monkeypatch: pytest.MonkeyPatch, began: Callable[[bool], object]) -> None:
    """Calls began(whether it goes to the host) as every copy begins."""
    on_host: list[torch.Tensor] = []

    def watch(pairs: host_copies.Pairs) -> None:
        out = not any(source is host for _, source in pairs for host in on_host)
        on_host.extend(destination for destination, _ in pairs if out)
        began(out)

    before_copies(monkeypatch, watch)


def test_layers_leave_while_later_ones_run_and_a_backward_waits_for_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last forward waits for the first copy out; the last copy back waits for the first backward."""
    events = {name: threading.Event() for name in ("out", "B4")}
    loads = itertools.count()

    def told(name: str) -> None:
        if name == "F4":
            assert events["out"].wait(60)
        if name in events:
            events[name].set()

    def began(out: bool) -> None:
        if out:
            events["out"].set()
        elif next(loads) == 2:
            assert events["B4"].wait(60)

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
            assert next(begun) < last or ran.wait(60)

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
        peak = pipe.last.gather_timeline().peak_memory
        pipe.evaluate(batch(2), batch(2))
        assert pipe.last.gather_timeline().peak_memory == peak


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
        timeline = pipe.last.gather_timeline()
        pipe.step(data, data)
        return str(raised.value), timeline

    (message, first), (same, second) = run_pipelines(schedule, [Watched(), Watched()], steps, timeout=60)
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
    assert sum(map(len, pipe.last.timeline.copies)) == (0 if fails else 2)
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


class Noisy(nn.Linear):
    """Dropout of NumPy's random numbers, which an R does not draw again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numpy = pytest.importorskip("numpy")
        kept = torch.from_numpy(numpy.random.rand(*x.shape) > 0.5).to(x)
        return torch.tanh(super().forward(x * kept * 2))


@pytest.mark.parametrize("before", [0, 2, 3])
def test_the_first_r_of_each_chunk_is_compared(before: int) -> None:
    """Whatever other chunks have run again in steps before."""

    def order(again: int) -> Schedule:
        row = [Action("F", 0, 0), Action("F", 1, 0)]
        for chunk in (1, 0):
            row += [Action("R", chunk, 0), Action("BW", chunk, 0)] if chunk == again else [Action("BW", chunk, 0)]
        return Schedule.build([row], (0, 0), 1)

    chunks, data = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Noisy(8, 8)], torch.randn(16, 8)
    with one_rank(chunks, order(0)) as pipe:
        for _ in range(before):
            pipe.step([data], [data])
        with pytest.raises(PipelineError, match="Noisy gave one result, and another"):
            pipe.step([data], [data], schedule=order(1))
