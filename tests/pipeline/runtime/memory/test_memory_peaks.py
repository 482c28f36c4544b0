"""The peak memory of steps that offload and recompute: as it was planned from measured costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import one_rank
from tests.support.schedules import saved_in_turn, schedule_of, with_actions
from zbkern.pipeline import (
    Pipeline,
    ProfileOptions,
    Schedule,
    StepOptions,
    profile,
    schedules,
    simulate,
)
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.costs.chunks import COPY_SIZE


class Wide(nn.Module):
    """Wide enough that a few small tensors do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def planned_and_measured(
    csv: str, copy_size: int = COPY_SIZE, recompute: tuple[str, ...] = ()
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Peak bytes of every rank: simulated with measured costs, and of a step over gloo."""
    schedule = Schedule.from_csv(csv)
    torch.manual_seed(5)
    data = torch.randn(4 * schedule.microbatches, 16, 32), torch.randn(4 * schedule.microbatches, 16, 32)
    chunks = schedule.chunks_of(torch.distributed.get_rank())
    modules = [zbkern.convert(nn.Sequential(Wide(), Wide())) for _ in chunks]
    arguments = (nn.functional.mse_loss, *data, schedule.microbatches)
    options: dict[str, Any] = {"copy_size": copy_size, "recompute": recompute}
    measured = ProfileOptions(1, 0, **options)
    costs = profile(modules, schedule.placement, *arguments, options=measured)
    costs = replace(costs, message=0)  # those that wait are not held by microbatches
    planned = simulate(schedule, replace(costs, offload_bandwidth=1e6, reload_bandwidth=1e6)).peak_memory
    with Pipeline(modules, schedule, nn.functional.mse_loss, options=StepOptions(**options)) as pipe:
        pipe.step(*data)
        timeline = pipe.last.gather_timeline()
    assert timeline.memory_unit == "bytes"
    return planned, timeline.peak_memory


def check_peaks(ranks: Any, schedule: Schedule, *options: Any) -> None:
    results = ranks.run(planned_and_measured, schedule.to_csv(), *options)
    assert all(result == results[0] for result in results)
    planned, measured = results[0]
    assert measured == pytest.approx(planned, rel=0.1)


@pytest.mark.dist
@pytest.mark.parametrize("how", [["copied"], ["recomputed"], ["recomputed", "copied", None]])
def test_peak_bytes_are_as_planned_on_two_ranks(how: list[str | None], two_ranks: Any) -> None:
    check_peaks(two_ranks, with_actions(schedules.one_f_one_b(2, 6), saved_in_turn(*how)))


@pytest.mark.parametrize("copy_size", [20_000, 50_000])
def test_a_streamed_forward_holds_what_was_planned(copy_size: int) -> None:
    """What an F holds at most whose O follows it."""
    torch.manual_seed(5)
    data = torch.randn(4, 16, 32)
    modules = [zbkern.convert(nn.Sequential(*(Wide() for _ in range(8))))]
    arguments = (nn.functional.mse_loss, data, data, 1, LocalTransport.ring(1)[0])
    costs = profile(modules, [0], *arguments, options=ProfileOptions(1, 0, copy_size)).per_chunk(1)
    in_forward: list[float] = []
    schedule = schedule_of("0F0 0O0 0L0 0BW0", microbatches=1)
    with one_rank(modules, schedule, options=StepOptions(copy_size=copy_size)) as pipe:
        modules[0].register_forward_hook(lambda *_: in_forward.append(pipe._calls.loop.recorder.peak_bytes))
        pipe.step(data, data)
    assert costs.streamed[0] < costs.activation[0] / 2
    assert in_forward[0] == pytest.approx(costs.streamed[0], rel=0.1)


@pytest.mark.dist
@pytest.mark.parametrize("how", [["copied"], ["recomputed", "copied"]])
def test_peak_bytes_are_as_planned_with_small_transfers_and_of_parts(how: list[str | None], two_ranks: Any) -> None:
    schedule = with_actions(schedules.one_f_one_b(2, 6), saved_in_turn(*how))
    check_peaks(two_ranks, schedule, 20_000, ("*norm", "*.up"))
