"""An independent simulation: one clock for all ranks, in ticks, everything looked at on every tick."""

from __future__ import annotations

import pytest

from zbkern.pipeline import Action, Costs, Schedule, Timeline


class Ticks:
    """Integer durations only. Written without a look at simulate: no arrival times are computed ahead."""

    def __init__(self, schedule: Schedule, costs: Costs, eager: bool, limit: float) -> None:
        self.schedule, self.costs = schedule, costs.per_chunk(len(schedule.placement))
        self.given, self.eager, self.limit = costs, eager, limit
        self.todo = [[a for a in row if not (eager and a.kind == "W")] for row in schedule.actions]
        self.pending: list[list[Action]] = [[] for _ in self.todo]
        self.running: list[tuple[Action, int] | None] = [None] * len(self.todo)
        self.last: list[Action | None] = [None] * len(self.todo)
        self.there = {("F", 0, m) for m in range(schedule.microbatches)}
        self.there |= {("B", len(schedule.placement) - 1, m) for m in range(schedule.microbatches)}
        self.flying: list[tuple[int, tuple[str, int, int]]] = []
        self.memory, self.peak = [0.0] * len(self.todo), [0.0] * len(self.todo)
        self.log: list[list[tuple[Action, int, int]]] = [[] for _ in self.todo]

    def run(self) -> Ticks:
        clock = 0
        while any(self.todo) or any(self.pending) or any(self.running):
            assert clock < 100_000
            for rank in range(len(self.todo)):
                self.finish(rank, clock)
            self.land(clock)
            for rank in range(len(self.todo)):
                self.start(rank, clock)
            clock += 1
        return self

    def finish(self, rank: int, clock: int) -> None:
        if self.running[rank] is None or self.running[rank][1] > clock:
            return
        action = self.running[rank][0]
        self.running[rank] = None
        activation, held = self.costs.activation[action.chunk], self.costs.held[action.chunk]
        if action.kind == "W":
            self.memory[rank] -= held
            return
        if action.kind != "F":
            self.memory[rank] -= activation - (held if action.kind == "B" else 0)
            self.peak[rank] = max(self.peak[rank], self.memory[rank])
        if action.kind == "B" and self.eager:
            self.pending[rank].append(Action("W", action.chunk, action.unit))
        to = action.chunk + (1 if action.kind == "F" else -1)
        if 0 <= to < len(self.schedule.placement):
            message = ("F" if action.kind == "F" else "B", to, action.unit)
            peer = self.schedule.placement[to]
            time = self.costs.communication[min(to, action.chunk)] if peer != rank else 0
            self.flying.append((clock + int(time), message))

    def land(self, clock: int) -> None:
        for arrival, message in self.flying:
            if arrival <= clock:
                self.there.add(message)

    def start(self, rank: int, clock: int) -> None:
        if self.running[rank] is not None:
            return
        action = self.todo[rank][0] if self.todo[rank] else None
        waiting = self.pending[rank]
        if action is None or (action.kind != "W" and self.must_fill(rank, action)):
            if not waiting:
                return
            action = waiting.pop(0)
        else:
            self.todo[rank].pop(0)
        length = self.length(rank, action)
        if action.kind == "F":
            self.memory[rank] += self.costs.activation[action.chunk]
            self.peak[rank] = max(self.peak[rank], self.memory[rank])
        self.running[rank] = (action, clock + length)
        self.last[rank] = action
        self.log[rank].append((action, clock, clock + length))

    def must_fill(self, rank: int, action: Action) -> bool:
        arrived = ("F" if action.kind == "F" else "B", action.chunk, action.unit) in self.there
        full = action.kind == "F" and self.memory[rank] + self.costs.activation[action.chunk] > self.limit
        return not arrived or (full and bool(self.pending[rank]))

    def length(self, rank: int, action: Action) -> int:
        kind, chunk, _ = action
        table = {"F": "forward", "B": "backward", "W": "weight", "BW": "fused"}
        length = getattr(self.costs, table[kind])[chunk]
        last = self.last[rank]
        if kind == "W" and not self.eager and last and last[:2] == ("W", chunk):
            length -= self.costs.merge_saving[chunk]
        assert length == int(length)
        return int(length)


def assert_equal(timeline: Timeline, ticks: Ticks) -> None:
    ours = [[(event.action, event.start, event.end) for event in row] for row in timeline.events]
    assert ours == ticks.log
    assert list(timeline.peak_memory) == ticks.peak
    curves = timeline.memory_held(ticks.given)
    assert [max(held for _, held in curve) for curve in curves] == pytest.approx(ticks.peak)
    assert all(curve[-1][1] == pytest.approx(0, abs=1e-9) for curve in curves)
    assert [[time for time, _ in curve] for curve in curves] == [sorted(time for time, _ in curve) for curve in curves]
    spans = [row[-1][2] - row[0][1] for row in ticks.log]
    assert timeline.cost == max(spans)
    assert timeline.makespan == max(row[-1][2] for row in ticks.log) - min(row[0][1] for row in ticks.log)
    busy = sum(end - start for row in ticks.log for _, start, end in row)
    assert timeline.bubble_rate == pytest.approx(1 - busy / len(ticks.log) / max(spans))
