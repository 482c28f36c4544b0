"""Which searches run, in which order, for how long: constructive answers first, then annealing from the best."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from zbkern.pipeline import schedules
from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.annealing import anneal, costed, grown
from zbkern.pipeline.planner.block_search import search_blocks
from zbkern.pipeline.planner.bounds import cost_bound, warm_up
from zbkern.pipeline.planner.incumbents import Budget, Pool
from zbkern.pipeline.planner.list_scheduler import Rule, list_schedule, refine, rules
from zbkern.pipeline.planner.pattern_search import Pattern, is_v, search_patterns, zb_v_patterns
from zbkern.pipeline.planner.problem import Ordering, Problem, fits, one_at_a_time, orders_of
from zbkern.pipeline.planner.settings import SearchSettings
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.schedules.schedule import Schedule

logger = logging.getLogger("zbkern")

SETTINGS = SearchSettings()


def search(problem: Problem, pool: Pool, budget: Budget, seed: int) -> int:
    """Fills the pool; how many rounds came to their end.

    No published schedule that fits is better than the first of the pool, where there was time to make them all.
    """
    candidates = construct(problem, pool, budget.part(0.5))
    if problem.passes <= SETTINGS.published_passes or budget.allows(0):
        add_published(problem, pool, budget)
    if not pool.orders:  # one microbatch after the other fits whenever anything does
        for fuse in (False, True)[: 1 + problem.may_fuse]:
            if native.core is not None:
                pool.add(search_blocks(problem, seed=seed, temperatures=(), moves=0, fuse=fuse, seconds=budget.left))
            elif fits(problem, serial := one_at_a_time(problem, fuse)):
                pool.add(costed(problem, serial))
    if native.core is None:
        if not pool.optimal:
            logger.warning(
                "plan: the compiled search is not here, so that this is only the best of the published and the "
                "constructed schedules; install a C++ compiler, then install zbkern again"
            )
        return 0
    population = Population(problem, candidates, pool, budget)
    fewer = _fewer(problem)
    small: Population | None = None
    round_ = 0
    while not pool.optimal and budget.allows(round_):
        passes, turn = SETTINGS.first_round * 2**round_, seed * 64 + round_
        if fewer is not None:
            if small is None:
                best = Pool(1, cost_bound(fewer))
                small = Population(fewer, construct(fewer, best, budget), best, budget)
                add_published(fewer, best, budget)
            small.round(passes // 2, turn, budget, passes)
            if small.refined is not None:
                pool.add(small.refined.schedule(problem.microbatches))
            if small.pattern_search.best is not None:
                population.pattern_search.offer(small.pattern_search.best[1])
            for orders in small.pool.orders:
                for each in grown(problem, orders, problem.microbatches) if not any(orders.fused) else []:
                    if budget.left > 0:
                        pool.add(costed(problem, each))
        population.round(passes, turn, budget, passes if small is None else passes // 2)
        if budget.left > 0:
            round_ += 1
    return round_


def _fewer(problem: Problem) -> Problem | None:
    """Warm-up and cool-down are the hard part, and nearly the same for any number of microbatches: search with few."""
    small = min(problem.microbatches, 3 * problem.ranks)
    worth = problem.microbatches >= 4 * problem.ranks // 3 and small < problem.microbatches
    return problem.with_microbatches(small) if worth else None


class Candidate(NamedTuple):
    """A rule, what it came to, and the problem, with this limit or a smaller one, that it was tried on."""

    cost: int
    name: int  # of limit and rule, the same for any larger limit
    rule: Rule
    problem: Problem
    bound: int  # on what any rule can come to

    def schedule(self, microbatches: int) -> Ordering | None:
        return list_schedule(self.problem.with_microbatches(microbatches), self.rule)


def construct(problem: Problem, pool: Pool, budget: Budget) -> list[Candidate]:
    """Adds what the list scheduler finds, for this limit and for smaller ones: more memory never makes it worse.

    Returns the best candidates for every limit, best first. With many passes the rules, or some of them, are tried on
    fewer microbatches, and those that do best there on all. Ends early when the time is over and there is an answer.
    """
    kept = SETTINGS.refined_rules
    most = SETTINGS.trial_passes if native.core is not None else SETTINGS.trial_passes_in_python
    count = sum(1 for _ in rules(problem))
    levels = _levels(problem)
    passes = problem.passes * count
    if passes * len(levels) > most:
        levels = levels[: max(1, most // passes)]
    trial, stride = problem, 1
    if passes > most:
        trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
        stride = trial.passes * count // most | 1  # odd, so that both of every choice are among them
    candidates: list[Candidate] = []
    for name, limit in levels:
        if candidates and not budget.left:
            break
        here = trial.with_limit(limit)
        bound = cost_bound(problem.with_limit(limit))
        if pool.beats(bound):
            continue
        some: list[Candidate] = []
        for place, rule in enumerate(islice(rules(here), 0, None, stride)):
            if some and not budget.left:
                break
            cutoff = some[-1].cost - 1 if len(some) == kept else None
            orders = list_schedule(here, rule, cutoff)
            if orders is None or any(orders.cost == each.cost for each in some):
                continue
            some = sorted([*some, Candidate(orders.cost, name * count + place, rule, here, bound)])[:kept]
            if trial is problem:
                pool.add(orders)
                if pool.optimal:
                    return []
        candidates += some
    candidates = sorted(candidates)[: 2 * kept]
    if trial is not problem:
        for each in candidates[:3]:
            pool.add(each.schedule(problem.microbatches))
    return candidates


def warm_start(problem: Problem, budget: Budget) -> Ordering | None:
    """With one chunk per rank: what the list scheduler makes of the warm-up that the lower bound is about.

    At 16 stages annealing gets from there to the bound where it does not from other starts.
    """
    down = tuple(range(problem.ranks))
    if problem.placement != down or problem.makespan or problem.may_fuse or problem.saves:
        return None
    caps = warm_up(problem, cost_bound(problem))
    tried = takewhile(lambda rule: budget.left > 0, rules(problem, [tuple(caps)] if caps is not None else []))
    found = [list_schedule(problem, rule) for rule in tried]
    return min((orders for orders in found if orders is not None), key=lambda orders: orders.cost, default=None)


class Population:
    """Annealing from several starts: in every round new ones join, all go on for a while, and the best are kept.

    A start decides what short annealing can come to: with little memory most lead to a steady state that is not the
    best. With plenty one long search from hot comes further, so that it takes half of the time.
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
        self._long = self._warm is None and min(problem.limit) > _held_by_1f1b(problem)

    def round(self, passes: int, turn: int, budget: Budget, pattern_passes: int) -> None:
        """Runs about so many passes, and `pattern_passes` in search for a pattern."""
        pool = self.pool
        found = self.pattern_search.round(pattern_passes, turn, budget)
        members = [*self._members, *pool.orders[:1], found, self._refined(passes // 4, turn, budget)]
        members += [self._warm or self._block(passes // 8, 2 * turn + which, budget) for which in range(2)]
        distinct = list({orders.cost: orders for orders in members if orders is not None}.values())
        short = passes // ((2 if self._long else 1) * len(distinct)) if distinct else 0
        for place, start in enumerate(distinct):
            way = SETTINGS.schedules[(turn + place) % len(SETTINGS.schedules)]
            distinct[place] = self._annealed(start, short, turn * 16 + place, way, budget)
        if self._long and pool.orders:
            distinct.append(self._annealed(pool.orders[0], passes, turn * 16 + 15, SETTINGS.long_schedule, budget))
        self._members = sorted(distinct, key=lambda orders: orders.cost)[: self._kept]

    def _annealed(self, start: Ordering, passes: int, seed: int, way: tuple[float, int], budget: Budget) -> Ordering:
        if self.pool.optimal or not budget.left:
            return start
        (heat, spread), problem = way, self.problem
        found, _ = anneal(
            problem,
            start,
            seed=seed,
            temperatures=_cooling(problem, heat, SETTINGS.cold),
            moves=int(passes / (SETTINGS.temperatures * (SETTINGS.share_run_again * problem.passes + 50))),
            spread=spread,
            target=self.pool.bound,
            seconds=budget.left,
        )
        self.pool.add(found)
        return found

    def _refined(self, passes: int, turn: int, budget: Budget) -> Ordering | None:
        """The best of the candidates with their rules changed at random, in some attempts."""
        best: Ordering | None = None
        for each in self._candidates:
            whole = each.problem.with_microbatches(self.problem.microbatches)
            tries = passes // (SETTINGS.list_pass * whole.passes * SETTINGS.refined_rules)
            if not tries or self.pool.optimal or not budget.left:
                break
            runs = max(1, tries // SETTINGS.rule_tries)
            for run in range(0 if self.pool.beats(each.bound) else runs):
                number = (turn << 8 | run) << 32 | each.name
                found = refine(whole, each.rule, tries // runs, number, self.pool.bound, budget.left)
                if found is not None and (best is None or found[0].cost < best.cost):
                    best, self.refined = found[0], each._replace(rule=found[1])
                    self.pool.add(best)
        return best

    def _block(self, passes: int, turn: int, budget: Budget) -> Ordering | None:
        problem = self.problem
        moves = passes // (SETTINGS.temperatures * problem.passes)
        if moves < 1 or self.pool.optimal or not budget.left:
            return None
        cooling = _cooling(problem, 1.0, 0.1)
        fuse = problem.may_fuse and turn % 2 == 1
        found = search_blocks(
            problem,
            seed=turn,
            temperatures=cooling,
            moves=moves,
            target=self.pool.bound,
            fuse=fuse,
            seconds=budget.left,
        )
        found = found and costed(problem, found)
        self.pool.add(found)
        return found


class PatternSearch:
    """Patterns, for two chunks per rank in a V: ZB-V's with other counts, and what annealing makes of the best.

    Nothing, where even the best to start from is far from the pool's best: with little memory.
    """

    def __init__(self, problem: Problem, pool: Pool, budget: Budget) -> None:
        self.problem, self.pool = problem, pool
        self.best: tuple[Ordering, Pattern] | None = None
        self._start: tuple[Ordering, Pattern] | None = None
        if is_v(problem):
            self._begin(budget)

    def _begin(self, budget: Budget) -> None:
        """Tries ZB-V's pattern for this limit, and for smaller ones: more memory never makes it worse."""
        problem, levels = self.problem, _levels(self.problem)
        patterns = list(zb_v_patterns(problem))
        trial = problem
        if problem.passes * len(patterns) > SETTINGS.pattern_start_passes:
            trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
        levels = levels[: max(1, SETTINGS.pattern_start_passes // (trial.passes * len(patterns)))]
        stride = trial.passes * len(patterns) // SETTINGS.pattern_start_passes | 1
        for _, limit in levels:
            tried = takewhile(lambda pattern: budget.left > 0, patterns[::stride])
            found = [(each, search_patterns(trial.with_limit(limit), each)) for each in tried]
            costs = [(result[0].cost, place) for place, (_, result) in enumerate(found) if result is not None]
            for _, place in sorted(costs)[:2]:
                self._add(search_patterns(problem.with_limit(limit), found[place][0]), limit == problem.limit)
        self._start = self.best
        if self.best is not None and self.best[0].cost > SETTINGS.pattern_far * self.pool.orders[0].cost:
            self.best = self._start = None

    def offer(self, pattern: Pattern) -> None:
        """One that was found for fewer microbatches."""
        self._add(search_patterns(self.problem, pattern))

    def _add(self, found: tuple[Ordering, Pattern] | None, own: bool = True) -> None:
        if found is None:
            return
        self.pool.add(costed(self.problem, found[0]) if self.problem.saves else found[0])
        if own and (self.best is None or found[0].cost < self.best[0].cost):
            self.best = found

    def round(self, passes: int, turn: int, budget: Budget) -> Ordering | None:
        """Runs about so many passes, half of them from the start, in some attempts, the others from the best so far."""
        problem = self.problem
        moves = passes // (SETTINGS.temperatures * problem.passes)  # most are lost before half of their passes
        attempts = max(1, moves // (SETTINGS.pattern_moves * problem.ranks))
        for attempt in range(attempts + 1):
            begin, some = (self._start, moves // attempts) if attempt < attempts else (self.best, moves)
            if begin is None or some < 1 or self.pool.optimal or not budget.left:
                break
            seed = turn << 16 | attempt
            heats = SETTINGS.pattern_heats
            cooling = _cooling(problem, heats[(turn + attempt) % len(heats)], SETTINGS.cold)
            target = self.pool.bound
            self._add(
                search_patterns(
                    problem,
                    begin[1],
                    seed=seed,
                    temperatures=cooling,
                    moves=some,
                    spread=SETTINGS.pattern_spread,
                    target=target,
                    seconds=budget.left,
                )
            )
        return self.best and self.best[0]


def _cooling(problem: Problem, hot: float, cold: float) -> list[int]:
    """Temperatures from hot to cold, in parts of the mean length of a pass."""
    mean = (sum(problem.forward) + sum(problem.backward) + sum(problem.weight)) // (3 * problem.chunks)
    ratio = min(cold / hot, 1.0)
    return [int(mean * hot * ratio ** (step / (SETTINGS.temperatures - 1))) for step in range(SETTINGS.temperatures)]


def _levels(problem: Problem) -> list[tuple[int, tuple[int, ...]]]:
    """The limit itself, then smaller ones: eighths of what 1F1B holds, the same for any limit. Each with a number."""
    needs = _whole_microbatch(problem)
    unit = _held_by_1f1b(problem)
    levels = [(0, problem.limit)]
    eighths = 8 * min(problem.limit) // unit if unit else 0
    for eighth in range(min(eighths, 24), 0, -1):
        slack = unit >> 30  # activations are rounded; see Problem
        level = tuple(min(limit, unit * eighth // 8 + slack) for limit in problem.limit)
        if level == problem.limit:
            levels = [(eighth, level)]
        elif all(need <= limit for need, limit in zip(needs, level, strict=True)):
            levels.append((eighth, level))
    return levels


def _whole_microbatch(problem: Problem) -> list[int]:
    """What every rank holds of one microbatch in all its chunks."""
    return [sum(problem.activation[chunk] for chunk in problem.chunks_of(rank)) for rank in range(problem.ranks)]


def _held_by_1f1b(problem: Problem) -> int:
    """As many microbatches as ranks, in all chunks of a rank."""
    return max(_whole_microbatch(problem)) * problem.ranks


def add_published(problem: Problem, pool: Pool, budget: Budget) -> None:
    """Adds every published schedule with this placement that fits the limit, as long as there is time for the next."""
    slowest = 0.0
    for make in _published(problem):
        if pool.orders and budget.left < 2 * slowest:
            break
        begin = time.monotonic()
        try:
            orders = orders_of(make())
        except ScheduleError:  # it needs more microbatches
            continue
        if fits(problem, orders):
            pool.add(costed(problem, orders))
        slowest = max(slowest, time.monotonic() - begin)


def _published(problem: Problem) -> list[Callable[[], Schedule]]:
    """The generators of all published schedules with this placement, the quickest first."""
    ranks, microbatches = problem.ranks, problem.microbatches
    down = tuple(range(ranks))
    per_rank = problem.chunks // ranks
    generators: tuple[Callable[..., Schedule], ...] = ()
    more: tuple[int, ...] = ()
    if problem.placement == down:
        generators = (schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2)
    elif problem.placement == down + down[::-1]:
        generators = (
            schedules.zb_v, schedules.dualpipe_v, schedules.one_f_one_b_v, schedules.v_min, schedules.v_half
        )  # fmt: skip
    elif problem.placement == down * per_rank:
        generators, more = (schedules.interleaved, schedules.interleaved_zero_bubble), (per_rank,)
    return [partial(generator, ranks, microbatches, *more) for generator in generators]
