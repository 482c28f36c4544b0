"""simulate: when every action of a schedule runs, given its costs; as planned, or with W filled in as the clock says.

F of a chunk waits for F of the chunk before it, B (or BW) for B of the chunk after it, and every action for the one
before it on its rank. A message between chunks on different ranks takes the edge's communication; on one rank nothing.
Copies run beside the passes (`copies.py`): a pass waits for its load, and a rank for its offload where the O stands.
Passes beside each other begin once the inputs of all have arrived, and hide each other's collectives (`turns.py`).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from zbkern.planning.costs.chunks import ROUNDING, Costs, checked_number
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.costs.memory import Limit, Memory, limits_of
from zbkern.planning.simulation.copies import Copies
from zbkern.planning.simulation.timeline import Event, Timeline, arrival
from zbkern.planning.simulation.turns import Parts, in_turns
from zbkern.schedules.actions import COPIES, Action, Ranges
from zbkern.schedules.dependencies import Result, order_of_running, result
from zbkern.schedules.program import FILLS, offloads_or_recomputes, recomputed
from zbkern.schedules.schedule import Schedule

_TAKING = ("F", "R")  # passes that take memory


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    fill: str = "planned",
    memory_limit: Limit = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """The timeline of one step: all events, cost, bubble rate and memory per rank.

    Args:
        costs: `Costs()`, all passes of unit length, when not given.
        fill: "planned" runs every W where the schedule has it; "eager" keeps only the order of F and B and runs the
            oldest pending W whenever the next input has not arrived, and before an F that would
            exceed `memory_limit` (one number, or one per rank; by default the schedule's own peak): what the engine
            does with fill="eager".
        jitter: each pass takes its cost times a normal variate of mean 1 and this deviation, at least 0; the sample
            depends on `seed` and not on the order or the fill, so that both can be compared on it.

    Memory: every rank starts with its chunks' `static`; F adds the chunk's activation when it starts; B leaves `held`
    when it ends, and BW nothing; W releases `held` when it ends. A W that directly follows a W of its
    chunk gains `merge_saving` (never with fill="eager", which runs them one by one).

    O and L take memory per bandwidth, one after the other in each direction, and are in `Timeline.copies`, each as long
    as its transfers together, up to the end of the last; passes beside them take longer by `copy_slowdown`. Activations
    go in transfers of `copy_size` (`copies.py`). fill="eager" is for schedules without R, O and L.

    Where costs have network time, passes beside each other (`Schedule.beside`) take turns, and their events overlap.
    Without, and with fill="eager", they run one after the other. Copies lengthen such a pass as if it ran by itself.

    Raises ScheduleError when the schedule is not valid, TypeError or ValueError for other arguments.
    """
    checked_number("simulate", "jitter", jitter, math.inf)
    if fill not in FILLS:
        raise ValueError(f"simulate: fill must be one of {FILLS}; got {fill!r}")
    if fill == "planned" and memory_limit is not None:
        raise ValueError('simulate: memory_limit belongs to fill="eager"; with "planned" the schedule decides')
    schedule.validate()
    if fill == "eager" and any(offloads_or_recomputes(row) for row in schedule.actions):
        raise ValueError(
            'simulate: fill="eager" moves W, and a schedule with R, O or L has its memory counted where W stands; use '
            '"planned"'
        )
    costs = costs or Costs()
    flat = flat_costs(costs, schedule)
    durations = _durations(schedule, flat, jitter, seed)
    run = _Run(schedule, flat, durations)
    if fill == "eager":
        limits = limits_of("simulate", memory_limit, schedule.ranks)
        run.fill_eagerly(limits or _Run(schedule, flat, durations).timeline().peak_memory)
    return replace(run.timeline(), unit=costs.time_unit or "", memory_unit=costs.memory_unit or "")


class _Run:
    """One simulation: actions are executed in an order in which the inputs of each have been computed."""

    def __init__(self, schedule: Schedule, costs: FlatCosts, durations: dict[tuple[str, int, int], float]) -> None:
        self._schedule, self._costs, self._durations = schedule, costs, durations
        self._rows: list[Sequence[Action]] = list(schedule.actions)
        self._events: list[list[Event]] = [[] for _ in self._rows]
        self._ends: dict[Result | None, float] = {}
        self._memory = [Memory(costs, row, static) for row, static in zip(schedule.actions, costs.static, strict=True)]
        self._copies = {
            rank: Copies(rank, row, costs)
            for rank, row in enumerate(schedule.actions)
            if any(action.kind in COPIES for action in row)
        }
        self._previous: list[Action | None] = [None] * len(self._rows)
        self._eager: list[deque[Action]] = []  # the pending W of every rank, oldest first; empty where W are planned
        self._free = [0.0] * len(self._rows)  # when each rank has run what it was given
        self._beside: Sequence[Ranges] = schedule.beside if costs.has_network else ()
        self._groups = {  # of each that runs beside others: all of them for the first, none for the others
            action: tuple(row[first:end]) if action == row[first] else ()
            for row, ranges in zip(schedule.actions, self._beside, strict=False)
            for first, end in ranges
            for action in row[first:end]
        }

    def fill_eagerly(self, limits: Sequence[float]) -> None:
        self._beside, self._groups = (), {}
        self._rows = [[action for action in row if action.kind != "W"] for row in self._rows]
        slack = ROUNDING * max(limits)
        self._eager, self._limits = [deque() for _ in limits], [limit + slack for limit in limits]

    def timeline(self) -> Timeline:
        for rank, action in order_of_running(self._rows, len(self._schedule.placement), self._beside):
            if action in self._groups:
                self._take_turns(rank, self._groups[action])
                continue
            arrived = self._arrived(action)
            if self._eager:
                self._fill(rank, self._eager[rank], action, arrived)
            self._execute(rank, action, arrived)
        for rank, pending in enumerate(self._eager):
            while pending:
                self._execute(rank, pending.popleft())
        events = tuple(tuple(row) for row in self._events)
        peak = tuple(memory.peak for memory in self._memory)
        copies = [tuple(self._copies[rank].events) if rank in self._copies else () for rank in range(len(self._rows))]
        return Timeline(self._schedule, events, peak, copies=tuple(copies) if self._copies else ())

    def _execute(self, rank: int, action: Action, arrived: float = 0.0) -> None:
        events, copies, memory = self._events[rank], self._copies.get(rank), self._memory[rank]
        start = max(self._free[rank], arrived)
        if copies is None:
            end = start + self._length(rank, action)
        elif action.kind in COPIES:
            copies.reach(action, start, memory.copied(action.chunk, action.unit))
            memory.account(action)
            self._previous[rank] = action
            return
        else:
            start = copies.start(action, start)
            end = copies.run(action, start, self._length(rank, action))
        events.append(Event(rank, action, start, end))
        memory.account(action)
        self._previous[rank] = action
        self._ends[result(action)] = self._free[rank] = end
        if self._eager and action.kind == "B":
            self._eager[rank].append(action._replace(kind="W"))

    def _arrived(self, action: Action) -> float:
        travel = self._costs.of_unit(action.unit).communication
        return arrival(action, self._ends, travel, self._schedule.placement)[1]

    def _take_turns(self, rank: int, passes: Sequence[Action]) -> None:
        if not passes:
            return
        memory, start = self._memory[rank], max(self._free[rank], *map(self._arrived, passes))
        self._previous[rank], copies = None, self._copies.get(rank)
        if copies is not None:
            start = max(copies.start(action, start) for action in passes)
        times = in_turns([Parts.of(each, self._costs, self._length(rank, each)) for each in passes], start)
        if copies is not None:
            ends = [copies.run(each, start, end - start) for each, (start, end) in zip(passes, times, strict=True)]
            times = [(start, end) for (start, _), end in zip(times, ends, strict=True)]
        self._events[rank] += [Event(rank, action, *time) for action, time in zip(passes, times, strict=True)]
        for action in [each for each in passes if each.kind in _TAKING]:  # before any other frees some
            memory.account(action)
        for _, action in sorted(zip(times, passes, strict=True), key=lambda each: each[0][1]):
            if action.kind not in _TAKING:
                memory.account(action)
        for action, (_, end) in zip(passes, times, strict=True):
            self._ends[result(action)] = end
            self._free[rank] = max(self._free[rank], end)

    def _length(self, rank: int, action: Action) -> float:
        kind, chunk, unit = action
        length = self._durations[action]
        before = self._previous[rank]
        follows = before is not None and before.kind == "W" and before.chunk == chunk
        if kind == "W" and follows and not self._eager:
            return max(0.0, length - self._costs.of_unit(unit).merge_saving[chunk])
        return length

    def _fill(self, rank: int, pending: deque[Action], action: Action, arrived: float) -> None:
        """Runs pending W: as many as must free their memory for an F to fit, then until the input arrives."""
        memory = self._memory[rank]
        kind, chunk, unit = action
        carried = self._costs.carried_change(kind, chunk, unit)
        taken = self._costs.of_unit(unit).activation[chunk] + carried
        limit = self._limits[rank] - taken if action.kind == "F" else float("inf")
        while pending and (memory.now > limit or self._free[rank] < arrived):
            self._execute(rank, pending.popleft())


def _durations(schedule: Schedule, costs: FlatCosts, jitter: float, seed: int) -> dict[tuple[str, int, int], float]:
    generator = random.Random(seed)

    def factor() -> float:
        return max(0.0, generator.gauss(1.0, jitter)) if jitter else 1.0

    by_slice = [{"F": each.forward, "B": each.backward, "W": each.weight, "BW": each.fused} for each in costs.by_place]
    durations = {}
    for unit in range(len(schedule.units)):
        lengths = by_slice[unit % len(by_slice)]
        for chunk in range(len(schedule.placement)):
            for kind, cost in lengths.items():
                durations[kind, chunk, unit] = cost[chunk] * factor()
    for row in schedule.actions:  # drawn after the others, whose sample a recomputation must not change
        for chunk, unit in sorted(recomputed(row)):
            durations["R", chunk, unit] = costs.of_unit(unit).recompute[chunk] * factor()
    return durations
