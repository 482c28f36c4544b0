"""Patterns: the hand-made order of ZB-V with its counts free, for two chunks per rank in a V.

A rank runs f and F, the forwards of its first and second chunk, and b and B, their backwards, in this order (arXiv
2401.10241, section 6, there with counts for passes of equal length and 1F1B's memory, and with no third phase):

    f as often as ahead[rank], then F f as often as paired[rank], F B as often as turned[rank], f F B as often as
    filled[rank], and f b F B until nothing is left,

and W, the oldest first, where the next of these comes late, or where its memory is needed. Late is by the patience of
the rank in the phase: before the first b, while there are f, and after. Seven numbers per rank, so that annealing
finds in a second how a step should start and end with real costs, many passes at a time, where moving pass by pass
does not (p=16, m=48, 1.25 times 1F1B's memory: 2.4% idle, rules and moved passes came to 5.2%). A pattern that has
come to repeat itself holds for any more microbatches.

csrc/planner_patterns.cpp is the compiled twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zbkern.pipeline.planner.lists import compiled
from zbkern.pipeline.planner.problem import BACKWARD, FORWARD, WEIGHT, Orders, Problem, Rows
from zbkern.pipeline.planner.randomness import Random

_NEVER = 2**61
_PATIENCE = 4  # where the patience of the three phases begins, behind the four counts
_DOWN, _UP, _BACK_UP, _BACK_DOWN = range(4)  # f, F, b and B: twice the kind, and 1 for the second chunk
# What a move adds to the four counts, or takes away. Mostly several change, so that ranks stay in step.
_STEPS = (
    (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, -1, 0), (2, -1, 0, 0), (1, -1, 0, 0),
    (2, -1, 1, 0), (1, -1, 1, 0), (1, 0, 1, 0), (0, 0, 1, -1), (1, 0, 0, -1), (1, 0, 0, 1),
)  # fmt: skip
Pattern = list[list[int]]  # [7][ranks]: ahead, paired, turned, filled, and patience in quarters of a W by phase


def is_v(problem: Problem) -> bool:
    """Whether patterns are for this placement."""
    down = tuple(range(problem.ranks))
    return problem.placement == down + down[::-1]


def zb_v_pattern(problem: Problem, percent: int, patience: int) -> Pattern:
    """The pattern of ZB-V with so much of its counts, the same patience everywhere."""
    ranks = problem.ranks

    def share(count: int) -> int:
        return (count * percent + 50) // 100

    ahead = [max(1, share(2 * (ranks - rank) - 1)) for rank in range(ranks)]
    paired = [share(rank) for rank in range(ranks)]
    turned = [share(ranks - rank) for rank in range(ranks)]
    return [ahead, paired, turned, [0] * ranks, *([patience] * ranks for _ in range(3))]


def zb_v_patterns(problem: Problem) -> Iterator[Pattern]:
    """Those to start from: first ZB-V's own counts, then more for more memory, and fewer for less."""
    for percent in (100, *range(104, 164, 4), *range(96, 40, -4)):
        for patience in (4, 2, 1):
            yield zb_v_pattern(problem, percent, patience)


def search_patterns(
    problem: Problem,
    start: Pattern,
    *,
    seed: int = 0,
    temperatures: Sequence[int] = (),
    moves: int = 0,
    spread: int = 1,
    target: int = 0,
) -> tuple[Orders, Pattern] | None:
    """The best orders found and their pattern, from `start` on; None when that one cannot run or does not fit.

    temperatures: one after the other, in units of time, `moves` tried at each. spread: the weight of the mean span
    beside the largest. target: a cost at which to stop. Nothing is fused, and savings of merged W are not weighed.
    """
    scaled = [problem.ranks * temperature for temperature in temperatures]
    if compiled is not None:
        found, pattern = compiled.search_patterns(problem, start, seed, scaled, moves, spread, target)
        orders = Orders(*found)
        return (orders, pattern) if orders.rows else None
    return _search(problem, start, seed, scaled, moves, spread, target)


def _search(
    problem: Problem, start: Pattern, seed: int, temperatures: Sequence[int], moves: int, spread: int, target: int
) -> tuple[Orders, Pattern] | None:
    random = Random(seed)
    spans, rows = _Run(problem, start).run()
    if not rows:
        return None
    fused = [0] * (problem.chunks * problem.microbatches)
    best, pattern, now = Orders(max(spans), rows, fused), start, start
    energy = problem.ranks * max(spans) + spread * sum(spans)
    for temperature in temperatures:
        for _ in range(moves):
            if best.cost <= target:
                break
            trial = _changed(now, random)
            threshold = energy + (temperature >> 16) * random.exponential()
            if trial == now:
                continue
            spans, rows = _Run(problem, trial).run()
            if not rows or problem.ranks * max(spans) + spread * sum(spans) > threshold:
                continue
            now, energy = trial, problem.ranks * max(spans) + spread * sum(spans)
            if max(spans) < best.cost:
                best, pattern = Orders(max(spans), rows, fused), now
    return best, pattern


