"""Timeline: when every action ran on every rank, simulated or measured, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from zbkern.planning import draw
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.costs.memory import Memory
from zbkern.schedules.actions import Action
from zbkern.schedules.actions import Event as Event
from zbkern.schedules.dependencies import Result, producer, result
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import duration

_TAKING = ("F", "R", "L")  # what takes memory when it starts


class Sample(NamedTuple):
    """After an action: seconds, pending W, bytes that these hold, bytes allocated on the device (0 on a CPU)."""

    seconds: float
    pending: int
    pinned: int
    allocated: int


@dataclass(frozen=True)
class Timeline:
    """Every event of a schedule, by rank and then by start; `peak_memory[rank]` is in the unit of `Costs.activation`.

    `cost` is the longest span over ranks from a rank's own first F to its own last W (arXiv 2401.10241, section 5.3): a
    rank may start late for free, which assumes an optimizer step without a barrier. `makespan` is first start to last
    end over all ranks, the right figure when the optimizer step does synchronise. `bubble_rate` is the share of `cost`
    in which a rank is idle, mean over ranks: (cost - m (F + B + W)) / cost where all chunks cost the same.
    `samples[rank]` is what a pipeline has recorded. `unit` and `memory_unit` are as in `Costs`, empty where not known.
    `copies[rank]`, if there are any: when each O and L copied, beside the `events`, which hold all other actions. A
    recomputation counts as work: look at `cost` to compare schedules that recompute with others.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    peak_memory: tuple[float, ...] = ()
    unit: str = ""
    samples: tuple[tuple[Sample, ...], ...] = ()
    memory_unit: str = ""
    copies: tuple[tuple[Event, ...], ...] = ()

    @property
    def cost(self) -> float:
        """The longest span of a rank, from its own first F to its own last W."""
        return max((ended(row) - row[0].start for row in self.events if row), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        rows = [row for row in self.events if row]
        return max(map(ended, rows)) - min(row[0].start for row in rows) if rows else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """Time each rank spends in actions, that of several beside each other once."""
        return tuple(sum(own_times(row)) for row in self.events)

    @property
    def bubble_rate(self) -> float:
        """The share of `cost` in which a rank is idle, mean over ranks: 0 to 1."""
        cost = self.cost
        known = sum(1 for row in self.events if row)  # a pipeline's last.timeline has one rank's
        return 1.0 - sum(self.busy) / (known * cost) if cost > 0 else 0.0

    def __repr__(self) -> str:
        name, ranks, cost = self.schedule.name, self.schedule.ranks, duration(self.cost, self.unit)
        return f"<Timeline of {name}: {ranks} ranks, cost {cost}, idle {self.bubble_rate:.1%}>"

    def memory_held(self, costs: Costs) -> list[list[tuple[float, float]]]:
        """What each rank holds over time: (time, memory from then on) after every event, in the unit of the costs.

        Without what is there all the time (`memory_static`). F, R and L take their memory at their start; the others
        give theirs back at their end.
        """
        flat = flat_costs(costs, self.schedule)
        curves = []
        for rank, row in enumerate(self.events):
            copies = self.copies[rank] if self.copies else ()
            changes = [(e.start if e.action.kind in _TAKING else e.end, e.action) for e in (*row, *copies)]
            if copies or self.schedule.beside:
                changes.sort(key=lambda change: (change[0], change[1].kind in _TAKING))
            memory, curve = Memory(flat, self.schedule.actions[rank]), []
            for time, action in changes:
                memory.account(action)
                curve.append((time, memory.now))
            curves.append(curve)
        return curves

    def memory_static(self, costs: Costs) -> list[float]:
        """What each rank holds all the time: weights, gradients, optimizer states (`Costs.static`), and room for
        messages (`Costs.message`)."""
        return flat_costs(costs, self.schedule).static

    def save(self, path: str | Path) -> Path:
        """Writes the picture or trace that the suffix names: .svg, .html, or .json (Perfetto)."""
        return draw.save([self], path)


def ended(row: Sequence[Event]) -> float:
    """When the last of a rank's actions ends: of those beside each other the last begun may end first."""
    return max(event.end for event in row)


def own_times(row: Sequence[Event]) -> list[float]:
    """How long each event of a row took. What several share at one time counts for each of them in equal parts."""
    if all(before.end <= after.start for before, after in pairwise(row)):
        return [event.end - event.start for event in row]
    found, active, begun = [0.0] * len(row), list[int](), 0
    times = sorted({time for event in row for time in (event.start, event.end)})
    for start, end in pairwise(times):
        active = [index for index in active if row[index].end > start]
        while begun < len(row) and row[begun].start <= start:
            active.append(begun)
            begun += 1
        for index in active:
            found[index] += (end - start) / len(active)
    return found


def rescaled(timeline: Timeline, factor: float, unit: str, first: float = 0.0) -> Timeline:
    """The same with all times of its events and copies counted from `first`, and multiplied, in another unit."""

    def moved(rows: Sequence[Sequence[Event]]) -> tuple[tuple[Event, ...], ...]:
        times = [[(e, (e.start - first) * factor, (e.end - first) * factor) for e in row] for row in rows]
        return tuple(tuple(e._replace(start=start, end=end) for e, start, end in row) for row in times)

    return replace(timeline, events=moved(timeline.events), copies=moved(timeline.copies), unit=unit)


def measured(
    schedule: Schedule,
    rows: Sequence[Sequence[Event]],
    samples: Sequence[Sequence[Sample]] = (),
    copies: Sequence[Sequence[Event]] = (),
    peak_bytes: Sequence[int] = (),
) -> Timeline:
    """The timeline of events, samples and copies in seconds, by rank, shifted so that it starts at 0.

    peak_bytes: of each rank, where they were counted: what units held at most, as `Memory` counts it.
    """
    first = min((row[0].start for row in rows if row), default=0.0)
    shifted = tuple(tuple(s._replace(seconds=s.seconds - first) for s in row) for row in samples)
    unit, peaks = "bytes" if peak_bytes else "", tuple(peak_bytes)
    found = Timeline(schedule, tuple(map(tuple, rows)), peaks, "s", shifted, unit, tuple(map(tuple, copies)))
    return rescaled(found, 1.0, "s", first)


def ends_of(timeline: Timeline, ranks: Iterable[int] | None = None) -> dict[Result | None, float]:
    """When each result of a chunk was there that others need; of these ranks' chunks alone, if they are given."""
    rows = timeline.events if ranks is None else [timeline.events[rank] for rank in ranks]
    return {result(event.action): event.end for row in rows for event in row}


def arrival(
    action: Action, ends: Mapping[Result | None, float], travel: Sequence[float], placement: Sequence[int]
) -> tuple[float, float]:
    """When the input of a pass was computed, and when it arrived, by the time over each edge; 0 where it needs none."""
    need = producer(action, len(placement))
    if need is None:
        return 0.0, 0.0
    distant = placement[action.chunk] != placement[need[1]]
    return ends[need], ends[need] + (travel[min(action.chunk, need[1])] if distant else 0.0)
