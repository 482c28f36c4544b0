"""Which searches run, in which order, for how long: constructive answers first, then annealing from the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from zbkern.pipeline import schedules
from zbkern.pipeline.actions import Schedule, ScheduleError
from zbkern.pipeline.planner.lists import Rule, compiled, list_schedule, refine, rules
from zbkern.pipeline.planner.problem import Orders, Problem, orders_of
from zbkern.pipeline.planner.search import anneal, grown

# Passes run per second of `time_limit`. A 2.5 GHz core does about half as many again, so that a busy one keeps up.
_SPEED = 120e6 if compiled is not None else 0.3e6
_SHARE = 0.25  # of all passes, that a move has to run again in the compiled search
# Each round of annealing starts this hot, in parts of the mean length of a pass, and ends at 1/20 of that or less.
_HEATS = (0.5, 0.25, 1.0, 0.5, 0.15, 2.0, 0.5, 0.3)
_COLD = 0.02
_STEPS = 60  # temperatures per round
_RULE_PASSES = 10  # one pass in the list scheduler takes the time of ten in annealing
_REFINED = 4  # rules whose caps are refined
_TRIAL_PASSES = 4_000_000  # about a second of list scheduling, all rules together


def search(problem: Problem, bound: int, seconds: float, seed: int, keep: int) -> list[Orders]:
    """Up to `keep` orders, the best first; every published schedule that fits is no better than the first."""
    begin = time.monotonic()
    pool = _Pool(keep)
    for orders in construct(problem):
        pool.add(orders)
    for orders in published(problem):
        pool.add(orders)
    if compiled is None and seconds - (time.monotonic() - begin) <= 0:
        return pool.orders
    budget = seconds * _SPEED
    for orders in _refined(problem, bound, budget / 8, seed, pool):
        pool.add(orders)
    small = min(problem.microbatches, 3 * problem.ranks)
    if problem.microbatches >= 4 * problem.ranks // 3 and small < problem.microbatches:
        # Warm-up and cool-down are the hard part, and nearly the same for any number of microbatches: search with few.
        fewer = problem.with_microbatches(small)
        best = _Pool(2)
        for orders in [*construct(fewer), *published(fewer)]:
            best.add(orders)
        _anneal(fewer, best, 0, budget / 2, seed, lambda: begin + 0.6 * seconds)
        for orders in best.orders:
            for each in grown(problem, orders, problem.microbatches) if not any(orders.fused) else []:
                pool.add(_costed(problem, each))
        budget /= 2
    narrow = _narrowed(problem)
    if narrow is not None:
        _anneal(narrow, pool, bound, budget / 2, seed, lambda: begin + 0.8 * seconds)
        budget /= 2
    _anneal(problem, pool, bound, budget, seed, lambda: begin + seconds)
    return pool.orders


class _Pool:
    """The best orders found, of different cost, best first."""

    def __init__(self, keep: int) -> None:
        self.orders: list[Orders] = []
        self._keep = keep

    def add(self, orders: Orders | None) -> None:
        if orders is not None and all(orders.cost != other.cost for other in self.orders):
            self.orders = sorted([*self.orders, orders], key=lambda each: each.cost)[: max(self._keep, 1)]


def construct(problem: Problem) -> list[Orders]:
    """What the list scheduler finds, for this limit and for smaller ones: more memory never makes it worse.

    With many passes all rules are tried on fewer microbatches, and those that do best there on all.
    """
    every = list(rules(problem))
    levels = _levels(problem)
    passes = problem.passes * len(every)
    if passes * len(levels) > _TRIAL_PASSES:
        levels = levels[: max(1, _TRIAL_PASSES // passes)]
    trial = problem
    if passes > _TRIAL_PASSES:
        trial = problem.with_microbatches(min(problem.microbatches, 2 * problem.ranks + 2))
    found = []
    for limit in levels:
        ranked: list[tuple[int, int, Rule]] = []
        best: Orders | None = None
        for index, rule in enumerate(every):
            orders = list_schedule(trial.with_limit(limit), rule)
            if orders is None:
                continue
            ranked.append((orders.cost, index, rule))
            if trial is problem and (best is None or orders.cost < best.cost):
                best = orders
        if trial is not problem:
            full = [list_schedule(problem.with_limit(limit), rule) for _, _, rule in sorted(ranked)[:3]]
            best = min((orders for orders in full if orders is not None), key=lambda each: each.cost, default=None)
        if best is not None:
            found.append(best)
    return found


def _refined(problem: Problem, bound: int, budget: float, seed: int, pool: _Pool) -> Iterator[Orders]:
    """The best rules with their caps changed at random."""
    tries = int(budget / (_RULE_PASSES * problem.passes * _REFINED))
    if tries < 1:
        return
    ranked = []
    for index, rule in enumerate(rules(problem)):
        orders = list_schedule(problem, rule)
        if orders is not None:
            ranked.append((orders.cost, index, rule))
    for _, index, rule in sorted(ranked)[:_REFINED]:
        if pool.orders and pool.orders[0].cost <= bound:
            return
        orders = refine(problem, rule, tries, seed * len(ranked) + index)
        if orders is not None:
            yield orders


def _levels(problem: Problem) -> list[tuple[int, ...]]:
    """The limit itself, then smaller ones: eighths of what 1F1B holds, the same for any limit."""
    needs = [sum(problem.activation[chunk] for chunk in problem.chunks_of(rank)) for rank in range(problem.ranks)]
    unit = _unit(problem)
    levels = [problem.limit]
    eighths = 8 * min(problem.limit) // unit if unit else 0
    for eighth in range(min(eighths, 24), 0, -1):
        slack = unit >> 30  # activations are rounded; see Problem
        level = tuple(min(limit, unit * eighth // 8 + slack) for limit in problem.limit)
        if level != levels[-1] and all(need <= limit for need, limit in zip(needs, level, strict=True)):
            levels.append(level)
    return levels


def _narrowed(problem: Problem) -> Problem | None:
    """With more memory than 9/4 of what 1F1B holds, the problem with that much: fewer orders, hardly a worse one."""
    levels = [level for level in _levels(problem) if 4 * min(level) >= 9 * _unit(problem)]
    return problem.with_limit(levels[-1]) if len(levels) > 1 else None


def _unit(problem: Problem) -> int:
    """What 1F1B holds: as many microbatches as ranks, in all chunks of a rank."""
    needs = [sum(problem.activation[chunk] for chunk in problem.chunks_of(rank)) for rank in range(problem.ranks)]
    return max(needs) * problem.ranks


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
        if _fits(problem, schedule):
            costed = _costed(problem, orders)
            if costed is not None:
                yield costed


def _fits(problem: Problem, schedule: Schedule) -> bool:
    for row, limit in zip(schedule.actions, problem.limit, strict=True):
        memory = 0
        for kind, chunk, _, _ in row:
            activation, held = problem.activation[chunk], problem.held[chunk]
            memory += {"F": activation, "B": held - activation, "W": -held, "BW": -activation}[kind]
            if memory > limit:
                return False
    return True


def _costed(problem: Problem, orders: Orders) -> Orders | None:
    try:
        return anneal(problem, orders)[0]
    except ValueError:  # its microbatches do not pass in order
        return None


def _anneal(problem: Problem, pool: _Pool, bound: int, budget: float, seed: int, deadline: Callable[[], float]) -> None:
    """Rounds of annealing until `budget` passes have run, by turns from what was constructed and from the best."""
    rounds = len(_HEATS)
    moves = int(budget / (rounds * _STEPS * (_SHARE * problem.passes + 50)))
    if moves < 1 or not pool.orders:
        return
    total = sum(problem.forward) + sum(problem.backward) + sum(problem.weight)
    mean = total // (3 * problem.chunks)
    constructed = list(pool.orders)
    for turn, heat in enumerate(_HEATS):
        seconds = deadline() - time.monotonic()
        if seconds <= 0 or pool.orders[0].cost <= bound:
            return
        start = pool.orders[0] if turn % 2 else constructed[turn // 2 % len(constructed)]
        temperatures = [int(mean * heat * (_COLD / heat) ** (step / (_STEPS - 1))) for step in range(_STEPS)]
        found, finished = anneal(
            problem,
            start,
            seed=seed * rounds + turn,
            temperatures=temperatures,
            moves=moves,
            target=bound,
            seconds=seconds,
        )
        pool.add(found)
        if not finished:
            return
