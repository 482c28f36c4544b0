"""Timeline: when every action ran on every rank, simulated or measured, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.schedule import Schedule


class Event(NamedTuple):
    """One action on one rank, from start to end, in the unit of the costs (seconds when measured)."""

    rank: int
    action: Action
    start: float
    end: float


class Sample(NamedTuple):
    """After an action: seconds, W that wait, bytes that W pin, bytes allocated on the device (0 on a CPU)."""

    seconds: float
    pending: int
    pinned: int
    allocated: int


@dataclass(frozen=True)
class Timeline:
    """Every event of a schedule, by rank and then by start; `peak_memory[rank]` is in the unit of `Costs.activation`.

    `cost` is the longest span over ranks from a rank's own first F to its own last W (arXiv 2401.10241, section 5.3): a
    rank may start late for free, which assumes an optimizer step without a barrier. `makespan` is first start to last
    end over all ranks, the honest figure when the optimizer does synchronise. `bubble_rate` is the share of `cost` in
    which a rank is idle, mean over ranks: (cost - m (F + B + W)) / cost where all chunks cost the same.
    `samples[rank]` is what a pipeline has recorded.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    peak_memory: tuple[float, ...] = ()
    unit: str = ""
    samples: tuple[tuple[Sample, ...], ...] = ()

    @property
    def cost(self) -> float:
        return max((row[-1].end - row[0].start for row in self.events if row), default=0.0)

    @property
    def makespan(self) -> float:
        rows = [row for row in self.events if row]
        return max(row[-1].end for row in rows) - min(row[0].start for row in rows) if rows else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """Time each rank spends in actions."""
        return tuple(sum(event.end - event.start for event in row) for row in self.events)

    @property
    def bubble_rate(self) -> float:
        cost = self.cost
        known = sum(1 for row in self.events if row)  # a pipeline's last_timeline has one rank's
        return 1.0 - sum(self.busy) / (known * cost) if cost > 0 else 0.0

    def __repr__(self) -> str:
        cost = f"{self.cost:.4g} {self.unit}".rstrip()
        name, ranks = self.schedule.name, self.schedule.stages
        return f"<Timeline of {name}: {ranks} ranks, cost {cost}, idle {self.bubble_rate:.1%}>"

    def save(self, path: str | Path) -> Path:
        """Writes the picture or trace that the suffix names: .svg, .html, .png, or .json (Perfetto)."""
        return save_together([self], path)


def save_together(timelines: Sequence[Timeline], path: str | Path, titles: Sequence[str] | None = None) -> Path:
    """Writes all of them as one picture or trace, by the suffix; titles: one for each, or the schedules' names."""
    from zbkern.pipeline import draw  # which sit on top of this
    from zbkern.pipeline.draw import trace  # which sit on top of this

    return (trace if Path(path).suffix == ".json" else draw).save(timelines, path, titles)


def measured(schedule: Schedule, rows: Sequence[Sequence[Event]], samples: Sequence[Sequence[Sample]] = ()) -> Timeline:
    """Events and samples in seconds, by rank, as a timeline that begins at zero."""
    first = min((row[0].start for row in rows if row), default=0.0)
    events = (tuple(e._replace(start=e.start - first, end=e.end - first) for e in row) for row in rows)
    shifted = (tuple(s._replace(seconds=s.seconds - first) for s in row) for row in samples)
    return Timeline(schedule, tuple(events), unit="s", samples=tuple(shifted))
