"""Schedules made to fit by offload and recomputation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.overlap_planned import costs_of
from zbkern.pipeline import Action, Costs, LayerCosts, ModelCosts, Schedule, ScheduleError, plan, schedules, simulate
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.planner.idle_time import idle_time
from zbkern.planning.planner.offload import fit, variants

COPIES = {"offload_bandwidth": 1.0, "reload_bandwidth": 1.0, "copy_slowdown": 0.03}
COSTS = Costs(held=1.1, checkpoint=0.05, **COPIES)


def passes(schedule: Schedule) -> list[list[Action]]:
    return [[action for action in row if action.kind not in ("R", "O", "L")] for row in schedule.actions]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_comes_back_fits_and_has_the_same_passes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["one_f_one_b", "zb_h1", "zb_h2", "zb_v", "v_half", "gpipe"]))
    stages = data.draw(st.integers(1, 4))
    schedule = getattr(schedules, name)(stages, data.draw(st.integers(2 * stages, 10)))
    costs = Costs(
        held=data.draw(st.sampled_from([0.5, 1.13])),
        checkpoint=data.draw(st.sampled_from([0.0, 0.1])),
        offload_bandwidth=data.draw(st.sampled_from([0.3, 2.0])),
        reload_bandwidth=data.draw(st.sampled_from([0.5, 1.0])),
        merge_saving=0.1,
        copy_size=data.draw(st.sampled_from([None, 0.1, 0.4])),
    )
    plain = simulate(schedule, costs)
    limit = data.draw(st.floats(0.3, 1.1)) * max(plain.peak_memory)
    offload = data.draw(st.booleans())
    try:
        timeline = fit(schedule, costs, limit, offload=offload, recompute=not offload or data.draw(st.booleans()))
    except ScheduleError:
        assume(False)  # other examples
    assert passes(timeline.schedule) == [list(row) for row in schedule.actions]
    assert max(timeline.peak_memory) <= limit * (1 + 1e-6)
    for row in timeline.schedule.actions:  # W that run merged stay so
        for before, between, after in zip(row, row[1:], row[2:], strict=False):
            assert not (before.kind == after.kind == "W" and before.chunk == after.chunk and between.kind in "ROL")
    assert timeline.events == simulate(timeline.schedule, costs).events
    assert timeline.cost >= plain.cost * (1 - 1e-9)


def test_a_schedule_that_fits_stays_as_it_is() -> None:
    schedule = schedules.zb_h1(4, 8)
    assert fit(schedule, COSTS, 5.0).schedule is schedule


def test_a_quick_copy_costs_next_to_nothing_and_is_chosen_before_recomputation() -> None:
    schedule = schedules.one_f_one_b(8, 16)
    before = simulate(schedule, COSTS).cost
    timeline = fit(schedule, COSTS, 4.0, recompute=True)
    assert timeline.cost < 1.03 * before
    assert {event.action.kind for row in timeline.copies for event in row} == {"O", "L"}
    assert fit(schedule, COSTS, 4.0, offload=False, recompute=True).cost > 1.1 * before
    slow = Costs(checkpoint=0.05, offload_bandwidth=0.05, reload_bandwidth=0.05)
    assert any(
        action.kind == "R" for row in fit(schedule, slow, 4.0, recompute=True).schedule.actions for action in row
    )


def test_forwards_that_are_offloaded_while_they_run_fit_in_less_memory() -> None:
    """With one microbatch's activations to load beside them; a chunk at a time, a forward needs room for all of its."""
    schedule = schedules.one_f_one_b(8, 24)
    whole = Costs(held=1.1, **{**COPIES, "offload_bandwidth": 2.0, "reload_bandwidth": 2.0})
    parts = replace(whole, copy_size=0.1)
    before = simulate(schedule, whole).cost
    assert fit(schedule, whole, 1.5).cost > 1.2 * before
    assert fit(schedule, parts, 1.5).cost < 1.03 * before
    assert fit(schedule, parts, 3.0).cost < fit(schedule, whole, 3.0).cost


