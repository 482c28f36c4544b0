"""Which searches run, in which order, for how long: constructive answers first, then annealing from the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from zbkern.pipeline import schedules
from zbkern.pipeline.actions import Schedule, ScheduleError
from zbkern.pipeline.planner.bounds import cost_bound
from zbkern.pipeline.planner.lists import Rule, compiled, forward_caps, list_schedule, refine, rules
from zbkern.pipeline.planner.problem import Orders, Problem, fits, orders_of
from zbkern.pipeline.planner.search import anneal, grown

# The search is a sequence of rounds, each twice as long as the one before, that depends on the seed alone.
_FIRST = 8_000_000 if compiled is not None else 10_000  # passes that the first round runs: a tenth of a second
_SHARE = 0.25  # of all passes, that a move has to run again in the compiled search
# Annealing in a round starts by turns this hot, in parts of the mean length of a pass, and ends at `_COLD`.
_HEATS = (0.5, 0.25, 1.0, 0.5, 0.15, 2.0, 0.5, 0.3)
_COLD = 0.02
_STEPS = 60  # temperatures, one after the other
_RULE_PASSES = 10  # one pass in the list scheduler takes the time of ten in annealing
_REFINED = 2  # rules per limit whose caps are refined
_TRIAL_PASSES = 4_000_000  # about a second of list scheduling, all rules together
_QUICK_PASSES = 40_000  # up to here the published schedules are made in no time


class Clock:
    """When to stop: after some seconds, or after a number of rounds whatever the time."""

    def __init__(self, seconds: float, rounds: int | None) -> None:
        self._end = time.monotonic() + seconds if rounds is None else float("inf")
        self._rounds = rounds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def allows(self, round_: int) -> bool:
        return self.left > 0 if self._rounds is None else round_ < self._rounds


def search(problem: Problem, pool: Pool, clock: Clock, seed: int) -> int:
    """Fills the pool; how many rounds came to their end. No published schedule that fits is better than the first."""
    candidates = construct(problem, pool)
    if problem.passes <= _QUICK_PASSES or clock.allows(0):
        for orders in published(problem):
            pool.add(orders)
    fewer = _fewer(problem)
    best: Pool | None = None
    round_ = 0
    while not pool.optimal and clock.allows(round_):
        passes, turn = _FIRST * 2**round_, seed * 64 + round_
        _refine(candidates, passes // 8, turn, pool, clock)
        if fewer is not None:
            if best is None:
                best = Pool(2, cost_bound(fewer))
                construct(fewer, best)
                for orders in published(fewer):
                    best.add(orders)
            _anneal(fewer, best, passes // 2, turn, clock)
            for orders in best.orders:
                for each in grown(problem, orders, problem.microbatches) if not any(orders.fused) else []:
                    pool.add(_costed(problem, each))
        _anneal(problem, pool, passes, turn, clock)
        if clock.left > 0:
            round_ += 1
    return round_


def _fewer(problem: Problem) -> Problem | None:
    """Warm-up and cool-down are the hard part, and nearly the same for any number of microbatches: search with few."""
    small = min(problem.microbatches, 3 * problem.ranks)
    worth = problem.microbatches >= 4 * problem.ranks // 3 and small < problem.microbatches
    return problem.with_microbatches(small) if worth else None


class Pool:
    """The best orders found, of different cost, best first."""

    def __init__(self, keep: int, bound: int) -> None:
        self.orders: list[Orders] = []
        self.bound = bound
        self._keep = max(keep, 1)

    def add(self, orders: Orders | None) -> None:
        if orders is not None and all(orders.cost != other.cost for other in self.orders):
            self.orders = sorted([*self.orders, orders], key=lambda each: each.cost)[: self._keep]

    @property
    def optimal(self) -> bool:
        return bool(self.orders) and self.orders[0].cost <= self.bound


class Candidate(NamedTuple):
    """A rule, what it came to, and the problem, with this limit or a smaller one, that it was tried on."""

    cost: int
    name: int  # of limit and rule, the same for any larger limit
    rule: Rule
    problem: Problem


def construct(problem: Problem, pool: Pool) -> list[Candidate]:
    """Adds what the list scheduler finds, for this limit and for smaller ones: more memory never makes it worse.

    Returns the best candidates for every limit, best first. With many passes all rules are tried on fewer microbatches,
    and those that do best there on all.
    """
    every = list(rules(problem))
    levels = _levels(problem)
    passes = problem.passes * len(every)
    if passes * len(levels) > _TRIAL_PASSES:
        levels = levels[: max(1, _TRIAL_PASSES // passes)]
    trial = problem
    if passes > _TRIAL_PASSES:
        trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
    candidates: list[Candidate] = []
    for name, limit in levels:
        here = trial.with_limit(limit)
        caps = {slope: forward_caps(here, slope) for slope in {rule.slope for rule in every}}
        some: list[Candidate] = []
        for place, rule in enumerate(every):
            cutoff = some[-1].cost - 1 if len(some) == _REFINED else None
            orders = list_schedule(here, rule, caps[rule.slope], cutoff)
            if orders is None or any(orders.cost == each.cost for each in some):
                continue
            some = sorted([*some, Candidate(orders.cost, name * len(every) + place, rule, here)])[:_REFINED]
            if trial is problem:
                pool.add(orders)
                if pool.optimal:
                    return []
        candidates += some
    candidates.sort()
    if trial is not problem:
        count = problem.microbatches
        candidates = [each._replace(problem=each.problem.with_microbatches(count)) for each in candidates]
        for each in candidates[:3]:
            pool.add(list_schedule(each.problem, each.rule))
    return candidates


def _refine(candidates: Sequence[Candidate], passes: int, seed: int, pool: Pool, clock: Clock) -> None:
    """The candidates with their caps changed at random, each with a seed of its own, whatever the limit."""
    for each in candidates:
        tries = passes // (_RULE_PASSES * each.problem.passes * _REFINED)
        if not tries or pool.optimal or not clock.left:
            return
        pool.add(refine(each.problem, each.rule, tries, seed << 32 | each.name, pool.bound))


def _levels(problem: Problem) -> list[tuple[int, tuple[int, ...]]]:
    """The limit itself, then smaller ones: eighths of what 1F1B holds, the same for any limit. Each with a number."""
    needs = [sum(problem.activation[chunk] for chunk in problem.chunks_of(rank)) for rank in range(problem.ranks)]
    unit = max(needs) * problem.ranks  # what 1F1B holds: as many microbatches as ranks, in all chunks of a rank
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


def published(problem: Problem) -> Iterator[Orders]:
    """Every published schedule with this placement that fits the limit."""
    ranks, microbatches = problem.ranks, problem.microbatches
    makers: list[Callable[[], Schedule]] = []
    down = tuple(range(ranks))
    per_rank = problem.chunks // ranks
    if problem.placement == down:
        for make in (schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2):
            makers.append(lambda make=make: make(ranks, microbatches))
    elif problem.placement == down + down[::-1]:
        v_shaped = (
            schedules.zb_v, schedules.v_half, schedules.v_min, schedules.one_f_one_b_v, schedules.dualpipe_v
        )  # fmt: skip
        for make in v_shaped:
            makers.append(lambda make=make: make(ranks, microbatches))
    elif problem.placement == down * per_rank:
        for make in (schedules.interleaved, schedules.interleaved_zero_bubble):
            makers.append(lambda make=make: make(ranks, microbatches, per_rank))
    for maker in makers:
        try:
            schedule = maker()
        except ScheduleError:  # it needs more microbatches
            continue
        orders = orders_of(schedule)
        if fits(problem, orders):
            costed = _costed(problem, orders)
            if costed is not None:
                yield costed


def _costed(problem: Problem, orders: Orders) -> Orders | None:
    try:
        return anneal(problem, orders)[0]
    except ValueError:  # its microbatches do not pass in order
        return None


def _anneal(problem: Problem, pool: Pool, passes: int, seed: int, clock: Clock) -> None:
    """Annealing until about so many passes have run, by turns from the best orders and from those at the start."""
    moves = int(passes / (len(_HEATS) * _STEPS * (_SHARE * problem.passes + 50)))
    if moves < 1 or not pool.orders:
        return
    mean = (sum(problem.forward) + sum(problem.backward) + sum(problem.weight)) // (3 * problem.chunks)
    given = pool.orders[0]
    for turn, heat in enumerate(_HEATS):
        if pool.optimal or not clock.left:
            return
        start = given if turn % 3 == 2 else pool.orders[0]
        cold = min(_COLD / heat, 1.0)
        temperatures = [int(mean * heat * cold ** (step / (_STEPS - 1))) for step in range(_STEPS)]
        found, _ = anneal(
            problem,
            start,
            seed=seed * len(_HEATS) + turn,
            temperatures=temperatures,
            moves=moves,
            target=pool.bound,
            seconds=clock.left,
        )
        pool.add(found)
