"""Where a schedule offloads and recomputes activations so that it fits in less memory, with the least time.

The order of the passes stays, and what runs beside each other. Each rank's row is gone through once with the times of
a simulation: where what runs next would exceed the limit, what is needed latest and costs least time is given up, and
brought back ahead of its use as soon as there is room. A recomputation runs in turn, or beside the passes before it,
which hide its collectives. How early, how and in which preference is tried in several ways, and the simulator tells
which is fastest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.costs.memory import Memory, limits_of
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import Action, Ranges, ScheduleError
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount

_ROUNDING = 1e-9  # relative, of a limit
_LEADS = (1.0, 2.0)  # how many copies before its use something is loaded; either alone: up to 1.4% slower on average
_ROUNDS = 2  # of placing actions by the times that the last placing gave; one: 0.5% slower on average
_MOST_BESIDE = 3  # passes that a recomputation makes a group of
MORE_MEMORY = (1.0, 1.5, 2.0, None)  # times the limit, in which orders are searched; None for no limit

_Times = dict[Action, tuple[float, float]]


def fit(
    schedule: Schedule,
    costs: Costs,
    memory_limit: float | Sequence[float],
    *,
    offload: bool = True,
    recompute: bool = False,
    objective: str = "cost",
    fully_shard: bool = False,
) -> Timeline:
    """The fastest simulation of this order of passes that holds at most `memory_limit` on every rank.

    memory_limit: one number, or one per rank, in the unit of `costs.activation`. offload, recompute: what may be added.
    objective: "cost" or "makespan". fully_shard: as in `PlanOptions`. A schedule that fits as it is comes
    back as it is. Raises ScheduleError where nothing makes it fit, ValueError where the costs lack what is to be added.
    """
    limits = limits_of("fit", memory_limit, schedule.ranks)
    assert limits is not None
    plain = simulate(schedule, costs)
    if _fits(plain, limits):
        return plain
    flat = flat_costs(costs, schedule)
    best: Timeline | None = None
    simulated: dict[tuple[Any, ...], Timeline] = {}  # half of the placings are as one before
    for preference in _preferences(offload, recompute, flat.has_network, fully_shard):
        timeline = plain
        for _ in range(_ROUNDS):
            found = _place(schedule, flat, limits, timeline, preference)
            if found is None:
                break
            key = found.actions, found.beside
            if key not in simulated:
                simulated[key] = simulate(found, costs)
            timeline = simulated[key]
            if _fits(timeline, limits) and (
                best is None or getattr(timeline, objective) < getattr(best, objective) * (1 - _ROUNDING)
            ):
                best = timeline
    if best is None:
        added = " or ".join(name for name, wanted in (("offload", offload), ("recompute", recompute)) if wanted)
        raise ScheduleError(
            f"fit: no {added} makes {schedule.name} fit memory_limit={amount(min(limits), costs.memory_unit)}, where "
            f"it holds {amount(max(plain.peak_memory), costs.memory_unit)}; raise the limit, or take another order"
        )
    return best


def variants(schedule: Schedule, costs: Costs) -> Iterator[Timeline]:
    """The schedule's timeline, and that of the same order with every B and its W as one BW: it holds nothing for W.

    Then both with the passes that run beside each other in turn, which hold less at once.
    """
    orders = [schedule]
    if any(action.kind == "B" for row in schedule.actions for action in row):
        orders.append(_fused(schedule))
    in_turn = [replace(each, beside=()) for each in orders if each.beside]
    for each in (*orders, *in_turn):
        yield simulate(each, costs)


def _fused(schedule: Schedule) -> Schedule:
    rows, beside = [], []
    for rank, row in enumerate(schedule.actions):
        kept = [place for place, action in enumerate(row) if action.kind != "W"]
        rows.append(
            tuple(action._replace(kind="BW") if action.kind == "B" else action for action in map(row.__getitem__, kept))
        )
        ranges = [(bisect_left(kept, first), bisect_left(kept, end)) for first, end in schedule.beside_of(rank)]
        beside.append(tuple((first, end) for first, end in ranges if end - first > 1))
    return replace(schedule, actions=tuple(rows), beside=tuple(beside) if any(beside) else ())


@dataclass(frozen=True)
class _Preference:
    """How a row is gone through. lead: how many copies ahead something is loaded; oldest: of equals, what has been held
    for the longest time is given up, and not what is needed latest (either alone: 2.4% slower on average); joins: what
    is recomputed runs beside the passes before it, where it may, but apart from those of its chunk if `apart`."""

    offload: bool
    recompute: bool
    lead: float
    oldest: bool
    joins: bool
    apart: bool


def _preferences(offload: bool, recompute: bool, has_network: bool, apart: bool) -> Iterator[_Preference]:
    kinds = [(offload, False), (False, recompute), (offload, recompute)]
    for kind in dict.fromkeys(kind for kind in kinds if any(kind)):
        leads, joins = _LEADS if kind[0] else _LEADS[:1], (False, True) if kind[1] and has_network else (False,)
        for lead, oldest, join in product(leads, (False, True), joins):
            yield _Preference(*kind, lead, oldest, join, apart)


@dataclass(eq=False)
class _Held:
    """What a microbatch holds in a row from `begin` to `end`, places in it: activations, or what its W needs.

    kept: what stays when it is recomputed; inf where it cannot be.
    """

    chunk: int
    unit: int
    begin: int
    end: int
    size: float
    kept: float
    given_up: bool = False


def _place(
    schedule: Schedule, flat: FlatCosts, limits: Sequence[float], timeline: Timeline, preference: _Preference
) -> Schedule | None:
    costs = flat.given
    if preference.recompute and costs.checkpoint is None:
        raise ValueError("fit: recompute needs Costs.checkpoint, the memory a microbatch holds between an F and its R")
    if preference.offload and (costs.offload_bandwidth is None or costs.reload_bandwidth is None):
        raise ValueError("fit: offload needs Costs.offload_bandwidth and Costs.reload_bandwidth")
    rows, beside = [], []
    for rank, static in enumerate(flat.static):
        times = {event.action: (event.start, event.end) for event in timeline.events[rank]}
        groups = schedule.beside_of(rank)
        row = _Row(schedule.actions[rank], groups, flat, limits[rank] - static, times, preference)
        if not row.place():
            return None
        rows.append(tuple(row.found))
        beside.append(tuple((first, end) for first, end in row.groups if end - first > 1))
    # simulate validates it
    return replace(
        schedule,
        actions=tuple(rows),
        beside=tuple(beside) if any(beside) else (),
        name=f"{schedule.name}-saving",
    )


class _Row:
    """One rank's row, gone through from its first action to its last, those beside each other at once.

    found: the row with what makes it fit. groups: of what has run, each with those beside it, where it is in that row.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        beside: Ranges,
        flat: FlatCosts,
        limit: float,
        times: _Times,
        preference: _Preference,
    ) -> None:
        self._actions, self._beside, self._flat, self._preference = actions, dict(beside), flat, preference
        self._limit = limit * (1 + _ROUNDING)
        self._times = [times[action] for action in actions]
        costs = flat.given
        self._out, self._back = costs.offload_bandwidth or 0.0, costs.reload_bandwidth or 0.0
        self._slow = 1.0 + costs.copy_slowdown
        self._begun, self._ended = _spans(actions, flat)
        self._changes = list(_changes(actions, flat))
        self._first = self._end = 0  # what runs next
        self._now = 0.0  # memory
        self._most = 0.0  # memory, within the last group
        self._lane_out = 0.0  # until when copies to the host run
        self._here: dict[_Held, None] = {}
        self._away: list[_Held] = []
        self._recomputed: set[_Held] = set()
        self.found: list[Action] = []
        self.groups: list[tuple[int, int]] = []

    def place(self) -> bool:
        """Whether anything makes the row fit."""
        while self._end < len(self._actions):
            self._first = self._end
            self._end = self._beside.get(self._first, self._first + 1)
            places = range(self._first, self._end)
            if not self._bring_back([self._ended[place] for place in places if place in self._ended]):
                return False
            streams = self._streams()
            # of passes beside each other it is not known which one ends first
            takes = (
                sum(max(0.0, self._changes[place]) for place in places)
                if len(places) > 1
                else self._changes[self._first]
            )
            if not streams and not self._free_memory(takes):
                return False
            self._most = self._now + max(0.0, takes)
            self.groups.append((len(self.found), len(self.found) + len(places)))
            for place in places:
                self.found.append(self._actions[place])
                self._now += self._changes[place]
                if place in self._ended:
                    self._here.pop(self._ended[place], None)
                if place in self._begun:
                    self._here[self._begun[place]] = None
            if streams:
                self._give_up(self._begun[self._first], copied=True)
        return True

    def _streams(self) -> bool:
        """Whether an F comes next that is offloaded while it runs, for which there is room then."""
        kind, chunk, unit = self._actions[self._first]
        costs = self._flat.of_unit(unit)
        activation, streamed = costs.activation[chunk], costs.streamed[chunk]
        alone = self._end - self._first == 1
        if kind != "F" or not alone or not self._preference.offload or streamed == activation:
            return False
        change = self._changes[self._first]
        if self._free_memory(change) or not self._free_memory(change - activation + streamed):
            return False
        start, end = self._times[self._first]
        begin = start + (end - start) * streamed / activation / 2
        copied = activation / self._out
        self._lane_out = max(max(begin, self._lane_out) + copied, end)
        return True

    def _bring_back(self, needed: Sequence[_Held]) -> bool:
        """What comes next needs these; what can come early, too: loads and recomputations before it."""
        for held in [each for each in needed if each in self._recomputed]:
            self._recomputed.discard(held)
            again, more = Action("R", held.chunk, held.unit), held.size - held.kept
            if self._joins(again, more):
                first, end = self.groups[-1]
                self.groups[-1] = first, end + 1
                self._most += more
            elif self._free_memory(more):
                self._most = self._now + more
                self.groups.append((len(self.found), len(self.found) + 1))
            else:
                return False
            self.found.append(again)
            self._now += more
        now = self._times[self._first][0]
        for held in sorted(self._away, key=lambda held: held.end):
            must = held in needed
            early = self._times[held.end][0] - now <= self._preference.lead * held.size / self._back * self._slow
            if not (must or (early and not self._within_merged(self._first))):
                continue
            if not self._free_memory(held.size, None if must else held):
                if must:
                    return False
                continue
            self._away.remove(held)
            self.found.append(Action("L", held.chunk, held.unit))
            self._now += held.size
            self._here[held] = None
        return True

    def _joins(self, again: Action, more: float) -> bool:
        """Whether this R can run beside the passes before it, and is to. more: the memory that it takes."""
        first, end = self.groups[-1] if self.groups else (0, 0)
        if not self._preference.joins or end != len(self.found) or not 0 < end - first < _MOST_BESIDE:
            return False
        own = [action for action in self.found[first:end] if action.chunk == again.chunk]
        excluded = ("F", "R", "B", "BW") if self._preference.apart else ("F", "R")
        if any(action.unit == again.unit or action.kind in excluded for action in own):
            return False
        return max(self._most, self._now) + more <= self._limit

    def _within_merged(self, place: int) -> bool:
        """Whether a copy before this action would part two W of one chunk, which run as one."""
        if place == 0:
            return False
        before, action = self._actions[place - 1], self._actions[place]
        return before.kind == action.kind == "W" and before.chunk == action.chunk

    def _free_memory(self, size: float, early: _Held | None = None) -> bool:
        """Gives up what it must so that `size` more fits now. early: it is loaded ahead of its use, and only what costs
        no time and is needed later is given up for it."""
        chosen: list[tuple[_Held, bool]] = []
        free, lane = self._limit - self._now, self._lane_out
        while size > free:
            best = self._cheapest(lane, [held for held, _ in chosen])
            if best is None or (early is not None and (best[0] > 0 or best[3].end <= early.end)):
                return False
            _, _, copied, held, ends = best
            chosen.append((held, copied))
            free += held.size if copied else held.size - held.kept
            lane = ends
        for held, copied in chosen:
            self._give_up(held, copied)
        self._lane_out = lane
        return True

    def _give_up(self, held: _Held, copied: bool) -> None:
        held.given_up = True
        del self._here[held]
        if copied:
            self.found.append(Action("O", held.chunk, held.unit))
            self._away.append(held)
            self._now -= held.size
        else:
            self._recomputed.add(held)
            self._now -= held.size - held.kept

    def _cheapest(self, lane: float, taken: Sequence[_Held]) -> tuple[float, float, bool, _Held, float] | None:
        """What costs the least time to give up: the time, a preference, whether it is copied, what, and when the lane
        of copies is free then."""
        now, options = self._times[self._first][0], []
        for held in self._here:
            if held.given_up or held in taken or held.end < self._end:
                continue
            if self._within_merged(held.end) and self._flat.of_unit(held.unit).merge_saving[held.chunk] > 0:
                continue
            prefers = self._times[held.begin][1] if self._preference.oldest else -self._times[held.end][0]
            if self._preference.offload:
                ends = max(self._times[held.begin][1], lane) + held.size / self._out
                waits = max(0.0, ends - now)
                hurry = held.size / self._back - (self._times[held.end][0] - max(now, ends))
                options.append((waits + max(0.0, hurry), prefers, True, held, ends))
            if self._preference.recompute and held.kept < held.size:
                before = self._times[held.end - 1][1] if held.end else 0.0
                idle = self._times[held.end][0] - before
                waits = max(0.0, self._flat.of_unit(held.unit).recompute[held.chunk] - idle)
                options.append((waits, prefers, False, held, lane))
        return min(options, key=lambda option: option[:2], default=None)


