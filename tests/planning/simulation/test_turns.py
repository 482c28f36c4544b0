"""Passes beside each other in the simulation: turns on one compute lane, collectives on one network lane."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import zbkern
from bench import ranks
from zbkern import wgrad
from zbkern.pipeline import Action, Costs, Pipeline, Schedule, Timeline, plan, schedules, simulate
from zbkern.planning.simulation.turns import Parts, in_turns
from zbkern.wgrad.queue import AT_ONCE

UNIT = 0.2  # seconds of F without its collectives, of all chunks of a rank
COLLECTIVES = 2  # of an F of a chunk, and of a B


def test_turns_of_two_passes_by_hand() -> None:
    # 1 1 of compute around 2 of network: the other computes meanwhile, and its collective waits for the network
    assert in_turns([Parts(2, 2, 1), Parts(2, 2, 1)], 10.0) == [(10, 14), (11, 16)]
    assert in_turns([Parts(2, 2, 1)], 0.0) == [(0, 4)]
    assert in_turns([Parts(2, 0, 0), Parts(2, 2, 1)], 0.0) == [(0, 2), (2, 6)]
    assert in_turns([Parts(2, 2, 1), Parts(3, 0, 2)], 0.0) == [(0, 4), (1, 6)]  # a W between whose parts F goes on


def costs_of(share: float, chunks: int) -> Costs:
    """share: of all-to-alls in the time of F, B and W in turn, where each of them computes for UNIT."""
    network = 1.5 * share / (1 - share)  # of F, and of B, whose compute is 1
    part = UNIT / chunks
    return Costs(
        forward=part * (1 + network),
        backward=part * (1 + network),
        weight=part,
        network_forward=part * network,
        network_backward=part * network,
        collectives=COLLECTIVES,
    )


def test_costs_without_network_time_run_pairs_in_turn() -> None:
    pairs = schedules.dualpipe_v(4, 16)
    in_turn = simulate(replace(pairs, beside=()))
    assert simulate(pairs).events == in_turn.events
    hidden = simulate(pairs, costs_of(0.25, 2))
    assert hidden.cost < 0.9 * simulate(replace(pairs, beside=()), costs_of(0.25, 2)).cost
    assert 0 < hidden.bubble_rate < 1


def test_a_pair_begins_when_all_inputs_have_arrived_and_holds_the_memory_of_both() -> None:
    rows = [
        [Action(kind, 0, int(number)) for kind, number in ("F0", "F1", "B0", "W0", "B1", "W1")],
        [Action(kind, 1, int(number)) for kind, number in ("F0", "B0", "F1", "B1", "W0", "W1")],
    ]
    costs = Costs(3, 3, 1, network_forward=1, network_backward=1, collectives=1)
    pairs = Schedule.build(rows, [0, 1], 2, beside=[[(1, 3)], []])
    timeline = simulate(pairs, costs)
    times = {event.action: event[2:] for row in timeline.events for event in row}
    assert times[Action("F", 0, 1)] == (9, 12)  # B of chunk 0 waits for F and B of chunk 1, and F waits with it
    assert times[Action("B", 0, 0)] == (10, 13)
    assert timeline.peak_memory[0] == 2
    assert timeline.busy[0] == 3 + 4 + 1 + 3 + 1


class Sleeping(torch.autograd.Function):
    """A chunk that sleeps instead of computing, and whose collectives end later, one after the other on a rank."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, times: tuple[float, float, float], lane: list[float]) -> Tensor:
        ctx.times, ctx.weight, ctx.lane = times, weight, lane
        _sleep(*times[:2], lane)
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor):
        compute, network, w = ctx.times
        scope = wgrad.current()
        fused = scope is None or scope[1] is AT_ONCE
        _sleep(compute + (w if fused else 0.0), network, ctx.lane)
        total = dy.sum().view(1)
        if fused:
            return dy, total, None, None

        def launch(segments, outputs, accumulate):
            time.sleep(w * len(segments))
            outputs[0].add_(total) if accumulate else outputs[0].copy_(total)

        queue, key = scope
        queue.add(wgrad.WGradTask(launch, (dy,), (ctx.weight,)), key)
        return dy, None, None, None


def _sleep(compute: float, network: float, lane: list[float]) -> None:
    for _ in range(COLLECTIVES):
        time.sleep(compute / (COLLECTIVES + 1))
        end = lane[0] = max(time.perf_counter(), lane[0]) + network / COLLECTIVES
        zbkern.in_flight()
        time.sleep(max(0.0, end - time.perf_counter()))
    time.sleep(compute / (COLLECTIVES + 1))


class Chunk(nn.Module):
    def __init__(self, times: tuple[float, float, float], lane: list[float]) -> None:
        super().__init__()
        self.weight, self.times, self.lane = nn.Parameter(torch.zeros(1)), times, lane

    def forward(self, x: Tensor) -> Tensor:
        return Sleeping.apply(x, self.weight, self.times, self.lane)


def measured(schedule: Schedule, costs: Costs) -> Timeline:
    """A step of ranks that sleep as long as costs say."""
    network, microbatches = costs.network_forward, schedule.microbatches
    times = costs.forward - network, network, costs.weight
    ring = ranks.delayed_ring(schedule.ranks, lambda *_: 0.0)

    def step(rank: int) -> Timeline:
        lane = [0.0]
        chunks = [Chunk(times, lane) for _ in schedule.chunks_of(rank)]
        with Pipeline(chunks, schedule, lambda y, _: y.sum(), ring[rank], timeout=60) as pipe:
            x = torch.ones(microbatches, 1, requires_grad=True)
            pipe.step(x, x)
            pipe.gather(0)
            pipe.step(x, x)
            timeline = pipe.last.gather_timeline()
        for chunk in chunks:
            torch.testing.assert_close(chunk.weight.grad, torch.full((1,), 2.0))
        return timeline

    return ranks.run_in_threads([ring], step)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.40])
def test_ranks_that_sleep_take_as_long_as_simulated(share: float) -> None:
    costs, schedule = costs_of(share, 2), schedules.dualpipe_v(4, 16)
    expected = simulate(schedule, costs)
    for _ in range(3):  # a busy machine stalls some of the ranks' threads
        found = measured(schedule, costs)
        if found.makespan == pytest.approx(expected.makespan, rel=0.05):
            break
    assert pass_ratio(found, expected) == pytest.approx(1, rel=0.05)
    assert found.makespan == pytest.approx(expected.makespan, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.40])
def test_planned_passes_beside_each_other_take_as_long_as_simulated(share: float) -> None:
    """Each of them: what a rank waits for others adds up to steps that are longer (docs/overlap.md)."""
    costs = costs_of(share, 2)
    schedule = plan(costs, 4, 16, 2, "v", effort=0).schedule
    assert pass_ratio(measured(schedule, costs), simulate(schedule, costs)) == pytest.approx(1, rel=0.05)


def pass_ratio(found: Timeline, expected: Timeline) -> float:
    """Of the passes beside others, measured over simulated; the median."""
    lengths = {event.action: event.end - event.start for row in expected.events for event in row}
    beside = {
        action
        for row, ranges in zip(expected.schedule.actions, expected.schedule.beside, strict=True)
        for first, end in ranges
        for action in row[first:end]
    }
    events = [event for row in found.events for event in row if event.action in beside]
    return statistics.median((event.end - event.start) / lengths[event.action] for event in events)
