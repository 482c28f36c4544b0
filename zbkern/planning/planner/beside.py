"""Orders in which passes run beside each other, by list scheduling: what a rank is ready for runs together.

A rank that is free takes a B and an F whose inputs have arrived, and lets W fill what is left of their network time.
What it waits for, how many passes run together, and how many microbatches are begun are settings; all are tried, and
simulation chooses. Passes of a group take turns (`simulation/turns.py`), so that a group takes the longer of what it
computes and communicates, and little more.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from typing import NamedTuple

from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.costs.memory import ROUNDING, exceeds
from zbkern.planning.planner.published import generators_of
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.planning.simulation.turns import Parts, in_turns
from zbkern.schedules.actions import Action
from zbkern.schedules.schedule import Schedule


class Setting(NamedTuple):
    """How a rank chooses what to run.

    most: passes of a group. waits: for a partner of a pass that is ready, as a share of the time of an F. begun:
    microbatches that are begun and not through their last B, as a share of the ranks. alike: whether two F, or two B,
    of different chunks run together. fused: whether a backward beside an F is a BW.
    """

    fused: bool
    alike: bool
    begun: float
    waits: float
    most: int


_SETTINGS = [Setting(*each) for each in product((False, True), (False, True), (3.0, 1.5), (0.8, 0.4, 0.0), (2, 3))]
_WORK = 300_000  # passes in all that are tried: some seconds
_SIMULATED = 3  # of the fastest

_turns = lru_cache(maxsize=4096)(in_turns)


def best_beside(
    flat: FlatCosts, microbatches: int, limits: Sequence[float] | None, objective: str, apart: bool = False
) -> Iterator[Timeline]:
    """The fastest orders with passes beside each other that fit, the published ones of this placement among them.

    limits: the memory of every rank. apart: no two F or B of one chunk are beside each other. For whole sequences.
    """
    tried = max(1, _WORK // (3 * microbatches * len(flat.placement)))
    found = []
    for setting in islice(_SETTINGS, tried):
        lists = _ListScheduler(flat, microbatches, limits, setting, apart)
        schedule = lists.schedule()
        if schedule is not None and schedule.beside:
            found.append((lists.reached(objective), schedule))
    found.sort(key=lambda each: each[0])
    made = [make(len(flat.static), microbatches) for make in generators_of(flat.placement)]
    for schedule in (*(each for each in made if each.beside), *(each for _, each in found[:_SIMULATED])):
        timeline = simulate(schedule, flat.given)
        if limits is None or not any(map(exceeds, timeline.peak_memory, limits)):
            yield timeline


def _is_of_one_chunk(pair: Sequence[Action]) -> bool:
    return pair[0].chunk == pair[1].chunk


class _Rank:
    """What a rank has run, and what it is ready for."""

    def __init__(self, limit: float) -> None:
        self.first = math.inf  # when it began
        self.free, self.memory, self.limit = 0.0, 0.0, limit
        self.row: list[Action] = []
        self.beside: list[tuple[int, int]] = []
        self.forwards: dict[int, deque[tuple[int, float]]] = {}  # of a chunk: (microbatch, when its input is there)
        self.backwards: dict[int, deque[tuple[int, float]]] = {}
        self.weights: deque[Action] = deque()


class _ListScheduler:
    """Runs all ranks in the order of time, each as far as it gets."""

    def __init__(
        self, flat: FlatCosts, microbatches: int, limits: Sequence[float] | None, setting: Setting, apart: bool
    ) -> None:
        self._costs, self._microbatches, self._setting = flat.of_unit(0), microbatches, setting
        self._placement, self._apart = flat.placement, apart
        self._last = len(self._placement) - 1
        count = len(flat.static)
        limits = [math.inf] * count if limits is None else limits
        self._ranks = [_Rank(limit - static) for limit, static in zip(limits, flat.static, strict=True)]
        for chunk, rank in enumerate(self._placement):
            self._ranks[rank].forwards[chunk] = deque()
            self._ranks[rank].backwards[chunk] = deque()
        self._ranks[self._placement[0]].forwards[0].extend((number, 0.0) for number in range(microbatches))
        self._begun = round(setting.begun * count)
        self._ahead = 0
        costs = self._costs
        self._parts = {
            (kind, chunk): Parts.of(Action(kind, chunk, 0), flat, cost[chunk])
            for kind, cost in {"F": costs.forward, "B": costs.backward, "W": costs.weight, "BW": costs.fused}.items()
            for chunk in range(self._last + 1)
        }

    def reached(self, objective: str) -> float:
        return max(each.free - (each.first if objective == "cost" else 0.0) for each in self._ranks)

    def schedule(self) -> Schedule | None:
        """None where memory does not suffice."""
        events = [(0.0, rank) for rank in range(len(self._ranks))]
        heapq.heapify(events)
        self._left = 3 * self._microbatches * (self._last + 1)
        while events:
            now, rank = heapq.heappop(events)
            each = self._ranks[rank]
            if now < each.free:
                continue
            group = self._choose(each, now)
            if not group:
                continue
            self._left -= len(group)
            self._run(each, group, now)
            for time, other in self._news:
                heapq.heappush(events, (time, other))
            heapq.heappush(events, (each.free, rank))
        if self._left:
            return None
        rows = tuple(tuple(each.row) for each in self._ranks)
        beside = tuple(tuple(each.beside) for each in self._ranks)
        return Schedule(rows, self._placement, self._microbatches, "plan-beside", beside=beside if any(beside) else ())

    def _choose(self, rank: _Rank, now: float) -> list[Action]:
        """What runs next from now on; nothing where it is better to wait."""
        costs, setting = self._costs, self._setting
        backwards = [Action("B", c, q[0][0]) for c, q in rank.backwards.items() if q and q[0][1] <= now]
        forwards = []
        memory, short = rank.memory, False
        for chunk in sorted(rank.forwards, reverse=True):
            queue = rank.forwards[chunk]
            if not queue or queue[0][1] > now:
                continue
            if chunk == 0 and self._ahead >= self._begun:
                continue
            reserve = sum(costs.activation[c] for c in rank.forwards if c > chunk)
            if memory + costs.activation[chunk] + reserve > rank.limit * (1 + ROUNDING):
                short = True
                continue
            forwards.append(Action("F", chunk, queue[0][0]))
            memory += costs.activation[chunk]
        backwards.sort(key=lambda each: (each.microbatch, -each.chunk))
        if not backwards and not forwards:
            return self._weight_alone(rank, now, short)
        if setting.waits and not (backwards and forwards):
            queues = rank.forwards if backwards else rank.backwards
            # the first chunk's inputs are there: what keeps them is memory
            soon = min((q[0][1] for q in queues.values() if q and q[0][1] > now), default=math.inf)
            if soon <= now + setting.waits * costs.forward[0]:
                return self._weight_alone(rank, now, False)
        if setting.fused and forwards:
            backwards = [each._replace(kind="BW") for each in backwards]
        pairs = [(f, b) for f, b in product(forwards, backwards) if not self._apart or f.chunk != b.chunk]
        group = [*min(pairs, key=_is_of_one_chunk, default=(backwards + forwards)[:1])]
        if setting.alike:
            for each in backwards + forwards:
                fits = not self._apart or all(each.chunk != other.chunk for other in group)
                if len(group) < setting.most and fits and each not in group:
                    group.append(each)
        network = sum(self._parts[each.kind, each.chunk].network for each in group)
        for action in list(rank.weights)[: setting.most - len(group)] if network else ():
            group.append(action)
        return group

    def _weight_alone(self, rank: _Rank, now: float, short: bool) -> list[Action]:
        """A W, if it is over before the next input comes, or most of it."""
        if not rank.weights:
            return []
        nexts = [q[0][1] for queues in (rank.forwards, rank.backwards) for q in queues.values() if q]
        coming = min((time for time in nexts if time > now), default=math.inf)
        weight = rank.weights[0]
        if short or now + 0.5 * self._costs.weight[weight.chunk] <= coming:
            return [weight]
        return []

    def _run(self, rank: _Rank, group: list[Action], now: float) -> None:
        if len(group) > 1:
            rank.beside.append((len(rank.row), len(rank.row) + len(group)))
        rank.row += group
        rank.first = min(rank.first, now)
        times = _turns(tuple(self._parts[each.kind, each.chunk] for each in group), 0.0)
        self._news: list[tuple[float, int]] = []
        costs, placement = self._costs, self._placement
        rank.free = now + max(end for _, end in times)
        for action, (_, end) in zip(group, times, strict=True):
            kind, chunk, number = action
            end += now
            if kind == "F":
                rank.forwards[chunk].popleft()
                rank.memory += costs.activation[chunk]
                self._ahead += chunk == 0
                if chunk == self._last:
                    self._arrives("B", chunk, number, rank.free)
                else:
                    self._arrives("F", chunk + 1, number, end + self._travel(chunk))
            elif kind in ("B", "BW"):
                rank.backwards[chunk].popleft()
                rank.memory -= costs.activation[chunk]
                if kind == "B":
                    rank.memory += costs.held[chunk]
                    rank.weights.append(Action("W", chunk, number))
                else:
                    self._left -= 1
                if chunk:
                    self._arrives("B", chunk - 1, number, end + self._travel(chunk - 1))
                else:
                    self._ahead -= 1
                    self._news.append((end, placement[0]))
            else:
                rank.weights.remove(action)
                rank.memory -= costs.held[chunk]

    def _travel(self, edge: int) -> float:
        return self._costs.communication[edge] if self._placement[edge] != self._placement[edge + 1] else 0.0

    def _arrives(self, kind: str, chunk: int, number: int, time: float) -> None:
        rank = self._placement[chunk]
        queues = self._ranks[rank].forwards if kind == "F" else self._ranks[rank].backwards
        queues[chunk].append((number, time))
        self._news.append((time, rank))
