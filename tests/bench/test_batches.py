"""The benchmark of batches: what it compares, and ranks that sleep as planned."""

from __future__ import annotations

import pytest

from bench import batches, batches_simulated
from zbkern.pipeline import Costs
from zbkern.planning.planner import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")


def test_the_usual_way_has_the_fewest_packs() -> None:
    costs = Costs(2.0, 3.0, 1.0, tokens=100)
    steps = batches.static_steps([100, 90, 80, 10, 10, 10], 100, costs)
    assert [sorted(row) for row in steps[batches.USUAL].rows] == [[0], [1, 4], [2, 3, 5]]
    assert {name for name in steps if "4 packs" in name} == {"1F1B, 4 packs", "interleaved, 4 packs", "ZB-V, 4 packs"}
    assert not any("2 packs" in name for name in steps)
    assert batches.usual_memory([100, 90, 80, 10, 10, 10], 100, costs) == pytest.approx(2 * (100 + 100) / 100)


def test_the_best_static_way_runs_all_batches() -> None:
    seconds = {batches.USUAL: [3.0, 3.0], "ZB-V, 4 packs": [2.0], "1F1B, 4 packs": [2.5, 2.9]}
    assert batches.best_static({**seconds, batches.PLANNED: [1.0, 1.0], batches.TORCH: [1.0, 1.0]}) == "1F1B, 4 packs"


def test_ranks_sleep_as_long_as_planned() -> None:
    kind = batches_simulated.Kind(12, 3000, 1.5, 20_000)
    [(lengths, plan, _)] = batches_simulated.plans(kind, 1.0, 1)
    unit = 0.2 / batches_simulated.perfect(lengths)
    assert batches_simulated.asleep(plan, unit) >= plan.makespan * unit * 0.99
