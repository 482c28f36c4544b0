from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbkern.pipeline import Costs, schedules, simulate
from zbkern.planning.simulation.comparison import INTERLEAVED, rechunk, timelines

amounts = st.integers(1, 50).map(float)


@given(values=st.lists(amounts, min_size=1, max_size=9), wanted=st.integers(1, 9))
def test_the_model_stays_the_same_however_it_is_cut(values: list[float], wanted: int) -> None:
    costs = Costs(forward=values, backward=3.0, activation=values)
    cut = rechunk(costs, len(values), wanted).per_chunk(wanted)
    assert sum(cut.forward) == pytest.approx(sum(values))
    assert sum(cut.activation) == pytest.approx(sum(values))
    assert cut.backward == pytest.approx((3.0 * len(values) / wanted,) * wanted)
    for share in range(wanted + 1):  # and so does every part of it that both cuts have
        if share * len(values) % wanted == 0:
            assert sum(cut.forward[:share]) == pytest.approx(sum(values[: share * len(values) // wanted]))


def test_joined_and_halved_by_hand() -> None:
    costs = Costs(forward=[1, 3, 5, 7], weight=2, communication=0.5, held=0.25)
    joined, halved = rechunk(costs, 4, 2), rechunk(costs, 4, 8)
    assert joined.forward == (4, 12)
    assert (joined.weight, joined.held, joined.communication) == ((4, 4), (0.5, 0.5), 0.5)
    assert halved.forward == (0.5, 0.5, 1.5, 1.5, 2.5, 2.5, 2, 5)  # of the last 7, 3 are more than the others' median
    assert rechunk(costs, 4, 4) is costs


HEAD = Costs(  # an 8B model on 8 stages
    forward=[24.1, *[23.2] * 6, 33.9],
    backward=[23.0, *[23.9] * 6, 32.5],
    weight=[17.2, *[16.8] * 6, 25.9],
    communication=0.9,
    activation=[2.6e9, *[2.5e9] * 6, 3.6e9],
    held=[*[1.1e9] * 7, 1.4e9],
    time_unit="ms",
    memory_unit="bytes",
)


def test_the_head_and_the_embedding_stay_whole() -> None:
    cut = rechunk(HEAD, 8, 16)
    assert cut.forward == pytest.approx([12.5, *[11.6] * 14, 22.3])
    assert cut.backward == pytest.approx([11.5, 11.5, *[11.95] * 13, 20.55])  # what is less at an end is spread
    assert cut.activation == pytest.approx([1.35e9, *[1.25e9] * 14, 2.35e9])
    assert simulate(schedules.zb_v(8, 32), cut).bubble_rate == pytest.approx(0.280, abs=0.001)
    joined = rechunk(HEAD, 8, 4)
    assert joined.forward == pytest.approx([47.3, 46.4, 46.4, 57.1])


@given(values=st.lists(st.tuples(amounts, amounts), min_size=2, max_size=6), wanted=st.integers(1, 12))
def test_overheads_and_savings_stay_within_their_passes(values: list[tuple[float, float]], wanted: int) -> None:
    weight = [max(pair) for pair in values]
    costs = Costs(weight=weight, merge_saving=[min(pair) for pair in values], split_overhead=weight)
    flat = rechunk(costs, len(values), wanted).per_chunk(wanted)
    assert all(fused >= 0 for fused in flat.fused)
    assert all(saving <= weight for saving, weight in zip(flat.merge_saving, flat.weight, strict=True))
    assert sum(flat.weight) == pytest.approx(sum(weight))


def test_edges_of_other_chunks_have_the_longest_latency() -> None:
    costs = Costs(communication=[0.1, 0.2])
    assert rechunk(costs, 3, 6).communication == 0.2
    assert rechunk(costs, 3, 3) is costs
    assert rechunk(Costs(communication=[]), 1, 2).communication == 0.0


def test_every_schedule_does_the_same_work() -> None:
    found = timelines(Costs(forward=4, backward=4, weight=4), 3, 6, chunks=3)
    assert [each.schedule.name for each in found] == list(schedules.NAMES)
    assert {each.schedule.chunks for each in found if each.schedule.name in INTERLEAVED} == {3}
    for each in found:
        assert each.busy == pytest.approx((3 * 6 * 12,) * 3)
