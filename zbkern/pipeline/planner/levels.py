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

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.annealing import extended, measured
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
from zbkern.pipeline.planner.rounds import Work

logger = logging.getLogger("zbkern")

ROUNDING = 1e-9  # relative: a cost this near to a lower bound is no better than it
_PARTS = 16  # of what 1F1B holds: the distance of levels
_MOST = 3  # times what 1F1B holds: up to there the levels go

_MOST_ROUNDS = 64
_AHEAD = 3
"""From the second round on the best level goes first, and so many rounds: what it comes to leaves fewer others that may
come to something better. Not against a clock, so that no round is begun that others have not reached."""
_SUMS = 20_000  # of activations and held tensors on a rank: with more, limits stay as they are

Limits = tuple[int, ...]  # one per rank
Known = tuple[Ordering, list[int]]  # orders with their cost, and the most that each rank holds


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
        ruled: bool,
        most_rounds: int = _MOST_ROUNDS,
    ) -> None:
        self.problem, self.pool, self.ruled = problem, Pool(problem, keep), ruled
        self._most_rounds = most_rounds
        self._constructed = self.started = False
        self._rounds = 0
        self._gained = math.inf  # by the last round, relative
        self._known, self._work, self._budget = known, work, budget
        self._seed, self._published = seed, published
        self._candidates: list[Candidate] = []
        self._population: Population | None = None
        self._few: tuple[Problem, Population] | None = None

    @cached_property
    def bound(self) -> int:
        return cost_bound(self.problem)

    def construct(self) -> None:
        """The constructive answer: what is known, and the best of some rules."""
        if self._constructed:
            return
        for orders, peaks in self._known:
            if within(peaks, self.problem.limit):
                self.pool.add_grouped(orders)
        self._candidates = construct(self.problem, self.pool, self._budget, self._work.rules)
        if not self.pool.orders:
            add_serial(self.problem, self.pool, self._budget)
        self._constructed = True

    @property
    def least(self) -> float:
        """What the rounds that are left will not be below."""
        if not self.started:
            return self.bound
        least: float = self.pool.reached
        for number in range(self._rounds, min(self._budget.rounds, self._most_rounds)):
            least = self._least_after(number, least)
        return max(self.bound, least * (1 - ROUNDING))

    def _least_after(self, number: int, reached: float) -> float:
        """What the round of this number may come to from there: what it finds beyond that counts in the next one.

        So a level that is far behind can be left out although nobody knows what it would find.
        """
        before = self._gained if number == self._rounds else math.inf
        gain, share = self._work.most_gain(number, self.problem.passes, before)
        return max(reached * (1 - gain), self.bound + (reached - self.bound) * (1 - share))

    def start(self) -> None:
        """What the rounds begin with."""
        if self.started:
            return
        self.construct()
        self._candidates = sorted(self._candidates, key=lambda each: each.cost)[: 2 * SETTINGS.refined_rules]
        self.started = True

    def rounds(self, count: int) -> None:
        """Runs what is left of so many rounds, each twice as long as the one before."""
        for number in range(self._rounds, min(count, self._most_rounds)):
            before, self.pool.bound = self.pool.reached, self.bound
            self.pool.refuse_below(math.ceil(self._least_after(number, self.pool.reached)))
            if not self.pool.optimal:
                self._round(number)
            self._rounds += self._budget.left > 0
            self._gained = 1 - self.pool.reached / before if before else 0.0

    def _round(self, number: int) -> None:
        problem, pool, budget = self.problem, self.pool, self._budget
        passes = min(self._work.passes(number), SETTINGS.most_runs * problem.passes * 2**number)
        base_seed = self._seed * 64 + number
        if self._population is None:
            self._begin()
        assert self._population is not None
        if self._work.more_rules and number == self._work.ruled_round:
            self._population.offer(construct(problem, pool, budget, self._work.more_rules))
        if self._few is not None:
            population = self._few[1]
            population.round(passes // 2, base_seed, budget)
            if population.refined is not None:
                pool.add(population.refined.schedule(problem.microbatches))
            if population.pattern_search.best is not None:
                self._population.pattern_search.offer(population.pattern_search.best[1])
            for orders in population.pool.orders:
                if not any(orders.fused) and budget.left > 0:
                    pool.add(extended(problem, orders))
        self._population.round(passes, base_seed, budget)

    def _begin(self) -> None:
        problem, budget, patterns = self.problem, self._budget, self._work.rounds[0] // 8
        few = _fewer(problem, self._work.fewer)
        if few is not None:
            best = Pool(few, 1, cost_bound(few))
            for orders in self._published.orders(few.placement, few.microbatches):
                found = measured(few, orders)
                if found is not None and within(found[1], few.limit):
                    best.add_grouped(found[0])
            few_candidates = construct(few, best, budget, self._work.rules)
            self._few = few, Population(few, few_candidates, best, budget, patterns)
        self._population = Population(problem, self._candidates, self.pool, budget, patterns)


def _fewer(problem: Problem, times: float) -> Problem | None:
    """The problem with so many times fewer microbatches, where that is worth a search of its own; None elsewhere.

    Warm-up and cool-down are the hard part, and nearly the same for any number of microbatches.
    """
    small = min(problem.microbatches, 3 * problem.ranks)
    worth = problem.microbatches >= max(4 * problem.ranks // 3, times * small) and small < problem.microbatches
    return problem.with_microbatches(small) if worth else None


class Ladder:
    """The levels of one problem within its limit, and what was found at all of them: `pool`.

    No published schedule that fits is better than the best of the pool, where there was time to make them all.
    """

    def __init__(
        self,
        problem: Problem,
        keep: int,
        work: Work,
        budget: Budget,
        seed: int,
        published: Published,
        bound: int = 0,
    ) -> None:
        self.problem, self.pool = problem, Pool(problem, keep, bound)
        self.known: list[Known] = []
        self.levels: list[Level] = []
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

    def published_steps(self) -> Iterator[float]:
        """What a rank holds at most, in the unit of the costs, in the published schedules that nothing smaller beats.

        Those that do not fit the limit are left out.
        """
        problem = self.problem
        held = (
            (max(map(add, peaks, problem.static)), orders.cost)
            for orders, peaks in self.known
            if within(peaks, problem.limit)
        )
        least = math.inf
        for most, cost in sorted(held):
            if cost < least:
                least = cost
                yield most / problem.memory_scale

    def add_level(self, limit: Limits, ruled: bool, most_rounds: int = _MOST_ROUNDS) -> None:
        """The next level, with less memory than the one before. ruled: it takes part in the constructive answer.

        most_rounds: how many rounds it has at most.
        """
        problem = self.problem.with_limit(limit)
        keep, work, budget = self.pool.keep, self._work, self._budget
        level = Level(problem, self.known, keep, work, budget, self._seed, self._published, ruled, most_rounds)
        self.levels.append(level)

    def construct(self, best: Callable[[], float]) -> None:
        for level in self._worth_it(best, [level for level in self.levels if level.ruled]):
            if self.pool.orders and not self._budget.left:
                break
            level.construct()
            self._take(level)

    def open(self, best: float) -> bool:
        """Whether some level may come to something better than this."""
        return any(self._beats(level.least, lambda: best) for level in self._worth_it(lambda: best, self.levels))

    def advance_best(self, count: int, best: Callable[[], float]) -> None:
        """So many rounds of the level that has come to the best answer."""
        started = [level for level in self.levels if level.started]
        if started:
            level = min(started, key=lambda each: each.pool.reached)
            if self._beats(level.least, best):
                level.rounds(count)
                self._take(level)

    def rounds(self, count: int, best: Callable[[], float]) -> None:
        for level in self._worth_it(best, self.levels):
            if not self._budget.left:
                break
            level.start()
            if self._beats(level.least, best):
                level.rounds(count)
            self._take(level)

    def _take(self, level: Level) -> None:
        for orders in level.pool.orders:
            self.pool.add_grouped(orders)

    def _worth_it(self, best: Callable[[], float], levels: Sequence[Level]) -> Iterator[Level]:
        """Of these levels those before the first whose lower bound is no better than the best known: with less memory,
        none is.
        """
        for level in levels:
            if not self._beats(level.bound, best):
                return
            yield level

    def _beats(self, least: float, best: Callable[[], float]) -> bool:
        return least / self.problem.time_scale < best() * (1 - ROUNDING)

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
        if rounds and budget.left == math.inf:
            by_answer[0].advance_best(min(rounds + _AHEAD, budget.rounds), best)
        for ladder in by_answer:
            ladder.rounds(rounds + 1, best)
        rounds += budget.left > 0
    return rounds


def search(
    problem: Problem, keep: int, budget: Budget, seed: int, progress: Callable[[str], None] = lambda line: None
) -> tuple[Pool, int]:
    """The best orders that are found, and how many rounds were completed. keep: of how many costs. progress: see
    `plan`."""
    every = _ruled_every(problem)
    first_rounds = [SETTINGS.first_round // (4 if problem.passes > SETTINGS.large else 1)]
    work = Work(SETTINGS.trial_passes // (_MOST * _PARTS // every + 2), first_rounds)
    ladder = Ladder(problem, keep, work, budget, seed, Published(), cost_bound(problem))
    for limit, ruled in _levels_within(problem, every):
        ladder.add_level(limit, ruled)
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


def _ruled_every(problem: Problem) -> int:
    """Rules are tried at every so many-th level: fewer where more passes are needed for all rules."""
    if native.core is None:
        return 8
    fewer = (every for every, passes in SETTINGS.levels if problem.passes * passes <= SETTINGS.trial_passes)
    return next(fewer, 8)


def _ladder(problem: Problem, every: int) -> list[tuple[Limits, bool]]:
    """Levels of memory that depend on the model alone, the largest first, and where rules are tried.

    They are room beside what ranks hold all the time; a rank with more of that has so much less room, as within one
    limit for all. The least level is what one microbatch needs; then they are sixteenths of what 1F1B holds, up to
    three times that; the largest is all that there is to hold. Levels between which no rank can hold more are one.
    """
    needs = memory_of_a_microbatch(problem)
    unit, always = held_by_1f1b(problem), max(problem.static)
    unlimited = problem.microbatches * sum(map(max, problem.activation, problem.held))
    least = max(map(add, needs, problem.static)) - always
    parts = range(1, _MOST * _PARTS + 1)
    rooms = {unit * part // _PARTS: part % every == 0 for part in parts}
    rooms = {room: ruled for room, ruled in rooms.items() if least < room < unlimited} | {least: True, unlimited: True}
    sums = [_sums(problem, rank) for rank in range(problem.ranks)]
    levels: dict[Limits, bool] = {}
    for room in sorted(rooms, reverse=True):
        most = [min(room + always - static, unlimited) for static in problem.static]
        most = [each + (each >> 31) for each in most]  # activations are rounded
        level = tuple(own[bisect_right(own, each) - 1] if own else each for own, each in zip(sums, most, strict=True))
        levels[level] = levels.get(level, False) or rooms[room]
    return list(levels.items())


def _levels_within(problem: Problem, every: int) -> list[tuple[Limits, bool]]:
    """The levels of the ladder within the limit, largest first; before them the limit where ranks have several."""
    levels = [level for level in _ladder(problem, every) if within(level[0], problem.limit)]
    unlimited = problem.microbatches * sum(map(max, problem.activation, problem.held))
    given = max(map(add, problem.limit, problem.static))
    one = all(
        abs(min(given - static, unlimited) - limit) <= unlimited >> 28
        for static, limit in zip(problem.static, problem.limit, strict=True)
    )
    return levels if one and levels else [(problem.limit, True), *levels]
