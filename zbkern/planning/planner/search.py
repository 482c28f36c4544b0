"""The search for the best orders of a problem: published and constructed ones, then rounds of all the other searches.

Several problems, as the partitions of one model are, are searched side by side; after each round the better half of
them goes on, and of these only what its lower bound leaves a chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

from zbkern.planning.planner.annealing import anneal, at_speeds
from zbkern.planning.planner.bounds import cost_bound
from zbkern.planning.planner.incumbents import ROUNDING, Incumbent
from zbkern.planning.planner.list_scheduler import Rule
from zbkern.planning.planner.portfolio import SETTINGS, Population, add_serial, best_tried_rules, temperatures
from zbkern.planning.planner.problem import Ordering, Problem
from zbkern.planning.planner.published import MANY, published_orders

_TIMES = 4  # rules are tried, with more room for messages than before
_NEAR = 0.003  # relative: so much more may orders cost that bear delays better than the best do


class Search:
    """The search for the best orders of one problem. What it finds depends on the problem, the work and the seed."""

    def __init__(
        self,
        problem: Problem,
        seed: int,
        name: str = "",
        partition: tuple[float, ...] | None = None,
        published: bool = True,
    ) -> None:
        """Begins with every published schedule that fits, or with nothing.

        name: of the placement. partition: of layers, if it is of any.
        """
        self.name, self.partition = name, partition
        self.problem, self.best, self._seed = problem, Incumbent(problem), seed
        self._population: Population | None = None
        self._rules: list[tuple[int, Rule]] = []
        self._tried = 0  # passes on which rules were tried
        known = published_orders(problem.placement, problem.microbatches, len(problem.slices)) if published else ()
        for _, orders in known:
            self.best.offer(orders)
            if self.best.orders is not None and problem.passes > MANY:
                break  # to make one takes up to a second
        self.published = self.reached  # by a published schedule

    @cached_property
    def bound(self) -> float:
        """No orders cost less, in the unit of the costs."""
        self.best.bound = cost_bound(self.problem)
        return self.best.bound / self.problem.time_scale

    @cached_property
    def least(self) -> float:
        """A lower bound that takes no time: the work of the busiest rank."""
        return max(map(self.problem.work, range(self.problem.ranks))) / self.problem.time_scale

    @property
    def reached(self) -> float:
        """The objective, in the unit of the costs."""
        return math.inf if self.best.orders is None else self.best.orders.cost / self.problem.time_scale

    def may_cost_less(self, cost: float) -> bool:
        return self.least < cost and self.bound < cost

    def promise(self, rounds: int, bound: float | None = None) -> float:
        """What the objective may come to after so many rounds: less near to the bound with more chunks per rank, as the
        same work then does less, and the later it is. bound: another one."""
        per_rank = self.problem.chunks / self.problem.ranks
        missed = (per_rank / (per_rank + SETTINGS.half_missed)) ** (1 / (1 + rounds))
        bound = self.bound if bound is None else bound
        return bound + missed * (self.reached - bound)

    def construct(self, passes: int, shares: Sequence[float] = SETTINGS.shares) -> None:
        """The constructive answer: the best of some rules, tried on at most so many passes. Again with more, or not."""
        if passes > self._tried:
            self._tried = passes
            for _ in range(_TIMES):
                found = best_tried_rules(self.best, passes, shares)
                if not self.best.refused:
                    break
            self._rules = [*found, *self._rules][: 2 * SETTINGS.refined_rules]
        if self.best.orders is None:
            add_serial(self.best)

    def round(self, number: int, passes: int) -> None:
        passes = min(passes, SETTINGS.most_runs * self.problem.passes * 2**number)
        self.construct(passes // SETTINGS.rule_share)
        if self._population is None:
            self._population = Population(self.best, passes // 8)
        self._population.round(passes, self._seed * 64 + number, self._rules)

    def finish(self, rounds: int, share: float) -> None:
        """Anneals the best orders once more, at low temperatures, for this share of what the next round would take.

        Rounds end hot, and with a spread that fills every gap: this takes 0.1 to 0.8% from their cost.
        """
        self.best.offer(self._annealed(share, rounds))

    def make_steady(self, rounds: int, share: float, most: float) -> None:
        """The same where ranks are slower or faster, twice as long: it makes gaps where they are of use.

        What it finds is taken where its objective is no more than `most`.
        """
        found = self._annealed(2 * share, rounds, SETTINGS.samples)
        self.best.offer(found, most * self.problem.time_scale)

    def _annealed(self, share: float, rounds: int, count: int = 0) -> Ordering | None:
        """count: of samples of the ranks' speeds."""
        if self.best.orders is None or (problem := self.best.beside(self.best.orders)) is None:
            return None
        samples = at_speeds(problem, count, 2 * self._seed) if count else ()
        passes = min(SETTINGS.first_round, SETTINGS.most_runs * self.problem.passes) * 2**rounds
        effort = self.best.effort(self._seed, temperatures(self.problem, *SETTINGS.finish), int(share * passes), 0)
        if samples:  # orders that cost no less may bear delays better
            effort = effort._replace(target=0)
        return anneal(problem, self.best.orders, effort, samples)


