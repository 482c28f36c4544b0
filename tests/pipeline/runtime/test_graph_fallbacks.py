"""What is not captured runs as it is written, and says why. Here graphs are recorded operations."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from tests.support import recorded_graphs
from tests.support.chunks import WIDTH, make_model, one_rank
from tests.support.graph_training import GRAPHS, Wrapped, assert_told, batches, check, check_one
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.saving import schedule_of
from zbkern.pipeline import PipelineError, StepOptions, schedules
from zbkern.pipeline.runtime import graphs

pytestmark = pytest.mark.usefixtures("recorded")


class Waits(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 if x.sum().item() > 0 else 2)


class Selects(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * x[x > 0].mean()


class Lists(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * len(x.sum(0).tolist())


class Counts(Wrapped):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


class Remembers(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return self.linear(x)


class Replaces(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.linear(x - self.mean)


class Chooses(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * random.random()


class Returns(Wrapped):
    def forward(self, x: Tensor) -> Any:
        return {"out": Box(self.linear(x))}


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hooked(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, args, output: output * 2)


def halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class HookedWeight(Wrapped):
    def __deepcopy__(self, memo: Any) -> Any:
        found = HookedWeight()
        found.linear.weight.register_post_accumulate_grad_hook(halve)
        return found


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Waits, "RuntimeError: operation not permitted when stream is capturing"),
        (Selects, "RuntimeError: operation not permitted when stream is capturing"),
        (Lists, "RuntimeError: operation not permitted when stream is capturing"),
        (Counts, "its forward sets module.calls, which a replay would not"),
        (Remembers, "its forward sets the length of module.seen, which a replay would not"),
        (Replaces, "its forward sets module.mean, which a replay would not"),
        (Chooses, "its forward draws random numbers on the host"),
        (Returns, "what it takes or returns is not only numbers and tensors on its device: a Box"),
        (Hooked, "a replay would not run the hooks of module.linear"),
        (HookedWeight, "a replay would not run the hooks of module.linear"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is_written(
    kind: type[nn.Module], reason: str, recorded: type[RecordedGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output["out"].value if isinstance(output, dict) else output, target)

    state = random.getstate()

    def again(step: int, modules: Any) -> None:
        if step == 0:
            random.setstate(state)

    check_one(kind(), loss_fn=loss_fn, between=again)
    assert recorded.replays == 0
    assert_told(caplog, reason)


def test_a_loss_with_weights_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for options in (None, GRAPHS):
        module, head, schedule = zbkern.convert(Wrapped()), zbkern.convert(Wrapped().double()), schedules.zb_h1(1, 2)
        head.linear = zbkern.convert(nn.Linear(3, 3).double())
        head.load_state_dict({"linear.weight": torch.eye(3), "linear.bias": torch.ones(3)})
        loss_fn = lambda output, target, head=head: F.mse_loss(head(output), target)  # noqa: E731
        with one_rank(module, schedule, loss_fn, options=options) as pipe:
            losses = [pipe.step(*batch) for batch in batches(schedule, 5)]
        found.append([losses, *(p.grad for p in (*module.parameters(), *head.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)
    reason = "not all W that wait are those of its graphs: the loss has left some, or some have run"
    assert_told(caplog, reason, "W")
    assert RecordedGraphs.graphs == 2


@pytest.mark.parametrize("limit", [0, 200, 400, 1 << 20])
def test_w_that_run_early_under_a_limit(limit: int) -> None:
    schedule = schedules.zb_h2(1, 4)
    options = StepOptions(graphs=True, max_wgrad_bytes=limit)
    assert check([nn.Sequential(Wrapped(), nn.Linear(3, 3).double())], schedule, batches(schedule, 5), graphs=options)


def test_a_w_that_cannot_be_captured_is_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = zbkern.WGradQueue.run

    def fails(queue: zbkern.WGradQueue, key: Any = None) -> int:
        if getattr(recorded_graphs._thread, "captures", False):
            queue.run_one(key)
            raise ValueError("no W today")
        return run(queue, key)

    monkeypatch.setattr(zbkern.WGradQueue, "run", fails)
    (module,) = make_model(1)
    check_one(module)
    assert_told(caplog, "ValueError: no W today", "W")


def test_an_error_of_the_module_is_what_it_always_is(recorded: type[RecordedGraphs]) -> None:
    class Fails(Wrapped):
        bad = False

        def forward(self, x: Tensor) -> Tensor:
            if self.bad:
                raise ValueError("bad")
            return self.linear(x)

    module, schedule = zbkern.convert(Fails()), schedules.zb_h1(1, 2)
    with one_rank(module, schedule, options=GRAPHS) as pipe:
        data = batches(schedule, 7)
        for batch in data[:4]:
            pipe.step(*batch)
        module.bad = True
        with pytest.raises(PipelineError, match="rank 0, action 0F0: ValueError: bad"):
            pipe.step(*data[4])
        module.bad = False
        module.zero_grad()
        loss = pipe.step(*data[5])
    expected = zbkern.convert(Fails())
    plain = F.mse_loss(expected(data[5][0]), data[5][1])
    plain.backward()
    torch.testing.assert_close(loss, plain.detach())
    torch.testing.assert_close(module.linear.weight.grad, expected.linear.weight.grad)


def test_replays_go_on_after_a_step_that_failed(recorded: type[RecordedGraphs]) -> None:
    calls = itertools.count()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == 13:  # the second microbatch of the fourth step
            raise ValueError("not finite")
        return F.mse_loss(output, target)

    schedule, chunk = schedules.zb_h2(1, 4), Wrapped()
    module, data = zbkern.convert(copy.deepcopy(chunk)), batches(schedule, 5)
    with one_rank(module, schedule, loss_fn, options=GRAPHS) as pipe:
        for batch in data[:3]:
            pipe.step(*batch)
        with pytest.raises(PipelineError, match="not finite"):
            pipe.step(*data[3])
        module.zero_grad()
        before = recorded.graphs, recorded.replays
        loss = pipe.step(*data[4])
        assert (recorded.graphs, recorded.replays - before[1]) == (before[0], 12)
    expected = F.mse_loss(chunk(data[4][0]), data[4][1])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(module.linear.weight.grad, chunk.linear.weight.grad)


def test_a_gradient_that_came_never_before_is_an_error() -> None:
    class Two(Wrapped):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), x * self.linear.bias.sum()

    both = []

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + (output[1].mean() if both else 0)

    module, schedule = zbkern.convert(Two()), schedules.zb_h1(1, 2)
    with one_rank(module, schedule, loss_fn, options=GRAPHS) as pipe:
        data = batches(schedule, 5)
        for batch in data[:4]:
            pipe.step(*batch)
        both.append(True)
        with pytest.raises(
            PipelineError, match="StepOptions: graphs must be False where an output first gets a gradient"
        ):
            pipe.step(*data[4])


def test_sequences_in_slices(caplog: pytest.LogCaptureFixture) -> None:
    class Adds(Wrapped):
        def forward(self, x: Tensor, carry: Any) -> Tensor:
            return self.linear(x) + carry.append(self, self.linear(x), 1).sum(1, keepdim=True)

    schedule = schedules.zb_h1(1, 2, slices=(3, 2))
    check([Adds()], schedule, [(x[:4], y[:4]) for x, y in batches(schedule, 4)])
    assert_told(caplog, "what it takes or returns is not only numbers and tensors on its device: a Carry")


def test_a_frozen_chunk(caplog: pytest.LogCaptureFixture) -> None:
    model, schedule = make_model(2), schedules.zb_h1(2, 4)
    model[0].requires_grad_(False)
    check(model, schedule, batches(schedule, 5))
    assert_told(caplog, "no gradient came of what it returned in the first two steps")


def test_tensors_elsewhere() -> None:
    """Their values would be those of the capture: what the host does with them is in no graph."""
    elsewhere, here, (module,) = torch.zeros(2, device="meta"), torch.device("cpu"), make_model(1)
    with pytest.raises(graphs._NotCaptured, match="numbers and tensors on its device: a tensor on meta"):
        graphs._form_of({"x": elsewhere}, here)
    module.lengths = elsewhere
    with pytest.raises(graphs._NotCaptured, match=r"module\.lengths is not on its device"):
        graphs._state_of(module, here)


def test_what_listens_to_w(caplog: pytest.LogCaptureFixture) -> None:
    with one_rank(zbkern.convert(Wrapped()), schedules.zb_h1(1, 2), options=GRAPHS) as pipe:
        pipe.queue.listeners.append(lambda tasks: None)
        for batch in batches(pipe.schedule, 4):
            pipe.step(*batch)
    assert_told(caplog, "its passes go with those of other ranks or streams: parallel data, tensors or W")


def test_offload(caplog: pytest.LogCaptureFixture) -> None:
    schedule = schedule_of("0F0 0O0 0L0 0B0 0W0", microbatches=1)
    check([Wrapped()], schedule, batches(schedule, 4))
    assert caplog.messages == ["rank 0: its F, B and W run without CUDA graphs, because it offloads or recomputes"]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(graphs.GraphedStage, "backend", graphs.CudaGraphs)
    check_one(Hooked(), steps=4)
    assert_told(caplog, "it is on cpu, not on a CUDA device")


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_fails_on_a_gpu_is_ended(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By CUDA, or, where that fails, too, by another capture after it: else torch's random numbers are stuck."""
    calls: list[Any] = []

    class Graph:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
            calls.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            calls.append("end")
            if not ends and len(calls) == 2:
                raise RuntimeError("invalidated")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    with pytest.raises(ZeroDivisionError):
        graphs.CudaGraphs(torch.device("cuda")).capture(lambda: 1 / 0, (0, 7))
    again = [] if ends else [("begin", None, "thread_local"), "end"]
    assert calls == [("begin", (0, 7), "thread_local"), "end", *again]


def test_options() -> None:
    with pytest.raises(TypeError, match="graphs must be True or False; got 1"):
        StepOptions(graphs=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="graphs must be False with check_values"):
        StepOptions(graphs=True, check_values=True)
