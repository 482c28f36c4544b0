"""Plans for one batch whose passes run beside each other: units of slices and packs, whose collectives others hide."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.overlap_planned import costs_of as equal_costs
from tests.support.batches import check_complete, costs_of, lengths_of, placements
from zbkern.pipeline import Costs, ScheduleError, plan_batch, schedules, simulate
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.planner import native
from zbkern.planning.planner.batch import BatchPlan
from zbkern.planning.planner.lane_bounds import batch_bound
from zbkern.planning.simulation import drift
from zbkern.planning.simulation.timeline import rescaled

pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")


def with_network(costs: Costs, generator: random.Random, least: float = 0.0) -> Costs:
    """Of the times of F and B from the least share up to all is collectives in flight."""
    forward, backward = [], []
    for f, b in zip(costs.forward, costs.backward, strict=True):  # type: ignore[arg-type]
        share = generator.choice([least, generator.uniform(least, 1), 1.0])
        forward.append(share * f), backward.append(share * b)
    return replace(
        costs, network_forward=forward, network_backward=backward, collectives=generator.choice([1, 2, 4, 9])
    )


def check_lanes(plan: BatchPlan) -> None:
    """On no rank does the step take less time than its passes compute, or have collectives in flight."""
    flat = flat_costs(plan.costs, plan.schedule)
    for row in plan.schedule.actions:
        network = 0.0
        for kind, chunk, unit in row:
            each = flat.of_unit(unit)
            network += {"F": each.network_forward[chunk], "W": 0.0}.get(kind, each.network_backward[chunk])
        assert plan.makespan >= network * (1 - 1e-9)
    assert plan.bound <= plan.makespan * (1 + 1e-9)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 100))])
def test_plans_are_valid_within_the_limit_and_no_worse_than_in_turn(seed: int) -> None:
    generator = random.Random(seed)
    lengths, where = lengths_of(generator, generator.randint(1, 30)), placements(generator)
    in_turn = costs_of(where["stages"] * where.get("chunks", 2), generator)
    costs = with_network(in_turn, generator)
    free = plan_batch(lengths, costs, **where, passes=20_000)
    limit = generator.uniform(0.6, 1.2) * max(free.peak_memory)
    for memory_limit in (None, limit):
        try:
            plan = plan_batch(lengths, costs, **where, memory_limit=memory_limit, passes=20_000)
        except ScheduleError:
            assert memory_limit is not None
            with pytest.raises(ScheduleError):
                plan_batch(lengths, in_turn, **where, memory_limit=limit, passes=20_000)
            continue
        check_complete(plan, lengths)
        check_lanes(plan)
        assert memory_limit is None or max(plan.peak_memory) <= limit * (1 + 1e-9)
        alone = plan_batch(lengths, in_turn, **where, memory_limit=memory_limit, passes=20_000)
        assert plan.makespan <= alone.makespan * (1 + 1e-9)
        assert not alone.schedule.beside
        assert 0 <= plan.lower_bound <= 1
        assert plan.idle.total == pytest.approx(1 - sum(plan.timeline.busy) / (where["stages"] * plan.makespan))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_times_and_memory_are_those_of_the_simulator(stages: int, seed: int) -> None:
    """Of sequences too long to be packed, since the simulator takes a pack for one sequence."""
    generator = random.Random(seed)
    lengths = [generator.randint(3000, 20000) for _ in range(5)]
    costs = with_network(costs_of(2 * stages, generator), generator, 0.5)
    free = plan_batch(lengths, costs, stages, passes=20_000)
    tight = plan_batch(lengths, costs, stages, passes=20_000, memory_limit=0.9 * max(free.peak_memory))
    for plan in (free, tight):
        assert plan.schedule.beside
        assert all(len(row) == 1 for row in plan.rows)
        simulated = simulate(plan.schedule, costs)
        assert plan.peak_memory == pytest.approx(simulated.peak_memory, rel=1e-6)
        for row, expected in zip(plan.timeline.events, simulated.events, strict=True):
            assert [event.action for event in row] == [event.action for event in expected]
            for event, other in zip(row, expected, strict=True):
                assert (event.start, event.end) == pytest.approx((other.start, other.end), rel=1e-6)


def test_most_of_the_network_is_hidden_in_packs_and_slices() -> None:
    """A quarter of the work in turn, of 60 sequences on four ranks: in turn at most .75 of compute alone."""
    generator = random.Random(7)
    lengths = lengths_of(generator, 60)
    costs = Costs(1.5, 1.5, 1.0, network_forward=0.5, network_backward=0.5, collectives=4, overhead=0.01, tokens=4096)
    plan = plan_batch(lengths, costs, 4)
    assert any(len(row) > 1 for row in plan.rows)
    assert any(len(cut) > 1 for cut in plan.schedule.own_slices)
    compute = 2 * 3 * sum(lengths) / 4096
    assert plan.makespan < compute / 0.88
    assert plan_batch(lengths, replace(costs, network_forward=0.0, network_backward=0.0), 4).makespan > compute / 0.75


@pytest.mark.parametrize("count", [8, 16])
def test_a_published_schedule_is_measured_with_its_pairs(count: int) -> None:
    costs = replace(equal_costs(0.25, 2), tokens=1024)
    found = plan_batch([1024] * count, costs, 4)
    pairs = simulate(schedules.dualpipe_v(4, count), costs).makespan
    assert found.published == ("dualpipe_v", pytest.approx(pairs))
    assert found.makespan <= pairs * (1 + 1e-9)
    in_turn = plan_batch([1024] * count, replace(costs, network_forward=0.0, network_backward=0.0), 4)
    assert in_turn.published is not None
    assert in_turn.published[1] > 1.05 * pairs


def test_pairs_are_the_plan_where_nothing_is_better() -> None:
    """Here after no search, where the order that takes the least memory is all there is beside published ones."""
    costs = replace(equal_costs(0.25, 2), tokens=1024)
    found = plan_batch([1024] * 16, costs, 4, passes=1)
    assert found.published is not None
    assert found.makespan <= found.published[1] * (1 + 1e-9)


def test_passes_of_a_chunk_in_fully_shard_are_apart() -> None:
    generator = random.Random(3)
    lengths, costs = lengths_of(generator, 30), with_network(costs_of(8, generator), generator, 0.5)
    free, apart = (plan_batch(lengths, costs, 4, passes=50_000, fully_shard=each) for each in (False, True))

    def alike(plan: BatchPlan) -> int:
        """Groups that have several passes of one chunk."""
        rows = zip(plan.schedule.actions, plan.schedule.beside, strict=True)
        groups = [[each.chunk for each in row[a:b] if each.kind != "W"] for row, ranges in rows for a, b in ranges]
        return sum(len({*group}) < len(group) for group in groups)

    assert alike(free)
    assert apart.schedule.beside
    assert not alike(apart)


def test_the_bound_is_the_longer_of_compute_and_network() -> None:
    """By hand, of sequences of half and of twice the length: 2.5 in tokens, 4.25 in pairs of them."""
    costs = Costs(5.0, 4.0, 1.0, network_forward=3.0, network_backward=[1.0, 3.5], attention_forward=1.0, tokens=100)
    flat = FlatCosts.of(costs, (0, 1))
    forward, backward = 4.0 * 2.5 + 1.0 * 4.25, 5.0 * 2.5
    assert batch_bound(flat, [0.5, 2.0], beside=False) == pytest.approx(forward + backward)
    assert batch_bound(flat, [0.5, 2.0], beside=True) == pytest.approx(forward + backward - (3.0 + 1.0) * 2.5)
    costs = replace(costs, network_backward=3.5, attention_forward=0.0, network_forward=4.5)
    assert batch_bound(FlatCosts.of(costs, (0, 1)), [0.5, 2.0], beside=True) == pytest.approx((4.5 + 3.5) * 2.5)


def test_a_step_of_packs_beside_each_other_is_held_against_its_plan() -> None:
    costs = Costs(2, 4, 1, network_forward=1, network_backward=1.5, attention_forward=0.5, tokens=1024, time_unit="ms")
    plan = plan_batch([50] * 24, replace(costs, overhead=0.2), 2)
    assert plan.schedule.beside
    assert max(map(len, plan.rows)) > 1
    found = drift.compare(rescaled(plan.timeline, 1.25e-3, "s"), drift.in_seconds(plan.costs), plan.timeline)
    assert "+25.0%" in found.to_text()
