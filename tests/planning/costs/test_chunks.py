"""Costs: one number or one per chunk, checked, written out, and carried by JSON."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zbkern.pipeline import Costs, LayerCosts, ModelCosts, plan, schedules, simulate
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.simulation import comparison, drift, step_costs


def test_numbers_stand_for_every_chunk() -> None:
    flat = Costs(forward=2, backward=[1, 2, 3], weight=1, communication=0.5, split_overhead=0.25).per_chunk(3)
    assert flat.forward == (2.0, 2.0, 2.0)
    assert flat.backward == (1.0, 2.0, 3.0)
    assert flat.fused == (1.75, 2.75, 3.75)
    assert flat.communication == (0.5, 0.5)


def test_what_w_holds_is_as_much_as_the_activation_unless_it_is_given() -> None:
    assert Costs(activation=[1, 3]).per_chunk(2).held == (1.0, 3.0)
    assert Costs(activation=3, held=0).per_chunk(2).held == (0.0, 0.0)
    assert Costs.from_json('{"activation": 7}').held == 7
    assert LayerCosts("block", 1, 1, 1, activation=5).held == 5


def test_one_chunk_has_no_edges() -> None:
    assert Costs(communication=3).per_chunk(1).communication == ()
    assert Costs(communication=[]).per_chunk(1).communication == ()


def test_arrays_are_numbers_per_chunk() -> None:
    assert Costs(forward=np.array([1, 2]), held=np.float32(0.25)) == Costs(forward=[1, 2], held=0.25)


def test_json_round_trip(tmp_path: Path) -> None:
    costs = Costs(forward=[1, 2], communication=[0.25], held=0.1, merge_saving=0.01)
    assert Costs.from_json(costs.to_json()) == costs
    assert Costs.load(costs.save(tmp_path / "costs.json")) == costs
    assert Costs.from_json('{"forward": 3}') == Costs(forward=3)


def test_units_are_carried_by_json_and_by_everything_made_of_the_costs(tmp_path: Path) -> None:
    costs = Costs(forward=2, communication=0.5, time_unit="ms", memory_unit="bytes")
    assert Costs.load(costs.save(tmp_path / "costs.json")) == costs
    timeline = simulate(schedules.zb_h1(2, 4), costs)
    assert (timeline.unit, timeline.memory_unit) == ("ms", "bytes")
    cut = comparison.rechunk(costs, 2, 4)
    assert (cut.time_unit, cut.memory_unit, cut.communication) == ("ms", "bytes", 0.5)
    measured = step_costs.costs([timeline], costs)
    assert (measured.time_unit, measured.memory_unit) == ("ms", "bytes")
    assert (simulate(schedules.zb_h1(2, 4)).unit, simulate(schedules.zb_h1(2, 4)).memory_unit) == ("", "")


def test_seconds_follow_from_the_unit() -> None:
    for unit, forward in ((None, 0.002), ("ms", 0.002), ("us", 2e-6), ("s", 2.0)):
        found = drift.in_seconds(Costs(forward=2, backward=[2, 4], time_unit=unit))
        assert (found.forward, found.backward, found.time_unit) == (forward, (forward, 2 * forward), "s")


def test_the_largest_costs_can_be_simulated_and_planned() -> None:
    costs = Costs(1e100, 1e100, 1e100, 1e100, 1e100, 1e100)
    timeline = simulate(schedules.zb_v(2, 4), costs)
    found = plan(costs, 2, 4, memory_limit=4e100, effort=1)
    for rate in (timeline.bubble_rate, found.bubble_rate, found.lower_bound):
        assert 0 <= rate < 1


@pytest.mark.parametrize("smallest", [5e-324, 1e-300, 1e-100])
def test_the_smallest_costs_can_be_simulated_and_planned(smallest: float) -> None:
    costs = Costs(smallest, smallest, smallest, smallest, smallest, smallest)
    found = plan(costs, 2, 4, effort=1)
    assert 0 <= found.lower_bound <= max(found.bubble_rate, 0) < 1


def test_they_are_shown_in_a_line() -> None:
    """Of a plan with all its costs, too: four digits, equal numbers once, and nothing that is as by default."""
    costs = Costs([1 / 3] * 30 + [2.0], weight=[1.0, 1 / 7] * 15 + [1.0], activation=2**30, memory_unit="bytes")
    assert repr(costs) == (
        "Costs(forward=(0.3333 x 30, 2), weight=(1, 0.1429, 1, 0.1429, 1, 0.1429, and so on: 31), "
        "activation=1.074e+09, held=1.074e+09, memory_unit='bytes')"
    )
    layers = ModelCosts((LayerCosts("block", 1.0, 1.0, 1.0),) * 8, latency=0.25)
    assert repr(layers) == "ModelCosts(layers=<8 LayerCosts>, latency=0.25)"
    found = plan(layers, 2, 4, chunks=1, effort=0)
    assert repr(found).startswith("<Plan: <Schedule plan")
    assert ", cut before layers [0, 4]>" in repr(found)
    assert len(repr(found)) < 250


def test_network_time_is_a_part_of_a_pass_in_chunks_layers_slices_files_and_units(tmp_path: Path) -> None:
    costs = Costs(4.0, 6.0, 2.0, network_forward=1.0, network_backward=[2.0, 3.0], collectives=8, time_unit="ms")
    assert Costs.load(costs.save(tmp_path / "costs.json")) == costs
    assert drift.in_seconds(costs).network_backward == (0.002, 0.003)
    cut = comparison.rechunk(costs, 2, 4)
    assert (cut.network_forward, cut.network_backward) == ((0.5,) * 4, (1.0, 1.0, 1.0, 2.0))
    assert cut.collectives == (4.0,) * 4
    halves = flat_costs(costs, schedules.one_f_one_b(2, 4, slices=2)).by_place
    assert [each.network_forward for each in halves] == [(0.5, 0.5)] * 2
    layers = [LayerCosts(f"block {i}", 4, 6, 2, network_forward=1, network_backward=2, collectives=2) for i in range(4)]
    found = ModelCosts(layers).chunk_costs((0, 1))
    assert (found.network_forward, found.network_backward, found.collectives) == ((1, 3), (2, 6), (2, 6))
    with pytest.raises(ValueError, match=r"network_forward of chunk 0 must be at most its forward, 4; got 5"):
        Costs(4.0, network_forward=5.0).per_chunk(2)
