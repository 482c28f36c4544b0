"""Partitions: as equal as possible, and with room for what ranks hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbkern.pipeline import LayerCosts, ModelCosts
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.planner import native
from zbkern.planning.planner.partition import balanced_chunks, balanced_partitions, even_partitions, work_of
from zbkern.schedules.layout import HALVES

needs_core = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
V4 = (0, 1, 2, 3, 3, 2, 1, 0)


def model(work: list[float], **more: float) -> ModelCosts:
    return ModelCosts(tuple(LayerCosts(f"layer {index}", each, each, each, **more) for index, each in enumerate(work)))


def loads(costs: ModelCosts, partition: tuple[int, ...], placement: tuple[int, ...]) -> list[float]:
    found = [0.0] * (max(placement) + 1)
    for (begin, end), rank in zip(pairwise([*partition, len(costs.layers)]), placement, strict=True):
        found[rank] += sum(map(work_of, costs.layers[begin:end]))
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=9), st.integers(1, 4))
def test_the_largest_chunk_is_as_small_as_possible(work: list[int], chunks: int) -> None:
    starts = balanced_chunks(tuple(work), (1.0,) * chunks)
    assert starts[0] == 0
    assert len(starts) == chunks

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(work[begin:end]) for begin, end in pairwise([0, *cuts, len(work)]))

    assert largest(starts[1:]) == min(map(largest, combinations(range(1, len(work)), chunks - 1)))


def test_rounding_does_not_leave_a_cut_without_layers() -> None:
    starts = balanced_chunks((0.15, *[3.0] * 23), (1.0,) * 16)
    assert starts[0] == 0
    assert all(first < second for first, second in pairwise([*starts, 24])), starts


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0.1, 5), min_size=8, max_size=24),
    st.sampled_from([(0, 1, 2, 3), V4, (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 1, 0)]),
    st.floats(1, 40),
)
def test_partitions_are_whole_and_never_less_equal_than_even_ones(
    work: list[float], placement: tuple[int, ...], limit: float
) -> None:
    costs = model(work, activation=1.0, held=1.2)
    ranks = max(placement) + 1
    for limits in (None, [limit] * ranks):
        for partition in balanced_partitions(costs, placement, 12, limits):
            costs.chunk_costs(partition, placement)  # raises for a partition that is none
    chunks = balanced_partitions(costs, tuple(range(len(placement))), 12, None)[0]
    one_each = tuple(range(len(placement)))
    most = max(loads(costs, chunks, one_each))
    for partition in even_partitions(len(work), len(placement)):
        assert most <= max(loads(costs, partition, one_each)) * (1 + 1e-9)


@needs_core
def test_with_several_chunks_the_busiest_rank_has_as_little_as_possible() -> None:
    random = Random(0)
    for _ in range(20):
        costs = model([random.choice((0.1, 1.0, 3.0, 3.4)) for _ in range(10)])
        for placement in ((0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)):
            found = balanced_partitions(costs, placement, 8, None)[0]
            every = combinations(range(1, 10), len(placement) - 1)
            least = min(max(loads(costs, (0, *cuts), placement)) for cuts in every)
            assert max(loads(costs, found, placement)) == pytest.approx(least)


def test_partitions_of_half_blocks_have_those_of_whole_ones() -> None:
    """Whose blocks are 0, then 1 and 2, 3 and 4, ..., and the last."""
    names = ["embedding", *(f"{block}{half}" for block in range(6) for half in HALVES), "head"]
    work = [0.1, *[3.0, 1.0] * 6, 2.0]
    costs = ModelCosts(tuple(LayerCosts(name, each, each, each) for name, each in zip(names, work, strict=True)))
    whole = model([0.1, *[4.0] * 6, 2.0])
    found = balanced_partitions(costs, (0, 1, 1, 0), 8, None)
    of_blocks = [*balanced_partitions(whole, (0, 1, 1, 0), 8, None), *even_partitions(8, 4)]
    assert {tuple(max(0, 2 * first - 1) for first in each) for each in of_blocks} < {*found}


@needs_core
def test_memory_moves_layers_to_where_there_is_room() -> None:
    """The first rank of 1F1B holds most microbatches: with little memory it gets fewer layers."""
    costs = model([1.0] * 24, activation=1.0, held=1.0, static=0.5)
    equal, *others = balanced_partitions(costs, (0, 1, 2, 3), 16, [14.0] * 4)
    assert equal == (0, 6, 12, 18)  # less room for microbatches, and equal work
    sizes = [[end - begin for begin, end in pairwise([*each, 24])] for each in others]
    assert any(each == sorted(each) and each[0] < each[-1] for each in sizes), sizes


@needs_core
def test_tied_weights_are_held_once() -> None:
    ends = {"static": 8.0, "tied": "embedding"}
    layers = [LayerCosts("embedding", 1, 0, 1, **ends), *model([1.0] * 6, static=1.0).layers]
    costs = ModelCosts((*layers, LayerCosts("head", 1, 1, 1, **ends)))
    partition = balanced_partitions(costs, (0, 1, 1, 0), 4, [11.0, 11.0])[0]
    chunks = costs.chunk_costs(partition, (0, 1, 1, 0))
    assert max(FlatCosts.of(chunks, (0, 1, 1, 0)).static) <= 11


def test_even_partitions_may_leave_the_last_layers_alone() -> None:
    """A head that costs as much as several blocks is a chunk of its own, or shares one with the norm or a block."""
    found = even_partitions(34, 8)
    assert (0, 5, 10, 15, 20, 25, 29, 33) in found
    assert (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 29, 32) in even_partitions(34, 16)


@needs_core
def test_ranks_get_the_layers_that_their_speeds_can_carry() -> None:
    """With one chunk per rank and with several no cut has a busiest rank that takes less."""
    random = Random(1)
    for _ in range(10):
        costs = model([random.choice((1.0, 1.5, 2.0)) for _ in range(12)])
        for placement in ((0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)):
            speeds = [random.choice((0.5, 0.7, 1.0)) for _ in range(max(placement) + 1)]
            found = balanced_partitions(replace(costs, speeds=speeds), placement, 8, None)[0]

            def most(cut: tuple[int, ...]) -> float:
                times = zip(loads(costs, cut, placement), speeds, strict=True)  # noqa: B023  # is called here
                return max(work / speed for work, speed in times)

            every = combinations(range(1, 12), len(placement) - 1)
            assert most(found) == pytest.approx(min(most((0, *cuts)) for cuts in every))
