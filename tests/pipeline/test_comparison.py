from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbkern.pipeline import Costs, schedules, simulate
from zbkern.pipeline.comparison import INTERLEAVED, build, recut, timelines

amounts = st.integers(1, 50).map(float)


@given(values=st.lists(amounts, min_size=1, max_size=9), wanted=st.integers(1, 9))
def test_the_model_stays_the_same_however_it_is_cut(values: list[float], wanted: int) -> None:
    costs = Costs(forward=values, backward=3.0, activation=values)
    cut = recut(costs, len(values), wanted).per_chunk(wanted)
    assert sum(cut.forward) == pytest.approx(sum(values))
    assert sum(cut.activation) == pytest.approx(sum(values))
    assert cut.backward == pytest.approx((3.0 * len(values) / wanted,) * wanted)
    for share in range(wanted + 1):  # and so does every part of it that both cuts have
        if share * len(values) % wanted == 0:
            assert sum(cut.forward[:share]) == pytest.approx(sum(values[: share * len(values) // wanted]))


def test_joined_and_halved_by_hand() -> None:
    costs = Costs(forward=[1, 3, 5, 7], weight=2, communication=0.5, held=0.25)
    joined, halved = recut(costs, 4, 2), recut(costs, 4, 8)
    assert joined.forward == (4, 12)
    assert (joined.weight, joined.held, joined.communication) == (4, 0.5, 0.5)
    assert halved.forward == (0.5, 0.5, 1.5, 1.5, 2.5, 2.5, 3.5, 3.5)
    assert recut(costs, 4, 4) is costs


def test_edges_with_latencies_of_their_own_cannot_be_cut() -> None:
    costs = Costs(communication=[0.1, 0.2])
    with pytest.raises(ValueError, match=r"recut: costs.communication has one number per edge of 3 chunks"):
        recut(costs, 3, 6)
    found, unknown = timelines(costs, 3, 4)
    assert [each.schedule.name for each in found] == ["gpipe", "one_f_one_b", "zb_h1", "zb_h2"]
    assert [*(each.schedule.name for each in found), *unknown] == list(schedules.NAMES)


def test_every_schedule_does_the_same_work() -> None:
    found, unknown = timelines(Costs(forward=4, backward=4, weight=4), 3, 6, chunks=3)
    assert unknown == []
    assert [each.schedule.name for each in found] == list(schedules.NAMES)
    assert {each.schedule.chunks for each in found if each.schedule.name in INTERLEAVED} == {3}
    for each in found:
        assert each.busy == pytest.approx((3 * 6 * 12,) * 3)


def test_chunks_matter_to_the_interleaved_alone() -> None:
    assert build("interleaved", 2, 4, 3).chunks == 3
    assert build("interleaved", 2, 4).chunks == 2
    assert build("zb_v", 2, 4, 3) == schedules.zb_v(2, 4)
    assert simulate(build("zb_h1", 2, 4, 3)).bubble_rate == simulate(schedules.zb_h1(2, 4)).bubble_rate
