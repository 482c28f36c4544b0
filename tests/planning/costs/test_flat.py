"""Costs of slices: what they take and hold by where they lie, slices of equal times, and sums that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configurations import H100, setting_of
from zbkern.pipeline import Action, Costs, LayerCosts, ModelCosts, draw, plan_batch, schedules, simulate
from zbkern.planning.cost_model.operations import rising_share
from zbkern.planning.costs.chunks import ChunkCosts
from zbkern.planning.costs.equal_slices import equal_lengths, equal_times
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.planner.offload import fit
from zbkern.planning.simulation import step_costs

SOME = Costs(
    *(8.0, 12.0, 4.0),
    communication=1.0,
    activation=6.0,
    held=2.0,
    attention_forward=4.0,
    attention_backward=8.0,
    overhead=0.5,
    carried=1.0,
)


def slice_costs(costs: Costs, chunks: int, slices: Sequence[int]) -> tuple[ChunkCosts, ...]:
    return FlatCosts.of(costs, range(chunks), slices).by_place


def test_a_slice_takes_what_its_place_says() -> None:
    first, last = slice_costs(SOME, 1, (3, 1))
    # overhead, attention of b^2 - a^2, and the rest by length
    assert (first.forward[0], last.forward[0]) == pytest.approx(
        (0.5 + 4 * 9 / 16 + 3.5 * 0.75, 0.5 + 4 * 7 / 16 + 0.875)
    )
    assert (first.backward[0], last.backward[0]) == pytest.approx((0.5 + 4.5 + 2.625, 0.5 + 3.5 + 0.875))
    assert (first.weight[0], last.weight[0]) == pytest.approx((0.5 + 2.625, 0.5 + 0.875))
    assert (first.fused[0], last.fused[0]) == pytest.approx((10.75, 6.25))  # nothing is lost by the split
    once = slice_costs(replace(SOME, split_overhead=0.7), 1, (3, 1))
    assert [10.75 - once[0].fused[0], 6.25 - once[1].fused[0]] == pytest.approx([0.5 + 0.15, 0.5 + 0.05])
    assert (first.activation[0], last.activation[0]) == (3.75, 1.25)
    assert (first.held[0], last.held[0]) == (1.5, 0.5)


def test_one_slice_is_the_whole_sequence() -> None:
    assert slice_costs(SOME, 3, (7,)) == (SOME.per_chunk(3),)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6))
def test_all_slices_together_take_the_whole_and_the_overhead_of_each(lengths: list[int]) -> None:
    found = slice_costs(SOME, 1, lengths)
    more = 0.5 * (len(lengths) - 1)
    for name, whole in (("forward", 8), ("backward", 12), ("weight", 4), ("fused", 16 + more)):
        assert sum(getattr(each, name)[0] for each in found) == pytest.approx(whole + more)
    assert sum(each.activation[0] for each in found) + 1.0 == pytest.approx(6)


def test_memory_counts_keys_and_values_until_the_last_backward() -> None:
    schedule = schedules.gpipe(1, 1, slices=2)
    timeline = simulate(schedule, SOME)
    (curve,) = timeline.memory_held(SOME)
    # F: 2.5 of a slice and 1 of all keys; F: 2.5; BW of the last: gradients of all keys; BW of the first: nothing left
    assert [memory for _, memory in curve] == pytest.approx([3.5, 6.0, 4.5, 0.0])
    assert timeline.peak_memory == (6.0,)


def test_a_layer_with_a_window_is_between_a_constant_and_a_rising_context() -> None:
    assert rising_share(1.0) == 1.0
    assert rising_share(1e-6) < 1e-5
    for window, slices in ((1 / 16, 4), (1 / 2, 4), (1 / 64, 8)):
        attention = 6.0 * rising_share(window)
        costs = ModelCosts([LayerCosts("one", 8.0, 8.0, 1.0, attention_forward=attention)]).chunk_costs([0])
        found = [each.forward[0] - 2 / slices for each in slice_costs(costs, 1, (1,) * slices)]

        def seen(x: float, window: float = window) -> float:
            return x * x / 2 if x < window else window * x - window * window / 2

        exact = [6 * (seen((i + 1) / slices) - seen(i / slices)) / seen(1.0) for i in range(slices)]
        assert found == pytest.approx(exact, abs=0.3)  # a twentieth of the attention


def test_slices_of_equal_times_and_lengths() -> None:
    flat = SOME.per_chunk(1)
    lengths = equal_times(flat, 4, 131072)
    assert sum(lengths) == 131072
    assert all(length % 128 == 0 for length in lengths)
    times = [each.forward[0] + each.backward[0] + each.weight[0] for each in slice_costs(SOME, 1, lengths)]
    assert max(times) / min(times) < 1.01
    assert lengths[0] > lengths[-1]
    assert equal_lengths(3, 4096) == (1408, 1280, 1408)
    assert equal_lengths(4) == (1, 1, 1, 1)
    assert equal_times(Costs().per_chunk(1), 4) == (1, 1, 1, 1)
    assert equal_lengths(3, 100) == (33, 34, 33)
    assert equal_times(Costs().per_chunk(2), 5, 640) == (128,) * 5


def test_what_sizes_cannot_be_are_still_slices() -> None:
    for slices in (6, 7, 8):
        found = equal_times(SOME.per_chunk(1), slices, 8)
        assert (len(found), sum(found), min(found)) == (slices, 8, 1)
    assert sum(equal_times(SOME.per_chunk(1), 32, 4096)) == 4096
    assert equal_times(SOME.per_chunk(1), 1500) == (1,) * 1500  # without tokens


def test_a_model_from_its_configuration_has_costs_of_slices() -> None:
    setting = setting_of("llama-3-8b", sequence=131072, tensor_parallel=8)
    block = setting.costs.layers[1]
    assert setting.costs.tokens == 131072
    # keys and values of 8 heads in bf16, of which every GPU has one
    assert block.carried == 131072 * 2 * 128 * 2
    # two products of 32 heads of 128 with half of the keys, on 8 GPUs that reach 0.67 of their 989 TFLOPS
    flops = 2 * 2 * 32 * 128 * 131073 / 2 * 131072 / 8
    assert block.attention_forward == pytest.approx(1e3 * flops / (0.67 * H100.matmul_flops))
    short = setting_of("llama-3-8b", sequence=16384, tensor_parallel=8).costs.layers[1]
    as_slice = slice_costs(ModelCosts((block,)).chunk_costs([0]), 1, (16384, 131072 - 16384))[0]
    # the first slice is a short sequence
    assert as_slice.forward[0] == pytest.approx(short.forward, rel=0.02)
    assert as_slice.backward[0] == pytest.approx(short.backward, rel=0.02)
    assert as_slice.weight[0] == pytest.approx(short.weight, rel=0.02)


def test_a_slice_waits_for_the_whole_latency_of_its_messages() -> None:
    first, last = slice_costs(Costs(communication=(1.0, 0.3), latency=0.4), 3, (1, 3))
    assert first.communication == pytest.approx((0.4 + 0.6 / 4, 0.3))
    assert last.communication == pytest.approx((0.4 + 0.6 * 3 / 4, 0.3))
    layers = tuple(LayerCosts(f"{index}", 1, 1, 1, output=8.0) for index in range(2))
    cut = ModelCosts(layers, latency=0.5, bandwidth=4.0).chunk_costs([0, 1])
    halves = slice_costs(cut, 2, (1, 1))
    assert [each.communication for each in halves] == [(1.5,), (1.5,)]


def test_windows_of_a_configuration() -> None:
    setting = setting_of("gpt-oss-120b", sequence=131072, tensor_parallel=8)
    windowed, whole = setting.costs.layers[1:3]
    flops = [block.parts[0].core.flops(131072) for block in setting.architecture.blocks[:2]]
    rising = rising_share(128 / 131072) * flops[0] / flops[1]
    assert windowed.attention_forward == pytest.approx(rising * whole.attention_forward)


def test_measured_slices_give_the_costs_of_the_sequence() -> None:
    given_ = Costs(8.0, 12.0, 4.0, attention_forward=4.0, attention_backward=8.0)
    schedule = schedules.zb_h1(2, 2, slices=[5, 4, 3, 2])
    found = step_costs.costs([simulate(schedule, given_)])
    assert found.forward == pytest.approx((8.0, 8.0))
    assert found.attention_forward == pytest.approx((4.0, 4.0))
    assert found.attention_backward == pytest.approx((8.0, 8.0))
    assert simulate(schedule, found).cost == pytest.approx(simulate(schedule, given_).cost)


def test_pictures_name_sequence_and_slice() -> None:
    picture = draw.svg([simulate(schedules.one_f_one_b(2, 2, slices=3))])
    assert ">1.2</text>" in picture
    assert ">1.2</text>" not in draw.svg([simulate(schedules.one_f_one_b(2, 6))])


@pytest.mark.parametrize("saving", [{"offload": True}, {"offload": False, "recompute": True}])
def test_a_schedule_of_slices_is_made_to_fit(saving: dict[str, bool]) -> None:
    costs = Costs(8.0, 12.0, 4.0, activation=6.0, held=2.0, attention_forward=4.0, carried=1.0, checkpoint=0.5)
    costs = replace(costs, offload_bandwidth=4.0, reload_bandwidth=4.0)
    schedule = schedules.one_f_one_b(2, 2, slices=4)
    plain = simulate(schedule, costs)
    limit = 0.8 * max(plain.peak_memory)
    fitted = fit(schedule, costs, limit, **saving)
    assert max(fitted.peak_memory) <= limit < max(plain.peak_memory)
    assert fitted.schedule.slices == (1, 1, 1, 1)
    assert {action.kind for row in fitted.schedule.actions for action in row} & {"O", "R"}


def test_a_schedule_whose_sequences_have_slices_of_their_own_is_made_to_fit() -> None:
    costs = Costs(2.0, 3.5, 1.0, attention_forward=1.0, attention_backward=2.5, overhead=0.01, tokens=8192)
    costs = replace(costs, checkpoint=0.02)
    schedule = plan_batch([60_000, 8_000, 8_000, 4_000, 1_000], costs, stages=4).schedule
    rows = [
        [each for a in row for each in ([Action("R", *a[1:3]), a] if a.kind in ("B", "BW") else [a])]
        for row in schedule.actions
    ]
    least = simulate(replace(schedule, actions=tuple(map(tuple, rows))), costs).peak_memory
    limit = (max(simulate(schedule, costs).peak_memory) + max(least)) / 2
    assert max(fit(schedule, costs, limit, offload=False, recompute=True).peak_memory) <= limit * (1 + 1e-9)


def test_passes_take_what_the_speed_of_their_rank_says() -> None:
    """Times of every kind, and neither messages nor memory; the same from a file, and for layers."""
    costs = Costs(2, 4, 6, 0.5, 1, 1, 1, 2, 8, 3, 0.5, 1, 1, 0.5, tokens=512, speeds=(1, 0.5))
    sent = replace(costs, network_forward=1, network_backward=3)
    assert FlatCosts.of(sent, (0, 1)).whole.forward == (2, 3)
    assert FlatCosts.of(sent, (0, 1)).whole.fused == (9, 15)
    assert FlatCosts.of(sent, (0, 1)).whole.network_backward == (3, 3)
    found = FlatCosts.of(Costs.from_json(costs.to_json()), (0, 1, 1, 0)).whole
    equal = FlatCosts.of(replace(costs, speeds=None), (0, 1, 1, 0)).whole
    times = ("forward", "backward", "weight", "fused", "merge_saving", "recompute", "overhead")
    for name in equal._fields:
        factor = 2 if name in times or name.startswith("attention") else 1
        before = getattr(equal, name)
        middle = (1, 2) if len(before) == 4 else (1,)
        expected = [each * (factor if at in middle else 1) for at, each in enumerate(before)]
        assert getattr(found, name) == tuple(expected), name
    with pytest.raises(ValueError, match=r"speeds must be one number per rank \(3\)"):
        FlatCosts.of(costs, (0, 1, 2))
    for wrong in ((), 0.5, (1, 0)):
        with pytest.raises(ValueError, match="speeds must be"):
            Costs(speeds=wrong)
    layers = ModelCosts([LayerCosts(f"{n}", 1, 1, 1) for n in range(4)], speeds=(1, 0.5))
    assert FlatCosts.of(layers.chunk_costs([0, 2], [0, 1]), (0, 1)).whole.forward == (2, 4)
    assert layers.chunk_costs([0, 1, 2]).speeds is None  # of two ranks, and for three
