"""Passes beside each other with time counted instead of measured: what an order takes by itself, on any machine.

One stage of expert-parallel layers, as in bench.overlap, whose all-to-alls are 25 % and then 40 % of a step in turn. A
clock goes on by what each part computes, and to the end of a collective that is waited for. So a figure has the turns
of the engine, its W and its waiting, and nothing of the machine. The table is that of docs/overlap.md.

    python -m bench.overlap_counted [--microbatches 8]
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench import report
from bench.overlap import LAYERS, SHARES, Way, one_stage
from bench.overlap_asleep import Chunk, Lane, Times
from zbkern.pipeline import Pipeline, Schedule
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.schedules.actions import Event

LINEARS, EXPERTS = 0.4, 0.6  # of what a layer computes, in F, B and W


class Counted(Lane):
    """A rank whose time is a number that each sleep adds to."""

    def __init__(self, has_latency: bool = False) -> None:
        super().__init__(has_latency)
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Stamped(LocalTransport):
    """Messages bring the time at which they arrive: nobody has them earlier."""

    lane: Counted

    def travel(self, sender: int, receiver: int, tag: Any, message: Any) -> float:
        """Seconds of a message."""
        return 0.0

    def send(self, peer: int, tag: Any, message: Any) -> None:
        super().send(peer, tag, (message, self.lane.time + self.travel(self.rank, peer, tag, message)))

    def receive(self, peer: int, tag: Any, timeout: float | None) -> Any:
        message, arrival = super().receive(peer, tag, timeout)
        self.lane.time = max(self.lane.time, arrival)
        return message


def counted(
    schedule: Schedule, times: Times, wgrads_per_collective: Any = 0, has_latency: bool = False
) -> list[list[Event]]:
    """The events of an engine's second step on each rank."""
    ring: Any = Stamped.ring(schedule.ranks)

    def step(rank: int) -> list[Event]:
        lane = ring[rank].lane = Counted(has_latency)
        chunks = [Chunk(times, lane) for _ in schedule.chunks_of(rank)]
        with Pipeline(chunks, schedule, lambda y, _: y.sum(), ring[rank], timeout=60) as pipe:
            pipe.queue.merge, pipe.queue.wgrads_per_collective = False, wgrads_per_collective
            recorder = pipe._calls.loop.recorder
            recorder.now = lane.now
            x = torch.ones(schedule.microbatches, 1, requires_grad=True)
            pipe.step(x, x)  # after which it is known that no backward runs a forward again
            for chunk in chunks:
                chunk.sleeps = True
            pipe.step(x, x)
            return recorder.events()

    return [*ThreadPoolExecutor(schedule.ranks).map(step, range(schedule.ranks))]


def stage_of(share: float) -> Times:
    """Of a stage whose F, B and W compute for a second each. Collectives of F: numbers of tokens, there and back."""
    linears, experts = LINEARS / LAYERS, EXPERTS / LAYERS
    forward, backward = [0.0], [0.0]
    for _ in range(LAYERS):
        forward[-1] += linears
        forward += [0.0, experts, 0.0]
        backward += [experts, linears]
    weights = [linears / 2, linears / 2, 2 * experts / 3, experts / 3] * LAYERS
    count = len(forward) + len(backward) - 2
    return Times(tuple(forward), tuple(backward), tuple(weights), 3 * share / (1 - share) / count)


def ways_of(microbatches: int) -> list[Way]:
    turns, pairs = (one_stage(microbatches, beside) for beside in (False, True))
    return [
        Way("in turn", turns),
        Way("in turn, 2 W", turns, 2),
        Way("F beside B", pairs),
        Way("and 1 W", pairs, 1),
        Way("and 2 W", pairs, 2),
        Way('and "eager"', pairs, "eager"),
    ]


def row_of(share: float, microbatches: int) -> dict[str, Any]:
    """Of each way its time over that without collectives."""
    times, row = stage_of(share), {"share": share}
    for way in ways_of(microbatches):
        (events,) = counted(way.schedule, times, way.wgrads_per_collective, has_latency=True)
        row[way.name] = max(event.end for event in events) / (3 * microbatches)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    report.add_out(parser)
    o = parser.parse_args(arguments)
    rows = [row_of(share, o.microbatches) for share in SHARES]
    columns = "; ".join(["all-to-alls: {share:.0%}", *(f"{name}: {{{name}:.2f}}" for name in [*rows[0]][1:])])
    print(report.table("time over that without all-to-alls", columns, rows))
    print("\n" + report.write_json("overlap_counted", rows, o.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
