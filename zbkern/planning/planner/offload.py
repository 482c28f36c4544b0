"""Where a schedule offloads and recomputes activations so that it fits in less memory, with the least time.

The order of the passes stays. Each rank's row is gone through once with the times of a simulation: where the next pass
would exceed the limit, what is needed latest and costs least time is given up, and brought back ahead of its use as
soon as there is room. How early and in which preference is tried in several ways, and the simulator tells which is
fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.costs.memory import Memory, limits_of
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import Action, ScheduleError
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount

_ROUNDING = 1e-9  # relative, of a limit
_LEADS = (1.0, 2.0)  # how many copies before its use something is loaded; either alone: up to 1.4% slower on average
_ROUNDS = 2  # of placing actions by the times that the last placing gave; one: 0.5% slower on average
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
) -> Timeline:
    """The fastest simulation of this order of passes that holds at most `memory_limit` on every rank.

    memory_limit: one number, or one per rank, in the unit of `costs.activation`. offload, recompute: what may be added.
    objective: "cost" or "makespan". A schedule that fits as it is comes back as it is. Raises ScheduleError where
    nothing makes it fit, ValueError where the costs lack what is to be added.
    """
    limits = limits_of("fit", memory_limit, schedule.ranks)
    assert limits is not None
    plain = simulate(schedule, costs)
    if _fits(plain, limits):
        return plain
    flat = flat_costs(costs, schedule)
    best: Timeline | None = None
    for preference in _preferences(offload, recompute):
        timeline = plain
        for _ in range(_ROUNDS):
            found = _place(schedule, flat, limits, timeline, preference)
            if found is None:
                break
            timeline = simulate(found, costs)
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


def with_fused(schedule: Schedule, costs: Costs) -> Iterator[Timeline]:
    """The schedule's timeline, and that of the same order with every B and its W as one BW: it holds nothing for W."""
    yield simulate(schedule, costs)
    if any(action.kind == "B" for row in schedule.actions for action in row):
        rows = (
            tuple(action._replace(kind="BW") if action.kind == "B" else action for action in row if action.kind != "W")
            for row in schedule.actions
        )
        yield simulate(replace(schedule, actions=tuple(rows), beside=()), costs)


@dataclass(frozen=True)
class _Preference:
    """How a row is gone through. lead: how many copies ahead something is loaded; oldest: of equals, what has been held
    for the longest time is given up, and not what is needed latest (either alone: 2.4% slower on average)."""

    offload: bool
    recompute: bool
    lead: float
    oldest: bool


def _preferences(offload: bool, recompute: bool) -> Iterator[_Preference]:
    kinds = [(offload, False), (False, recompute), (offload, recompute)]
    for kind in dict.fromkeys(kind for kind in kinds if any(kind)):
        for lead, oldest in product(_LEADS if kind[0] else _LEADS[:1], (False, True)):
            yield _Preference(*kind, lead, oldest)


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
    rows = []
    for rank, static in enumerate(flat.static):
        times = {event.action: (event.start, event.end) for event in timeline.events[rank]}
        row = _Row(schedule.actions[rank], flat, limits[rank] - static, times, preference).placed()
        if row is None:
            return None
        rows.append(tuple(row))
    # one pass after the other; simulate validates it
    return replace(schedule, actions=tuple(rows), beside=(), name=f"{schedule.name}-saving")


