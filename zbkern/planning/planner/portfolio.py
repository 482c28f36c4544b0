"""Which searches run, in which order and for how long: constructive answers first, then annealing from the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from zbkern.planning.planner.annealing import anneal, search_blocks
from zbkern.planning.planner.bounds import cost_bound, warm_up_forwards
from zbkern.planning.planner.incumbents import Incumbent
from zbkern.planning.planner.list_scheduler import (
    Choices,
    Rule,
    all_choices,
    best_rules,
    list_schedule,
    refine,
    rules_to_try,
)
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.pattern_search import Pattern, is_v, search_patterns, zb_v_patterns
from zbkern.planning.planner.problem import Ordering, Problem, fewer_ranks, serial_ordering, tighter
from zbkern.planning.planner.published import MANY
from zbkern.planning.planner.settings import SearchSettings

SETTINGS = SearchSettings()


def add_serial(best: Incumbent) -> None:
    """Adds what fits whenever anything does: building blocks, or one microbatch after the other."""
    for fuse in (False, True)[: 1 + best.problem.may_fuse]:
        # blocks of slices hold two microbatches at once, and others have more messages
        best.offer(serial_ordering(best.problem, fuse))
        best.offer(search_blocks(best.problem, fuse, Effort()))


_Find = Callable[[Problem, Sequence[int], int], list[tuple[int, int]]]


def _best_of(problem: Problem, count: int, most: int, find: _Find) -> list[tuple[int, int]]:
    """Costs and numbers of the best of so many things to try, the best first.

    Where all would take more than `most` passes they are tried on fewer ranks, the best of them with all ranks on fewer
    microbatches, and a few of those on all. find: the best of some of these numbers, and how many of these, for a
    problem.
    """
    small = trial = problem
    if problem.passes * count > most:
        slices = len(problem.slices)
        few = -(-2 * (problem.ranks + 1) // slices) * slices
        small = trial = replace(problem, units=min(problem.units, few))
    while small.passes * count > most and small.ranks >= 2 * SETTINGS.least_ranks:
        small = fewer_ranks(trial, small.ranks // 2)
    numbers: Sequence[int] = range(0, count, small.passes * count // most | 1)  # odd, so that both of every choice are
    if small is not trial:
        numbers = [number for _, number in find(small, numbers, max(2, most // trial.passes))]
    if trial is not problem:
        numbers = [number for _, number in find(trial, numbers, SETTINGS.rules_on_all)]
    return find(problem, numbers, SETTINGS.refined_rules)


def best_tried_rules(best: Incumbent, most: int, shares: Sequence[float]) -> list[tuple[int, Rule]]:
    """The numbers and the best of all rules, of which the best one's orders are offered; and of those in less memory.

    most: passes that the rules of each limit are tried on. shares: as for `tighter`. Orders of many passes take long,
    and there is one limit.
    """
    known: list[tuple[int, Rule]] = []
    for problem in [best.problem, *(tighter(best.problem, shares) if best.problem.passes <= MANY else ())]:
        choices = all_choices(problem)
        found = _best_of(problem, len(choices), most, partial(_find_rules, choices))
        rules = rules_to_try(problem, [choices[number] for _, number in found])
        for rule in rules[:1]:
            best.offer(list_schedule(problem, rule))
        known = known or [(number, rule) for (_, number), rule in zip(found, rules, strict=True)]
    return known


def _find_rules(
    choices: Sequence[Choices], problem: Problem, numbers: Sequence[int], kept: int
) -> list[tuple[int, int]]:
    tried = rules_to_try(problem, [choices[number] for number in numbers])
    return [(cost, numbers[index]) for cost, index in best_rules(problem, tried, kept)]


def warm_start(best: Incumbent) -> Ordering | None:
    """With one chunk per rank: what the list scheduler makes from the warm-up that reaches the lower bound.

    With 16 stages it mostly is at the bound, which annealing from other starts reaches late or not at all.
    """
    problem = best.problem
    if problem.placement != tuple(range(problem.ranks)) or len(problem.slices) > 1 or problem.makespan:
        return None
    caps = warm_up_forwards(problem, cost_bound(problem)) or ()
    tried = list({rule._replace(caps=tuple(caps)): None for rule in rules_to_try(problem) if caps})
    found = best_rules(problem, tried, 1)
    return list_schedule(problem, tried[found[0][1]]) if found else None


def first_pattern(best: Incumbent, passes: int) -> Pattern | None:
    """The best of ZB-V's patterns with other counts, tried on at most so many passes; None but for a single V."""
    if not is_v(best.problem):
        return None
    patterns = list(zb_v_patterns(best.problem))
    found = _best_of(best.problem, len(patterns), passes, _find_patterns)
    return patterns[found[0][1]] if found else None


def _find_patterns(problem: Problem, numbers: Sequence[int], kept: int) -> list[tuple[int, int]]:
    patterns = list(zb_v_patterns(problem))
    costs = [(found[0].cost, each) for each in numbers if (found := search_patterns(problem, patterns[each]))]
    return sorted(costs)[:kept]


