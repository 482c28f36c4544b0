"""Captured passes against the engine without graphs. Here graphs are recorded operations (support/recorded_graphs.py);
tests/gpu/test_graphs.py has CUDA's."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from tests.support import recorded_graphs
from tests.support.chunks import WIDTH, make_model, needed, one_rank, run_pipelines
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.same import assert_same
from tests.support.saving import schedule_of
from tests.support.tied import Tied
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, StepOptions, schedules
from zbkern.pipeline.runtime import graphs
from zbkern.pipeline.schedules.schedule import Schedule

GRAPHS = StepOptions(graphs=True)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraphs]:
    return recorded_graphs.install(monkeypatch)


def batches(schedule: Schedule, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = (2 * schedule.microbatches, 5, WIDTH), (2 * schedule.microbatches, 5, 3)
    return [
        tuple(torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes) for _ in range(steps)
    ]


def train(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    options: StepOptions | None,
    data: Sequence[Any],
    between: Callable[[int, Sequence[nn.Module]], None] = lambda step, modules: None,
    loss_fn: Any = F.mse_loss,
    set_to_none: bool = True,
    **more: Any,
) -> list[Any]:
    """By rank, of every step: its loss, the gradients; at the end the weights and buffers, too."""
    modules = [zbkern.convert(module) for module in copy.deepcopy([*modules])]
    torch.manual_seed(0)

    def of_rank(pipe: Pipeline) -> list[Any]:
        mine = [modules[chunk] for chunk in schedule.chunks_of(pipe.rank)]
        parameters = [*dict.fromkeys(parameter for module in mine for parameter in module.parameters())]
        optimizer, found = torch.optim.AdamW(parameters, lr=0.05), []
        for step, batch in enumerate(data):
            between(step, mine)
            loss = pipe.step(*needed(pipe, *batch))
            found.append((loss, [None if p.grad is None else p.grad.clone() for p in parameters]))
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return [*found, [module.state_dict() for module in mine]]

    return run_pipelines(schedule, modules, of_rank, loss_fn, options=options, **more)


def check(modules: Sequence[nn.Module], schedule: Schedule, data: Sequence[Any], **more: Any) -> int:
    """Trains with graphs and without: the same but for the rounding of float64. Returns how many graphs there were."""
    expected = train(modules, schedule, None, data, **{key: each for key, each in more.items() if key != "graphs"})
    before = RecordedGraphs.graphs
    found = train(modules, schedule, more.pop("graphs", GRAPHS), data, **more)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    return RecordedGraphs.graphs - before


def check_one(module: nn.Module, steps: int = 5, microbatches: int = 2, **more: Any) -> int:
    schedule = schedules.zb_h1(1, microbatches)
    return check([module], schedule, more.pop("data", None) or batches(schedule, steps), **more)


def assert_told(caplog: pytest.LogCaptureFixture, reason: str, what: str = "F, B and W") -> None:
    assert caplog.messages == [f"chunk 0: its {what} run without CUDA graphs, because {reason}"]


class Wrapped(nn.Module):
    """A linear layer and what a subclass makes of its output."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(WIDTH, 3).double()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.double)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


# ---- what is captured


@pytest.mark.parametrize("fill", ["planned", "eager"])
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_h2", "interleaved", "zb_v"])
def test_steps_are_those_without_graphs(
    name: str, fill: str, recorded: type[RecordedGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    schedule = getattr(schedules, name)(2, 4)
    chunks = len(schedule.placement)
    check(make_model(chunks), schedule, batches(schedule, 6), fill=fill, set_to_none=name != "zb_h2")
    assert not caplog.records
    of_f_and_b = 4 * chunks * 4 * 2  # steps, chunks, microbatches
    if fill == "eager" and name.startswith("zb"):
        assert recorded.replays == of_f_and_b
    else:
        assert recorded.replays > of_f_and_b


def test_every_pass_of_a_later_step_is_a_replay(recorded: type[RecordedGraphs]) -> None:
    schedule = schedules.one_f_one_b(1, 4)
    (module,) = make_model(1)
    with one_rank(zbkern.convert(module), schedule, options=GRAPHS) as pipe:
        counts = []
        for batch in batches(schedule, 5):
            module.zero_grad()
            pipe.step(*batch)
            counts.append((recorded.graphs, recorded.replays))
    # in the third step the first W has no gradient yet to add to
    assert counts == [(0, 0), (0, 0), (3, 11), (3, 23), (3, 35)]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_random_numbers_are_those_without_graphs(microbatches: int) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.GELU(), nn.Linear(WIDTH, 3)).double()
    assert check_one(module, microbatches=microbatches) > 0


def test_every_replay_draws_other_random_numbers(recorded: type[RecordedGraphs]) -> None:
    module, schedule = nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.5)).double(), schedules.zb_h1(1, 1)
    (batch,) = batches(schedule, 1)
    with one_rank(zbkern.convert(module), schedule, options=GRAPHS) as pipe:
        losses = [pipe.step(*batch).item() for _ in range(8)]
    assert recorded.replays > 15
    assert len({*losses}) == 8


