"""Plans from the costs of layers: partition, chunks, placement and order in one search, or any of them given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zbkern.pipeline import LayerCosts, ModelCosts, PlanOptions, ScheduleError, plan, schedules, simulate
from zbkern.planning.planner import native
from zbkern.planning.planner.partition import balanced_partitions, even_partitions
from zbkern.planning.simulation.comparison import INTERLEAVED

needs_core = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")


def llama(blocks: int, head: float = 2.0, latency: float = 0.02) -> ModelCosts:
    """Embedding, blocks whose held tensors are larger than their activations, and a head with the loss."""
    block = [
        LayerCosts(f"block {index}", 1.0, 1.1, 0.9, 1.0, 1.13, 0.05, 0.02, output=0.1, static=1.5)
        for index in range(blocks)
    ]
    ends = {"static": 3.0, "tied": "embedding"}
    first = LayerCosts("embedding", 0.05, 0.0, 0.1, 0.1, 0.1, output=0.1, **ends)
    return ModelCosts(
        (first, *block, LayerCosts("head", head, head, head, 0.4, 0.5, **ends)), bandwidth=20.0, latency=latency
    )


def published_on_every_split(model: ModelCosts, stages: int, microbatches: int, limit: float | None) -> float:
    """The least cost of any published schedule that fits, on any even or balanced partition."""
    best = float("inf")
    limits = None if limit is None else [limit] * stages
    for name in schedules.NAMES:
        for chunks in (2, 3, 4) if name in INTERLEAVED else (None,):
            more = {} if chunks is None else {"chunks": chunks}
            schedule = getattr(schedules, name)(stages, microbatches, **more)
            if len(schedule.placement) > len(model.layers):
                continue
            partitions = even_partitions(len(model.layers), len(schedule.placement))
            for partition in [*partitions, *balanced_partitions(model, schedule.placement, microbatches, limits)]:
                timeline = simulate(schedule, model.chunk_costs(partition, schedule.placement))
                if limit is None or max(timeline.peak_memory) <= limit:
                    best = min(best, timeline.cost)
    return best


@needs_core
@pytest.mark.parametrize(("stages", "microbatches", "limit"), [(4, 8, None), (2, 5, 50.0)])
def test_never_worse_than_what_is_published(stages: int, microbatches: int, limit: float | None) -> None:
    model = llama(12)
    found = plan(model, stages, microbatches, memory_limit=limit, effort=0)
    assert found.timeline.cost <= published_on_every_split(model, stages, microbatches, limit) * (1 + 1e-9)
    assert limit is None or max(found.timeline.peak_memory) <= limit * (1 + 1e-9)


@examples(4, 16)
@given(
    st.lists(st.tuples(*[st.floats(0, 5)] * 3), min_size=6, max_size=14),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 6),
    st.floats(1, 6),
    st.sampled_from(["cost", "makespan"]),
)
def test_every_plan_is_valid_and_fits(
    times: list[tuple[float, ...]], stages: int, microbatches: int, room: float, objective: str
) -> None:
    layers = tuple(LayerCosts(f"{index}", *each, 1.0, 1.2, static=0.3) for index, each in enumerate(times))
    model = ModelCosts(layers, latency=0.1)
    limit = len(layers) * (0.3 + room)
    found = plan(model, stages, microbatches, memory_limit=limit, effort=0, options=PlanOptions(objective))
    found.schedule.validate()
    costs = model.chunk_costs(found.partition, found.schedule.placement)
    timeline = simulate(found.schedule, costs)
    assert costs == found.costs
    assert timeline.cost == found.timeline.cost
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    assert 0 <= found.lower_bound <= 1
    length = timeline.cost if objective == "cost" else timeline.makespan
    idle = 1 - sum(timeline.busy) / (stages * length) if length else 0.0
    assert found.idle.total == pytest.approx(idle, abs=1e-9)


def test_of_equal_plans_the_one_with_the_fewest_chunks_is_taken() -> None:
    """One rank is never idle, however many chunks it has."""
    assert plan(llama(10), 1, 6, effort=0).schedule.chunks == 1


def test_all_of_it_can_be_given() -> None:
    model = llama(10)
    partition, placement = (0, 2, 5, 7, 9, 11), (0, 1, 2, 1, 0, 2)
    options = PlanOptions(partition=partition)
    found = plan(model, 3, 6, 2, placement, 200.0, effort=0, options=options)
    assert (found.partition, found.schedule.placement, found.schedule.chunks) == (partition, placement, 2)
    assert plan(model, 3, 6, effort=0, options=options).schedule.chunks == 2
    assert plan(model, 3, 6, placement="v", effort=0).schedule.placement == (0, 1, 2, 2, 1, 0)
    assert plan(model, 3, 6, chunks=3, effort=0).schedule.chunks == 3


@needs_core
def test_a_heavy_head_moves_layers_away_from_its_rank() -> None:
    """The cut is worth more than any order: the published schedules on an even division are idle most of the time."""
    model = llama(16, head=6.0)
    found = plan(model, 4, 16, effort=0)
    even = simulate(schedules.zb_h1(4, 16), model.chunk_costs(even_partitions(18, 4)[0]))
    assert found.timeline.cost < even.cost / 1.3


def test_the_memory_counts_what_is_always_there() -> None:
    model = llama(8)
    states = "fullest rank holds 9 of weights, gradients and optimizer states"
    needed = f"{states} and 4.4 for one microbatch, 0.1 for a message, 13.5 in all"
    with pytest.raises(ScheduleError, match=f"memory_limit=8: in the best cut into 2 stages of one chunk the {needed}"):
        plan(model, 2, 4, memory_limit=8.0, effort=0)
    found = plan(model, 2, 4, memory_limit=20.0, effort=0)
    assert 9 < min(found.timeline.peak_memory) <= max(found.timeline.peak_memory) <= 20


def test_slices_take_any_cut_that_fits() -> None:
    """However uneven it is."""
    model = ModelCosts([LayerCosts(str(n), 1, 1, 1, 1, static=6.0 if n == 3 else 0.0) for n in range(8)])
    for slices in (1, 2):
        assert max(plan(model, 3, 2, memory_limit=7, effort=0, slices=slices).timeline.peak_memory) <= 7


def test_the_least_that_fits_is_told_of_the_best_cut() -> None:
    """Where the limit is enough for one chunk per rank, and not for the two that are asked for."""
    works, activations = (1, 1, 3, 2, 3), (1, 1, 2, 3, 1)
    layers = enumerate(zip(works, activations, strict=True))
    model = ModelCosts([LayerCosts(str(n), w, w, w, a, static=0.0 if n else 6.0) for n, (w, a) in layers])
    with pytest.raises(ScheduleError, match="smallest limit that any schedule fits is 8"):
        plan(model, 2, 2, 2, memory_limit=7, effort=0)
    assert plan(model, 2, 2, 2, memory_limit=8, effort=0)


def test_wrong_questions_are_refused() -> None:
    model = llama(6)
    with pytest.raises(ValueError, match="9 stages with 1 chunks each need as many layers, and costs has 8"):
        plan(model, 9, 4)
    with pytest.raises(ValueError, match="partition must have chunks x stages entries, a multiple of 3; got 4"):
        plan(model, 3, 4, options=PlanOptions(partition=(0, 1, 2, 3)))
    with pytest.raises(ValueError, match="partition must be the first layer of every chunk"):
        plan(model, 2, 4, effort=0, options=PlanOptions(partition=(0, 9)))
    with pytest.raises(TypeError, match="partition divides layers"):
        plan(model.chunk_costs((0, 4)), 2, 4, options=PlanOptions(partition=(0, 4)))


@needs_core
@pytest.mark.parametrize(
    ("blocks", "stages", "microbatches"), [(14, 4, 8), pytest.param(22, 4, 5, marks=pytest.mark.slow), (10, 2, 7)]
)
def test_the_first_answer_is_about_the_best_of_those_for_each_number_of_chunks(
    blocks: int, stages: int, microbatches: int
) -> None:
    model = llama(blocks)
    best = plan(model, stages, microbatches, effort=0).timeline.cost
    for chunks in range(1, 5):
        if chunks * stages <= len(model.layers):
            assert best <= plan(model, stages, microbatches, chunks, effort=0).timeline.cost * 1.003
