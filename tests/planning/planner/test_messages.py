"""The memory of messages that wait on a rank: in simulated peaks, within limits of plans, in costs of layers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from zbkern.pipeline import Costs, LayerCosts, ModelCosts, PlanOptions, plan, plan_batch, schedules, simulate
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.costs.memory import exceeds
from zbkern.planning.planner import native
from zbkern.planning.planner.annealing import measured, timeline_of
from zbkern.planning.planner.incumbents import Incumbent
from zbkern.planning.planner.problem import ordering_of, problem_of
from zbkern.schedules.ahead import messages_ahead

compiled = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
COSTS = Costs(1.0, 1.1, 0.9, communication=0.1, held=1.15, static=0.3, tokens=1024)
QUICK = PlanOptions(steady=False)


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("slices", [1, 4])
def test_a_peak_has_the_messages_that_may_wait(name: str, slices: int) -> None:
    schedule = getattr(schedules, name)(4, 8, slices=slices)
    without, with_them = (simulate(schedule, replace(COSTS, message=size)) for size in (0.0, 0.25))
    more = [each * 0.25 / slices for each in messages_ahead(schedule)]
    assert with_them.peak_memory == pytest.approx([a + b for a, b in zip(without.peak_memory, more, strict=True)])
    assert min(more) > 0
    assert with_them.events == without.events
    assert with_them.memory_held(COSTS) == without.memory_held(COSTS)


def test_messages_have_the_size_of_their_edge_and_none_is_within_a_rank() -> None:
    schedule = schedules.one_f_one_b(4, 8)
    sizes = (0.5, 0.0, 2.0)
    assert flat_costs(Costs(message=sizes), schedule).ahead == (2.0, 2.0, 4.0, 4.0)  # of 4, 4, 2 and 2
    assert FlatCosts.of(Costs(message=sizes), range(4)).ahead == (0.5, 0.5, 2.0, 2.0)  # one at least
    assert flat_costs(Costs(message=(0.0, 9.0, 0.0)), schedules.zb_v(2, 4)).ahead == (0.0, 0.0)
    assert flat_costs(Costs(message=1.0), schedules.one_f_one_b(1, 4)).ahead == (0.0,)
    with pytest.raises(ValueError, match="message has 2 entries and the schedule 3 edges"):
        simulate(schedule, Costs(message=(1.0, 1.0)))


def test_costs_without_messages_are_read_and_written() -> None:
    assert Costs.from_json('{"forward": 1.0}').message == 0.0
    costs = Costs(message=[1.0, 2.0])
    assert Costs.from_json(costs.to_json()) == costs


def test_chunks_of_layers_send_what_their_last_layer_passes_on() -> None:
    costs = ModelCosts([LayerCosts(f"{n}", 1, 1, 1, output=float(n)) for n in range(6)])
    assert costs.chunk_costs([0, 2, 5]).message == (1.0, 4.0)


@compiled
def test_the_compiled_core_counts_as_the_simulator_does() -> None:
    schedule, costs = schedules.zb_h2(4, 8), replace(COSTS, message=0.25)
    problem = problem_of(FlatCosts.of(costs, schedule.placement), 8, None, "cost")
    found = timeline_of(ordering_of(schedule), problem, "")
    assert found.peak_memory == pytest.approx(simulate(schedule, costs).peak_memory)


@compiled
@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("slices", [1, 3])
def test_the_compiled_core_counts_messages_of_an_order(name: str, slices: int) -> None:
    schedule = getattr(schedules, name)(4, 8, slices=slices)
    edges = len(schedule.placement) - 1
    costs = replace(COSTS, message=[0.01 * (3 + edge % 3) for edge in range(edges)])
    flat = FlatCosts.of(costs, schedule.placement, schedule.slices)
    problem = problem_of(flat, 8, 30.0, "cost")
    found = measured(problem, ordering_of(schedule))
    more = [a - b for a, b in zip(flat_costs(costs, schedule).ahead, flat.ahead, strict=True)]
    assert [each / problem.memory_scale for each in found.messages] == pytest.approx(more, abs=1e-9)
    roomier = problem.with_room(found.messages)
    assert measured(roomier, ordering_of(schedule)).messages == [0] * 4
    assert [a - b for a, b in zip(problem.limit, roomier.limit, strict=True)] == found.messages


@compiled
def test_orders_whose_messages_do_not_fit_are_refused_and_get_room() -> None:
    schedule, costs = schedules.zb_v(4, 8), replace(COSTS, message=0.1)
    flat = FlatCosts.of(costs, schedule.placement)
    orders = ordering_of(schedule)
    peak = max(simulate(schedule, costs).peak_memory)
    for limit, refused in ((peak * (1 + 1e-6), False), (peak - 0.05, True)):
        problem = problem_of(flat, 8, limit, "cost")
        best = Incumbent(problem)
        best.offer(orders)
        assert best.refused == refused == (best.orders is None) == (best.beside(orders) is None)
        assert all(a <= b for a, b in zip(best.problem.limit, problem.limit, strict=True))
        assert best.problem != problem


SHAPES = [(4, 1, "linear", 1), (3, 2, "v", 1), (2, 2, "loop", 1), (3, 1, "linear", 3)]


@compiled
@pytest.mark.parametrize(("stages", "chunks", "placement", "slices"), SHAPES)
@pytest.mark.parametrize("message", [0.02, 0.3])
def test_a_plan_fits_with_its_messages(stages: int, chunks: int, placement: str, slices: int, message: float) -> None:
    costs, where = replace(COSTS, message=message), (stages, 3 * stages, chunks, placement)
    for limit in (1.5 * stages * chunks, 2.2 * chunks):
        how = {"memory_limit": limit, "effort": 1, "slices": slices, "options": QUICK}
        found = plan(costs, *where, **how)
        assert not any(exceeds(peak, limit) for peak in found.peak_memory)
        assert found.peak_memory == pytest.approx(simulate(found.schedule, costs).peak_memory)
        assert plan(replace(costs, message=0.0), *where, **how).bound <= found.bound * (1 + 1e-9)
        assert found.bound <= found._reached * (1 + 1e-9)
        for name in schedules.NAMES:
            published = getattr(schedules, name)(stages, 3 * stages, slices=found.schedule.slices)
            timeline = simulate(published, costs) if published.placement == found.schedule.placement else None
            if timeline is not None and not any(exceeds(peak, limit) for peak in timeline.peak_memory):
                assert found._reached <= timeline.cost * (1 + 1e-9), name


@compiled
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_least_limit_has_room_for_one_message(chunks: int) -> None:
    costs = replace(COSTS, message=0.3)
    with pytest.raises(ValueError, match="the smallest limit that any schedule fits is") as caught:
        plan(costs, 4, 8, chunks, memory_limit=1.0, effort=0)
    least = float(re.findall(r"fits is ([\d.]+)", str(caught.value))[0])
    assert least == pytest.approx(chunks * (1 + 0.3) + 0.3, rel=1e-3)
    found = plan(costs, 4, 8, chunks, memory_limit=least, effort=0)
    assert not any(exceeds(peak, least) for peak in found.peak_memory)


@compiled
def test_a_plan_of_one_batch_fits_with_its_messages() -> None:
    lengths = [256, 900, 128, 512, 700, 1024, 384, 512]
    for message in (0.05, 0.4):
        costs = replace(COSTS, message=message, carried=0.2)
        for limit in (6.0, 4.5):
            found = plan_batch(lengths, costs, 2, memory_limit=limit)
            assert not any(exceeds(peak, limit) for peak in found.peak_memory)
            assert found.peak_memory == pytest.approx(simulate(found.schedule, costs).peak_memory)


@compiled
def test_the_least_limit_of_layers_has_room_for_one_message() -> None:
    costs = ModelCosts(
        [LayerCosts(f"{n}", 1, 1, 1, activation=1.0, held=1.0, static=2.0, output=0.3) for n in range(8)]
    )
    with pytest.raises(ValueError, match=r"0\.3 for a message, 6\.3 in all") as caught:
        plan(costs, 4, 8, memory_limit=5.0, effort=0)
    least = float(re.findall(r"([\d.]+) in all", str(caught.value))[0])
    found = plan(costs, 4, 8, memory_limit=least, effort=0)
    assert max(found.peak_memory) <= least * (1 + 1e-9)
