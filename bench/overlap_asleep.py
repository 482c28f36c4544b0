"""Passes beside each other, planned and measured: virtual ranks that sleep instead of computing, next to simulation.

Each of F, B and W sleeps for --unit seconds on a rank. All-to-alls of F and B are a share of all that in turn; a rank
has one in flight at a time. What is measured beyond the simulation is then the engine's: its turns and its waiting.
The gradients are checked: every W must have run once for every microbatch.

    python -m bench.overlap_asleep [--ranks 4] [--microbatches 16] [--unit 0.2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zbkern
from bench import overlap_planned, ranks, report
from zbkern import wgrad
from zbkern.pipeline import Costs, Pipeline, Schedule, Timeline, plan, schedules, simulate
from zbkern.reporting import environment, machine_line
from zbkern.wgrad.queue import AT_ONCE

COLLECTIVES = 2  # of an F of a chunk, and of a B


def costs_of(share: float, unit: float) -> Costs:
    """Of two chunks on each rank, in seconds."""
    return replace(overlap_planned.costs_of(share, 2, unit), collectives=COLLECTIVES)


class Times(NamedTuple):
    """Of a chunk: what F and B compute before, between and behind their collectives; W of each weight; a collective."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    collective: float


class Lane:
    """A rank that sleeps, and its network: one collective at a time, or any number, each of which takes as long."""

    def __init__(self, has_latency: bool = False) -> None:
        self._has_latency, self._network_free = has_latency, 0.0

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def start(self, seconds: float) -> float:
        """Starts a collective, and says when it ends."""
        begin = self.now() if self._has_latency else max(self.now(), self._network_free)
        self._network_free = begin + seconds
        return self._network_free


class Sleeping(torch.autograd.Function):
    """A chunk that sleeps instead of computing, and whose collectives end later; beside others each W is a turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Times, lane: Lane, *weights: Tensor) -> Tensor:
        ctx.times, ctx.weights, ctx.lane = times, weights, lane
        _run(lane, times.forward, times.collective)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        times: Times = ctx.times
        lane, weights = ctx.lane, ctx.weights
        total, scope = dy.sum().view(1), wgrad.current()
        if scope is None or scope[1] is AT_ONCE:
            share = sum(times.weights) / len(times.backward)
            _run(lane, [seconds + share for seconds in times.backward], times.collective)
            return dy, None, None, *[total] * len(weights)
        _run(lane, times.backward, times.collective)
        queue, key = scope
        for weight, seconds in zip(weights, times.weights, strict=True):
            queue.add(wgrad.WGradTask(partial(_launch, lane, seconds, total), (dy,), (weight,)), key)
        return dy, None, None, *[None] * len(weights)


def _launch(lane: Lane, seconds: float, total: Tensor, segments: Any, outputs: Any, accumulate: bool) -> None:
    lane.sleep(seconds * len(segments))
    outputs[0].add_(total) if accumulate else outputs[0].copy_(total)


def _run(lane: Lane, parts: Sequence[float], collective: float) -> None:
    for seconds in parts[:-1]:
        lane.sleep(seconds)
        end = lane.start(collective)
        zbkern.in_flight(partial(_wait, lane, end), partial(_is_over, lane, end))
    lane.sleep(parts[-1])


def _wait(lane: Lane, end: float) -> None:
    lane.sleep(max(0.0, end - lane.now()))


def _is_over(lane: Lane, end: float) -> bool:
    return lane.now() >= end


class Chunk(nn.Module):
    """Sleeps nothing until it is told to."""

    def __init__(self, times: Times, lane: Lane) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(1) for _ in times.weights)
        self.times, self.lane, self.sleeps = times, lane, False

    def forward(self, x: Tensor) -> Tensor:
        times = self.times if self.sleeps else Times(*([0.0] * len(each) for each in self.times[:3]), 0.0)  # type: ignore[arg-type]
        return Sleeping.apply(x, times, self.lane, *self.weights)


def times_of(costs: Costs) -> Times:
    """Of a `Chunk` of which F and B are alike."""
    each = costs.per_chunk(1)
    network, parts = each.network_forward[0], COLLECTIVES + 1
    compute = ((each.forward[0] - network) / parts,) * parts
    return Times(compute, compute, (each.weight[0] / parts,) * parts, network / COLLECTIVES)


def measured(schedule: Schedule, costs: Costs) -> Timeline:
    """A step of ranks that sleep as long as costs of equal chunks say, whose F and B are alike."""
    times, microbatches = times_of(costs), schedule.microbatches
    ring = ranks.delayed_ring(schedule.ranks, lambda *_: 0.0)

    def step(rank: int) -> Timeline:
        lane = Lane()
        chunks = [Chunk(times, lane) for _ in schedule.chunks_of(rank)]
        with Pipeline(chunks, schedule, lambda y, _: y.sum(), ring[rank], timeout=60) as pipe:
            x = torch.ones(microbatches, 1, requires_grad=True)
            pipe.step(x, x)
            pipe.gather(0)
            for chunk in chunks:
                chunk.sleeps = True
            pipe.step(x, x)
            timeline = pipe.last.gather_timeline()
        for chunk in chunks:
            for weight in chunk.weights:
                torch.testing.assert_close(weight.grad, torch.full((1,), 2.0))
        return timeline

    return ranks.run_in_threads([ring], step)


def row_of(schedule: Schedule, costs: Costs, share: float, way: str) -> dict[str, Any]:
    expected, found = simulate(schedule, costs), measured(schedule, costs)
    compute = schedule.microbatches * schedule.chunks * sum(costs.per_chunk(1).weight) * 3
    return {
        "share": share,
        "way": way,
        "simulated": compute / expected.cost,
        "measured": compute / found.cost,
        "of_simulated": found.cost / expected.cost,
    }


COLUMNS = (
    "all-to-alls: {share:.0%}; order: {way}; simulated: {simulated:.3f}; measured: {measured:.3f}; "
    "step, / simulated: {of_simulated:.3f}"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.2, help="seconds of F of one microbatch on one rank")
    report.add_out(parser)
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for share in overlap_planned.SHARES:
        costs = costs_of(share, o.unit)
        planned = plan(costs, o.ranks, o.microbatches, 2, "v", effort=0).schedule
        pairs = schedules.dualpipe_v(o.ranks, o.microbatches)
        rows += [row_of(*each) for each in ((pairs, costs, share, "DualPipe-V"), (planned, costs, share, "plan"))]
    print(report.table(f"share of compute alone, {o.ranks} ranks, {o.microbatches} microbatches", COLUMNS, rows))
    print(f"\n{machine_line(environment())}\n{report.write_json('overlap_asleep', rows, o.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
