"""Plans that recompute or offload and have passes beside each other, run and compared with one process, in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from bench.overlap_planned import costs_of
from tests.support.chunks import run_pipelines
from tests.support.random_chunks import WIDTH, InFlight
from zbkern.pipeline import Pipeline, plan
from zbkern.planning.planner import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")
MICROBATCHES = 8


CASES = [
    ("R", 4, 2, "v", 0.5),
    ("OL", 4, 2, "v", 0.75),
    ("ROL", 4, 2, "v", 0.75),
    ("R", 2, 2, "loop", 0.75),
    ("OL", 2, 2, "loop", 0.9),
    ("R", 3, 1, "linear", 0.75),
]


@pytest.mark.parametrize(("kinds", "stages", "chunks", "placement", "memory"), CASES)
def test_steps_equal_one_process(kinds: str, stages: int, chunks: int, placement: str, memory: float) -> None:
    """kinds: of the actions beside passes. memory: of that of 1F1B."""
    copies = {"offload_bandwidth": 0.5, "reload_bandwidth": 0.5, "copy_slowdown": 0.03}
    costs = replace(costs_of(0.25, chunks), checkpoint=0.05 / chunks, **copies)
    limit, added = memory * stages, {"recompute": "R" in kinds, "offload": "O" in kinds}
    schedule = plan(costs, stages, MICROBATCHES, chunks, placement, limit, effort=0, **added).schedule
    assert schedule.beside
    assert {action.kind for row in schedule.actions for action in row} >= {*kinds}
    torch.manual_seed(stages)
    modules = [nn.Sequential(InFlight(), InFlight()).double() for _ in schedule.placement]
    inputs, targets = ([torch.randn(2, 3, WIDTH, dtype=torch.float64) for _ in range(MICROBATCHES)] for _ in range(2))
    whole = nn.Sequential(*copy.deepcopy(modules))
    losses = [nn.functional.mse_loss(whole(x), y) for x, y in zip(inputs, targets, strict=True)]
    (sum(losses) / MICROBATCHES).backward()  # type: ignore[union-attr]

    def step(pipe: Pipeline) -> None:
        pipe.step(inputs, targets)

    run_pipelines(schedule, modules, step)
    for module, other in zip(modules, whole, strict=True):
        for found, expected in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_a_plan_that_must_recompute_has_its_groups() -> None:
    costs = replace(costs_of(0.25, 2), checkpoint=0.025)
    found = plan(costs, 4, MICROBATCHES, 2, "v", 2.0, effort=0, recompute=True).schedule
    groups = [found.actions[rank][a:b] for rank, ranges in enumerate(found.beside) for a, b in ranges]
    assert sum(len(each) for each in groups) > 100
    assert any(each.kind == "R" for group in groups for each in group)
    assert all(first[1] <= second[0] for ranges in found.beside for first, second in pairwise(ranges))
