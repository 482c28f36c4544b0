"""Which searches run, in which order and for how long: constructive answers first, then annealing from the best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.annealing import anneal, with_cost
from zbkern.pipeline.planner.block_search import search_blocks
from zbkern.pipeline.planner.bounds import cost_bound, warm_up_forwards
from zbkern.pipeline.planner.incumbents import Budget, Pool
from zbkern.pipeline.planner.list_scheduler import Rule, best_rules, count_rules, list_schedule, refine, rules
from zbkern.pipeline.planner.pattern_search import Pattern, is_v, search_patterns, zb_v_patterns
from zbkern.pipeline.planner.problem import Ordering, Problem, fits, serial_ordering
from zbkern.pipeline.planner.settings import SearchSettings

SETTINGS = SearchSettings()


def add_serial(problem: Problem, pool: Pool, budget: Budget) -> None:
    """Adds what fits whenever anything does: building blocks, or one microbatch after the other."""
    for fuse in (False, True)[: 1 + problem.may_fuse]:
        if native.core is not None:
            pool.add(search_blocks(problem, seed=0, temperatures=(), moves=0, fuse=fuse, seconds=budget.left))
        elif fits(problem, serial := serial_ordering(problem, fuse)):
            pool.add(serial)


class Candidate(NamedTuple):
    """A rule, its cost, and the problem that it was tried on, mostly with fewer microbatches."""

    cost: int
    name: int
    rule: Rule
    problem: Problem

    def schedule(self, microbatches: int) -> Ordering | None:
        return list_schedule(self.problem.with_microbatches(microbatches), self.rule)


def construct(problem: Problem, pool: Pool, budget: Budget, most: int) -> list[Candidate]:
    """The best rules for this limit, whose best orders are added to the pool.

    most: passes that the rules are tried on. With more, some of the rules are tried on fewer microbatches, and the best
    of them on all.
    """
    if native.core is None:
        most = min(most, SETTINGS.trial_passes_in_python)
    count = count_rules(problem)
    trial, stride = problem, 1
    if problem.passes * count > most:
        trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
        stride = trial.passes * count // most | 1  # odd, so that both of every choice are among them
    tried = list(rules(trial, stride=stride))
    found = [
        Candidate(cost, index, tried[index], trial)
        for cost, index in best_rules(trial, tried, SETTINGS.refined_rules, budget.left)
    ]
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
    tried = list(rules(problem, [tuple(caps)] if caps is not None else []))
    best = best_rules(problem, tried, 1, budget.left)
    return list_schedule(problem, tried[best[0][1]]) if best else None


class Population:
    """Annealing from several starts: in every round new ones join, all are annealed for a while, the best are kept.

    What short annealing can reach depends on its start: with little memory, most lead to a steady state that is not the
    best. With plenty of memory, or more than two chunks per rank (p=4, m=12, four chunks, 0.6 times 1F1B's memory:
    19.7% idle instead of 20.9%), one long annealing from a high temperature reaches more, and gets most of the time.
    """

    def __init__(
        self, problem: Problem, candidates: Sequence[Candidate], pool: Pool, budget: Budget, pattern_passes: int
    ) -> None:
        self.problem, self.pool = problem, pool
        self._candidates = candidates
        self.refined: Candidate | None = None  # the best rule of the last round
        self.pattern_search = PatternSearch(problem, pool, budget, pattern_passes)
        self._members: list[Ordering] = []
        self._warm = warm_start(problem, budget)
        pool.add(self._warm)
        self._kept = 1 if self._warm is None else 2  # with the new ones about four go on in either case
        plenty = min(problem.limit) > SETTINGS.plenty * held_by_1f1b(problem)
        self._long = self._warm is None and (plenty or problem.chunks > 2 * problem.ranks)

    def offer(self, candidates: Sequence[Candidate]) -> None:
        """Takes rules that were found among more, before those there are."""
        self._candidates = [*candidates, *self._candidates][: 2 * SETTINGS.refined_rules]

    def round(self, passes: int, base_seed: int, budget: Budget) -> None:
        """Runs about `passes` passes, and where there is a pattern a quarter as many in the search for a better one."""
        pool = self.pool
        found = self.pattern_search.round(passes // 4, base_seed, budget)
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
            for run in range(runs):
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

    def __init__(self, problem: Problem, pool: Pool, budget: Budget, passes: int) -> None:
        """passes: patterns are tried as a start on at most so many."""
        self.problem, self.pool = problem, pool
        self.best: tuple[Ordering, Pattern] | None = None
        if is_v(problem):
            self._begin(budget, passes)
        self._start = self.best

    def _begin(self, budget: Budget, passes: int) -> None:
        problem, patterns = self.problem, list(zb_v_patterns(self.problem))
        trial = problem
        if problem.passes * len(patterns) > passes:
            trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
        stride = trial.passes * len(patterns) // passes | 1
        tried = takewhile(lambda pattern: budget.left > 0, patterns[::stride])
        found = [(each, search_patterns(trial, each)) for each in tried]
        costs = [(result[0].cost, index) for index, (_, result) in enumerate(found) if result is not None]
        for _, index in sorted(costs)[:2]:
            self._add(search_patterns(problem, found[index][0]))
        if self.best is not None and self.best[0].cost > SETTINGS.pattern_cutoff * self.pool.orders[0].cost:
            self.best = None

    def offer(self, pattern: Pattern) -> None:
        """Takes a pattern that was found for fewer microbatches."""
        self._add(search_patterns(self.problem, pattern))

    def _add(self, found: tuple[Ordering, Pattern] | None) -> None:
        if found is None:
            return
        self.pool.add(found[0])
        if self.best is None or found[0].cost < self.best[0].cost:
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


def memory_of_a_microbatch(problem: Problem) -> list[int]:
    """What every rank holds for one microbatch in all its chunks."""
    return [sum(problem.activation[chunk] for chunk in problem.chunks_of(rank)) for rank in range(problem.ranks)]


def held_by_1f1b(problem: Problem) -> int:
    """What 1F1B holds at most: as many microbatches as there are ranks, in all chunks of a rank."""
    return max(memory_of_a_microbatch(problem)) * problem.ranks