def _changes(actions: Sequence[Action], costs: FlatCosts) -> Iterator[float]:
    """The memory that every action takes, or frees."""
    memory = Memory(costs)
    for action in actions:
        before = memory.now
        memory.account(action)
        yield memory.now - before


def _spans(actions: Sequence[Action], costs: FlatCosts) -> tuple[dict[int, _Held], dict[int, _Held]]:
    """What is held in a row, by the place of the action that it begins with, and of the action that needs it."""
    begun: dict[int, _Held] = {}
    ended: dict[int, _Held] = {}
    held: dict[tuple[int, int], _Held] = {}
    for index, (kind, chunk, unit) in enumerate(actions):
        key, flat = (chunk, unit), costs.of_unit(unit)
        if kind in ("B", "BW", "W") and key in held:
            held[key].end = index
            ended[index] = held.pop(key)
        if kind == "F":
            kept = math.inf if flat.checkpoint is None else min(flat.checkpoint[chunk], flat.activation[chunk])
            begun[index] = held[key] = _Held(chunk, unit, index, index, flat.activation[chunk], kept)
        elif kind == "B":
            begun[index] = held[key] = _Held(chunk, unit, index, index, flat.held[chunk], math.inf)
    return begun, ended


def _fits(timeline: Timeline, limits: Sequence[float]) -> bool:
    return all(peak <= limit * (1 + 2 * _ROUNDING) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
