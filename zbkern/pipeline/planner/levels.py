"""Levels of memory: the search is made anew within each, so that more memory is never worse.

What a search finds within a limit may be worse than what it finds within a smaller one: by chance, or because its rules
depend on the limit. So it is not made for the limit that is asked for, but for levels of memory that depend on the
problem alone, all those within the limit, with the same work for each; the answer is the best of all. Every answer for
less memory is then among those for more. A level needs no search once its lower bound is as high as the best that is
known, which mostly leaves a few.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import add
from typing import NamedTuple

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.annealing import extended, measured, with_cost
from zbkern.pipeline.planner.bounds import cost_bound
from zbkern.pipeline.planner.incumbents import Budget, Pool
from zbkern.pipeline.planner.portfolio import (
    SETTINGS,
    Candidate,
    Population,
    add_serial,
    construct,
    held_by_1f1b,
    memory_of_a_microbatch,
)
from zbkern.pipeline.planner.problem import Ordering, Problem, within
from zbkern.pipeline.planner.published import Published

logger = logging.getLogger("zbkern")

ROUNDING = 1e-9  # relative: a cost this near to a lower bound is no better than it
_PARTS = 16  # of what 1F1B holds: the distance of levels
_MOST = 3  # times what 1F1B holds: up to there the levels go

_SUMS = 20_000  # of activations and held tensors on a rank: with more, limits stay as they are

Limits = tuple[int, ...]  # one per rank
Known = tuple[Ordering, list[int]]  # orders with their cost, and the most that each rank holds


class Work(NamedTuple):
    """How much is done at a level, in passes: rules that are tried, and the first round of the search."""

    rules: int
    first_round: int


class Level:
    """The search for the best orders of a problem within one level of memory, which is the problem's limit.

    What it finds depends on the problem, the level and the seed alone. known: orders of the same problem, of which
    those that fit are starts.
    """

    def __init__(
        self,
        problem: Problem,
        known: Sequence[Known],
        keep: int,
        work: Work,
        budget: Budget,
        seed: int,
        published: Published,
    ) -> None:
        self.problem, self.pool = problem, Pool(problem, keep)
        self._known, self._work, self._budget = known, work, budget
        self._seed, self._published = seed, published
        self._candidates: list[Candidate] | None = None
        self._population: Population | None = None
        self._few: tuple[Problem, Population] | None = None

    @cached_property
    def bound(self) -> int:
        return cost_bound(self.problem)

    def construct(self) -> None:
        """The constructive answer: what is known, and the best of some rules."""
        if self._candidates is not None:
            return
        for orders, peaks in self._known:
            if within(peaks, self.problem.limit):
                self.pool.add_grouped(orders)
        self._candidates = construct(self.problem, self.pool, self._budget, self._work.rules)
        if not self.pool.orders:
            add_serial(self.problem, self.pool, self._budget)

    def round(self, number: int) -> None:
        """Of the rounds, each twice as long as the one before, the one of this number; all before it have run."""
        self.construct()
        self.pool.bound = self.bound
        if self.pool.optimal:
            return
        problem, pool, budget = self.problem, self.pool, self._budget
        passes = min(self._work.first_round, SETTINGS.most_runs * problem.passes) * 2**number
        base_seed = self._seed * 64 + number
        if self._population is None:
            self._begin()
        assert self._population is not None
        if self._few is not None:
            population = self._few[1]
            population.round(passes // 2, base_seed, budget, passes)
            if population.refined is not None:
                pool.add(population.refined.schedule(problem.microbatches))
            if population.pattern_search.best is not None:
                self._population.pattern_search.offer(population.pattern_search.best[1])
            for orders in population.pool.orders:
                for each in extended(problem, orders, problem.microbatches) if not any(orders.fused) else []:
                    if budget.left > 0:
                        pool.add(with_cost(problem, each))
        self._population.round(passes, base_seed, budget, passes if self._few is None else passes // 2)

    def _begin(self) -> None:
        problem, budget, patterns = self.problem, self._budget, self._work.first_round // 4
        assert self._candidates is not None
        few = _fewer(problem)
        if few is not None:
            best = Pool(few, 1, cost_bound(few))
            for orders in self._published.orders(few.placement, few.microbatches):
                found = measured(few, orders)
                if found is not None and within(found[1], few.limit):
                    best.add_grouped(found[0])
            candidates = construct(few, best, budget, self._work.rules)
            self._few = few, Population(few, candidates, best, budget, patterns)
        self._population = Population(problem, self._candidates, self.pool, budget, patterns)


def _fewer(problem: Problem) -> Problem | None:
    """The problem with fewer microbatches, where that is worth a search of its own; None elsewhere.

    Warm-up and cool-down are the hard part, and nearly the same for any number of microbatches.
    """
    small = min(problem.microbatches, 3 * problem.ranks)
    worth = problem.microbatches >= 4 * problem.ranks // 3 and small < problem.microbatches
    return problem.with_microbatches(small) if worth else None


class Ladder:
    """The levels of one problem within its limit, and what was found at all of them: `pool`.

    No published schedule that fits is better than the best of the pool, where there was time to make them all.
    """

    def __init__(
        self, problem: Problem, keep: int, work: Work, budget: Budget, seed: int, published: Published, bound: int = 0
    ) -> None:
        self.problem, self.pool = problem, Pool(problem, keep, bound)
        self.known: list[Known] = []
        self.levels: list[tuple[Level, bool]] = []
        self._sums = [_sums(problem, rank) for rank in range(problem.ranks)]
        self._work, self._budget, self._seed, self._published = work, budget, seed, published
        self._add_published(budget.part(0.5))

    @property
    def reached(self) -> float:
        """The objective, in the unit of the costs."""
        orders = self.pool.orders
        return orders[0].cost / self.problem.time_scale if orders else math.inf

    def limit_of(self, total: float) -> Limits:
        """A limit for what every rank holds, in the unit of the costs, as that of the problem."""
        return self.problem.limit_of([total] * self.problem.ranks)

    def known_within(self, limit: Limits) -> float:
        """The objective of the best published schedule that fits this limit."""
        costs = (orders.cost for orders, peaks in self.known if within(peaks, limit))
        return min(costs, default=math.inf) / self.problem.time_scale

    def add_level(self, limit: Limits, constructive: bool) -> None:
        """The next level, with less memory than the one before; none where no rank can hold less for it.

        constructive: it takes part in the constructive answer.
        """
        pairs = zip(self._sums, limit, strict=True)
        limit = tuple(sums[bisect_right(sums, most) - 1] if sums else most for sums, most in pairs)
        if self.levels and self.levels[-1][0].problem.limit == limit:
            level, before = self.levels[-1]
            self.levels[-1] = level, before or constructive
            return
        problem = self.problem.with_limit(limit)
        level = Level(problem, self.known, self.pool.keep, self._work, self._budget, self._seed, self._published)
        self.levels.append((level, constructive))

    def construct(self, best: Callable[[], float]) -> None:
        for level, constructive in self._worth_it(best):
            if self.pool.orders and not self._budget.left:
                break
            if constructive:
                level.construct()
                self._take(level)
        if not self.pool.orders:
            add_serial(self.problem, self.pool, self._budget)

    def open(self, best: float) -> bool:
        """Whether some level may have something better than this."""
        return any(True for _ in self._worth_it(lambda: best))

    def round(self, number: int, best: Callable[[], float]) -> None:
        for level, _ in self._worth_it(best):
            if not self._budget.left:
                break
            level.round(number)
            self._take(level)

    def _take(self, level: Level) -> None:
        for orders in level.pool.orders:
            self.pool.add_grouped(orders)

    def _worth_it(self, best: Callable[[], float]) -> Iterator[tuple[Level, bool]]:
        """The levels up to the first whose lower bound is no better than the best known: with less memory, none is."""
        for level, constructive in self.levels:
            if level.bound / self.problem.time_scale >= best() * (1 - ROUNDING):
                return
            yield level, constructive

    def _add_published(self, budget: Budget) -> None:
        """Adds every published schedule with this placement, as long as there is time for the next."""
        slowest, begin = 0.0, time.monotonic()
        for orders in self._published.orders(self.problem.placement, self.problem.microbatches):
            found = measured(self.problem, orders)
            if found is not None:
                self.known.append(found)
                if within(found[1], self.problem.limit):
                    self.pool.add_grouped(found[0])
            slowest = max(slowest, time.monotonic() - begin)
            if self.pool.orders and budget.left < 2 * slowest:
                break
            begin = time.monotonic()


def _sums(problem: Problem, rank: int) -> list[int]:
    """All that a rank may hold, ascending; empty where that is too much to list."""
    own_chunks = problem.chunks_of(rank)
    counts = Counter(size for chunk in own_chunks for size in {problem.activation[chunk], problem.held[chunk]} if size)
    if math.prod(problem.microbatches * count + 1 for count in counts.values()) > _SUMS:
        return []
    found = {0}
    for size, count in counts.items():
        found = {some + size * more for some in found for more in range(problem.microbatches * count + 1)}
    return sorted(found)


def least_work(problem: Problem) -> float:
    """The work of the busiest rank, below which no orders are, in the unit of the costs."""
    return max(map(problem.work, range(problem.ranks))) / problem.time_scale


def least_limit(problem: Problem) -> float:
    """The least limit that one microbatch fits, in the unit of the costs."""
    return max(map(add, memory_of_a_microbatch(problem), problem.static)) / problem.memory_scale


def search_ladders(ladders: Sequence[Ladder], budget: Budget, progress: Callable[[int, Ladder], None]) -> int:
    """The rounds of all ladders side by side; how many were completed. progress: is told the next and the best."""
    rounds = 0

    def best() -> float:
        return min(ladder.reached for ladder in ladders)

    while native.core is not None and budget.allows(rounds) and any(ladder.open(best()) for ladder in ladders):
        by_answer = sorted(ladders, key=lambda ladder: ladder.reached)
        progress(rounds, by_answer[0])
        for ladder in by_answer:
            ladder.round(rounds, best)
        rounds += budget.left > 0
    return rounds


def search(
    problem: Problem, keep: int, budget: Budget, seed: int, progress: Callable[[str], None] = lambda line: None
) -> tuple[Pool, int]:
    """The best orders that are found, and how many rounds were completed. keep: of how many costs. progress: see
    `plan`."""
    every = _constructive_every(problem)
    limits = _levels_within(problem)
    constructive = _MOST * _PARTS // every + 2
    work = Work(SETTINGS.trial_passes // constructive, SETTINGS.first_round)
    ladder = Ladder(problem, keep, work, budget, seed, Published(), cost_bound(problem))
    for part, limit in limits:
        ladder.add_level(limit, part % every == 0)
    ladder.construct(lambda: ladder.reached)

    def describe(rounds: int, best: Ladder) -> None:
        idle = 1 - least_work(problem) / best.reached if best.reached else 0.0
        progress(f"round {rounds + 1}: the busiest rank is idle for {idle:.2%}")

    rounds = search_ladders([ladder], budget, describe)
    progress("")
    if native.core is None and not ladder.pool.optimal:
        logger.warning(
            "plan: the compiled search is not here, so that this is only the best of the published and the constructed "
            "schedules; install a C++ compiler, then install zbkern again"
        )
    return ladder.pool, rounds


def _constructive_every(problem: Problem) -> int:
    """Rules are tried at every so many-th level: fewer where more passes are needed for all rules."""
    if native.core is None:
        return 8
    fewer = (every for every, passes in SETTINGS.levels if problem.passes * passes <= SETTINGS.trial_passes)
    return next(fewer, 8)


def _ladder(problem: Problem) -> list[tuple[int, Limits]]:
    """Levels of memory that depend on the model alone, the largest first: room beside what ranks hold all the time.

    A rank with more of that has so much less room, as within one limit for all. The least level is what one microbatch
    needs; then they are sixteenths of what 1F1B holds, up to three times that; the largest is all that there is to
    hold. With each the number of sixteenths, 0 for the first and the last.
    """
    needs = memory_of_a_microbatch(problem)
    unit, always = held_by_1f1b(problem), max(problem.static)
    unlimited = problem.microbatches * sum(map(max, problem.activation, problem.held))
    least = max(map(add, needs, problem.static)) - always
    rooms = {unit * part // _PARTS: part for part in range(1, _MOST * _PARTS + 1)}
    rooms = {room: part for room, part in rooms.items() if least < room < unlimited} | {least: 0, unlimited: 0}
    levels = []
    for room in sorted(rooms, reverse=True):
        level = (min(room + always - static, unlimited) for static in problem.static)
        levels.append((rooms[room], tuple(each + (each >> 31) for each in level)))  # activations are rounded
    return levels


def _levels_within(problem: Problem) -> list[tuple[int, Limits]]:
    """The levels of the ladder within the limit, largest first; before them the limit where ranks have several."""
    levels = [level for level in _ladder(problem) if within(level[1], problem.limit)]
    unlimited = problem.microbatches * sum(map(max, problem.activation, problem.held))
    given = max(map(add, problem.limit, problem.static))
    one = all(
        abs(min(given - static, unlimited) - limit) <= unlimited >> 28
        for static, limit in zip(problem.static, problem.limit, strict=True)
    )
    return levels if one and levels else [(0, problem.limit), *levels]
