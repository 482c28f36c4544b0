"""Measured timelines: the costs of their passes, and where they took longer than planned."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from zbkern.planning import draw
from zbkern.planning.costs.chunks import TIMES, Costs
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.costs.memory import Memory
from zbkern.planning.simulation.network_fit import with_network
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline, arrival, ended, ends_of, own_times, rescaled
from zbkern.schedules.actions import Action
from zbkern.schedules.dependencies import result
from zbkern.schedules.units import TIME_UNITS, duration, number

_WORTH_A_CUT = 0.03  # of the cost: layers are seldom divided more evenly


def costs(timelines: Sequence[Timeline], memory: Costs | None = None) -> Costs:
    """Costs, in the timelines' unit, of measured steps of one schedule: medians over microbatches and steps.

    Where passes ran beside each other, times are those of passes that ran alone, if there are any, and network time is
    what fits (`network_fit.py`); of others each counts its share of the time that they took together.

    memory: whose `activation` and `held` to keep; a timeline has none. A pass in several events (layers of a W)
    counts as their sum; that of the slices of a sequence, too, and by how much the time per length rises along the
    sequence is attention. Bandwidths are those of all O or L together. communication is the least time from the end of
    a pass to the start of the one that needs it, over all edges, mean of both directions, so that a difference between
    two ranks' clocks cancels.
    """
    schedule = timelines[0].schedule
    if schedule.own_slices:
        raise ValueError("drift: costs must be given for a schedule whose sequences have slices of their own; got None")
    chunks = range(len(schedule.placement))
    by_slice: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for (kind, chunk, slice), length in medians(timelines).items():
        by_slice[kind, chunk][slice] = length
    wholes = {key: sum(each.values()) * len(schedule.slices) / len(each) for key, each in by_slice.items()}
    times = [[wholes.get((kind, chunk), 0.0) for chunk in chunks] for kind in ("F", "B", "W")]
    for chunk in chunks:  # a fused pass: both halves in one
        if ("BW", chunk) in wholes and ("B", chunk) not in wholes:
            times[1][chunk] = times[2][chunk] = wholes["BW", chunk] / 2
    memory = memory or Costs()
    attention = [
        tuple(_attention(by_slice.get((kind, chunk), {}), schedule.slices) for chunk in chunks) for kind in "FB"
    ]
    again = {chunk: wholes["R", chunk] for chunk in chunks if ("R", chunk) in wholes}
    found = replace(
        memory,
        recompute=tuple(again.get(chunk, times[0][chunk]) for chunk in chunks) if again else memory.recompute,
        checkpoint=0.0 if again and memory.checkpoint is None else memory.checkpoint,
        offload_bandwidth=_bandwidth(timelines, "O", memory),
        reload_bandwidth=_bandwidth(timelines, "L", memory),
        forward=times[0],
        backward=times[1],
        weight=times[2],
        communication=min(hops(timelines).values(), default=0.0) * len(schedule.slices),
        attention_forward=tuple(map(min, attention[0], times[0])),
        attention_backward=tuple(map(min, attention[1], times[1])),
        overhead=0.0,
        network_forward=0.0,
        network_backward=0.0,
        split_overhead=0.0,
        merge_saving=0.0,
        latency=0.0,
        speeds=None,  # are in the times
        time_unit=timelines[0].unit or None,
    )
    return with_network(found, timelines) if schedule.beside else found


def medians(timelines: Sequence[Timeline]) -> dict[tuple[str, int, int], float]:
    """(kind, chunk, slice) -> how long such a pass took."""
    return {key: statistics.median(lengths) for key, lengths in _lengths(timelines).items()}


def spread(timelines: Sequence[Timeline]) -> float:
    """How far apart the quartiles of a pass's times are, over microbatches and steps: the most of all passes.

    Relative to the median of that pass, or to the mean of all passes where this is longer, so that the noise of a pass
    that takes next to no time does not count. Infinite where a pass was measured once.
    """
    samples = [*_lengths(timelines).values()]
    if any(len(lengths) < 2 for lengths in samples):
        return math.inf
    mean = statistics.fmean(map(statistics.median, samples))
    quartiles = [statistics.quantiles(lengths, n=4, method="inclusive") for lengths in samples]
    return max((high - low) / (max(middle, mean) or 1.0) for low, middle, high in quartiles)


def _lengths(timelines: Sequence[Timeline]) -> dict[tuple[str, int, int], list[float]]:
    """(kind, chunk, slice) -> how long each of these passes took; of those that ran alone, if there are any."""
    alone: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    beside: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    schedule = timelines[0].schedule
    grouped = {
        action
        for rank, row in enumerate(schedule.actions)
        for first, end in schedule.beside_of(rank)
        for action in row[first:end]
    }
    for timeline in timelines:
        for action, length in _passes(timeline).items():
            kind, chunk, unit = action
            found = beside if action in grouped else alone
            found[kind, chunk, unit % len(schedule.slices)].append(length)
    return {**beside, **alone}


def _attention(times: Mapping[int, float], slices: Sequence[int]) -> float:
    """What the passes of a sequence's slices take that grows with the length and with what came before; 0 where some
    slices are not known."""
    if len(times) < max(2, len(slices)):
        return 0.0
    whole = sum(slices)
    ends = [end / whole for end in accumulate(slices, initial=0)]
    context = [a + b for a, b in pairwise(ends)]
    per_length = [times[slice] * whole / length for slice, length in enumerate(slices)]
    return max(0.0, statistics.linear_regression(context, per_length).slope)


def hops(timelines: Sequence[Timeline]) -> dict[int, float]:
    """The least time of a message over every edge between ranks, by its first chunk, mean of both directions."""
    schedule = timelines[0].schedule
    found: dict[int, float] = {}
    for timeline in timelines:
        ends = ends_of(timeline)
        starts = {result(event.action): event.start for row in timeline.events for event in row}
        for low, high in pairwise(range(len(schedule.placement))):
            if schedule.placement[low] != schedule.placement[high]:
                pairs = range(len(schedule.units))
                there = min(starts["F", high, m] - ends["F", low, m] for m in pairs)
                back = min(starts["B", low, m] - ends["B", high, m] for m in pairs)
                found[low] = min(found.get(low, math.inf), max(0.0, (there + back) / 2))
    return found


def _bandwidth(timelines: Sequence[Timeline], kind: str, memory: Costs) -> float | None:
    """Memory per time of all copies in one direction; that of `memory` where there are none."""
    copies = [event for each in timelines for row in each.copies for event in row if event.action.kind == kind]
    spent, moved, schedule = sum(copy.end - copy.start for copy in copies), 0.0, timelines[0].schedule
    for row in schedule.actions if copies else ():
        held = Memory(flat_costs(memory, schedule))
        for action in row:
            moved += held.copied(action.chunk, action.unit) if action.kind == kind else 0.0
            held.account(action)
    given = memory.offload_bandwidth if kind == "O" else memory.reload_bandwidth
    return moved * len(timelines) / spent if moved > 0 and spent > 0 else given


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
    planned_with = given or costs([measured])
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
        planned, measured = _passes(self.planned), _passes(self.measured)
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


def _passes(timeline: Timeline) -> dict[tuple[str, int, int], float]:
    """(kind, chunk, unit) -> how long its events took together; of passes beside each other, their shares."""
    found: dict[tuple[str, int, int], float] = defaultdict(float)
    for row in timeline.events:
        for event, length in zip(row, own_times(row), strict=True):
            found[event.action] += length
    return found
