"""Plans with passes beside each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.overlap_planned import costs_of
from zbkern.pipeline import Costs, LayerCosts, ModelCosts, PlanOptions, plan, schedules, simulate
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.planner import native
from zbkern.planning.planner.beside import best_beside
from zbkern.planning.planner.lane_bounds import lanes_bound
from zbkern.planning.planner.problem import DoesNotFit, problem_of
from zbkern.planning.simulation.turns import Parts, in_turns


@pytest.mark.parametrize("memory", [1.25, 2.0])
@pytest.mark.parametrize("share", [0.14, 0.25, 0.40])
def test_a_plan_is_faster_than_dualpipe_v_with_its_pairs(share: float, memory: float) -> None:
    costs = costs_of(share, 2)
    pairs = simulate(schedules.dualpipe_v(4, 8), costs)
    found = plan(costs, 4, 8, 2, "v", 4 * memory, effort=0)
    assert found.timeline.cost < pairs.cost
    assert max(found.timeline.peak_memory) <= 4 * memory * (1 + 1e-9)
    assert simulate(found.schedule, costs).cost == found.timeline.cost
    assert found.lower_bound <= found.bubble_rate


def test_planned_pairs_hide_most_of_the_network() -> None:
    costs = costs_of(0.25, 2)
    found = plan(costs, 4, 16, 2, "v", effort=0)
    assert found.schedule.beside
    assert found.timeline.cost < 3 * 16 / 0.9  # of compute alone
    in_turn = replace(costs, network_forward=0, network_backward=0)
    assert not plan(in_turn, 4, 16, 2, "v", effort=0).schedule.beside
    assert found.timeline.cost < 0.8 * plan(in_turn, 4, 16, 2, "v", effort=0).timeline.cost


def test_a_plan_of_layers_has_passes_beside_each_other() -> None:
    layers = [
        LayerCosts(f"block {i}", 2, 2, 1, activation=1, network_forward=1, network_backward=1, collectives=2)
        for i in range(8)
    ]
    found = plan(ModelCosts(layers), 2, 8, effort=0)
    assert found.schedule.beside
    assert found.partition is not None


@pytest.mark.parametrize("microbatches", [6, 8])
def test_passes_of_a_chunk_in_fully_shard_are_apart(microbatches: int) -> None:
    options = PlanOptions(fully_shard=True)
    found = plan(costs_of(0.4, 2), 4, microbatches, 2, "v", effort=0, options=options).schedule
    assert found.beside
    for row, ranges in zip(found.actions, found.beside, strict=True):
        for first, end in ranges:
            chunks = [action.chunk for action in row[first:end] if action.kind != "W"]
            assert len({*chunks}) == len(chunks)


def test_saving_memory_keeps_a_plan_whose_passes_beside_each_other_fit() -> None:
    costs = replace(costs_of(0.4, 2), checkpoint=0.1)
    alone = plan(costs, 4, 8, 2, "v", 8.0, effort=2)
    saving = plan(costs, 4, 8, 2, "v", 8.0, effort=2, recompute=True)
    assert saving.timeline.cost <= alone.timeline.cost * (1 + 1e-9)


def test_the_bound_is_the_longer_of_compute_and_network() -> None:
    costs = Costs(5.0, 4.0, 1.0, network_forward=3.0, network_backward=[1.0, 3.5], split_overhead=0.25)
    flat = FlatCosts.of(costs, (0, 1))
    assert lanes_bound(flat, 10) == 10 * 6.5  # rank 1: its network; rank 0 computes 2 + 3 + 1 - .25


def test_slices_run_beside_each_other() -> None:
    costs = replace(costs_of(0.4, 2), attention_forward=0.2, attention_backward=0.4, carried=0.1)
    sliced = plan(costs, 4, 4, 2, "v", 8.0, effort=0, slices=4)
    assert sliced.schedule.beside
    assert max(sliced.peak_memory) <= 8.0 * (1 + 1e-9)
    apart = replace(costs, network_forward=0, network_backward=0)
    assert sliced.timeline.cost < 0.95 * plan(apart, 4, 4, 2, "v", 8.0, effort=0, slices=4).timeline.cost


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 6)), min_size=1, max_size=4))
def test_the_compiled_search_takes_turns_as_the_simulation_does(passes: list[tuple[int, int, int]]) -> None:
    ends = [end for _, end in in_turns([Parts(*each) for each in passes], 1000.0)]
    assert native.core.in_turns(passes, 1000) == pytest.approx(ends, rel=1e-6, abs=100)


costs_with_network = st.builds(
    lambda f, b, w, nf, nb, n, hop, held: Costs(
        f, b, w, hop, 1.0, held, network_forward=nf * f, network_backward=nb * b, collectives=n
    ),
    *[st.floats(0.1, 3.0)] * 3,
    *[st.floats(0.0, 1.0)] * 2,
    st.integers(0, 5),
    st.floats(0.0, 0.5),
    st.floats(0.2, 1.5),
)


@given(
    costs_with_network,
    st.sampled_from([(0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2)]),
    st.integers(1, 5),
    st.one_of(st.none(), st.floats(1.0, 9.0)),
    st.sampled_from(["cost", "makespan"]),
)
def test_orders_are_valid_fit_and_are_not_below_the_bound(
    costs: Costs, placement: tuple[int, ...], microbatches: int, limit: float | None, objective: str
) -> None:
    ranks = max(placement) + 1
    flat = FlatCosts.of(costs, placement)
    limits = None if limit is None else [limit] * ranks
    try:
        problem = problem_of(flat, microbatches, limits, objective)
    except DoesNotFit:
        return
    for timeline in best_beside(problem, limits):
        timeline.schedule.validate()
        assert timeline.schedule.microbatches == microbatches
        assert limit is None or max(timeline.peak_memory) <= limit * (1 + 1e-9)
        bound = lanes_bound(flat_costs(costs, timeline.schedule), microbatches)
        assert getattr(timeline, objective) >= bound * (1 - 1e-9)
