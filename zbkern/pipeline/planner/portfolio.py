"""Which searches run, in which order and for how long: constructive answers first, then annealing from the best."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import add
from typing import NamedTuple

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.annealing import anneal, extended, with_cost
from zbkern.pipeline.planner.block_search import search_blocks
from zbkern.pipeline.planner.bounds import cost_bound, warm_up_forwards
from zbkern.pipeline.planner.incumbents import Budget, Pool
from zbkern.pipeline.planner.list_scheduler import Rule, count_rules, list_schedule, refine, rules
from zbkern.pipeline.planner.pattern_search import Pattern, is_v, search_patterns, zb_v_patterns
from zbkern.pipeline.planner.problem import Ordering, Problem, fits, serial_ordering
from zbkern.pipeline.planner.published import Published
from zbkern.pipeline.planner.settings import SearchSettings

logger = logging.getLogger("zbkern")

SETTINGS = SearchSettings()


class Search:
    """The search for the best orders of one problem: a constructive answer, then rounds, each twice as long.

    No published schedule that fits is better than the first of the pool, where there was time to make them all.
    """

    def __init__(
        self, problem: Problem, pool: Pool, budget: Budget, seed: int, published: Published, most: int | None = None
    ) -> None:
        self.problem, self.pool, self.rounds = problem, pool, 0
        self._budget, self._seed, self._published = budget, seed, published
        add_published(problem, pool, budget.part(0.5), published)
        self._candidates = construct(problem, pool, budget.part(0.5), most)
        self._population: Population | None = None
        self._few: tuple[Problem, Population] | None = None

    @property
    def open(self) -> bool:
        """Whether another round may find something better."""
        return native.core is not None and not self.pool.optimal and self._budget.allows(self.rounds)

    def round(self) -> None:
        problem, pool, budget = self.problem, self.pool, self._budget
        passes, base_seed = SETTINGS.first_round * 2**self.rounds, self._seed * 64 + self.rounds
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
        if budget.left > 0:
            self.rounds += 1

    def _begin(self) -> None:
        problem, budget = self.problem, self._budget
        if problem.limit not in _levels_within(problem):
            most = SETTINGS.trial_passes // len(_ladder(problem))
            own = _construct_within(problem, self.pool, budget, most, self.pool.bound)
            self._candidates = sorted([*own, *self._candidates], key=_cost)[: 2 * SETTINGS.refined_rules]
        self._population = Population(problem, self._candidates, self.pool, budget)
        few = _fewer(problem)
        if few is not None:
            best = Pool(few, 1, cost_bound(few))
            self._few = few, Population(few, construct(few, best, budget), best, budget)
            add_published(few, best, budget, self._published)


def search(
    problem: Problem, pool: Pool, budget: Budget, seed: int, progress: Callable[[str], None] = lambda line: None
) -> int:
    """Fills the pool, and returns how many rounds were completed. progress: see `plan`."""
    run = Search(problem, pool, budget, seed, Published())
    while run.open:
        idle = 1 - max(map(problem.work, range(problem.ranks))) / max(1, pool.orders[0].cost)
        progress(f"round {run.rounds + 1}: the busiest rank is idle for {idle:.2%}")
        run.round()
    progress("")
    if native.core is None and not pool.optimal:
        logger.warning(
            "plan: the compiled search is not here, so that this is only the best of the published and the constructed "
            "schedules; install a C++ compiler, then install zbkern again"
        )
    return run.rounds


def add_serial(problem: Problem, pool: Pool, budget: Budget) -> None:
    """Adds what fits whenever anything does: building blocks, or one microbatch after the other."""
    for fuse in (False, True)[: 1 + problem.may_fuse]:
        if native.core is not None:
            pool.add(search_blocks(problem, seed=0, temperatures=(), moves=0, fuse=fuse, seconds=budget.left))
        elif fits(problem, serial := serial_ordering(problem, fuse)):
            pool.add(with_cost(problem, serial))


def _fewer(problem: Problem) -> Problem | None:
    """The problem with fewer microbatches, where that is worth a search of its own; None elsewhere.

    Warm-up and cool-down are the hard part, and nearly the same for any number of microbatches.
    """
    small = min(problem.microbatches, 3 * problem.ranks)
    worth = problem.microbatches >= 4 * problem.ranks // 3 and small < problem.microbatches
    return problem.with_microbatches(small) if worth else None


class Candidate(NamedTuple):
    """A rule, its cost, and the problem that it was tried on, with the given memory limit or a smaller one."""

    cost: int
    name: int  # of limit and rule
    rule: Rule
    problem: Problem
    bound: int  # the lower bound on the cost that any rule can reach there

    def schedule(self, microbatches: int) -> Ordering | None:
        return list_schedule(self.problem.with_microbatches(microbatches), self.rule)


def _cost(candidate: Candidate) -> int:
    return candidate.cost


def construct(problem: Problem, pool: Pool, budget: Budget, most: int | None = None) -> list[Candidate]:
    """Adds what the list scheduler finds within fixed levels of memory, all those that are not above the limit.

    What is tried at a level does not depend on the limit, so that more memory never hurts. Returns the best candidates
    of all levels, best first. With many passes some of the rules are tried on fewer microbatches, and the best of them
    on all. most: passes that the rules of all levels together are tried on. Ends early when the time is over and there
    is an answer.
    """
    if most is None:
        most = SETTINGS.trial_passes
    if native.core is None:
        most = min(most, SETTINGS.trial_passes_in_python)
    ladder = _ladder(problem, most)
    candidates: list[Candidate] = []
    for name, limit in enumerate(_levels_within(problem, ladder)):
        if pool.orders and not budget.left:
            break
        here = problem.with_limit(limit)
        bound = cost_bound(here) if pool.bound else 0  # first answers have none
        if pool.beats(bound):
            continue
        found = _construct_within(here, pool, budget, most // len(ladder), bound, name)
        candidates += found
        if limit == ladder[-1] and not found:
            add_serial(here, pool, budget)
    if not pool.orders:
        add_serial(problem, pool, budget)
    return sorted(candidates, key=_cost)[: 2 * SETTINGS.refined_rules]


def _construct_within(
    problem: Problem, pool: Pool, budget: Budget, most: int, bound: int, name: int = 0
) -> list[Candidate]:
    """The best candidates for this limit, which are added to the pool; most: passes that rules are tried on."""
    kept = SETTINGS.refined_rules
    count = count_rules(problem)
    trial, stride = problem, 1
    if problem.passes * count > most:
        trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
        stride = trial.passes * count // most | 1  # odd, so that both of every choice are among them
    found: list[Candidate] = []
    for index, rule in enumerate(rules(trial, stride=stride)):
        if found and not budget.left:
            break
        cutoff = found[-1].cost - 1 if len(found) == kept else None
        orders = list_schedule(trial, rule, cutoff)
        if orders is None or any(orders.cost == each.cost for each in found):
            continue
        found = sorted([*found, Candidate(orders.cost, name * count + index, rule, trial, bound)], key=_cost)[:kept]
    for each in found[:1]:
        pool.add(each.schedule(problem.microbatches))
    return found


def warm_start(problem: Problem, budget: Budget) -> Ordering | None:
    """With one chunk per rank: what the list scheduler makes from the warm-up that reaches the lower bound.

    With 16 stages, annealing from there reaches the bound where from other starts it does not.
    """
    down = tuple(range(problem.ranks))
    if problem.placement != down or problem.makespan or problem.fused_is_faster or problem.saves:
        return None
    caps = warm_up_forwards(problem, cost_bound(problem))
    tried = takewhile(lambda rule: budget.left > 0, rules(problem, [tuple(caps)] if caps is not None else []))
    found = [list_schedule(problem, rule) for rule in tried]
    return min((orders for orders in found if orders is not None), key=lambda orders: orders.cost, default=None)


class Population:
    """Annealing from several starts: in every round new ones join, all are annealed for a while, the best are kept.

    What short annealing can reach depends on its start: with little memory, most lead to a steady state that is not the
    best. With plenty of memory, or more than two chunks per rank (p=4, m=12, four chunks, 0.6 times 1F1B's memory:
    19.7% idle instead of 20.9%), one long annealing from a high temperature reaches more, and gets most of the time.
    """

    def __init__(self, problem: Problem, candidates: Sequence[Candidate], pool: Pool, budget: Budget) -> None:
        self.problem, self.pool = problem, pool
        self._candidates = candidates
        self.refined: Candidate | None = None  # the best rule of the last round
        self.pattern_search = PatternSearch(problem, pool, budget)
        self._members: list[Ordering] = []
        self._warm = warm_start(problem, budget)
        pool.add(self._warm)
        self._kept = 1 if self._warm is None else 2  # with the new ones about four go on in either case
        plenty = min(problem.limit) > _held_by_1f1b(problem)
        self._long = self._warm is None and (plenty or problem.chunks > 2 * problem.ranks)

    def round(self, passes: int, base_seed: int, budget: Budget, pattern_passes: int) -> None:
        """Runs about `passes` passes, and `pattern_passes` in the search for a pattern."""
        pool = self.pool
        found = self.pattern_search.round(pattern_passes, base_seed, budget)
        members = [*self._members, *pool.orders[:1], found, self._refined(passes // 4, base_seed, budget)]
        members += [self._warm or self._block(passes // 8, 2 * base_seed + which, budget) for which in range(2)]
        distinct = list({orders.cost: orders for orders in members if orders is not None}.values())
        short = passes // ((2 if self._long else 1) * len(distinct)) if distinct else 0
        for index, start in enumerate(distinct):
            cooling = SETTINGS.coolings[(base_seed + index) % len(SETTINGS.coolings)]
            distinct[index] = self._annealed(start, short, base_seed * 16 + index, cooling, budget)
        if self._long and pool.orders:
            distinct.append(self._annealed(pool.orders[0], passes, base_seed * 16 + 15, SETTINGS.long_cooling, budget))
        self._members = sorted(distinct, key=lambda orders: orders.cost)[: self._kept]

    def _annealed(
        self, start: Ordering, passes: int, seed: int, cooling: tuple[float, int], budget: Budget
    ) -> Ordering:
        if self.pool.optimal or not budget.left:
            return start
        (hot, spread), problem = cooling, self.problem
        found, _ = anneal(
            problem,
            start,
            seed=seed,
            temperatures=_temperatures(problem, hot, SETTINGS.end_temperature),
            passes=passes,
            spread=spread,
            target=self.pool.bound,
            seconds=budget.left,
        )
        self.pool.add(found)
        return found

    def _refined(self, passes: int, base_seed: int, budget: Budget) -> Ordering | None:
        """The best that some attempts find by changing the candidates' rules at random."""
        best: Ordering | None = None
        for each in self._candidates:
            whole = each.problem.with_microbatches(self.problem.microbatches)
            tries = passes // (SETTINGS.list_scheduler_pass * whole.passes * SETTINGS.refined_rules)
            if not tries or self.pool.optimal or not budget.left:
                break
            runs = max(1, tries // SETTINGS.rule_tries)
            for run in range(0 if self.pool.beats(each.bound) else runs):
                number = (base_seed << 8 | run) << 32 | each.name
                found = refine(whole, each.rule, tries // runs, number, self.pool.bound, budget.left)
                if found is not None and (best is None or found[0].cost < best.cost):
                    best, self.refined = found[0], each._replace(rule=found[1])
                    self.pool.add(best)
        return best

    def _block(self, passes: int, base_seed: int, budget: Budget) -> Ordering | None:
        problem = self.problem
        moves = passes // (SETTINGS.temperatures * problem.passes)
        if moves < 1 or self.pool.optimal or not budget.left:
            return None
        temperatures = _temperatures(problem, 1.0, 0.1)
        fuse = problem.may_fuse and base_seed % 2 == 1
        found = search_blocks(
            problem,
            seed=base_seed,
            temperatures=temperatures,
            moves=moves,
            target=self.pool.bound,
            fuse=fuse,
            seconds=budget.left,
        )
        found = found and with_cost(problem, found)
        self.pool.add(found)
        return found


class PatternSearch:
    """Patterns, for two chunks per rank in a V: ZB-V's with other counts, and what annealing makes of the best.

    Does nothing where even the best pattern to start from is far from the pool's best, as with little memory.
    """

    def __init__(self, problem: Problem, pool: Pool, budget: Budget) -> None:
        self.problem, self.pool = problem, pool
        self.best: tuple[Ordering, Pattern] | None = None
        self._start: tuple[Ordering, Pattern] | None = None
        if is_v(problem):
            self._begin(budget)

    def _begin(self, budget: Budget) -> None:
        """Tries ZB-V's pattern for this memory limit and for smaller ones, so that more memory never hurts."""
        problem, levels = self.problem, [self.problem.limit, *_levels_within(self.problem)]
        patterns = list(zb_v_patterns(problem))
        trial = problem
        if problem.passes * len(patterns) > SETTINGS.pattern_start_passes:
            trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
        levels = levels[: max(1, SETTINGS.pattern_start_passes // (trial.passes * len(patterns)))]
        stride = trial.passes * len(patterns) // SETTINGS.pattern_start_passes | 1
        for limit in levels:
            tried = takewhile(lambda pattern: budget.left > 0, patterns[::stride])
            found = [(each, search_patterns(trial.with_limit(limit), each)) for each in tried]
            costs = [(result[0].cost, index) for index, (_, result) in enumerate(found) if result is not None]
            for _, index in sorted(costs)[:2]:
                self._add(search_patterns(problem.with_limit(limit), found[index][0]), limit == problem.limit)
        self._start = self.best
        if self.best is not None and self.best[0].cost > SETTINGS.pattern_cutoff * self.pool.orders[0].cost:
            self.best = self._start = None

    def offer(self, pattern: Pattern) -> None:
        """Takes a pattern that was found for fewer microbatches."""
        self._add(search_patterns(self.problem, pattern))

    def _add(self, found: tuple[Ordering, Pattern] | None, own: bool = True) -> None:
        if found is None:
            return
        self.pool.add(found[0])
        if own and (self.best is None or found[0].cost < self.best[0].cost):
            self.best = found

    def round(self, passes: int, base_seed: int, budget: Budget) -> Ordering | None:
        """Runs about `passes` passes: half in attempts from the first pattern, the others from the best so far."""
        problem = self.problem
        moves = passes // (
            SETTINGS.temperatures * problem.passes
        )  # most are rejected before half of their passes have run
        attempts = max(1, moves // (SETTINGS.pattern_moves * problem.ranks))
        for attempt in range(attempts + 1):
            begin, some = (self._start, moves // attempts) if attempt < attempts else (self.best, moves)
            if begin is None or some < 1 or self.pool.optimal or not budget.left:
                break
            seed = base_seed << 16 | attempt
            starts = SETTINGS.pattern_start_temperatures
            temperatures = _temperatures(problem, starts[(base_seed + attempt) % len(starts)], SETTINGS.end_temperature)
            target = self.pool.bound
            self._add(
                search_patterns(
                    problem,
                    begin[1],
                    seed=seed,
                    temperatures=temperatures,
                    moves=some,
                    spread=SETTINGS.pattern_spread,
                    target=target,
                    seconds=budget.left,
                )
            )
        return self.best and self.best[0]


def _temperatures(problem: Problem, hot: float, cold: float) -> list[int]:
    """Temperatures from `hot` to `cold`, which are in units of the mean length of a pass, in units of time."""
    mean = (sum(problem.forward) + sum(problem.backward) + sum(problem.weight)) // (3 * problem.chunks)
    ratio = min(cold / hot, 1.0)
    return [int(mean * hot * ratio ** (step / (SETTINGS.temperatures - 1))) for step in range(SETTINGS.temperatures)]


def _ladder(problem: Problem, most: int = 0) -> list[tuple[int, ...]]:
    """Levels of memory that depend on the model alone, the largest first: room beside what ranks hold all the time.

    A rank with more of that has so much less room, as within one limit for all. The least level is what one microbatch
    needs; then they are eighths of what 1F1B holds, up to three times that, or quarters or halves where `most` passes
    are not enough for all rules, or a few, on so many; the largest is all that there is to hold.
    """
    needs = _memory_of_a_microbatch(problem)
    unit, always = _held_by_1f1b(problem), max(problem.static)
    unlimited = problem.microbatches * sum(map(max, problem.activation, problem.held))
    parts = next((parts for parts, passes in SETTINGS.levels if problem.passes * passes <= most), 2)
    rooms = {unit * part // parts for part in range(1, 3 * parts + 1)}
    least = max(map(add, needs, problem.static)) - always
    levels = []
    for room in sorted({room for room in rooms if least < room < unlimited} | {least, unlimited}, reverse=True):
        level = (min(room + always - static, unlimited) for static in problem.static)
        levels.append(tuple(each + (each >> 31) for each in level))  # activations are rounded; see Problem
    return levels


def _levels_within(problem: Problem, ladder: Sequence[tuple[int, ...]] | None = None) -> list[tuple[int, ...]]:
    """The levels of the ladder within the limit, largest first; before them the limit where ranks have several."""
    levels = [
        level
        for level in (_ladder(problem) if ladder is None else ladder)
        if all(each <= limit for each, limit in zip(level, problem.limit, strict=True))
    ]
    unlimited = problem.microbatches * sum(map(max, problem.activation, problem.held))
    given = max(map(add, problem.limit, problem.static))
    one = all(
        abs(min(given - static, unlimited) - limit) <= unlimited >> 28
        for static, limit in zip(problem.static, problem.limit, strict=True)
    )
    return levels if one and levels else [problem.limit, *levels]


def _memory_of_a_microbatch(problem: Problem) -> list[int]:
    """What every rank holds for one microbatch in all its chunks."""
    return [sum(problem.activation[chunk] for chunk in problem.chunks_of(rank)) for rank in range(problem.ranks)]


def _held_by_1f1b(problem: Problem) -> int:
    """What 1F1B holds at most: as many microbatches as there are ranks, in all chunks of a rank."""
    return max(_memory_of_a_microbatch(problem)) * problem.ranks


def add_published(problem: Problem, pool: Pool, budget: Budget, published: Published) -> None:
    """Adds every published schedule with this placement that fits the limit, as long as there is time for the next."""
    slowest, begin = 0.0, time.monotonic()
    for orders in published.orders(problem.placement, problem.microbatches):
        if fits(problem, orders):
            pool.add(with_cost(problem, orders))
        slowest = max(slowest, time.monotonic() - begin)
        if pool.orders and budget.left < 2 * slowest:
            break
        begin = time.monotonic()