def test_buffers_and_evaluation(recorded: type[RecordedGraphs]) -> None:
    class Normed(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    assert check_one(Normed()) > 0
    module = zbkern.convert(Normed())
    with one_rank(module, schedules.zb_h1(1, 2), options=GRAPHS) as pipe:
        for batch in batches(pipe.schedule, 4):
            pipe.step(*batch)
        before = recorded.replays
        torch.testing.assert_close(pipe.evaluate(*batch), F.mse_loss(module.eval()(batch[0]), batch[1]).detach())
    assert recorded.replays == before


def test_weights_used_twice_and_tied() -> None:
    torch.manual_seed(0)
    module, generator = Tied().double(), torch.Generator().manual_seed(1)
    data = [(torch.randint(11, (4, 5), generator=generator), torch.randint(11, (4, 5), generator=generator))] * 3
    data += [(torch.randint(11, (4, 5), generator=generator), torch.randint(11, (4, 5), generator=generator))] * 3
    assert check_one(module, data=data, loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_tied_between_chunks(ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, WIDTH)
            self.tied_parameters = {"table": self.table.weight}

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    class Last(nn.Module):
        def __init__(self, first: First) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 11, bias=False)
            self.head.weight = first.table.weight if ranks == 1 else nn.Parameter(first.table.weight.detach().clone())
            self.tied_parameters = {"table": self.head.weight}

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    first, generator = First().double(), torch.Generator().manual_seed(1)
    schedule = schedules.zb_h1(2, 4) if ranks == 2 else schedules.interleaved(1, 4, 2)
    data = [(torch.randint(11, (8, 5), generator=generator), torch.randint(11, (8, 5), generator=generator))]
    loss_fn = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    assert check([first, Last(first).double()], schedule, data * 6, loss_fn=loss_fn) > 0
    assert not caplog.records


@pytest.mark.parametrize("flags", [False, True])
def test_main_grads(flags: bool, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for options in (None, GRAPHS):
        module, schedule = zbkern.convert(Wrapped()), schedules.zb_h1(1, 3)
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            if flags:
                parameter.grad_added_to_main_grad = False
        with one_rank(module, schedule, options=options) as pipe:
            for batch in batches(schedule, 5):
                for parameter in module.parameters():
                    parameter.main_grad.mul_(0.5)
                    parameter.grad_added_to_main_grad = False
                pipe.step(*batch)
                assert (
                    all(p.grad is None and p.grad_added_to_main_grad is flags for p in module.parameters()) or not flags
                )
        found.append([parameter.main_grad for parameter in module.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)
    assert not caplog.records
    assert RecordedGraphs.graphs == 3


@pytest.mark.parametrize("converted", [True, False])
def test_casts_of_autocast_are_of_the_weights_as_they_are(converted: bool) -> None:
    """Autocast keeps a weight's cast until its block ends: a capture must not find it."""
    schedule, found = schedules.zb_h1(2, 4), []
    for options in (None, GRAPHS):
        torch.manual_seed(0)
        model = [nn.Linear(WIDTH, width) for width in (WIDTH, 3)]
        if converted:
            model = [*map(zbkern.convert, model)]

        def of_rank(pipe: Pipeline, model: Any = model) -> list[Any]:
            optimizer, losses = torch.optim.SGD(model[pipe.rank].parameters(), lr=0.5), []
            for x, y in batches(schedule, 6):
                with torch.autocast("cpu", torch.bfloat16):
                    model[pipe.rank](x.float())
                    losses.append(pipe.step(*needed(pipe, x.float(), y)))
                optimizer.step()
                optimizer.zero_grad()
            return [losses, model[pipe.rank].state_dict()]

        found.append(run_pipelines(schedule, model, of_rank, lambda x, y: F.mse_loss(x.double(), y), options=options))
    assert_same(*found)
    assert RecordedGraphs.graphs > 0


def test_an_output_without_gradient_stays_so() -> None:
    class First(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(WIDTH, 2).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.unused(x), self.linear(x), x > 0

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.double))

        def forward(self, unused: Tensor, x: Tensor, mask: Tensor) -> Tensor:
            return x * self.scale * mask.sum()

    schedule = schedules.zb_h1(2, 4)
    assert check([First(), Last()], schedule, batches(schedule, 5)) > 0


def test_lists_that_a_loss_fills_and_numbers_that_it_reads() -> None:
    seen, scale = [], itertools.count(1)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.detach())
        return next(scale) * F.mse_loss(output, target)

    module, schedule = zbkern.convert(Wrapped()), schedules.zb_h1(1, 2)
    with one_rank(module, schedule, loss_fn, options=GRAPHS) as pipe:
        data = batches(schedule, 5)
        losses = [pipe.step(*batch).item() for batch in data]
    expected = [module(x).detach() for x, _ in data]
    torch.testing.assert_close([torch.cat(seen[i : i + 2]) for i in range(0, 10, 2)], expected)
    pairs = [zip(out.chunk(2), y.chunk(2), strict=True) for out, (_, y) in zip(expected, data, strict=True)]
    numbers = itertools.count(1)
    plain = [sum(next(numbers) * F.mse_loss(*pair).item() / 2 for pair in of_step) for of_step in pairs]
    assert losses == pytest.approx(plain)
    assert RecordedGraphs.graphs > 0


def test_the_optimizer_that_validates_later() -> None:
    schedule, found = schedules.zb_h2(2, 4), []
    for options in (None, GRAPHS):
        model = [zbkern.convert(module) for module in make_model(2)]

        def of_rank(pipe: Pipeline, model: Any = model) -> list[Any]:
            module = model[pipe.rank]
            optimizer = Optimizer(torch.optim.AdamW(module.parameters(), lr=0.05), pipe, max_norm=0.5)
            losses = []
            for batch in batches(schedule, 6):
                losses.append(pipe.step(*needed(pipe, *batch)))
                optimizer.step()
                optimizer.zero_grad()
            optimizer.validate()
            return [losses, module.state_dict()]

        found.append(run_pipelines(schedule, model, of_rank, options=options))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)
    assert RecordedGraphs.graphs > 0


