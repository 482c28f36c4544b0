"""Plans for one batch: valid, complete, within the limit, and as long as the simulator says."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from tests.support.batches import check_complete, costs_of, lengths_of, placements
from zbkern.pipeline import Costs, ScheduleError, simulate
from zbkern.planning.costs import flat
from zbkern.planning.planner import native
from zbkern.planning.planner.batch import plan_batch

pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 120))])
def test_plans_are_valid_complete_and_within_the_limit(seed: int) -> None:
    generator = random.Random(seed)
    lengths, where = lengths_of(generator, generator.randint(1, 40)), placements(generator)
    costs = costs_of(where["stages"] * where.get("chunks", 2), generator)
    free = plan_batch(lengths, costs, **where, passes=20_000)
    limit = generator.uniform(0.6, 1.2) * max(free.peak_memory)
    plans = [free]
    try:
        plans.append(plan_batch(lengths, costs, **where, memory_limit=limit, passes=20_000))
    except ScheduleError:
        assert limit < max(free.peak_memory)
    for plan in plans:
        check_complete(plan, lengths)
        idle = 1 - sum(plan.timeline.busy) / (plan.schedule.ranks * plan.makespan)
        assert plan.idle.total == pytest.approx(idle, abs=1e-9)
        assert plan.idle.memory == 0 or plan is not free
        assert 0 <= plan.lower_bound <= idle + 1e-9
        assert not plan.optimal or idle - plan.lower_bound < 1e-9
        if plan.published is not None:
            assert plan.makespan <= plan.published[1] * (1 + 1e-9)
    assert max(plans[-1].peak_memory) <= limit * (1 + 1e-9) or len(plans) == 1


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 6])
def test_times_and_memory_are_those_of_the_simulator(seed: int) -> None:
    """Of sequences that are long enough for none to be packed, since the simulator takes a pack for one sequence."""
    generator = random.Random(seed)
    lengths, where = [generator.randint(3000, 20000) for _ in range(5)], placements(generator)
    costs = costs_of(where["stages"] * where.get("chunks", 2), generator)
    plan = plan_batch(lengths, costs, **where, passes=20_000)
    assert all(len(row) == 1 for row in plan.rows)
    simulated = simulate(plan.schedule, costs)
    assert plan.makespan == pytest.approx(simulated.makespan, rel=1e-9)
    assert plan.timeline.makespan == pytest.approx(simulated.makespan, rel=1e-9)
    assert plan.peak_memory == pytest.approx(simulated.peak_memory, rel=1e-6)


def test_a_pack_pays_the_attention_of_each_of_its_sequences() -> None:
    """One rank, one pack of four: by hand."""
    costs = Costs(3.0, 4.0, 2.0, attention_forward=1.0, attention_backward=2.0, tokens=100, activation=10.0, held=5.0)
    plan = plan_batch([50, 50, 50, 50], costs, 1, 1, multiple=1000, passes=1)
    times: dict[str, float] = defaultdict(float)
    for event in plan.timeline.events[0]:
        times[event.action.kind] += event.end - event.start
    linear, pairs = 200 / 100, 4 * 50**2 / 100**2
    assert times["F"] == pytest.approx(2 * linear + 1 * pairs)
    assert times["BW"] + times["B"] + times["W"] == pytest.approx((2 + 2) * linear + 2 * pairs)


def test_under_a_mask_a_pack_pays_for_pairs_of_tokens_of_different_sequences() -> None:
    """One rank, one pack of four, by hand; a sequence by itself, whole or cut, pays nothing."""
    costs = Costs(3.0, 4.0, 2.0, attention_forward=1.0, attention_backward=2.0, tokens=100, activation=10.0, held=5.0)
    costs = replace(costs, overhead=0.5)
    masked = replace(costs, masked_forward=0.03, masked_backward=0.07)
    one, other = (plan_batch([50, 50, 50, 50], each, 1, 1, multiple=1000, passes=1) for each in (costs, masked))
    assert len(other.rows) == 1
    between = (200**2 - 4 * 50**2) / 100**2
    assert other.makespan == pytest.approx(one.makespan + (0.03 + 0.07) * between)
    alone = [plan_batch([400], each, 2, 1, multiple=50, passes=1000).makespan for each in (costs, masked)]
    assert alone[0] == alone[1]


def test_under_a_mask_packs_have_fewer_tokens() -> None:
    generator = random.Random(3)
    lengths, costs = lengths_of(generator, 60), costs_of(8, generator, same=True)
    masked = replace(costs, masked_forward=20.0, masked_backward=50.0)
    few, many = (plan_batch(lengths, each, 4, passes=50_000) for each in (costs, masked))
    assert len(many.rows) > len(few.rows)
    check_complete(many, lengths)


def test_the_same_lengths_give_the_same_plan() -> None:
    generator = random.Random(5)
    lengths, costs = lengths_of(generator, 60), costs_of(8, generator)
    plans = [plan_batch(lengths, costs, 4, passes=50_000) for _ in range(2)]
    assert plans[0].schedule == plans[1].schedule
    assert plans[0].rows == plans[1].rows


def test_long_sequences_among_short_ones_are_cut_and_short_ones_packed() -> None:
    costs = costs_of(16, random.Random(0), same=True)
    plan = plan_batch([65536, *[300] * 60], costs, 8)
    whole = [row for row, cut in zip(plan.rows, plan.schedule.own_slices, strict=True) if len(cut) > 1]
    assert whole == [(0,)]
    assert max(len(row) for row in plan.rows) > 4
    assert plan.published is not None
    assert plan.makespan < 0.5 * plan.published[1]
    assert "61 sequences" in repr(plan)


def test_without_packs_each_sequence_has_a_row_of_its_own() -> None:
    generator = random.Random(2)
    lengths, costs = lengths_of(generator, 30), costs_of(8, generator)
    plan = plan_batch(lengths, costs, 4, packs=False)
    check_complete(plan, lengths)
    assert sorted(plan.rows) == [(number,) for number in range(30)]
    assert plan.ends == tuple((0, lengths[number]) for (number,) in plan.rows)
    assert any(len(row) > 1 for row in plan_batch(lengths, costs, 4).rows)


@pytest.mark.parametrize("lengths", [[8192, 4000], [8], [1]])
def test_a_limit_that_nothing_reaches_is_none(lengths: list[int]) -> None:
    """The last step of an epoch has few tokens, of which each needs far less than a GPU has."""
    costs = Costs(2.0, 3.0, 1.0, activation=10e6, held=5e6, tokens=8192, memory_unit="bytes")
    for limit in (80e9, 1e30):
        assert plan_batch(lengths, costs, 2, memory_limit=limit) == plan_batch(lengths, costs, 2)


def test_less_memory_takes_longer_and_too_little_names_the_least() -> None:
    generator = random.Random(3)
    lengths, costs = lengths_of(generator, 40), costs_of(8, generator, same=True)
    free = plan_batch(lengths, costs, 4)
    tight = plan_batch(lengths, costs, 4, memory_limit=0.7 * max(free.peak_memory))
    assert max(tight.peak_memory) <= 0.7 * max(free.peak_memory)
    with pytest.raises(ScheduleError, match=r"got 0\.5, and the least that any order found needs is \d"):
        plan_batch(lengths, costs, 4, memory_limit=0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        (([], Costs(tokens=8), 2), TypeError, "lengths must be a list"),
        (([4, 0], Costs(tokens=8), 2), ValueError, r"lengths\[1\] must be at least 1"),
        (([4, 2.5], Costs(tokens=8), 2), TypeError, r"lengths\[1\] must be an int"),
        (([4], Costs(), 2), ValueError, "costs must have tokens"),
        (([4], 3, 2), TypeError, "costs must be a zbkern.pipeline.Costs"),
        (([4], Costs(tokens=8), 0), ValueError, "stages must be at least 1"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        plan_batch(*arguments)


@pytest.mark.parametrize("carried", [0.0, 0.3])
@pytest.mark.parametrize("limit", [None, 3.0])
def test_sequences_that_are_not_cut_hold_their_keys_and_values(carried: float, limit: float | None) -> None:
    costs = Costs(1.0, 1.2, 0.8, activation=1.0, held=0.9, carried=carried, tokens=1024)
    plan = plan_batch([1024] * 8, costs, 4, chunks=1, placement="linear", multiple=1024, memory_limit=limit)
    assert all(len(cut) == 1 for cut in plan.schedule.own_slices)
    peaks = []
    for row in plan.schedule.actions:  # by the words of `Costs` alone
        held = [0.0]
        for action in row:
            held.append(held[-1] + {"F": 1.0, "B": 0.9 - 1.0, "BW": -1.0, "W": -0.9}[action.kind])
        peaks.append(max(held))
    assert plan.peak_memory == pytest.approx(peaks)
    assert simulate(plan.schedule, costs).peak_memory == pytest.approx(peaks)
    assert limit is None or max(peaks) <= limit * (1 + 1e-9)


def test_the_limit_that_an_error_names_is_enough_beside_what_each_rank_holds_all_the_time() -> None:
    costs = Costs(1.0, 1.2, 0.8, held=0.9, static=(4.0, 5.0, 6.0, 8.9), tokens=1024)
    for static, where, named in ((costs, {"stages": 4}, "9.9"), (replace(costs, static=10.0), {"stages": 2}, "11")):
        arguments = {**where, "chunks": 1, "placement": "linear"}
        with pytest.raises(ScheduleError, match=f"the least that any order found needs is {named};"):
            plan_batch([1024] * 4, static, **arguments, memory_limit=9.0)
        assert max(plan_batch([1024] * 4, static, **arguments, memory_limit=float(named)).peak_memory) <= float(named)


def test_a_rank_has_the_room_that_its_own_weights_leave() -> None:
    costs = Costs(1.0, 1.2, 0.8, held=0.9, tokens=1024)
    even, last = (replace(costs, static=(6.0, 6.0, 6.0, more)) for more in (6.0, 8.9))
    steps = [
        plan_batch([1024] * 8, each, 4, chunks=1, placement="linear", memory_limit=10.0).makespan
        for each in (even, last)
    ]
    assert steps[1] < 1.05 * steps[0]  # the last rank of 1F1B holds one sequence at a time
    with pytest.raises(ScheduleError, match=r"any order found needs .* more on some rank"):
        plan_batch([1024] * 8, last, 4, chunks=1, placement="linear", memory_limit=[10.0, 10.0, 10.0, 9.0])


@pytest.mark.parametrize(("count", "median", "sigma", "longest"), [(128, 6000, 1.0, 65536), (256, 1000, 1.1, 32768)])
def test_units_are_small_enough_where_memory_is_short(count: int, median: int, sigma: float, longest: int) -> None:
    """16 ranks, of which each may hold little more than the longest sequence: within the passes of a usual search."""
    linear, fixed, generator = 40_000, 144, random.Random(5)
    costs = Costs(
        forward=linear + fixed,
        backward=1.75 * linear + fixed,
        weight=linear / 2 + fixed,
        communication=0.03 * linear,
        activation=1.05 * linear / 2,
        held=1.15 * linear / 2,
        split_overhead=fixed,
        attention_forward=linear / 2,
        attention_backward=1.25 * linear,
        overhead=fixed,
        carried=0.025 * linear,
        tokens=linear,
    )
    lengths = [max(64, min(longest, round(generator.lognormvariate(math.log(median), sigma)))) for _ in range(count)]
    plan = plan_batch(lengths, costs, 16, memory_limit=1.28 * longest)
    perfect = sum(3 * length + 3.5 * length * length / linear for length in lengths)
    assert perfect / plan.makespan > 0.8


def test_a_plan_makes_no_costs_of_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of hundreds of units take longer than the search."""
    made: list[Any] = []
    monkeypatch.setattr(flat, "_of_own_slices", lambda *given: made.append(given))
    plan_batch([3000, 500, 900, 128], Costs(tokens=1024, message=0.05, carried=0.1), 2, memory_limit=20.0)
    assert not made