class Population:
    """Annealing from several starts: in every round new ones join, all are annealed for a while, the best one is kept.

    What short annealing can reach depends on its start: with little memory, most lead to a steady state that is not the
    best, and that of a pattern is not reached from a rule's orders. With more than two chunks per rank one long
    annealing from a high temperature reaches more, and gets most of the time. `SearchSettings` says what each is worth.
    """

    def __init__(self, best: Incumbent, pattern_passes: int) -> None:
        self.best, self._pattern = best, first_pattern(best, pattern_passes)
        self._by_pattern: Ordering | None = None
        self._member: Ordering | None = None  # the best of the last round
        self._changed: dict[int, tuple[Rule, int]] = {}  # what became of a candidate's rule, after how many tries
        best.offer(warm_start(best))
        self._long = self.problem.chunks > SETTINGS.long_chunks * self.problem.ranks

    @property
    def problem(self) -> Problem:
        return self.best.problem

    def round(self, passes: int, seed: int, rules: Sequence[tuple[int, Rule]]) -> None:
        """Runs about `passes` passes, and where there is a pattern a quarter as many in the search for a better one.

        rules: the best that are known.
        """
        pattern, refined = self._patterned(passes // 4, seed), self._refined(rules, passes // 4, seed)
        members = [pattern, self._member, self.best.orders, refined]
        members += [self._block(passes // 8, 2 * seed + which) for which in range(2)]
        by_cost = {each.cost: each for each in members if each is not None and self.best.beside(each) is not None}
        most = max(2, passes // (SETTINGS.least_runs * self.problem.passes))
        distinct = sorted(by_cost.values(), key=lambda orders: (orders is not pattern, orders.cost))[:most]
        short = passes // ((2 if self._long else 1) * len(distinct)) if distinct else 0
        for index, start in enumerate(distinct):
            cooling = SETTINGS.coolings[(seed + index) % len(SETTINGS.coolings)]
            distinct[index] = self._annealed(start, short, seed * 16 + index, cooling)
        if self._long and self.best.orders is not None:
            small = self.problem.passes <= SETTINGS.small
            cooling = SETTINGS.hot_cooling if small else SETTINGS.long_cooling
            distinct.append(self._annealed(self.best.orders, passes, seed * 16 + 15, cooling))
        self._member = min(distinct, key=lambda orders: orders.cost, default=None)

    def _annealed(self, start: Ordering, passes: int, seed: int, cooling: tuple[float, int]) -> Ordering:
        problem = self.best.beside(start)
        if self.best.over or problem is None:
            return start
        hot, spread = cooling
        effort = self.best.effort(seed, temperatures(problem, hot), passes, spread)
        found = anneal(problem, start, effort)
        self.best.offer(found)
        return found

    def _refined(self, rules: Sequence[tuple[int, Rule]], passes: int, seed: int) -> Ordering | None:
        """The best that some attempts find by changing these rules at random."""
        best: Ordering | None = None
        tries = passes // (SETTINGS.rule_pass * self.problem.passes * SETTINGS.refined_rules)
        runs = max(1, tries // SETTINGS.rule_tries)
        for (number, first), run in product(rules, range(runs)) if tries else ():
            if self.best.over:
                break
            rule, tried = self._changed.get(number, (first, 0))
            if tried >= SETTINGS.rule_tries:
                rule, tried = first, 0
            effort = self.best.effort((seed << 8 | run) << 32 | number, (0,), tries // runs)
            if (found := refine(self.problem, rule, effort)) is None:
                continue
            self._changed[number] = found[1], tried + tries // runs
            if best is None or found[0].cost < best.cost:
                best = found[0]
                self.best.offer(best)
        return best

    def _patterned(self, passes: int, seed: int) -> Ordering | None:
        """The best that attempts from the first pattern have found so far."""
        moves = passes // (SETTINGS.temperatures * self.problem.passes)  # most are rejected before half of it has run
        attempts = max(1, moves // (SETTINGS.pattern_moves * self.problem.ranks))
        hot = SETTINGS.pattern_temperatures
        for attempt in range(attempts if moves else 0):
            if self._pattern is None or self.best.over:
                break
            cooling = temperatures(self.problem, hot[(seed + attempt) % len(hot)])
            effort = self.best.effort(seed << 16 | attempt, cooling, 2 * moves // attempts, SETTINGS.pattern_spread)
            found = search_patterns(self.problem, self._pattern, effort)
            if found is None:  # there is less room than there was for it
                self._pattern = first_pattern(self.best, passes // 4)
            elif self._by_pattern is None or found[0].cost < self._by_pattern.cost:
                self.best.offer(found[0])
                if self.best.beside(found[0]) is not None:
                    self._by_pattern = found[0]
        return self._by_pattern

    def _block(self, passes: int, seed: int) -> Ordering | None:
        moves = passes // (SETTINGS.temperatures * self.problem.passes)
        if moves < 1 or self.best.over:
            return None
        effort = self.best.effort(seed, temperatures(self.problem, 1.0, 0.1), moves)
        found = search_blocks(self.problem, self.problem.may_fuse and seed % 2 == 1, effort)
        self.best.offer(found)
        return found


def temperatures(problem: Problem, hot: float, cold: float = SETTINGS.end_temperature) -> list[int]:
    """Temperatures from `hot` to `cold`, which are in units of the mean length of a pass, in units of time."""
    passes = sum(sum(each.forward) + sum(each.backward) + sum(each.weight) for each in problem.by_chunk)
    mean = passes // (3 * problem.chunks * len(problem.slices))
    ratio = min(cold / hot, 1.0)
    return [int(mean * hot * ratio ** (step / (SETTINGS.temperatures - 1))) for step in range(SETTINGS.temperatures)]