# ---- what changes


def test_what_somebody_keeps_of_an_earlier_step_stays(
    recorded: type[RecordedGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    module, schedule = zbkern.convert(Wrapped()), schedules.zb_h1(1, 2)
    kept, copies, replays = [], [], []
    with one_rank(module, schedule, options=GRAPHS) as pipe:
        for step, batch in enumerate(batches(schedule, 8)):
            if step == 6:
                kept.clear()
                copies.clear()
            module.zero_grad()
            before = recorded.replays
            pipe.step(*batch)
            replays.append(recorded.replays - before)
            kept.append(module.linear.weight.grad)
            copies.append(module.linear.weight.grad.clone())
    assert_same(kept, copies)
    assert replays == [0, 0, 5, 4, 4, 4, 6, 4]  # with W where the memory is free
    assert_told(caplog, "a gradient is another tensor than the one captured, which somebody may still have", "W")


def test_a_change_between_steps_is_captured_anew(caplog: pytest.LogCaptureFixture) -> None:
    def change(step: int, modules: Sequence[nn.Module]) -> None:
        if step == 4:
            modules[0][1].p = 0.1
        if step == 5:
            modules[0][0].weight.requires_grad_(False)
        if step == 6:
            modules[0].eval()

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Linear(WIDTH, 3)).double()
    check_one(module, steps=8, between=change)
    names = ["module.1.p", "the kind of module.0.weight", "module.training"]
    assert caplog.messages == [f"chunk 0: is captured anew, because {name} has changed between steps" for name in names]


def test_other_numbers_of_microbatches_and_rows(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for options in (None, GRAPHS):
        module, losses = zbkern.convert(Wrapped()), []
        with one_rank(module, schedules.zb_h1(1, 2), options=options) as pipe:
            for count, rows in ((2, 2), (2, 2), (2, 2), (4, 2), (1, 2), (3, 2), (2, 3), (2, 2)):
                pipe._use_schedule(schedules.zb_h1(1, count))
                generator = torch.Generator().manual_seed(count)
                x = torch.randn(rows * count, 5, WIDTH, generator=generator, dtype=torch.double)
                losses.append((pipe.step(x, x[..., :3]), module.linear.weight.grad.clone()))
        found.append(losses)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)
    assert_told(caplog, "shapes, types or numbers among its inputs are others than those captured")


# ---- what is not captured, and why


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
