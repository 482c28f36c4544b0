"""Losses read off timelines: of simulated ones they are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from bench.overlap_planned import costs_of
from tests.support.chunks import make_data, make_model
from zbkern.pipeline import Costs, Pipeline, StepOptions, plan, schedules, simulate
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.planner import native
from zbkern.planning.planner.batch import plan_batch
from zbkern.planning.simulation import drift, step_costs
from zbkern.planning.simulation.timeline import rescaled

COSTS = Costs(forward=(2, 3, 2, 4), backward=(2, 2.5, 2, 3), weight=(1, 1.5, 1, 2), communication=0.25)


def test_a_step_as_planned_has_lost_nothing() -> None:
    timeline = simulate(schedules.zb_h1(4, 8), COSTS)
    for loss in drift.compare(timeline, COSTS).time_lost:
        assert (loss.cost, loss.compute, loss.host) == pytest.approx((0, 0, 0))


def test_a_slow_pass_is_found_and_the_ranks_behind_it_are_late() -> None:
    schedule = schedules.zb_h1(4, 8)
    slow = Costs(forward=COSTS.forward, backward=(2, 2.5, 3, 3), weight=COSTS.weight, communication=0.25)
    found = drift.compare(simulate(schedule, slow), COSTS)
    assert [loss.compute for loss in found.time_lost] == pytest.approx([0, 0, 8, 0])
    assert {action.chunk for action, extra in found.actions() if extra > 1e-9} == {2}
    for loss in found.time_lost:
        assert loss.cost == pytest.approx(loss.compute + loss.late + loss.host, abs=0.6)
        assert loss.host == pytest.approx(0, abs=0.5)
    assert "furthest from the plan: 2B" in found.to_text()
    assert [found.to_text(worst).count("2B") for worst in (0, 1, 2)] == [0, 1, 2]
    assert found.to_text(0) == found.to_text(1).rpartition("\n")[0]
    with pytest.raises(ValueError, match="worst must be the number of passes to list, at least 0; got -1"):
        found.to_text(-1)


@pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")
def test_a_step_of_packs_is_held_against_its_plan() -> None:
    costs = Costs(2, 4, 1, attention_forward=1, attention_backward=2.5, overhead=0.01, tokens=1024, time_unit="ms")
    plan = plan_batch([900, 300, 300, 200, 200, 200], costs, 2)
    assert max(map(len, plan.rows)) > 1
    step = rescaled(plan.timeline, 1.25e-3, "s")
    found = drift.compare(step, drift.in_seconds(costs), plan.timeline)
    assert found.to_text().startswith(f"measured {step.cost:.4g}, planned ")
    assert "+25.0%" in found.to_text()
    assert drift.compare(step, drift.in_seconds(costs)).planned.cost > 1.02 * found.planned.cost  # a pack as a sequence
    with pytest.raises(ValueError, match="planned must be the timeline of the last step's plan"):
        drift.compare(step, drift.in_seconds(costs), simulate(schedules.zb_v(2, 4)))


def test_an_idle_share_is_that_of_the_ranks_that_are_known() -> None:
    whole = simulate(schedules.one_f_one_b(4, 8), Costs())
    one = replace(whole, events=(whole.events[0], (), (), ()))
    assert one.bubble_rate == pytest.approx(1 - whole.busy[0] / one.cost)
    assert replace(whole, events=((), (), (), ())).bubble_rate == 0


def test_without_a_step_there_is_nothing_to_compare() -> None:
    ring = LocalTransport.ring(1)
    with (
        Pipeline(nn.Linear(2, 2), schedules.one_f_one_b(1, 2), nn.functional.mse_loss, ring[0]) as pipe,
        pytest.raises(ValueError, match=r"rank 0 has none: run Pipeline.step first"),
    ):
        pipe.last.drift()


def test_an_evaluation_leaves_the_timeline_of_the_last_step() -> None:
    model, (inputs, targets) = make_model(1), make_data(2)
    ring = LocalTransport.ring(1)
    with Pipeline(
        model, schedules.one_f_one_b(1, 2), nn.functional.mse_loss, ring[0], options=StepOptions(record=True)
    ) as pipe:
        pipe.step(inputs, targets)
        before, samples = pipe.last.timeline, pipe.last.samples
        pipe.evaluate(inputs, targets)
        assert pipe.last.timeline.events == before.events
        assert pipe.last.samples == samples
        assert pipe.last.drift().measured.events == before.events
        profiled = Costs(1.0, (2.0,), 3.0, merge_saving=0.5, activation=7.0, time_unit="ms", memory_unit="bytes")
        seconds = {"forward": 0.001, "backward": (0.002,), "weight": 0.003, "merge_saving": 0.0005, "time_unit": "s"}
        assert pipe.last.drift(profiled).costs == replace(profiled, **seconds)
        with pytest.raises(ValueError, match="targets must be given"):
            pipe.evaluate(inputs)
        assert model[0].training
        assert pipe.last.timeline.events == before.events


def test_a_timeline_and_a_schedule_are_printed_in_a_line() -> None:
    timeline = simulate(schedules.one_f_one_b(4, 8), Costs())
    assert repr(timeline) == "<Timeline of one_f_one_b: 4 ranks, cost 33, idle 27.3%>"
    assert repr(timeline.schedule) == "<Schedule one_f_one_b: 4 ranks, 1 chunk each, 8 microbatches>"


@pytest.mark.parametrize("share", [0.14, 0.25, 0.40])
def test_a_step_tells_what_its_passes_hide_of_the_network(share: float) -> None:
    """Of passes beside each other their times alone, and the network time that makes groups as long as they were."""
    given = costs_of(share, 2)
    for ranks, microbatches in ((2, 6), (4, 16)):
        step = simulate(schedules.dualpipe_v(ranks, microbatches), given)
        found = drift.compare(step)
        assert found.planned.cost == pytest.approx(step.cost, rel=0.01)
        assert found.costs.forward == pytest.approx([given.forward] * 2 * ranks)
        assert found.costs.network_forward == pytest.approx([given.network_forward] * 2 * ranks, rel=0.05)
        lost = [part for each in found.time_lost for part in (each.cost, each.compute, each.late, each.host)]
        assert max(map(abs, lost)) < 0.03 * step.cost


@pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")
@pytest.mark.parametrize("share", [0.14, 0.25, 0.40])
def test_where_no_pass_of_a_kind_ran_alone_the_step_is_told_less_exactly(share: float) -> None:
    step = plan(costs_of(share, 2), 4, 8, 2, "v", effort=0).timeline
    assert step.schedule.beside
    assert drift.compare(step).planned.cost == pytest.approx(step.cost, rel=0.03)


def test_pictures_of_both(tmp_path: Path) -> None:
    found = drift.compare(simulate(schedules.zb_h1(4, 8), COSTS), COSTS)
    for suffix in ("svg", "html", "json"):
        text = found.save(tmp_path / f"drift.{suffix}").read_text()
        assert "planned" in text
        assert "measured" in text


def test_what_was_not_planned_is_not_called_so(tmp_path: Path) -> None:
    """Beside a plan of 3.5 %, a disturbed step idled ten times as much, and so did the simulation with its times."""
    found = drift.compare(simulate(schedules.zb_h1(4, 8), COSTS))
    text = found.save(tmp_path / "drift.svg").read_text()
    assert "simulated with the step&#x27;s own times" in text or "simulated with the step's own times" in text
    assert "planned" not in text + found.to_text()
    assert "planned" in drift.compare(found.measured, COSTS).to_text()


def test_a_better_schedule_for_the_costs_that_a_step_has_shown() -> None:
    measured = simulate(schedules.one_f_one_b(4, 8), COSTS)
    found = plan(drift.compare(measured).costs, 4, 8, effort=1)
    assert simulate(found.schedule, COSTS).cost < measured.cost


def test_a_slow_rank_has_its_speed_and_a_new_cut_a_gain() -> None:
    schedule, costs = schedules.zb_v(4, 8), replace(COSTS, forward=2, backward=2, weight=1)
    found = drift.compare(simulate(schedule, replace(costs, speeds=(1, 0.5, 1, 1))), costs)
    assert found.speeds == (1, 0.5, 1, 1)
    assert (
        0.3 < found.gain_of_new_cut < 0.5
    )  # of 160 for the slow rank, 160 / 3.5 x 2 with a cut by speed, and idle time
    assert "speeds are 1 0.5 1 1: a cut by them" in found.to_text()
    as_planned = drift.compare(found.measured, replace(costs, speeds=(1, 0.5, 1, 1)))
    assert as_planned.speeds == (1, 0.5, 1, 1)
    assert as_planned.actions()[0][1] == pytest.approx(0)
    slower = drift.compare(simulate(schedule, replace(costs, speeds=(0.8,) * 4)), costs)
    assert slower.speeds == (1, 1, 1, 1)
    assert "speeds" not in slower.to_text()
    measured = step_costs.costs([found.measured], replace(costs, speeds=(1, 0.5, 1, 1)))  # are in the times
    assert simulate(schedule, measured).cost == pytest.approx(found.measured.cost)
