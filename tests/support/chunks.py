"""A model in chunks for tests of the engine, the same in one process, and ranks as threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import zbkern
from bench.ranks import Delay, delayed_ring
from zbkern.pipeline import Pipeline, Schedule, cut
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.local import LocalTransport

WIDTH = 6


class Block(nn.Module):
    """Takes and returns a tuple, ends in a view, and has parameters that zbkern does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.linear(self.norm(x))) * self.scale
        return (y + (x if skip is None else skip)).view(x.shape), x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x if skip is None else x + 0.1 * skip)


def make_model(chunks: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    model = [Block().double() for _ in range(chunks - 1)] + [Head().double()]
    for module in model:
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.double) / 2
    return model


def make_data(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = 2 * microbatches
    inputs = torch.randn(rows, 5, WIDTH, generator=generator, dtype=torch.double)
    return inputs, torch.randn(rows, 5, 3, generator=generator, dtype=torch.double)


def plain(model: list[nn.Module], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One process, plain backward()."""
    out: Any = (inputs,)
    for module in model:
        out = module(*out) if isinstance(out, tuple) else module(out)
    loss = nn.functional.mse_loss(out, targets)
    loss.backward()
    return loss.detach()


def on_threads(
    size: int, function: Any, delay: Delay | None = None, ring: Callable[[int], Sequence[Any]] | None = None
) -> list[Any]:
    """What function(transport) returned or raised on each rank; a thread per rank. ring: LocalTransport's, if None."""
    results: list[Any] = [None] * size

    def call(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = function(transport)
        except BaseException as error:
            results[transport.rank] = error

    transports = (ring or LocalTransport.ring)(size) if delay is None else delayed_ring(size, delay)
    threads = [threading.Thread(target=call, args=(transport,), daemon=True) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a rank hangs"
    return results


def results_on_threads(
    size: int,
    function: Callable[[LocalTransport], Any],
    delay: Delay | None = None,
    ring: Callable[[int], Sequence[Any]] | None = None,
) -> list[Any]:
    """function(transport) on one thread per rank; raises what the first rank raised."""

    def call(transport: LocalTransport) -> Any:
        try:
            return function(transport)
        except BaseException as error:
            transport.fail(repr(error))
            raise

    results = on_threads(size, call, delay, ring)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, PipelineError)):
        raise error
    return results


def run_pipelines(
    schedule: Schedule,
    chunks: Sequence[nn.Module],
    function: Callable[[Pipeline], Any],
    loss_fn: Any = nn.functional.mse_loss,
    *,
    delay: Delay | None = None,
    keep_errors: bool = False,
    own: Schedule | Callable[[int], Schedule] | None = None,
    **options: Any,
) -> list[Any]:
    """function(pipe) by rank, each a thread with a Pipeline of its chunks; keep_errors: what a rank raised, as well;
    own: what the Pipelines are given in place of the schedule."""

    def call(transport: LocalTransport) -> Any:
        mine = [chunks[chunk] for chunk in schedule.chunks_of(transport.rank)]
        with Pipeline(mine, own or schedule, loss_fn, transport, **options) as pipe:
            return function(pipe)

    return (on_threads if keep_errors else results_on_threads)(schedule.ranks, call, delay)


def step_and_evaluate(
    model: nn.Module, schedule: Schedule, partition: Sequence[float] | str | None, loss_fn: Any, *batch: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """Both losses of one step and one evaluation of a batch, and all chunks that `cut` made of copies of a model."""

    def of_rank(transport: LocalTransport) -> Any:
        chunks = cut(copy.deepcopy(model), schedule, partition, rank=transport.rank)
        with Pipeline([*map(zbkern.convert, chunks)], schedule, loss_fn, transport, timeout=60) as pipe:
            return [pipe.step(*batch), pipe.evaluate(*batch)], chunks

    found = results_on_threads(schedule.ranks, of_rank)
    losses = [loss for mine, _ in found for loss in mine if loss is not None]
    assert len(losses) == 2
    return losses, [chunk for _, chunks in found for chunk in chunks]


def gradients_of(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for chunk in chunks for name, p in chunk.named_parameters(remove_duplicate=False)}


def one_rank(modules: Any, schedule: Schedule, loss_fn: Any = nn.functional.mse_loss, **options: Any) -> Pipeline:
    return Pipeline(modules, schedule, loss_fn, LocalTransport.ring(1)[0], **options)


def needed(pipe: Pipeline, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """The inputs where this rank has the first chunk, the targets where it has the last one; else None."""
    first, last = (pipe.schedule.placement[end] == pipe.rank for end in (0, -1))
    return inputs if first else None, targets if last else None


def assert_same(*found: Any) -> None:
    """All are the same trees of tensors and numbers, to the bit."""
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
