"""Weights that several ranks hold: what is told of them, copies on every rank, and ranks that fail beside them."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import WIDTH, on_threads, results_on_threads, run_pipelines
from tests.support.patience import patiently
from zbkern.pipeline import Pipeline, PipelineError, schedules
from zbkern.pipeline.transport.local import LocalTransport


class Table(nn.Module):
    """An embedding and a layer, in one module."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.layer = embedding, nn.Linear(WIDTH, WIDTH)


class Top(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.head = nn.Linear(*weight.shape[::-1], bias=False)
        self.head.weight = weight


def warnings_of(caplog: Any, modules: list[list[nn.Module]], tied: Any = lambda rank, modules: None) -> list[str]:
    """What a Pipeline's constructor logs; modules: by rank."""
    caplog.clear()
    schedule = schedules.zb_v(2, 4) if len(modules[0]) == 2 else schedules.zb_h1(len(modules), 4)

    def construct(transport: Any) -> None:
        mine = modules[transport.rank]
        Pipeline(mine, schedule, nn.functional.mse_loss, transport, tied=tied(transport.rank, mine)).close()

    results_on_threads(len(modules), construct)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("other", "told"), [(torch.ones(3), False), (torch.zeros(3), True), (torch.ones(3, device="meta"), False)]
)
def test_tied_copies_that_differ_are_told(caplog: pytest.LogCaptureFixture, other: torch.Tensor, told: bool) -> None:
    copies, modules = [torch.ones(3), other], [[nn.Linear(2, 2)], [nn.Linear(2, 2)]]
    said = warnings_of(caplog, modules, lambda rank, modules: {"table": nn.Parameter(copies[rank])})
    assert ["copies of tied 'table' differ between ranks [0, 1]" in text for text in said] == [True] * told


def test_a_forgotten_tie_is_told_with_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    table = nn.Embedding(700, WIDTH)
    modules: list[list[nn.Module]] = [[Table(table)], [Top(nn.Parameter(table.weight.detach().clone()))]]
    (said,) = warnings_of(caplog, modules)
    assert "'embedding.weight' of chunk 0 on rank 0 and 'head.weight' of chunk 1 on rank 1 hold the same values" in said
    ours, theirs = re.findall(r"tied=(\{.*?\}) on rank \d", said)
    written = [eval(text, {"chunk": chunk}) for text, (chunk,) in zip((ours, theirs), modules, strict=True)]
    assert warnings_of(caplog, modules, lambda rank, modules: written[rank]) == []
    (said,) = warnings_of(caplog, modules, lambda rank, modules: written[0] if rank == 0 else None)
    assert "tied={'embedding.weight': chunk.get_parameter('head.weight')} on rank 1" in said
    (weights,) = zip(*(names.values() for names in written), strict=True)
    misspelt, said = warnings_of(caplog, modules, lambda rank, modules: {"ab"[rank]: weights[rank]})
    assert "one rank alone gives" in misspelt
    assert "hold the same values" in said


def test_two_parameters_of_one_storage_are_told(caplog: pytest.LogCaptureFixture) -> None:
    table = nn.Embedding(7, WIDTH)
    middle = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    (said,) = warnings_of(caplog, [[Table(table), Top(nn.Parameter(table.weight.data))], middle])
    assert said.endswith("say so with one Parameter for both modules; if not, start them from different seeds")
    assert warnings_of(caplog, [[Table(table), Top(table.weight)], middle]) == []