def test_what_cannot_be_made_to_fit_is_told() -> None:
    with pytest.raises(ScheduleError, match=r"no offload makes one_f_one_b fit memory_limit=0\.5, where it holds 4"):
        fit(schedules.one_f_one_b(4, 8), COSTS, 0.5)
    with pytest.raises(ValueError, match=r"fit: offload needs Costs\.offload_bandwidth"):
        fit(schedules.one_f_one_b(4, 8), Costs(), 2)
    with pytest.raises(ValueError, match=r"fit: recompute needs Costs\.checkpoint"):
        fit(schedules.one_f_one_b(4, 8), Costs(), 2, offload=False, recompute=True)
    with pytest.raises(ValueError, match=r"one number or one per rank \(4\); got 2"):
        fit(schedules.one_f_one_b(4, 8), COSTS, [2, 2])


@pytest.mark.parametrize(("chunks", "memory", "gain"), [(1, 4.0, 0.03), (1, 2.0, 0.2), (2, 2.0, 0.1)])
def test_plans_that_offload_are_faster_in_the_same_memory(chunks: int, memory: float, gain: float) -> None:
    costs = Costs(
        forward=1 / chunks, backward=1.1 / chunks, weight=0.9 / chunks, activation=1 / chunks, held=1 / chunks, **COPIES
    )
    without = plan(costs, 4, 8, chunks=chunks, memory_limit=memory, effort=0)
    saving = plan(costs, 4, 8, chunks=chunks, memory_limit=memory, effort=0, offload=True)
    assert max(saving.timeline.peak_memory) <= memory * (1 + 1e-6)
    assert saving.timeline.cost < (1 - gain) * without.timeline.cost
    assert saving.lower_bound <= saving.bubble_rate
    assert saving.schedule == plan(costs, 4, 8, chunks=chunks, memory_limit=memory, effort=0, offload=True).schedule


def test_the_bound_is_that_of_the_chunks_of_the_plan() -> None:
    """And not of those that are best where memory is unlimited."""
    model = ModelCosts([LayerCosts(str(n), time, time, time, 1) for n, time in enumerate((3, 2, 1, 3))], latency=0.1)
    saving = plan(model, 2, 2, memory_limit=3, effort=0, recompute=True)
    unlimited = plan(saving.costs, 2, 2, placement=saving.schedule.placement, effort=0)
    least = [sum(each.timeline.busy) / 2 / (1 - each.lower_bound) for each in (saving, unlimited)]
    assert least[0] == pytest.approx(least[1])


def test_the_least_that_fits_is_told_as_that_without_saving() -> None:
    costs = Costs(held=0.5, checkpoint=0.1)
    assert plan(costs, 2, 4, chunks=2, memory_limit=1.1, effort=0, recompute=True)
    with pytest.raises(ScheduleError, match=r"no recompute makes .* fit .*; without, .* smallest limit .* is 2"):
        plan(costs, 2, 4, chunks=2, memory_limit=0.9, effort=0, recompute=True)


def test_memory_that_suffices_is_not_saved() -> None:
    costs = Costs(**COPIES)
    without = plan(costs, 4, 8, memory_limit=7, effort=0)
    saving = plan(costs, 4, 8, memory_limit=7, effort=0, offload=True)
    assert saving.timeline.cost <= without.timeline.cost
    assert not any(saving.timeline.copies)


def test_idle_time_names_the_wait_for_a_copy_and_the_warm_up_around_a_recomputation() -> None:
    costs = Costs(held=0.5, checkpoint=0.25, offload_bandwidth=0.25, reload_bandwidth=100.0)
    row = [Action(*each) for each in (("F", 0, 0), ("O", 0, 0), ("F", 0, 1), ("BW", 0, 1), ("L", 0, 0), ("BW", 0, 0))]
    waiting = simulate(Schedule.build([row], (0,), 2), costs)
    found = idle_time(waiting, flat_costs(costs, waiting.schedule), "cost", [1.0])
    assert found.memory == pytest.approx(1 - sum(waiting.busy) / waiting.cost)
    assert found.total == pytest.approx(found.memory)

    rows = [list(row) for row in schedules.one_f_one_b(3, 3).actions]
    rows[0].insert(3, Action("R", 0, 0))  # between the last of three F and the first backward
    recomputing = simulate(Schedule.build(rows, (0, 1, 2), 3), costs)
    gap = recomputing.events[0][4].start - recomputing.events[0][3].end
    assert gap > 0
    found = idle_time(recomputing, flat_costs(costs, recomputing.schedule), "makespan", None)
    assert found.warm_up >= 0.99 * gap / recomputing.makespan


