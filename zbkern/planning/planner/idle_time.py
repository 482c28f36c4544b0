"""Where the idle time of a timeline comes from: a rank's load, too little memory, messages, or the pipeline itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.costs.memory import Memory
from zbkern.planning.simulation.timeline import Event, Timeline, arrival, ended, ends_of

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


def idle_time(timeline: Timeline, costs: FlatCosts, objective: str, limits: Sequence[float] | None) -> IdleTime:
    """limits: the memory of every rank, None for no limit."""
    busy, ranks = timeline.busy, len(timeline.events)
    most, length = max(busy), timeline.cost if objective == "cost" else timeline.makespan
    shares = dict.fromkeys(("memory", "messages", "warm_up", "cool_down", "dependencies"), 0.0)
    if length <= 0:
        return IdleTime(0, 0.0, **shares)
    spans = [ended(row) - row[0].start for row in timeline.events]
    slowest = spans.index(max(spans)) if objective == "cost" else busy.index(most)
    for cause, time in _causes(timeline, costs, slowest, limits):
        shares[cause] += time
    if objective != "cost":  # it also waits for the first pass to come, and for the others to end
        row = timeline.events[slowest]
        first = min(each[0].start for each in timeline.events)
        shares["warm_up"] += row[0].start - first
        shares["cool_down"] += first + length - ended(row)
    waited, idle = sum(shares.values()), length - most
    scale = idle / length  # ratios alone: a product of times may be 0 where they are not
    load = (ranks * most - sum(busy)) / (ranks * length)
    found = {cause: time / waited * scale if waited > 0 else 0.0 for cause, time in shares.items()}
    return IdleTime(busy.index(most), load, **found)


def _causes(
    timeline: Timeline, costs: FlatCosts, rank: int, limits: Sequence[float] | None
) -> Iterator[tuple[str, float]]:
    """(cause, time) of every gap between the passes of one rank, in parts where it has several."""
    schedule, row = timeline.schedule, timeline.events[rank]
    own_chunks = [chunk for chunk, owner in enumerate(schedule.placement) if owner == rank]
    near = {schedule.placement[max(0, chunk - 1) : chunk + 2] for chunk in own_chunks}  # the ranks that it waits for
    ends = ends_of(timeline, {owner for owners in near for owner in owners})
    memory = Memory(costs, schedule.actions[rank], costs.static[rank])
    limit = float("inf") if limits is None else limits[rank] * (1 + _ROUNDING)
    copies = bool(timeline.copies and timeline.copies[rank])

    def arrival_of(event: Event) -> tuple[float, float]:
        return arrival(event.action, ends, costs.of_unit(event.action.unit).communication, schedule.placement)

    def taken_by(event: Event) -> float:
        return costs.of_unit(event.action.unit).activation[event.action.chunk]

    kinds = [event.action.kind for event in row]
    first_backward = next((index for index, kind in enumerate(kinds) if kind in ("B", "BW")), len(kinds))
    last_forward = len(kinds) - 1 - kinds[::-1].index("F")
    forwards: dict[int, list[Event]] = {}  # of every chunk, those to come, the next at the end
    for event in reversed(row):
        if event.action.kind == "F":
            forwards.setdefault(event.action.chunk, []).append(event)
    actions, clock = iter(schedule.actions[rank]), row[0].start  # with O and L, which are no events of the row
    for index, event in enumerate(row):
        gap = event.start - clock
        if gap > _ROUNDING * event.end:
            computed, arrived = arrival_of(event)
            ready = max(clock, arrived) if copies else event.start  # later than that, it waits for a copy
            nexts = [waiting[-1] for waiting in forwards.values() if waiting]
            full = [each for each in nexts if memory.now + taken_by(each) > limit]
            blocked = min([ready, *(arrival_of(each)[1] for each in full)])  # since when there is no room for an F
            for_room = min(gap, max(0.0, event.start - blocked))
            late = min(gap - for_room, max(0.0, event.start - max(computed, clock)))
            yield "memory", for_room
            yield "messages", late
            waits = index <= first_backward, index > last_forward
            yield "warm_up" if waits[0] else "cool_down" if waits[1] else "dependencies", gap - for_room - late
        for action in actions:
            memory.account(action)
            if action == event.action:
                break
        if event.action.kind == "F":
            forwards[event.action.chunk].pop()
        clock = max(clock, event.end)  # of passes beside each other the last begun may end first
