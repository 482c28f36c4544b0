"""Costs of layers: those of chunks follow from them, however the model is cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from zbkern.pipeline import Costs, LayerCosts, ModelCosts, PlanOptions, plan, schedules, simulate
from zbkern.planning.costs.needs import least_need
from zbkern.schedules.actions import ScheduleError


def block(name: str = "block", time: float = 1.0, **more) -> LayerCosts:
    return LayerCosts(name, time, time, time, activation=2.0, held=1.0, output=4.0, static=10.0, **more)


def model(**more) -> ModelCosts:
    ends = [block("embedding", 0.5, tied="vocabulary"), block("head", 3.0, tied="vocabulary")]
    return ModelCosts((ends[0], *[block() for _ in range(4)], ends[1]), **more)


def test_a_chunk_costs_what_its_layers_cost() -> None:
    costs = model(latency=0.25, bandwidth=16.0).chunk_costs([0, 1, 4])
    assert costs.forward == (0.5, 3.0, 4.0)
    assert costs.activation == (2.0, 6.0, 4.0)
    assert costs.held == (1.0, 3.0, 2.0)
    assert costs.communication == (0.5, 0.5)  # latency + 4 / 16
    assert costs.static == (10.0, 30.0, 20.0)


def test_half_blocks_are_numbered_as_cut_numbers_them() -> None:
    """A plan too, which has the first layer of every chunk so."""
    halves = [block(f"block.{n}{end}", 0.5) for n in range(3) for end in (":attention", ":mlp")]
    costs = ModelCosts((block("embedding", 0.5), *halves, block("head", 2.0)))
    assert costs._partition_of(range(8)) == (0, 1, 1.5, 2, 2.5, 3, 3.5, 4)
    assert costs.chunk_costs([0, 2.5]).forward == (2.0, 3.5)
    assert costs.chunk_costs([0, 1, 3.5]).static == (10.0, 50.0, 20.0)
    with pytest.raises(ValueError, match=r"first layer of every chunk of 8 layers, .*; got \[0, 4\.5\]"):
        costs.chunk_costs([0, 4.5])
    found = plan(costs, 2, 8, chunks=1, effort=0)
    assert found.partition == (0, 3)
    assert found.layers == tuple(layer.name for layer in costs.layers)
    given = plan(costs, 2, 8, effort=0, options=PlanOptions(partition=(0, 2.5)))
    assert given.partition == (0, 2.5)
    assert given.costs.forward == (2.0, 3.5)


def test_what_tied_layers_share_is_held_once_by_a_rank() -> None:
    costs = model().chunk_costs([0, 1, 4, 5], placement=[0, 1, 1, 0])
    assert costs.static == (10.0, 30.0, 10.0, 0.0)
    *others, head = model().layers
    with_logits = ModelCosts((*others, replace(head, static=13.0)))
    assert with_logits.chunk_costs([0, 1, 4, 5], placement=[0, 1, 1, 0]).static == (10.0, 30.0, 10.0, 3.0)
    assert [least_need(with_logits, stages).static for stages in (1, 3)] == [5 * 10.0 + 3.0, 10.0 + 13.0]


def test_static_memory_counts_in_a_simulation_and_towards_the_limit_of_a_plan() -> None:
    costs = Costs(static=[100.0, 200.0], activation=1.0, held=1.0)
    schedule = schedules.one_f_one_b(2, 4)
    assert simulate(schedule, costs).peak_memory == (102.0, 201.0)
    found = plan(costs, 2, 4, memory_limit=[102.0, 201.0], effort=0)
    assert found.timeline.peak_memory[0] <= 102
    assert found.timeline.peak_memory[1] <= 201
    with pytest.raises(ScheduleError, match=r"rank 1: .*holds 1 beside the 200 .*smallest limit .* is 201"):
        plan(costs, 2, 4, memory_limit=[102.0, 200.5], effort=0)


@pytest.mark.parametrize("bandwidth", [math.inf, 3.5])
def test_a_file_gives_back_what_was_saved(tmp_path, bandwidth: float) -> None:
    costs = model(bandwidth=bandwidth, latency=0.1, time_unit="ms", memory_unit="bytes")
    assert ModelCosts.load(costs.save(tmp_path / "model.json")) == costs


def test_what_named_parts_save_is_summed_and_inner_inputs_that_are_computed_again_are_not_kept() -> None:
    layers = [block(f"{n}", checkpoint=1.5, recompute=0.25, output_again=1.0 if n < 2 else 0.0) for n in range(4)]
    costs = ModelCosts(layers, forward_overhead=0.5).chunk_costs([0, 3])
    assert costs.recompute == (0.75, 0.25)
    assert costs.checkpoint == (2.5, 1.5)
    assert ModelCosts(layers).chunk_costs([0, 1, 2, 3]).checkpoint == (1.5, 1.5, 1.5, 1.5)
    with pytest.raises(ValueError, match=r"must both be given for all layers, or for none; .* not for 'head'"):
        ModelCosts([*layers, block("head")])
    with pytest.raises(ValueError, match="not for 'odd'"):
        ModelCosts([block("odd", checkpoint=1.0)])


@pytest.mark.parametrize("partition", [[], [1, 2], [0, 0], [0, 3, 2], [0, 6]])
def test_a_partition_that_is_none_is_refused(partition: list[int]) -> None:
    with pytest.raises(ValueError, match="partition must be the first layer of every chunk of 6 layers"):
        model().chunk_costs(partition)


def test_every_chunk_pays_what_forwards_do_besides_their_layers() -> None:
    plain, costs = model(), model(forward_overhead=0.25)
    assert costs.chunk_costs([0, 1, 4]).forward == tuple(t + 0.25 for t in plain.chunk_costs([0, 1, 4]).forward)
    assert costs.chunk_costs([0, 1, 4]).backward == plain.chunk_costs([0, 1, 4]).backward
    assert ModelCosts.from_json(costs.to_json()) == costs