def groups_of(schedule: Schedule) -> list[tuple[Action, ...]]:
    return [schedule.actions[rank][first:end] for rank, ranges in enumerate(schedule.beside) for first, end in ranges]


@pytest.mark.parametrize("how", ["offload", "recompute"])
def test_pairs_stay_where_something_is_saved(how: str) -> None:
    costs = replace(costs_of(0.25, 2), checkpoint=0.025, **COPIES)
    schedule = schedules.dualpipe_v(4, 8)
    pairs = simulate(schedule, costs)
    limit = 0.8 * max(pairs.peak_memory)
    added = {"offload": how == "offload", "recompute": how == "recompute"}
    saving = fit(schedule, costs, limit, **added)
    assert passes(saving.schedule) == [list(row) for row in schedule.actions]
    kept = [tuple(each for each in group if each.kind != "R") for group in groups_of(saving.schedule)]
    assert {*groups_of(schedule)} <= {*kept}
    assert max(saving.peak_memory) <= limit * (1 + 1e-9)
    assert saving.cost < 0.95 * fit(replace(schedule, beside=()), costs, limit, **added).cost


def test_an_order_has_variants_fused_and_in_turn() -> None:
    costs = costs_of(0.25, 2)
    order = plan(costs, 4, 8, 2, "v", effort=0).schedule
    assert any(action.kind == "W" for group in groups_of(order) for action in group)
    plain, fused, in_turn, both = (timeline.schedule for timeline in variants(order, costs))
    assert plain is order
    assert (in_turn.actions, both.actions) == (order.actions, fused.actions)
    assert not in_turn.beside
    assert not both.beside
    without = [tuple(each._replace(kind="BW") if each.kind == "B" else each for each in group if each.kind != "W")
               for group in groups_of(order)]  # fmt: skip
    assert groups_of(fused) == [group for group in without if len(group) > 1]


@pytest.mark.parametrize("fully_shard", [False, True])
def test_what_is_recomputed_beside_other_passes_hides_its_network(fully_shard: bool) -> None:
    costs = replace(costs_of(0.4, 1), checkpoint=0.05)
    schedule = schedules.one_f_one_b(4, 8)
    saving = fit(schedule, costs, 2.0, offload=False, recompute=True, fully_shard=fully_shard)
    hidden = [group for group in groups_of(saving.schedule) if any(each.kind == "R" for each in group)]
    assert bool(hidden) is not fully_shard  # one chunk per rank, whose passes are then apart
    assert max(saving.peak_memory) <= 2.0 * (1 + 1e-9)
    in_turn = replace(costs, network_forward=0.0, network_backward=0.0)
    alone = fit(schedule, in_turn, 2.0, offload=False, recompute=True)
    assert saving.cost <= alone.cost * (1 + 1e-9 if fully_shard else 0.98)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_plans_that_save_memory_are_no_worse_with_network_time_that_can_be_hidden(seed: int) -> None:
    draw = random.Random(seed)
    costs = replace(costs_of(draw.uniform(0.1, 0.4), 2), checkpoint=draw.choice([0.0, 0.05]), **COPIES)
    limit, stages = draw.uniform(0.6, 1.0), draw.choice([2, 3, 4])
    added = draw.choice([{"offload": True}, {"recompute": True}, {"offload": True, "recompute": True}])
    saving = plan(costs, stages, 3 * stages, 2, "v", limit * stages, effort=0, **added)
    assert max(saving.peak_memory) <= limit * stages * (1 + 1e-6)
    in_turn = replace(costs, network_forward=0.0, network_backward=0.0)
    alone = plan(in_turn, stages, 3 * stages, 2, "v", limit * stages, effort=0, **added)
    assert saving.timeline.cost <= alone.timeline.cost * (1 + 1e-9)
    assert saving.timeline.events == simulate(saving.schedule, costs).events
