"""Where the idle time of a timeline comes from: a rank's load, too little memory, messages, or the pipeline itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbkern.planning.simulation.costs import ChunkCosts, Costs
from zbkern.planning.simulation.memory import Memory, static_of_ranks
from zbkern.planning.simulation.slice_costs import slice_costs
from zbkern.planning.simulation.timeline import Event, Timeline, arrival, ends_of

_ROUNDING = 1e-9  # relative: sums of fractions of one number differ in the last digits


@dataclass(frozen=True)
class IdleTime:
    """Shares of the objective (cost or makespan) in which ranks are idle, mean over ranks; their sum is all idle time.

    load: the other ranks have less work than rank `busiest`, which no order changes. The rest is what the slowest rank
    waits for (the one with the longest span): memory: a forward had arrived, and the memory limit left no room for it,
    or a copy to or from the host was not done.
    messages: its input was computed and on its way. warm_up: before its first backward; cool_down: after its last
    forward; dependencies: between them, passes of other ranks that its next pass needs.
    """

    busiest: int
    load: float
    memory: float
    messages: float
    warm_up: float
    cool_down: float
    dependencies: float

    @property
    def total(self) -> float:
        return self.load + self.memory + self.messages + self.warm_up + self.cool_down + self.dependencies


def idle_time(timeline: Timeline, costs: Costs, objective: str, limits: Sequence[float] | None) -> IdleTime:
    """limits: the memory of every rank, None for no limit."""
    busy, ranks = timeline.busy, len(timeline.events)
    most, length = max(busy), timeline.cost if objective == "cost" else timeline.makespan
    shares = dict.fromkeys(("memory", "messages", "warm_up", "cool_down", "dependencies"), 0.0)
    if length <= 0:
        return IdleTime(0, 0.0, **shares)
    spans = [row[-1].end - row[0].start for row in timeline.events]
    slowest = spans.index(max(spans)) if objective == "cost" else busy.index(most)
    flat = slice_costs(costs.per_chunk(len(timeline.schedule.placement)), timeline.schedule.slices)
    gaps = _Gaps(timeline, flat, slowest, limits)
    for cause, time in gaps.causes():
        shares[cause] += time
    if objective != "cost":  # it also waits for the first pass to come, and for the others to end
        row = timeline.events[slowest]
        first = min(each[0].start for each in timeline.events)
        shares["warm_up"] += row[0].start - first
        shares["cool_down"] += first + length - row[-1].end
    waited, idle = sum(shares.values()), length - most
    scale = idle / length  # ratios alone: a product of times may be 0 where they are not
    load = (ranks * most - sum(busy)) / (ranks * length)
    found = {cause: time / waited * scale if waited > 0 else 0.0 for cause, time in shares.items()}
    return IdleTime(busy.index(most), load, **found)


class _Gaps:
    """The time between the passes of one rank, and why it passes."""

    def __init__(
        self, timeline: Timeline, costs: Sequence[ChunkCosts], rank: int, limits: Sequence[float] | None
    ) -> None:
        self._schedule, self._costs = timeline.schedule, costs
        self._row = timeline.events[rank]
        self._actions = iter(self._schedule.actions[rank])  # with O and L, which are no events of the row
        always = static_of_ranks(costs[0], timeline.schedule.placement)[rank]
        self._memory = Memory(costs, always, self._schedule.actions[rank])
        self._copies = bool(timeline.copies and timeline.copies[rank])
        self._limit = float("inf") if limits is None else limits[rank] * (1 + _ROUNDING)
        self._ends = ends_of(timeline)

    def causes(self) -> Iterator[tuple[str, float]]:
        """(cause, time) of every gap, in parts where it has several."""
        kinds = [event.action.kind for event in self._row]
        first_backward = next((index for index, kind in enumerate(kinds) if kind in ("B", "BW")), len(kinds))
        last_forward = len(kinds) - 1 - kinds[::-1].index("F")
        forwards: dict[int, list[Event]] = {}  # of every chunk, those to come, the next at the end
        for event in reversed(self._row):
            if event.action.kind == "F":
                forwards.setdefault(event.action.chunk, []).append(event)
        clock = self._row[0].start
        for index, event in enumerate(self._row):
            gap = event.start - clock
            if gap > _ROUNDING * event.end:
                computed, arrived = self._arrival(event)
                ready = max(clock, arrived) if self._copies else event.start  # later than that, it waits for a copy
                full = min(gap, max(0.0, event.start - min(ready, self._blocked(forwards))))
                late = min(gap - full, max(0.0, event.start - max(computed, clock)))
                yield "memory", full
                yield "messages", late
                waits = index <= first_backward, index > last_forward
                yield "warm_up" if waits[0] else "cool_down" if waits[1] else "dependencies", gap - full - late
            for action in self._actions:
                self._memory.account(action)
                if action == event.action:
                    break
            if event.action.kind == "F":
                forwards[event.action.chunk].pop()
            clock = event.end

    def _arrival(self, event: Event) -> tuple[float, float]:
        return arrival(event.action, self._ends, self._of(event).communication, self._schedule.placement)

    def _of(self, event: Event) -> ChunkCosts:
        """The costs of its slice."""
        return self._costs[event.action.microbatch % len(self._costs)]

    def _blocked(self, forwards: dict[int, list[Event]]) -> float:
        """Since when a forward has been there for which there is no room; infinite where there is none."""
        blocked = float("inf")
        for chunk, waiting in forwards.items():
            if waiting and self._memory.now + self._of(waiting[-1]).activation[chunk] > self._limit:
                blocked = min(blocked, self._arrival(waiting[-1])[1])
        return blocked
