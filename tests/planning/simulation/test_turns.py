"""Passes beside each other in the simulation: turns on one compute lane, collectives on one network lane."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.overlap_asleep import costs_of, measured, times_of
from bench.overlap_counted import counted
from tests.support.schedules import with_actions, with_neighbours_beside
from zbkern.pipeline import Action, Costs, Schedule, plan, schedules, simulate
from zbkern.planning.simulation import drift
from zbkern.planning.simulation.timeline import Event, own_times
from zbkern.planning.simulation.turns import Parts, in_turns

UNIT = 0.01  # seconds of F without its collectives, of all chunks of a rank


def test_turns_of_two_passes_by_hand() -> None:
    # 1 1 of compute around 2 of network: the other computes meanwhile, and its collective waits for the network
    assert in_turns([Parts(2, 2, 1), Parts(2, 2, 1)], 10.0) == [(10, 14), (11, 16)]
    assert in_turns([Parts(2, 2, 1)], 0.0) == [(0, 4)]
    assert in_turns([Parts(2, 0, 0), Parts(2, 2, 1)], 0.0) == [(0, 2), (2, 6)]
    assert in_turns([Parts(2, 2, 1), Parts(3, 0, 2)], 0.0) == [(0, 4), (1, 6)]  # a W between whose parts F goes on


def test_costs_without_network_time_run_pairs_in_turn() -> None:
    pairs = schedules.dualpipe_v(4, 16)
    in_turn = simulate(replace(pairs, beside=()))
    assert simulate(pairs).events == in_turn.events
    hidden = simulate(pairs, costs_of(0.25, UNIT))
    assert hidden.cost < 0.9 * simulate(replace(pairs, beside=()), costs_of(0.25, UNIT)).cost
    assert 0 < hidden.bubble_rate < 1


def test_times_that_passes_share_count_once() -> None:
    costs = costs_of(0.25, 1.0)
    step = simulate(schedules.dualpipe_v(2, 6), costs)
    for row, busy in zip(step.events, step.busy, strict=True):
        assert sum(own_times(row)) == pytest.approx(busy)
    assert own_times([Event(0, Action("F", 0, 0), 0, 4), Event(0, Action("B", 0, 1), 1, 6)]) == [2.5, 3.5]
    held = [[at for at, _ in curve] for curve in step.memory_held(costs)]
    assert held == [sorted(each) for each in held]
    lost = drift.compare(step, costs)
    assert [abs(each.cost) + abs(each.compute) for each in lost.time_lost] == pytest.approx([0, 0])
    assert lost.speeds == (1.0, 1.0)


def test_a_pair_begins_when_all_inputs_have_arrived_and_holds_the_memory_of_both() -> None:
    rows = [
        [Action(kind, 0, int(number)) for kind, number in ("F0", "F1", "B0", "W0", "B1", "W1")],
        [Action(kind, 1, int(number)) for kind, number in ("F0", "B0", "F1", "B1", "W0", "W1")],
    ]
    costs = Costs(3, 3, 1, network_forward=1, network_backward=1, collectives=1)
    pairs = Schedule.build(rows, [0, 1], 2, beside=[[(1, 3)], []])
    timeline = simulate(pairs, costs)
    times = {event.action: event[2:] for row in timeline.events for event in row}
    assert times[Action("F", 0, 1)] == (9, 12)  # B of chunk 0 waits for F and B of chunk 1, and F waits with it
    assert times[Action("B", 0, 0)] == (10, 13)
    assert timeline.peak_memory[0] == 2
    assert timeline.busy[0] == 3 + 4 + 1 + 3 + 1


@pytest.mark.parametrize("share", [0.14, 0.25, 0.40])
@pytest.mark.parametrize(("ranks", "microbatches", "memory"), [(4, 8, None), (4, 8, 1.25), (2, 5, 1.5)])
def test_the_engine_runs_plans_in_the_time_simulated(
    ranks: int, microbatches: int, memory: float | None, share: float
) -> None:
    costs = costs_of(share, 1.0)
    best = plan(costs, ranks, microbatches, 2, "v", None if memory is None else memory * ranks, effort=0)
    assert as_counted(best.schedule, costs) == as_simulated(best.schedule, costs)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "least"), [(0.14, 0.88), (0.25, 0.85), (0.40, 0.72)])
def test_plans_in_little_memory_are_near_compute_alone(share: float, least: float) -> None:
    costs = costs_of(share, 1.0)
    best = plan(costs, 4, 16, 2, "v", 1.25 * 4, effort=0)
    assert 3 * 16 / best.timeline.cost >= least
    assert as_counted(best.schedule, costs) == as_simulated(best.schedule, costs)


def test_the_engine_runs_pairs_in_the_time_simulated() -> None:
    pairs, costs = schedules.dualpipe_v(4, 10), costs_of(0.4, 1.0)
    assert as_counted(pairs, costs) == as_simulated(pairs, costs)


def test_ranks_that_copy_take_turns_too() -> None:
    """Copies that take no time change no pass; where a load takes long, its group waits for it."""
    costs = replace(costs_of(0.4, 1.0), offload_bandwidth=1e12, reload_bandwidth=1e12)
    line = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 0W0 0W1 0W2 0W3"
    row = [Action.parse(each) for each in line.split()]
    kept = Schedule.build([row], [0], 4, beside=[[(1, 3), (4, 6)]])
    row[3:3] = [Action("O", 0, 1), Action("L", 0, 1)]
    loaded = Schedule.build([row], [0], 4, beside=[[(1, 3), (6, 8)]])
    assert as_simulated(loaded, costs) == as_simulated(kept, costs)
    assert simulate(loaded, costs).cost < simulate(replace(loaded, beside=()), costs).cost
    slow = simulate(loaded, replace(costs, reload_bandwidth=0.1))
    times = {event.action: event for event in slow.events[0]}
    (load,) = (copy for copy in slow.copies[0] if copy.action.kind == "L")
    assert times[Action("B", 0, 1)].start >= load.end
    assert times[Action("F", 0, 3)].start >= load.end


@pytest.mark.parametrize("seed", range(4))
def test_the_engine_runs_recomputation_beside_passes_in_the_time_simulated(seed: int) -> None:
    rng, costs = random.Random(seed), replace(costs_of(0.4, 1.0), checkpoint=0.1)
    plain = with_actions(schedules.zb_v(2, 4), lambda action: "recomputed" if action.kind == "F" else None)
    schedule = with_neighbours_beside(rng, plain)
    groups = [row[a:b] for row, at in zip(schedule.actions, schedule.beside, strict=True) for a, b in at]
    assert any(action.kind == "R" for group in groups for action in group)
    assert as_counted(schedule, costs) == as_simulated(schedule, costs)


def as_counted(schedule: Schedule, costs: Costs) -> list[dict[Action, Any]]:
    return [_times(row) for row in counted(schedule, times_of(costs))]


def as_simulated(schedule: Schedule, costs: Costs) -> list[dict[Action, Any]]:
    return [_times(row) for row in simulate(schedule, costs).events]


def _times(row: Sequence[Event]) -> dict[Action, Any]:
    return {event.action: (round(event.start, 6), round(event.end, 6)) for event in row}


@pytest.mark.parametrize(("way", "share"), [("DualPipe-V", 0.25), ("plan", 0.40)])
def test_ranks_that_sleep_take_no_less_than_simulated(way: str, share: float) -> None:
    """Nor more than a busy machine adds, which `python -m bench.overlap_asleep` tells of one that is not."""
    costs, pairs = costs_of(share, UNIT), schedules.dualpipe_v(4, 8)
    schedule = plan(costs, 4, 8, 2, "v", effort=0).schedule if way == "plan" else pairs
    assert measured(schedule, costs).makespan >= 0.999 * simulate(schedule, costs).makespan
