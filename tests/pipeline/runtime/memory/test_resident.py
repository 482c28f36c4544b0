"""Memory of real ranks, as the operating system counts it: what was planned is what is held, and nothing stays."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.resident import Resident, give_back_what_is_free
from zbkern.pipeline import Pipeline, ProfileOptions, StepOptions, profile, schedules, simulate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WIDTH, TOKENS, LAYERS, MICROBATCHES = 128, 512, 4, 4


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def planned_and_held() -> tuple[float, float]:
    """Bytes at this rank's peak: of the simulation with measured costs, of the process in a step.

    W runs where the schedule has it: what eager filling holds depends on how long each pass takes on the day.
    """
    give_back_what_is_free()
    schedule = schedules.zb_v(2, MICROBATCHES)
    rank = torch.distributed.get_rank()
    modules = [zbkern.convert(nn.Sequential(*(Layer(WIDTH) for _ in range(LAYERS)))) for _ in schedule.chunks_of(rank)]
    inputs, targets = torch.randn(2, MICROBATCHES * TOKENS, WIDTH)
    arguments = (nn.functional.mse_loss, inputs[: 2 * TOKENS], targets[: 2 * TOKENS])
    costs = profile(modules, schedule.placement, *arguments, microbatches=2, options=ProfileOptions(1, 0))
    with Pipeline(modules, schedule, nn.functional.mse_loss, fill="planned") as pipe:
        pipe.step(inputs, targets)  # makes the gradients
        with Resident() as resident:
            pipe.step(inputs, targets)
    return simulate(schedule, costs, fill="planned").peak_memory[rank], resident.peak


@pytest.mark.slow
def test_the_peak_is_the_planned_one(fresh_ranks: Any) -> None:
    for planned, held in fresh_ranks.run(planned_and_held):
        assert planned == pytest.approx(held, rel=0.1)


def growth(steps: int) -> int:
    """Bytes that a tiny pipeline gains in so many steps after the first hundred."""
    give_back_what_is_free()
    schedule = schedules.zb_h1(2, 2)
    modules = [zbkern.convert(nn.Linear(64, 64))]
    data = torch.randn(2 * 64, 64)
    with Pipeline(modules, schedule, nn.functional.mse_loss, fill="eager", options=StepOptions(record=True)) as pipe:
        for _ in range(100):
            pipe.step(data, data)
        with Resident() as resident:
            for _ in range(steps):
                pipe.step(data, data)
    return resident.growth


@pytest.mark.slow
def test_five_hundred_steps_leave_nothing_behind(fresh_ranks: Any) -> None:
    assert max(fresh_ranks.run(growth, 500)) < 2**20


def left_of_a_closed_pipeline() -> list[bool]:
    """Whether the pipeline, its module and its batch are gone when nobody has them, before any garbage collection."""
    gc.collect()
    gc.disable()
    try:
        module, data = zbkern.convert(nn.Linear(64, 64)), torch.randn(2 * 64, 64)
        pipe = Pipeline([module], schedules.zb_h1(2, 2), nn.functional.mse_loss)
        pipe.step(data, data)
        batch = weakref.ref(data)
        del data
        left = [batch() is not None]
        pipe.close()
        watched = [weakref.ref(pipe), weakref.ref(module)]
        del pipe, module
        return left + [reference() is not None for reference in watched]
    finally:
        gc.enable()


def test_a_closed_pipeline_is_freed_at_once(fresh_ranks: Any) -> None:
    assert fresh_ranks.run(left_of_a_closed_pipeline) == [[False, False, False]] * 2
