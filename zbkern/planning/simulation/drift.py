"""A measured step next to its simulation or its plan: where it took longer."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from zbkern.planning import draw
from zbkern.planning.costs.chunks import TIMES, Costs
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.simulation import step_costs
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.step_costs import passes
from zbkern.planning.simulation.timeline import Timeline, arrival, ended, ends_of, rescaled
from zbkern.schedules.actions import Action
from zbkern.schedules.units import TIME_UNITS, duration, number

_WORTH_A_CUT = 0.03  # of the cost: layers are seldom divided more evenly


def in_seconds(given: Costs) -> Costs:
    """The same costs in seconds, the unit of a Pipeline's timelines; times without a unit count as milliseconds."""
    if not isinstance(given, Costs):
        raise TypeError(
            f"in_seconds: costs must be a zbkern.pipeline.Costs in milliseconds, as profile() gives them; got "
            f"{type(given).__name__} {given!r}"
        )
    per_second = TIME_UNITS[given.time_unit or "ms"]

    def scaled(name: str, factor: float) -> Any:
        value = getattr(given, name)
        return tuple(each * factor for each in value) if isinstance(value, tuple) else value and value * factor

    seconds = {name: scaled(name, 1 / per_second) for name in (*TIMES, "communication", "latency", "recompute")}
    rates = {name: scaled(name, per_second) for name in ("offload_bandwidth", "reload_bandwidth")}
    return replace(given, time_unit="s", **seconds, **rates)


def compare(measured: Timeline, given: Costs | None = None, planned: Timeline | None = None) -> Drift:
    """A measured step next to the simulation of its schedule, with these costs or with its own medians.

    planned: in place of the simulation, that of the plan, in milliseconds where it has no unit.
    """
    if planned is not None and planned.schedule.checksum != measured.schedule.checksum:
        raise ValueError("compare: planned must be the timeline of the last step's plan; got one of another schedule")
    for rank, row in enumerate(measured.events):
        if not row:
            raise ValueError(
                f"compare: the measured timeline must hold a step of every rank; rank {rank} has none: run "
                "Pipeline.step first, and take pipe.last.gather_timeline() or pipe.last.drift()"
            )
    planned_with = given or step_costs.costs([measured])
    if planned is None:
        planned = replace(simulate(measured.schedule, planned_with), unit=measured.unit)
    else:
        planned = rescaled(planned, 1 / TIME_UNITS[planned.unit or "ms"], measured.unit)
    return Drift(planned, measured, planned_with, given is not None)


@dataclass(frozen=True)
class TimeLost:
    """Where one rank's time went beyond the plan: `cost` measured minus planned is about the sum of the others.

    compute: passes that took longer than planned (negative: shorter). late: waiting for messages, beyond the waiting
    that was planned. host: time between passes after the input had arrived. In the timeline's unit.
    """

    rank: int
    cost: float
    compute: float
    late: float
    host: float


@dataclass(frozen=True)
class Drift:
    """A measured step next to its schedule simulated with `costs`: those of a plan, or the step's own medians.

    given: whether the costs were a plan's; with those of a disturbed step the simulation idles as much as the step.
    """

    planned: Timeline
    measured: Timeline
    costs: Costs
    given: bool = True

    @property
    def time_lost(self) -> tuple[TimeLost, ...]:
        """Per rank, where the time went."""
        return tuple(self._time_lost(rank) for rank in range(self.measured.schedule.ranks))

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of the ranks, for `plan(..., speeds=)`: the time of all passes at a speed of 1, over that which was measured.

        They are relative to the median rank, the faster of two: a step that all ranks take longer for has equal ones.
        Only the costs of a plan tell: with the step's own medians no rank is slow.
        """
        before = self.costs.speeds or (1.0,) * self.measured.schedule.ranks
        times = zip(self.planned.busy, self.measured.busy, before, strict=True)
        rates = [speed * planned / max(measured, 1e-300) for planned, measured, speed in times]
        usual = statistics.median_high(rates)
        return tuple(round(rate / usual, 3) for rate in rates)

    @property
    def gain_of_new_cut(self) -> float:
        """The share of the measured cost that a cut by `speeds` would save, if layers could be divided at will.

        The busiest rank is then as busy as all others; what ranks idle besides stays as it was.
        """
        busy = self.measured.busy
        work = sum(time * speed for time, speed in zip(busy, self.speeds, strict=True))
        return max(0.0, (max(busy) - work / sum(self.speeds)) / self.measured.cost)

    def actions(self) -> list[tuple[Action, float]]:
        """Every pass with its measured minus its planned duration, largest first."""
        planned, measured = passes(self.planned), passes(self.measured)
        found = [(Action(*key), busy - planned[key]) for key, busy in measured.items() if key in planned]
        return sorted(found, key=lambda pair: -pair[1])

    def to_text(self, worst: int = 5) -> str:
        """A table of the time lost in percent of the planned cost, and the `worst` passes that exceed the plan most."""
        if worst < 0:
            raise ValueError(f"Drift.to_text: worst must be the number of passes to list, at least 0; got {worst}")
        whole = self.planned.cost
        word, how = ("planned", "") if self.given else ("simulated", " with the step's own times")
        lines = [
            f"measured {self.measured.cost:.4g}, {word}{how} {duration(whole, self.measured.unit)}: "
            f"{self.measured.cost / whole - 1:+.1%}; idle {self.measured.bubble_rate:.1%}, "
            f"{word} {self.planned.bubble_rate:.1%}",
            "rank    cost  compute     late     host",
        ]
        for lost in self.time_lost:
            shares = (lost.cost, lost.compute, lost.late, lost.host)
            lines.append(f"{lost.rank:>4}" + "".join(f"{share / whole:>+9.1%}" for share in shares))
        if self.given and (gain := self.gain_of_new_cut) >= _WORTH_A_CUT:
            speeds = " ".join(map(number, self.speeds))
            lines.append(f"the ranks' speeds are {speeds}: a cut by them, plan(..., speeds=), saves up to {gain:.0%}")
        slow = ", ".join(f"{action} {extra / whole:+.1%}" for action, extra in self.actions()[:worst])
        return "\n".join([*lines, f"furthest from the plan: {slow}"] if slow else lines)

    def save(self, path: str | Path) -> Path:
        """Both timelines in one picture or trace, by the suffix: .svg, .html, or .json (Perfetto)."""
        title = "planned" if self.given else "simulated with the step's own times"
        return draw.save([self.planned, self.measured], path, [title, "measured"])

    def _time_lost(self, rank: int) -> TimeLost:
        mine, plan = self.measured.events[rank], self.planned.events[rank]
        busy = self.measured.busy[rank] - self.planned.busy[rank]
        late = host = 0.0
        ends, schedule = ends_of(self.measured), self.measured.schedule
        flat = flat_costs(self.costs, schedule)
        for behind, event in zip(accumulate((e.end for e in mine), max), mine[1:], strict=False):
            gap = max(0.0, event.start - behind)
            travel = flat.of_unit(event.action.unit).communication
            _, arrived = arrival(event.action, ends, travel, schedule.placement)
            waited = min(gap, max(0.0, arrived - behind))
            late, host = late + waited, host + gap - waited
        spans = [ended(row) - row[0].start if row else 0.0 for row in (mine, plan)]
        idle = spans[1] - self.planned.busy[rank]
        return TimeLost(rank, spans[0] - spans[1], busy, late - idle, host)