@pytest.mark.parametrize("kind", ["different values", "zeros", "no embedding", "frozen", "scalar type"])
def test_what_is_not_tied_is_not_told(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    table, weight = nn.Embedding(7, WIDTH), nn.Parameter(torch.randn(7, WIDTH))
    if kind != "different values":
        weight.data = table.weight.data.clone()
    if kind == "zeros":
        table.weight.data.zero_(), weight.data.zero_()
    first: nn.Module = Top(table.weight) if kind == "no embedding" else Table(table)
    last: nn.Module = Top(weight)
    if kind == "frozen":
        first.requires_grad_(False)
    if kind == "scalar type":
        last = last.bfloat16()
    assert warnings_of(caplog, [[first], [last]]) == []


def test_a_tied_weight_that_one_rank_alone_freezes_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    copies = [nn.Parameter(torch.ones(3), requires_grad=rank == 1) for rank in range(2)]
    with pytest.raises(ValueError, match=r"tied 'table' must be .* it is frozen on \[0\] of \[0, 1\]"):
        warnings_of(caplog, [[nn.Linear(2, 2)], [nn.Linear(2, 2)]], lambda rank, modules: {"table": copies[rank]})


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
def test_a_tied_weight_that_is_frozen_later_is_frozen_on_all_ranks(frozen: tuple[int, ...]) -> None:
    """Also where the copies of one rank differ: two chunks with a weight each."""
    torch.manual_seed(0)
    chunks = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for chunk in chunks[1:]:
        chunk.load_state_dict(chunks[0].state_dict())
    for chunk in chunks:
        chunk.tied_parameters = {"weight": chunk.weight}

    def train(pipe: Pipeline) -> None:
        mine = nn.ModuleList(pipe.modules.values())
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
        for step in range(3):
            for number in frozen if step == 1 else ():
                for chunk in mine if len(frozen) == 2 else [chunks[number]]:
                    chunk.weight.requires_grad_(False)
            torch.manual_seed(step)
            optimizer.zero_grad()
            pipe.step(*torch.randn(2, 8, WIDTH))
            optimizer.step()

    results = run_pipelines(schedules.zb_v(2, 4), chunks, train, keep_errors=True, timeout=60)
    if len(frozen) == 2:
        assert results == [None, None]
        assert all(torch.equal(chunk.weight, chunks[0].weight) for chunk in chunks)
        return
    for error in results:
        assert isinstance(error, PipelineError)
        assert "tied 'weight' must be trained on all ranks that hold it, or frozen on all" in str(error)


def tied_chain(transport: Any, hook: Any = None, **options: Any) -> tuple[Any, list[str]]:
    """The gradient of one weight that all ranks hold, after a good step, and the errors on the way."""
    rank, last = transport.rank, transport.size - 1
    generator, layer = torch.Generator().manual_seed(0), zbkern.convert(nn.Linear(WIDTH, WIDTH, bias=False))
    layer.weight.data, x = (torch.randn(rows, WIDTH, generator=generator) / 2 for rows in (WIDTH, 4))
    if hook is not None:
        layer.weight.register_post_accumulate_grad_hook(lambda _: hook(rank))
    errors: list[str] = []
    schedule = schedules.zb_h1(transport.size, 4)
    with Pipeline(layer, schedule, nn.functional.mse_loss, transport, tied={"w": layer.weight}, **options) as pipe:
        while True:
            try:
                pipe.step(x if rank == 0 else None, x if rank == last else None)
                return layer.weight.grad, errors
            except PipelineError as error:
                errors.append(str(error))
                layer.zero_grad()


def test_a_holder_that_fails_while_the_other_waits_for_its_gradient() -> None:
    finished: list[int] = []

    def hook(rank: int) -> None:
        finished.append(rank)
        if rank == 0 and finished.count(0) == 4:  # its last W: the last rank has nothing more to do
            raise ArithmeticError("a broken hook")

    good = results_on_threads(2, tied_chain)
    found = results_on_threads(2, lambda transport: tied_chain(transport, hook, timeout=60))
    for (gradient, errors), (expected, none) in zip(found, good, strict=True):
        assert len(errors) == 1
        assert "ArithmeticError: a broken hook" in errors[0]
        assert none == []
        torch.testing.assert_close(gradient, expected)


@pytest.mark.slow
def test_a_holder_that_hangs_is_named_though_it_is_no_neighbour() -> None:
    def check(scale: float) -> None:
        named = threading.Event()

        def steps(transport: LocalTransport) -> None:
            rank, layer, left = transport.rank, zbkern.convert(nn.Linear(WIDTH, WIDTH, bias=False)), [8]
            tied = {"weight": layer.weight} if rank in (0, 3) else None

            def hang(_: Any) -> None:
                left[0] -= 1
                if rank == 3 and not left[0]:  # in the last W of the second step: its own messages have left
                    named.wait(5 * scale)

            layer.weight.register_post_accumulate_grad_hook(hang)
            schedule, loss_fn = schedules.zb_h1(4, 4), nn.functional.mse_loss
            with Pipeline(layer, schedule, loss_fn, transport, tied=tied, timeout=2 * scale) as pipe:
                try:
                    for _ in range(3):
                        pipe.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH))
                finally:
                    named.set()

        messages = {str(error) for error in on_threads(4, steps)}
        assert len(messages) == 1, messages
        assert messages.pop().startswith("rank 3, action 3W")

    patiently(check)