def search_all(searches: Sequence[Search], effort: int, progress: Callable[[str], None] = lambda line: None) -> int:
    """All of them side by side; how many rounds were completed. progress: as in `PlanOptions`.

    Each round has twice the work of the one before, divided among half as many.
    """
    for each in sorted(searches, key=lambda each: each.reached):
        if each.best.orders is None or each.may_cost_less(min(other.reached for other in searches)):
            each.construct(SETTINGS.rule_passes // len(searches))
    first_round = SETTINGS.first_round if len(searches) == 1 else SETTINGS.first_round_of_several
    rounds = 0
    while rounds < effort:
        best = min(each.reached for each in searches)
        going_on = [each for each in searches if each.may_cost_less(best * (1 - ROUNDING))]
        promises = {each: each.promise(rounds) for each in going_on}
        going_on = sorted(going_on, key=promises.__getitem__)[: math.ceil(len(searches) / 2**rounds)]
        if not going_on:
            break
        progress(_describe(min(going_on, key=lambda each: each.reached), rounds))
        for each in going_on:
            each.round(rounds, first_round * 2**rounds // len(going_on))
        rounds += 1
        share = _finish_share(searches)
        for each in going_on if len(going_on) > 1 else ():  # what they come to then tells which of them is the best
            each.finish(rounds, share / len(going_on))
        best_yet = min(searches, key=lambda each: each.reached)
        best_yet.finish(rounds, share)  # after each, so that more are never worse
    progress("")
    return rounds


def _finish_share(searches: Sequence[Search]) -> float:
    return SETTINGS.finish_share if len(searches) == 1 else SETTINGS.finish_share_of_several


def _describe(search: Search, rounds: int) -> str:
    """A line of progress."""
    problem, reached = search.problem, search.reached
    per_rank, slices = problem.chunks // problem.ranks, len(problem.slices)
    idle = 1 - search.least / reached if reached else 0.0
    where = f"{per_rank} chunks per rank, {search.name}" + (f", {slices} slices" if slices > 1 else "")
    return f"round {rounds + 1}: {where}: the busiest rank is idle for {idle:.2%}"


def choose(searches: Sequence[Search], steady: bool, rounds: int, effort: int) -> Search:
    """The search that has the best orders, of equals the first, after so many rounds of all that were asked for.

    steady: its orders are then annealed with samples of the ranks' speeds, and may become 0.3% worse by it, but not
    worse than a published schedule. What is proven optimal stays so, and a published schedule that nothing is better
    than stays as it is.
    """
    reached = min(each.reached for each in searches)
    first = next(each for each in searches if each.reached <= reached * (1 + ROUNDING))
    published = min(each.published for each in searches)
    optimal = first.bound >= reached * (1 - ROUNDING)
    if steady and rounds and not (optimal and reached >= published * (1 - ROUNDING)):
        # what was optimal after few rounds is made to bear delays for as long as all others
        most = min(first.reached * (1 if optimal else 1 + _NEAR) * (1 + ROUNDING), published * (1 - ROUNDING))
        first.make_steady(effort if optimal else rounds, _finish_share(searches), most)
    return first