class _Row:
    """One rank's row, gone through from its first action to its last."""

    def __init__(
        self,
        actions: Sequence[Action],
        flat: FlatCosts,
        limit: float,
        times: _Times,
        preference: _Preference,
    ) -> None:
        self._actions, self._flat, self._preference = actions, flat, preference
        self._limit = limit * (1 + _ROUNDING)
        self._times = [times[action] for action in actions]
        costs = flat.given
        self._out, self._back = costs.offload_bandwidth or 0.0, costs.reload_bandwidth or 0.0
        self._slow = 1.0 + costs.copy_slowdown
        self._begun, self._ended = _spans(actions, flat)
        self._changes = list(_changes(actions, flat))
        self._now = 0.0  # memory
        self._lane_out = 0.0  # until when copies to the host run
        self._here: dict[_Held, None] = {}
        self._away: list[_Held] = []
        self._recomputed: set[_Held] = set()
        self._found: list[Action] = []

    def placed(self) -> list[Action] | None:
        """The row with what makes it fit; None where nothing does."""
        for index, action in enumerate(self._actions):
            ending = self._ended.get(index)
            if not self._bring_back(index, ending):
                return None
            streams = self._streams(index, ending)
            if not streams and not self._free_memory(index, self._changes[index], ending):
                return None
            self._found.append(action)
            self._now += self._changes[index]
            if ending is not None:
                self._here.pop(ending, None)
            if index in self._begun:
                self._here[self._begun[index]] = None
            if streams:
                self._give_up(self._begun[index], copied=True)
        return self._found

    def _streams(self, index: int, ending: _Held | None) -> bool:
        """Whether the action is an F that is offloaded while it runs, for which there is room then."""
        kind, chunk, unit = self._actions[index]
        costs = self._flat.of_unit(unit)
        activation, streamed = costs.activation[chunk], costs.streamed[chunk]
        if kind != "F" or not self._preference.offload or streamed == activation:
            return False
        if self._free_memory(index, self._changes[index], ending):
            return False
        if not self._free_memory(index, self._changes[index] - activation + streamed, ending):
            return False
        start, end = self._times[index]
        begin = start + (end - start) * streamed / activation / 2
        copied = activation / self._out
        self._lane_out = max(max(begin, self._lane_out) + copied, end)
        return True

    def _bring_back(self, index: int, ending: _Held | None) -> bool:
        """What this action needs, and what can come early: loads and recomputations before the action."""
        if ending is not None and ending in self._recomputed:
            self._recomputed.discard(ending)
            if not self._free_memory(index, ending.size - ending.kept, ending):
                return False
            self._found.append(Action("R", ending.chunk, ending.unit))
            self._now += ending.size - ending.kept
        now = self._times[index][0]
        for held in sorted(self._away, key=lambda held: held.end):
            must = held is ending
            early = self._times[held.end][0] - now <= self._preference.lead * held.size / self._back * self._slow
            if not (must or (early and not self._within_merged(index))):
                continue
            if not self._free_memory(index, held.size, ending if must else held, free_only=not must):
                if must:
                    return False
                continue
            self._away.remove(held)
            self._found.append(Action("L", held.chunk, held.unit))
            self._now += held.size
            self._here[held] = None
        return True

    def _within_merged(self, index: int) -> bool:
        """Whether a copy before this action would part two W of one chunk, which run as one."""
        if index == 0:
            return False
        before, action = self._actions[index - 1], self._actions[index]
        return before.kind == action.kind == "W" and before.chunk == action.chunk

    def _free_memory(self, index: int, size: float, spared: _Held | None, free_only: bool = False) -> bool:
        """Gives up what it must so that `size` more fits before this action; free_only: only what costs no time."""
        chosen: list[tuple[_Held, bool]] = []
        free, lane = self._limit - self._now, self._lane_out
        while size > free:
            best = self._cheapest(index, spared, lane, [held for held, _ in chosen])
            if best is None or (free_only and (best[0] > 0 or (spared is not None and best[3].end <= spared.end))):
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
            self._found.append(Action("O", held.chunk, held.unit))
            self._away.append(held)
            self._now -= held.size
        else:
            self._recomputed.add(held)
            self._now -= held.size - held.kept

    def _cheapest(
        self, index: int, spared: _Held | None, lane: float, taken: Sequence[_Held]
    ) -> tuple[float, float, bool, _Held, float] | None:
        """What costs the least time to give up: the time, a preference, whether it is copied, what, and when the lane
        of copies is free then."""
        now, options = self._times[index][0], []
        for held in self._here:
            if held is spared or held.given_up or held in taken or held.end <= index:
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
