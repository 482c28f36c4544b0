"""Published schedules beside a plan: each on the cut of the layers on which it is fastest and fits."""

from __future__ import annotations

import pytest

from tests.support.configurations import setting_of
from zbkern.pipeline import LayerCosts, ModelCosts, simulate
from zbkern.planning.command.published import published_timelines
from zbkern.planning.planner.partition import balanced_partitions, even_partitions


def test_published_schedules_get_the_partition_that_suits_them() -> None:
    """With a heavy last layer a balanced partition is faster, and one that fits is taken before a faster one."""
    layers = [LayerCosts(f"block {n}", 1, 1, 1, 1, static=1) for n in range(12)] + [LayerCosts("head", 4, 4, 4, 1)]
    free = {each.schedule.name: each for each in published_timelines(ModelCosts(layers), 2, 4, None)}
    assert free["one_f_one_b"].busy == (4 * 24, 4 * 24)
    tight = {each.schedule.name: each for each in published_timelines(ModelCosts(layers), 2, 4, 21)}
    assert max(free["one_f_one_b"].peak_memory) == 24
    assert max(tight["one_f_one_b"].peak_memory) <= 21
    assert tight["one_f_one_b"].cost > free["one_f_one_b"].cost
    assert max(tight["gpipe"].peak_memory) > 21
    names = [each.schedule.name for each in published_timelines(ModelCosts(layers[:3]), 2, 4, None)]
    assert "one_f_one_b" in names
    assert "zb_v" not in names


@pytest.mark.parametrize("limit", [*(pytest.param(each, marks=pytest.mark.slow) for each in (None, 36e9)), 30e9])
def test_published_schedules_get_the_fastest_cut_that_fits(limit: float | None) -> None:
    costs = setting_of("gemma-2-9b", tensor_parallel=2).costs
    for found in published_timelines(costs, 4, 8, limit):
        schedule = found.schedule
        chunks, limits = len(schedule.placement), None if limit is None else [limit] * 4
        cuts = [
            *balanced_partitions(costs, schedule.placement, 8, limits),
            *even_partitions(len(costs.layers), chunks),
        ]
        others = [simulate(schedule, costs.chunk_costs(cut, schedule.placement)) for cut in cuts]
        fitting = [each.cost for each in others if limit is None or max(each.peak_memory) <= limit]
        assert bool(fitting) == (limit is None or max(found.peak_memory) <= limit)
        assert found.cost == pytest.approx(min(fitting or [found.cost]), rel=1e-9)
        if not fitting:
            assert max(found.peak_memory) == pytest.approx(min(max(each.peak_memory) for each in others))
