"""Large problems: schedules of few microbatches made longer are those of many, and timelines the simulator's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from zbkern import schedules
from zbkern.pipeline import Costs, PlanOptions, Schedule, plan, simulate
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.planner import native, search
from zbkern.planning.planner.annealing import timeline_of
from zbkern.planning.planner.problem import Problem, grouped, ordering_of, schedule_of
from zbkern.planning.planner.published import few_of, generators_of, longer

pytestmark = pytest.mark.skipif(native.core is None, reason="needs the compiled search")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, "v", 3])
def test_published_schedules_repeat_themselves(ranks: int, chunks: int | str) -> None:
    down = tuple(range(ranks))
    placement = down + down[::-1] if chunks == "v" else down * int(chunks)
    for make in generators_of(placement):
        few, period = 12 * ranks, 1 if chunks in (1, "v") else ranks
        short, next_, whole = (grouped(ordering_of(make(ranks, count))) for count in (few, few + period, 20 * ranks))
        found = longer(short, next_, len(placement), few, period, 20 * ranks)
        if make is schedules.gpipe:
            assert found is None
        else:
            assert found is not None
            assert (found.rows, found.fused) == (whole.rows, whole.fused), make


@pytest.mark.parametrize("make", [schedules.zb_v, schedules.dualpipe_v, schedules.one_f_one_b_v])
def test_the_core_has_the_times_of_the_simulator(make: Callable[..., Schedule]) -> None:
    costs = Costs(
        (1.0, 1.1, 0.9, 1.3, 1.0, 1.2), 1.2, 0.7, 0.25, 1.0, 0.8, split_overhead=0.1, merge_saving=0.1, static=3.0
    )
    problem = Problem.build(FlatCosts.of(costs, (0, 1, 2, 2, 1, 0)), 14, [1e9] * 3, False)
    orders = replace(ordering_of(make(3, 14)), beside=())
    found, expected = timeline_of(orders, problem, "x"), simulate(schedule_of(orders, problem, "x"), costs)
    assert found.schedule == expected.schedule
    for row, other in zip(found.events, expected.events, strict=True):
        for event, same in zip(row, other, strict=True):
            assert event == (same.rank, same.action, pytest.approx(same.start), pytest.approx(same.end))
    assert found.peak_memory == pytest.approx(expected.peak_memory)


@pytest.mark.slow
def test_a_large_plan_is_as_good_as_that_of_the_whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, limit = (12, 1500, 2), 14.0
    costs = Costs(1.0, 1.1, 0.8, 0.1, 0.5, 0.3)
    quick = plan(costs, *shape, memory_limit=limit, effort=0)
    assert max(quick.timeline.peak_memory) <= limit * (1 + 1e-9)
    checked = Schedule.build(quick.schedule.actions, quick.schedule.placement, 1500)
    assert simulate(checked, costs).cost == pytest.approx(quick.timeline.cost)
    for module in (sys.modules["zbkern.planning.planner.plan"], search):
        monkeypatch.setattr(module, "MANY", 10**9)
    monkeypatch.setattr("zbkern.planning.planner.published.few_of", lambda _, count: (count, 1))
    whole = plan(costs, *shape, memory_limit=limit, effort=1, options=PlanOptions(steady=False))
    assert quick.timeline.cost <= 1.01 * whole.timeline.cost


def test_time_does_not_grow_with_what_repeats() -> None:
    begin = time.process_time()
    found = plan(Costs(communication=0.1), 64, 1024, effort=0)
    assert time.process_time() - begin < 10  # 0.9 s on one core; the simulator alone takes five times as long
    assert found.bubble_rate - found.lower_bound < 0.01
    assert few_of(range(64), 1024)[0] < 140
