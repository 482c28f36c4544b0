"""A run whose rank turns out slow: its speeds and its checkpoint go to a run that is cut by them, and trains as one.

Time is counted: a busy machine changes no speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.counted import counted_time as counted_time
from tests.support.counted import results_on_counted_ranks, sleep
from zbkern.pipeline import LayerCosts, ModelCosts, Pipeline, checkpoint, plan

LAYERS, MICROBATCHES, WIDTH = 9, 4, 6
SPEEDS = (1.0, 0.5)
SECONDS = 0.01  # of a pass of a layer on a rank of speed 1


class Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.seconds)
        return dy, None


class Layer(nn.Module):
    """Draws its weights from its number in the model."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(number)
        for parameter in self.linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Slept.apply(self.linear(x), self.seconds))


def layers(first: int, last: int, seconds: float = 0.0) -> nn.Sequential:
    found = nn.Sequential()
    for number in range(first, last):
        found.add_module(f"layer{number}", Layer(number, seconds))
    return found


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()


def costs() -> ModelCosts:
    each = [LayerCosts(f"layer{number}", 1e3 * SECONDS, 1e3 * SECONDS, 0.01, 1.0, 1.0) for number in range(LAYERS)]
    return ModelCosts(tuple(each), time_unit="ms")


def run(transport: Any, folder: Path, speeds: list[float] | None, steps: range, chunks: int) -> tuple[int, list[int]]:
    """One rank, which goes on from the checkpoint in the folder: from which step, and the layers that it has.

    Rank 0 writes the speeds of its last step, as a JSON list.
    """
    rank = transport.rank
    found = plan(costs(), 2, MICROBATCHES, chunks=chunks, speeds=speeds, effort=0)
    ends = [*map(int, found.partition or ()), LAYERS]
    seconds = SECONDS / SPEEDS[rank]
    mine = {
        chunk: zbkern.convert(layers(ends[chunk], ends[chunk + 1], seconds))
        for chunk, owner in enumerate(found.schedule.placement)
        if owner == rank
    }
    with Pipeline([*mine.values()], found.schedule, nn.functional.mse_loss, transport) as pipe:
        optimizer = torch.optim.AdamW((p for chunk in mine.values() for p in chunk.parameters()), lr=0.01)
        loaded = checkpoint.load(folder / "checkpoints", pipe, optimizer)
        for step in steps:
            pipe.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
        drift = pipe.last.drift(found.costs)
        checkpoint.save(folder / "checkpoints", steps.stop, pipe, optimizer)
    if rank == 0:
        (folder / "speeds.json").write_text(json.dumps(drift.speeds))
    return 0 if loaded is None else loaded.step, [number for c in mine for number in range(ends[c], ends[c + 1])]


def in_one_piece(steps: range) -> nn.Sequential:
    model = layers(0, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in steps:
        inputs, targets = batch(step)
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            (nn.functional.mse_loss(model(x), y) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.usefixtures("counted_time")
def test_a_run_is_cut_anew_by_the_speeds_of_the_one_before(tmp_path: Path) -> None:
    before = results_on_counted_ranks(2, lambda transport: run(transport, tmp_path, None, range(2), 1))
    assert [start for start, _ in before] == [0, 0]
    speeds = json.loads((tmp_path / "speeds.json").read_text())
    assert speeds[1] / speeds[0] == pytest.approx(SPEEDS[1] / SPEEDS[0], abs=0.01)
    after = results_on_counted_ranks(2, lambda transport: run(transport, tmp_path, speeds, range(2, 4), 2))
    assert [start for start, _ in after] == [2, 2]
    counts = [[len(layers) for _, layers in each] for each in (before, after)]
    assert counts[0] in ([4, 5], [5, 4])
    assert counts[1] == [6, 3]  # by speeds of 1 and 0.5, as they were measured
    assert {*before[1][1]} & {*after[0][1]}, "no weights have moved"

    whole, expected = layers(0, LAYERS), in_one_piece(range(4))
    assert checkpoint.load(tmp_path / "checkpoints", whole) == (4, None)
    torch.testing.assert_close(whole.state_dict(), expected.state_dict())
