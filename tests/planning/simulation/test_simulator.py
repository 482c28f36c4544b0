"""simulate: equal to an independent tick-by-tick simulation on random costs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from zbkern.pipeline import Action, Costs, Schedule, ScheduleError, Timeline, schedules, simulate

PUBLISHED = json.loads((Path(__file__).parent.parent.parent / "data" / "zb_profiles.json").read_text())

# ---- an independent simulation: one clock for all ranks, in ticks, everything looked at on every tick


class Ticks:
    """Integer durations only. Written without a look at simulate: no arrival times are computed ahead."""

    def __init__(self, schedule: Schedule, costs: Costs, count: int | None, limit: float) -> None:
        self.schedule, self.costs = schedule, costs.per_chunk(len(schedule.placement))
        self.given, self.count, self.limit = costs, count, limit
        eager = count is not None
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
            self.memory[rank] -= held / (action.part[1] if action.part else 1)
            return
        if action.kind != "F":
            self.memory[rank] -= activation - (held if action.kind == "B" else 0)
            self.peak[rank] = max(self.peak[rank], self.memory[rank])
        if action.kind == "B" and self.count is not None:
            parts = [None] if self.count == 1 else [(i, self.count) for i in range(self.count)]
            self.pending[rank] += [Action("W", action.chunk, action.microbatch, part) for part in parts]
        to = action.chunk + (1 if action.kind == "F" else -1)
        if 0 <= to < len(self.schedule.placement):
            message = ("F" if action.kind == "F" else "B", to, action.microbatch)
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
        arrived = ("F" if action.kind == "F" else "B", action.chunk, action.microbatch) in self.there
        full = action.kind == "F" and self.memory[rank] + self.costs.activation[action.chunk] > self.limit
        return not arrived or (full and bool(self.pending[rank]))

    def length(self, rank: int, action: Action) -> int:
        kind, chunk, _, part = action
        table = {"F": "forward", "B": "backward", "W": "weight", "BW": "fused"}
        length = getattr(self.costs, table[kind])[chunk] / (part[1] if part else 1)
        last = self.last[rank]
        if (
            kind == "W"
            and part is None
            and self.count is None
            and last
            and last._replace(microbatch=0) == (Action("W", chunk, 0))
        ):
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


# ---- the on-line mode and jitter


def test_jitter_samples_passes_and_not_their_order() -> None:
    schedule = schedules.zb_h1(4, 8)

    def lengths(**keywords: object) -> dict[Action, float]:
        timeline = simulate(schedule, Costs(4, 5, 3), jitter=0.1, **keywords)
        return {event.action: event.end - event.start for row in timeline.events for event in row}

    planned, eager = lengths(seed=3), lengths(seed=3, fill="eager", memory_limit=100.0)
    assert planned.keys() == eager.keys()
    assert all(planned[action] == pytest.approx(eager[action]) for action in planned)
    assert lengths(seed=3) == planned
    assert lengths(seed=4) != planned
    forwards = [length for seed in range(50) for action, length in lengths(seed=seed).items() if action.kind == "F"]
    assert mean(forwards) == pytest.approx(4, rel=0.01)
    assert mean((length - 4) ** 2 for length in forwards) ** 0.5 == pytest.approx(0.4, rel=0.1)


def test_parts_win_under_jitter_and_whole_weights_do_not() -> None:
    """8 stages, the 1.5B profile, 24 microbatches, all ranks limited to 1F1B's memory, every pass random by 10%."""
    cell = PUBLISHED["one_chunk"][0]
    times = [cell[name] for name in ("forward", "backward", "weight", "communication")]
    costs, schedule = Costs(*times, activation=cell["activation"], held=cell["held"]), schedules.zb_h1(8, 24)
    limit = 8 * cell["activation"]
    seeds = range(12)

    def idle(**keywords: object) -> float:
        return mean(simulate(schedule, costs, jitter=0.1, seed=seed, **keywords).bubble_rate for seed in seeds)

    fixed = idle()
    whole, sliced = (idle(fill="eager", parts=parts, memory_limit=limit) for parts in (1, 8))
    assert sliced < fixed - 0.015
    assert sliced < whole - 0.02
    assert simulate(schedule, costs).bubble_rate < sliced  # jitter costs something, whatever one does


def test_the_first_forward_of_a_sequence_needs_room_for_all_keys_and_values() -> None:
    costs, schedule = Costs(carried=0.8), schedules.zb_h2(3, 6, slices=2)
    assert max(simulate(schedule, costs, fill="eager", memory_limit=5).peak_memory) <= 5


# ---- arguments


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"fill": "lazy"}, "fill must be one of"),
        ({"jitter": float("nan")}, "jitter must be at least 0; got nan"),
        ({"fill": "eager", "memory_limit": [4, -1]}, "memory_limit must be at least 0"),
        ({"parts": 4}, 'belong to fill="eager"'),
        ({"fill": "eager", "memory_limit": [1, 2, 3]}, r"one number or one per rank \(2\); got 3"),
    ],
)
def test_arguments_are_checked(keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(schedules.zb_h1(2, 2), **keywords)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    lost = Schedule(((Action("F", 0, 0), Action("BW", 0, 0)), (Action("F", 1, 0),)), (0, 1), 1, "lost")
    with pytest.raises(ScheduleError, match="rank 1: 1B0 is missing"):
        simulate(lost)