def _changed(pattern: Pattern, random: Random) -> Pattern:
    """Other counts, or another patience in a phase, on a stretch of ranks."""
    ranks, changed = len(pattern[0]), [list(each) for each in pattern]
    way, where = random.below(5), random.below(4)
    first = random.below(ranks)
    last = min(ranks, first + 1 + random.below(6 if way else ranks))
    first, last = (0 if where == 0 else first), (ranks if where == 1 else last)
    if way == 0:
        phase, patience = random.below(3), 1 + random.below(8)
        changed[_PATIENCE + phase][first:last] = [patience] * (last - first)
        return changed
    step = _STEPS[random.below(len(_STEPS))]
    sign = 1 if random.percent(50) else -1
    for which, change in enumerate(step):
        for rank in range(first, last):
            changed[which][rank] = max(0 if which else 1, changed[which][rank] + sign * change)
    return changed


class _Run:
    """One run of a pattern."""

    def __init__(self, problem: Problem, pattern: Pattern) -> None:
        self.problem, self.pattern = problem, pattern
        self.rows: Rows = [[] for _ in range(problem.ranks)]
        self.pending: list[list[int]] = [[] for _ in range(problem.ranks)]  # the chunks of B whose W has not run
        self.count = [0] * (3 * problem.chunks)  # [kind * chunks + chunk]
        self.clock, self.memory = [0] * problem.ranks, [0] * problem.ranks
        self.start: list[Any] = [None] * problem.ranks
        self.ends: dict[int, int] = {}

    def run(self) -> tuple[list[int], Rows]:
        """The span of every rank, and the rows; no rows when it cannot run or does not fit the memory."""
        problem, ranks = self.problem, range(self.problem.ranks)
        scripts, place = [self._script(rank) for rank in ranks], [0] * problem.ranks
        progress = True
        while progress:
            progress = False
            for rank in ranks:
                while place[rank] < len(scripts[rank]):
                    ran = self._step(rank, *scripts[rank][place[rank]])
                    if ran is None:
                        return [], []
                    if not ran:
                        break
                    place[rank] += 1
                    progress = True
        if any(at < len(script) for at, script in zip(place, scripts, strict=True)):
            return [], []
        for rank in ranks:
            while self.pending[rank]:
                self._weight(rank)
        return [self.clock[rank] - self.start[rank] for rank in ranks], self.rows

    def _script(self, rank: int) -> list[tuple[int, int]]:
        """The forwards and backwards of a rank in order, each with its phase."""
        microbatches = self.problem.microbatches
        ahead, paired, turned, filled = (self.pattern[which][rank] for which in range(_PATIENCE))
        order = [_DOWN] * ahead + [_UP, _DOWN] * paired + [_UP, _BACK_DOWN] * turned
        order += [_DOWN, _UP, _BACK_DOWN] * filled
        begun = len(order)
        order += [_DOWN, _BACK_UP, _UP, _BACK_DOWN] * microbatches
        done, script = [0] * 4, []
        for index, what in enumerate(order):
            if index >= begun and (index - begun) % 4 == 0:
                phase = 1 if done[_DOWN] < microbatches else 2
            elif index < begun:
                phase = 0
            if done[what] < microbatches:
                script.append((phase, what))
                done[what] += 1
        return script

    def _step(self, rank: int, phase: int, what: int) -> bool | None:
        """Runs the pass, and W before it; false while its input is missing, None when it cannot run at all."""
        problem = self.problem
        kind, chunk = what // 2, problem.chunks - 1 - rank if what % 2 else rank
        item = kind * problem.chunks + chunk
        number = item * problem.microbatches + self.count[item]
        at = 0
        if kind == BACKWARD and self.count[chunk] <= self.count[item]:
            return None
        if kind == FORWARD and chunk > 0:
            at = self.ends.get(number - problem.microbatches, _NEVER) + problem.communication[chunk - 1]
        elif kind == BACKWARD and chunk < problem.chunks - 1:
            at = self.ends.get(number + problem.microbatches, _NEVER) + problem.communication[chunk]
        if at >= _NEVER:
            return False
        patience, pending = self.pattern[_PATIENCE + phase][rank], self.pending[rank]
        while pending and 4 * (at - self.clock[rank]) >= patience * problem.weight[pending[0]]:
            self._weight(rank)
        change = problem.activation[chunk] if kind == FORWARD else problem.held[chunk] - problem.activation[chunk]
        while pending and self.memory[rank] + change > problem.limit[rank]:
            self._weight(rank)
        if self.memory[rank] + change > problem.limit[rank]:
            return None
        begin = max(at, self.clock[rank])
        if self.start[rank] is None:
            self.start[rank] = 0 if problem.makespan else begin
        self.clock[rank] = begin + (problem.forward[chunk] if kind == FORWARD else problem.backward[chunk])
        self.ends[number] = self.clock[rank]
        self.memory[rank] += change
        self.count[item] += 1
        self.rows[rank].append(number)
        if kind == BACKWARD:
            pending.append(chunk)
        return True

    def _weight(self, rank: int) -> None:
        problem, chunk = self.problem, self.pending[rank].pop(0)
        item = WEIGHT * problem.chunks + chunk
        self.rows[rank].append(item * problem.microbatches + self.count[item])
        self.count[item] += 1
        self.clock[rank] += problem.weight[chunk]
        self.memory[rank] -= problem.held[chunk]
