"""Captured passes against the engine without graphs. Here graphs are recorded operations (support/recorded_graphs.py);
tests/gpu/test_graphs.py has CUDA's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from tests.support.chunks import WIDTH, make_model, needed, one_rank, run_pipelines
from tests.support.graph_training import GRAPHS, Wrapped, assert_told, batches, check, check_one
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.same import assert_same
from tests.support.tied import Tied
from zbkern.pipeline import Optimizer, Pipeline, schedules

pytestmark = pytest.mark.usefixtures("recorded")


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
