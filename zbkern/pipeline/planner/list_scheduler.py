"""The constructive search: a list scheduler is run with many rules, and the best schedules are kept.

Every rank decides what to run next from what has arrived: a forward, a backward, or a W. With one rule for all ranks
this is the greedy search of arXiv 2401.10241, section 3.1 (fill the warm-up with forwards, then one F and one B, W in
gaps and when memory is full, a few yes/no choices all tried), for any number of chunks, with two choices more: how long
a gap must be for a W, and how many forwards each chunk may be ahead of its backwards. Unlike there, ranks decide in the
order of time, each knowing only what has been sent to it by then. `refine` then searches for a rule of its own for
every rank. A schedule made by rules is as regular as they are, so that the best rules hardly depend on the number of
microbatches, and few have to be tried: with 16 stages, one chunk and 128 microbatches some hundred tries reach the
lower bound, where moving pass by pass stays above the published search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, pairwise, product
from typing import Any, NamedTuple

from zbkern.pipeline.planner import native
from zbkern.pipeline.planner.problem import BACKWARD, FORWARD, WEIGHT, Ordering, Problem, Rows

_NEVER = 2**61
_FREE = 2**30  # a cap that is none
_FORESEEN = 3  # chunks
_SLOPES = (0, 50, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 180)
_WAITS = ((0, False), (1, False), (2, False), (3, False), (4, False), (2, True), (4, True))
Each = tuple[int, ...]  # one per rank or per chunk


class Rule(NamedTuple):
    """How the ranks decide, for any number of microbatches; one entry per rank, and of `caps` per chunk.

    priority: with a forward and a backward ready, run 0 the backward, 1 the forward, 2 the one that was not run last.
    patience: a W may start when the next input arrives no sooner than in this many quarters of the W's
    length, or has not been sent yet.
    late_forward, late_backward: of several chunks ready, run the last. caps: how many forwards a chunk may be ahead of
    its backwards. foresight: a W also waits for a gradient that has not been sent yet, by the earliest time at which it
    can arrive, if the backward that sends it is a few chunks away. fuse: all backwards are fused; without it, those
    that would leave more than the memory has room for. follow: after the F or B of a chunk comes that of its neighbour,
    where the same rank has it.
    """

    priority: Each
    patience: Each
    late_forward: Each
    late_backward: Each
    caps: Each
    foresight: bool
    fuse: bool
    follow: bool


def rules(problem: Problem, caps: Sequence[Each] | None = None, stride: int = 1) -> Iterator[Rule]:
    """Every `stride`-th of the rules that are tried, the same for all ranks, with any of these caps."""

    def same(choice: int) -> Each:
        return (choice,) * problem.ranks

    @cache
    def cap(index: int) -> Each:
        return forward_caps(problem, _SLOPES[index]) if caps is None else caps[index]

    choices = product(*_choices(problem, len(_SLOPES if caps is None else caps)))
    for priority, (patience, foresight), index, forward, backward, fused, follow in islice(choices, 0, None, stride):
        yield Rule(same(priority), same(patience), same(forward), same(backward), cap(index), foresight, fused, follow)


def count_rules(problem: Problem) -> int:
    """How many `rules` there are."""
    return math.prod(map(len, _choices(problem, len(_SLOPES))))


def _choices(problem: Problem, caps: int) -> tuple[Sequence[Any], ...]:
    late = (1, 0) if problem.chunks > problem.ranks else (1,)
    fuse, follow = (False, True)[: 1 + problem.may_fuse], (False, True)[: 1 + _may_follow(problem)]
    return range(3), _WAITS, range(caps), late, late, fuse, follow


def _may_follow(problem: Problem) -> bool:
    """Whether neighbouring chunks share a rank, other than at the turn of a single V, for which there are patterns."""
    shared = sum(here == there for here, there in pairwise(problem.placement))
    return shared > 1


def list_schedule(problem: Problem, rule: Rule, cutoff: int | None = None) -> Ordering | None:
    """The orders that `rule` makes; None when it deadlocks, or costs more than `cutoff`."""
    cutoff = _NEVER if cutoff is None else cutoff
    if native.core is not None:
        orders = Ordering(*native.core.list_schedule(problem, rule, cutoff))
        return orders if orders.rows else None
    return _Lists(problem, rule).run(cutoff)


def best_rules(problem: Problem, tried: Sequence[Rule], kept: int, seconds: float = math.inf) -> list[tuple[int, int]]:
    """Costs and places of the best `kept` of these rules, the best first, of equal costs only the first.

    seconds: stop after this long, once there is any.
    """
    if native.core is not None:
        found: list[tuple[int, int]] = native.core.best_rules(problem, tried, kept, seconds)
        return found
    end, found = time.monotonic() + seconds, []
    for index, rule in enumerate(tried):
        if found and time.monotonic() > end:
            break
        orders = list_schedule(problem, rule, found[-1][0] - 1 if len(found) == kept else None)
        if orders is not None and all(orders.cost != cost for cost, _ in found):
            found = sorted([*found, (orders.cost, index)])[:kept]
    return found


def refine(
    problem: Problem, rule: Rule, tries: int, seed: int, target: int = 0, seconds: float = math.inf
) -> tuple[Ordering, Rule] | None:
    """The best orders found with other rules near this one, and their rule; None when this one makes none.

    A try changes one choice, or the caps, of some neighbouring ranks at random, and stays when that is no worse.
    target: a cost at which to stop. seconds: stop after this long. It runs in C++ (csrc/planner_lists.cpp).
    """
    assert native.core is not None
    found, changed = native.core.refine(problem, rule, _may_follow(problem), tries, seed, target, seconds)
    orders = Ordering(*found)
    return (orders, Rule(*changed)) if orders.rows else None


class _Lists:
    """One run of the list scheduler. csrc/planner_lists.cpp is its compiled twin."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        ranks, chunks, microbatches = problem.ranks, problem.chunks, problem.microbatches
        self.problem, self.rule = problem, rule
        self.chunks = [problem.chunks_of(rank) for rank in range(ranks)]
        self.forward_at = [[_NEVER] * microbatches for _ in range(chunks)]
        self.backward_at = [[_NEVER] * microbatches for _ in range(chunks)]
        self.forward_at[0] = [0] * microbatches
        self.backward_at[-1] = [0] * microbatches
        self.done = [[0] * chunks for _ in range(3)]  # [kind][chunk]
        self.clock, self.memory, self.held = [0] * ranks, [0] * ranks, [0] * ranks
        self.start: list[Any] = [None] * ranks
        self.idle, self.last_was_forward = [False] * ranks, [False] * ranks
        self.following: list[int | None] = [None] * ranks  # the chunk whose F or B comes next by `follow`
        self.pending: list[list[int]] = [[] for _ in range(ranks)]  # the chunks of its B whose W has not run
        self.rows: Rows = [[] for _ in range(ranks)]
        self.fused = [0] * (chunks * microbatches)
        self.cost = 0

    def run(self, cutoff: int) -> Ordering | None:
        left = self.problem.passes
        while left:
            rank = min(
                (rank for rank, idle in enumerate(self.idle) if not idle), key=self.clock.__getitem__, default=None
            )
            if rank is None:
                return None
            left -= self._step(rank)
            if self.cost > cutoff:
                return None
        return Ordering(self.cost, self.rows, self.fused)

    def _ready(self, rank: int) -> tuple[int | None, int | None, int, int]:
        """The chunk whose forward may run now, the one whose backward may, and when the next input arrives.

        Last, when the next gradient that is not sent yet can arrive; never, when that is not foreseen.
        """
        problem, now = self.problem, self.clock[rank]
        forwards, backwards = self.done[FORWARD], self.done[BACKWARD]
        forward = backward = None
        coming = expected = _NEVER
        # The first microbatch with a forward left here must always find room, or the pipeline locks up.
        oldest = min(forwards[chunk] for chunk in self.chunks[rank])
        for chunk in self.chunks[rank]:
            if backwards[chunk] < forwards[chunk]:
                at = self.backward_at[chunk][backwards[chunk]]
                if at >= _NEVER and self.rule.foresight:
                    at = self._foreseen(chunk, backwards[chunk])
                    expected = min(expected, at if at > now else _NEVER)
                elif at > now:
                    coming = min(coming, at)
                elif backward is None or self._prefers(rank, chunk, backward, self.rule.late_backward[rank], False):
                    backward = chunk
            if forwards[chunk] < problem.microbatches and forwards[chunk] - backwards[chunk] < self.rule.caps[chunk]:
                at = self.forward_at[chunk][forwards[chunk]]
                need = problem.activation[chunk] + sum(
                    problem.activation[other]
                    for other in self.chunks[rank]
                    if other != chunk and forwards[other] <= oldest
                )
                if at >= _NEVER or self.memory[rank] - self.held[rank] + need > problem.limit[rank]:
                    continue
                if at > now:
                    coming = min(coming, at)
                elif forward is None or self._prefers(rank, chunk, forward, self.rule.late_forward[rank], True):
                    forward = chunk
        return forward, backward, coming, expected

    def _prefers(self, rank: int, later: int, earlier: int, late: int, forward: bool) -> bool:
        """Whether the later of two chunks whose F (or B) may run is taken."""
        if self.last_was_forward[rank] == forward and self.following[rank] in (later, earlier):
            return self.following[rank] == later
        return bool(late)

    def _foreseen(self, chunk: int, microbatch: int) -> int:
        """The earliest that this gradient can arrive, if the backward before it is at most `_FORESEEN` chunks away."""
        problem, source = self.problem, chunk + 1
        while self.backward_at[source][microbatch] >= _NEVER:
            source += 1
            if source > chunk + _FORESEEN:
                return _NEVER
        if self.done[FORWARD][source] <= microbatch:
            return _NEVER
        at = self.backward_at[source][microbatch]
        for each in range(source, chunk, -1):
            at = max(at, self.clock[problem.placement[each]]) + problem.communication[each - 1]
            at += problem.fused[each] if self.rule.fuse else problem.backward[each]
        return at

    def _step(self, rank: int) -> int:
        """One decision of `rank`; how many passes it ran."""
        problem, now = self.problem, self.clock[rank]
        forward, backward, coming, expected = self._ready(rank)
        next_ = min(coming, expected)
        priority = self.rule.priority[rank]
        forward_first = priority == 1 or (priority == 2 and not self.last_was_forward[rank])
        following = self.following[rank]
        if following is not None and following == (forward if self.last_was_forward[rank] else backward):
            forward_first = self.last_was_forward[rank]
        if forward is not None and (backward is None or forward_first):
            full = self.memory[rank] + problem.activation[forward] > problem.limit[rank]
            kind = WEIGHT if full else FORWARD
        elif backward is not None:
            kind = WEIGHT if self._full(rank, backward) and self.pending[rank] and not self.rule.fuse else BACKWARD
        elif self.pending[rank] and (
            next_ >= _NEVER or 4 * (next_ - now) >= self.rule.patience[rank] * problem.weight[self.pending[rank][0]]
        ):
            kind = WEIGHT
        else:
            if next_ < _NEVER:
                self.clock[rank] = next_
            else:
                self.idle[rank] = True
            return 0
        chunk = {FORWARD: forward, BACKWARD: backward}.get(kind)
        return self._execute(rank, kind, self.pending[rank].pop(0) if chunk is None else chunk)

    def _full(self, rank: int, chunk: int) -> bool:
        """Whether a B of the chunk would leave more than there is room for."""
        left = self.problem.held[chunk] - self.problem.activation[chunk]
        return self.memory[rank] + left > self.problem.limit[rank]

    def _execute(self, rank: int, kind: int, chunk: int) -> int:
        problem, now = self.problem, self.clock[rank]
        fuse = self.rule.fuse or (kind == BACKWARD and self._full(rank, chunk))
        microbatch = self.done[kind][chunk]
        self.done[kind][chunk] += 1
        self.rows[rank].append((kind * problem.chunks + chunk) * problem.microbatches + microbatch)
        ran = 1
        if kind == FORWARD:
            length = problem.forward[chunk]
            self.memory[rank] += problem.activation[chunk]
        elif kind == BACKWARD:
            length = problem.fused[chunk] if fuse else problem.backward[chunk]
            self.memory[rank] -= problem.activation[chunk]
            self.fused[chunk * problem.microbatches + microbatch] = int(fuse)
            if fuse:
                self.rows[rank].append((WEIGHT * problem.chunks + chunk) * problem.microbatches + microbatch)
                self.done[WEIGHT][chunk] += 1
                ran = 2
            else:
                self.memory[rank] += problem.held[chunk]
                self.held[rank] += problem.held[chunk]
                self.pending[rank].append(chunk)
        else:
            length = problem.weight[chunk]
            self.memory[rank] -= problem.held[chunk]
            self.held[rank] -= problem.held[chunk]
        if self.start[rank] is None:
            self.start[rank] = now
        self.clock[rank] = end = now + length
        if kind != WEIGHT:
            self.last_was_forward[rank] = kind == FORWARD
        self.cost = max(self.cost, end - (0 if problem.makespan else self.start[rank]))
        consumer = chunk + 1 if kind == FORWARD else chunk - 1
        if kind != WEIGHT and self.rule.follow:
            shared = 0 <= consumer < problem.chunks and problem.placement[consumer] == rank
            self.following[rank] = consumer if shared else None
        if kind != WEIGHT and 0 <= consumer < problem.chunks:
            arrivals = self.forward_at if kind == FORWARD else self.backward_at
            arrivals[consumer][microbatch] = end + problem.communication[min(chunk, consumer)]
            peer = problem.placement[consumer]
            if self.idle[peer]:
                self.idle[peer] = False
                self.clock[peer] = max(self.clock[peer], now)
        return ran


def forward_caps(problem: Problem, slope: int) -> Each:
    """How many forwards each chunk may be ahead of its backwards: more, the further it is from the last chunk.

    slope: how fast they fall towards the last chunk, in percent of what fits the memory; 0 for no caps.
    """
    if slope == 0:
        return (_FREE,) * problem.chunks
    tightest: tuple[int, int] | None = None  # of all ranks: what is spare, and what that is divided by
    for rank in range(problem.ranks):
        own_chunks = problem.chunks_of(rank)
        weighted = sum(problem.activation[chunk] * (problem.chunks - 1 - chunk) for chunk in own_chunks)
        spare = max(0, problem.limit[rank] - sum(problem.activation[chunk] for chunk in own_chunks))
        if weighted and (tightest is None or spare * tightest[1] < tightest[0] * weighted):
            tightest = spare, weighted
    if tightest is None:
        return (_FREE,) * problem.chunks
    spare, weighted = tightest
    further = range(problem.chunks - 1, -1, -1)
    return tuple(min(_FREE, 1 + slope * spare * each // (100 * weighted)) for each in further)
