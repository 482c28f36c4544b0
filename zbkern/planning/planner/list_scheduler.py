"""The constructive search: a list scheduler is run with many rules, and the best schedules are kept.

Every rank decides what to run next from what has arrived: a forward, a backward, or a W. With one rule for all ranks
this is the greedy search of arXiv 2401.10241, section 3.1 (fill the warm-up with forwards, then one F and one B, W in
gaps and when memory is full, a few yes/no choices all tried), for any number of chunks, with two choices more: how long
a gap must be for a W, and how many forwards each chunk may be ahead of its backwards. Unlike there, ranks decide in the
order of time, each knowing only what has been sent to it by then. `refine` then searches for a rule of its own for
every rank. A schedule made by rules is as regular as they are, so that the best rules hardly depend on the number of
microbatches, and few have to be tried: with 16 stages, one chunk and 128 microbatches some hundred tries reach the
lower bound, where moving pass by pass stays above the published search.

It runs in C++ (csrc/planner_lists.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

from zbkern.planning.planner import native
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.problem import Ordering, Problem

_FREE = 2**30  # a cap that is none
_SLOPES = (0, 50, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 180)
Each = tuple[int, ...]  # one per rank or per chunk
Choices = tuple[int, int, int, int, int, int, bool]  # those of `all_choices`


class Rule(NamedTuple):
    """How the ranks decide, for any number of microbatches; one entry per rank, and of `caps` and `fuse` per chunk.

    priority: with a forward and a backward ready, run 0 the backward, 1 the forward, 2 the one that was not run last.
    patience: a W may start when the next input arrives no sooner than in this many quarters of the W's
    length, or has not been sent yet.
    late_forward, late_backward: of several chunks ready, run the last. caps: how many forwards a chunk may be ahead of
    its backwards. fuse: all of these are fused; without it, those that would leave more than the memory has room for.
    follow: after the F or B of a chunk comes that of its neighbour, where the same rank has it. reserve: a microbatch
    begins where there is room for all of it, without which unequal ones could wait for each other's memory. most: of
    the passes that run beside each other. waits: for a partner of an F or a B that is ready, in percent of the time of
    an F. alike: whether two F, or two B, of different chunks run beside each other.
    """

    priority: Each
    patience: Each
    late_forward: Each
    late_backward: Each
    caps: Each
    fuse: Each
    follow: bool
    reserve: bool = False
    most: int = 1
    waits: int = 0
    alike: bool = False


def rules_to_try(problem: Problem, choices: Sequence[Choices] | None = None) -> list[Rule]:
    """Those of these choices, or of all, the same for all ranks."""
    caps = _forward_caps(problem)
    every, rules = problem.ranks, list[Rule]()
    for priority, patience, slope, forward, backward, fuse, follow in (
        all_choices(problem) if choices is None else choices
    ):
        of_ranks = (priority,) * every, (patience,) * every, (forward,) * every, (backward,) * every
        rules.append(Rule(*of_ranks, caps[slope], (fuse,) * problem.chunks, follow))
    return rules


def all_choices(problem: Problem) -> list[Choices]:
    """Of every rule that is tried: priority, patience, slope of caps, late forward and backward, fuse, follow."""
    return _product(problem.chunks > problem.ranks, problem.may_fuse, _may_follow(problem))


@functools.cache
def _product(several: bool, may_fuse: bool, may_follow: bool) -> list[Choices]:
    late = (1, 0) if several else (1,)
    fuse, follow = (0, 1)[: 1 + may_fuse], (False, True)[: 1 + may_follow]
    return list(product(range(3), range(5), range(len(_SLOPES)), late, late, fuse, follow))


def _may_follow(problem: Problem) -> bool:
    """Whether neighbouring chunks share a rank, other than at the turn of a single V, for which there are patterns."""
    shared = sum(here == there for here, there in pairwise(problem.placement))
    return shared > 1


def list_schedule(problem: Problem, rule: Rule) -> Ordering | None:
    """The orders that `rule` makes; None when it deadlocks."""
    found = refine(problem, rule, Effort())
    return found and found[0]


def best_rules(problem: Problem, tried: Sequence[Rule], kept: int) -> list[tuple[int, int]]:
    """Costs and places of the best `kept` of these rules, the best first, of equal costs only the first."""
    found: list[tuple[int, int]] = native.core.best_rules(problem, tried, kept)
    return found


def refine(problem: Problem, rule: Rule, effort: Effort) -> tuple[Ordering, Rule] | None:
    """The best orders found with other rules near this one, and their rule; None when this one makes none.

    A move changes one choice, or the caps, of some neighbouring ranks at random.
    """
    found, changed = native.core.refine(problem, rule, _may_follow(problem), effort)
    orders = Ordering(*found)
    return (orders, Rule(*changed)) if orders.rows else None


def _forward_caps(problem: Problem) -> list[Each]:
    """How many forwards each chunk may be ahead of its backwards: more, the further it is from the last chunk.

    For each slope: how fast they fall towards the last chunk, in percent of what fits the memory; 0 for no caps. With
    slices a whole microbatch is ahead even in the last chunk, before the first backward.
    """
    tightest: tuple[int, int] | None = None  # of all ranks: what is spare, and what that is divided by
    for rank in range(problem.ranks):
        own_chunks = problem.chunks_of[rank]
        taken = {chunk: sum(problem.by_chunk[chunk].activation) for chunk in own_chunks}  # by a whole microbatch
        weighted = sum(taken[chunk] * (problem.chunks - 1 - chunk) for chunk in own_chunks)
        spare = max(0, problem.limit[rank] - sum(taken.values()))
        if weighted and (tightest is None or spare * tightest[1] < tightest[0] * weighted):
            tightest = spare, weighted
    none, slices = (_FREE,) * problem.chunks, len(problem.slices)
    if tightest is None:
        return [none] * len(_SLOPES)
    spare, weighted = tightest
    further = [spare * each * slices for each in range(problem.chunks - 1, -1, -1)]
    caps = [[min(_FREE, slices + slope * each // (100 * weighted)) for each in further] for slope in _SLOPES]
    return [tuple(each) if slope else none for slope, each in zip(_SLOPES, caps, strict=True)]
