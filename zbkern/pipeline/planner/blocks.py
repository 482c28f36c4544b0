"""Building blocks: one microbatch placed in time, that all microbatches repeat, each one turn after the one before.

V-Half and V-Min (arXiv 2405.15362) are such schedules, made by hand for passes of equal length. Here the block is
searched for, with the real costs: a rank runs its passes in the order of the time that the block gives them, each as
soon as it can, and simulated annealing moves passes of the block, which moves those of all microbatches at once. Where
memory is short, changing one microbatch after the other does not get from one steady state to a better one; this does.
What it finds starts and ends badly, and is the start of the search in search.py.

csrc/planner_blocks.cpp is the compiled twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zbkern.pipeline.planner.lists import compiled
from zbkern.pipeline.planner.problem import BACKWARD, FORWARD, WEIGHT, Orders, Problem, Rows, fits
from zbkern.pipeline.planner.randomness import Random

_TURN = 2**16  # from one microbatch to the next
_NEVER = 2**61
Block = list[int]  # [kind * chunks + chunk] when it is the turn of microbatch 0


def search_blocks(
    problem: Problem, *, seed: int, temperatures: Sequence[int], moves: int, target: int = 0, fuse: bool = False
) -> Orders | None:
    """The best orders found that repeat one block; None when there are none.

    temperatures: one after the other, in units of time, `moves` tried at each. target: a cost at which to stop.
    fuse: all backwards are fused. Savings of merged W are not weighed.
    """
    if compiled is not None:
        orders = Orders(*compiled.search_blocks(problem, seed, temperatures, moves, target, fuse))
        return orders if orders.rows else None
    return _Blocks(problem, fuse).search(seed, temperatures, moves, target)


class _Blocks:
    def __init__(self, problem: Problem, fuse: bool) -> None:
        self.problem, self.fuse = problem, fuse
        kinds = (FORWARD, BACKWARD) if fuse else (FORWARD, BACKWARD, WEIGHT)  # a fused W follows its B
        self.items = [
            [kind * problem.chunks + chunk for kind in kinds for chunk in problem.chunks_of(rank)]
            for rank in range(problem.ranks)
        ]
        backward, weight = (problem.fused, (0,) * problem.chunks) if fuse else (problem.backward, problem.weight)
        self.lengths = problem.forward + backward + weight

    def search(self, seed: int, temperatures: Sequence[int], moves: int, target: int) -> Orders | None:
        problem, random = self.problem, Random(seed)
        best, now = _NEVER, None
        for count in range(1, min(4 * problem.ranks, problem.microbatches) + 1):
            block = self._even(count)
            cost = self._run(block)
            if cost < best:
                best, now = cost, block
        if now is None:
            return None
        cost, found = best, now
        for temperature in temperatures:
            for _ in range(moves):
                if best <= target:
                    break
                trial = self._changed(now, random)
                if trial is None:
                    continue
                threshold = cost + (temperature >> 16) * random.exponential()
                trial_cost = self._run(trial)
                if trial_cost > threshold:
                    continue
                now, cost = trial, trial_cost
                if cost < best:
                    best, found = cost, now
        return Orders(best, self._rows(found), self._fused())

    def _fused(self) -> list[int]:
        return [int(self.fuse)] * (self.problem.chunks * self.problem.microbatches)

    def _even(self, count: int) -> Block:
        """The block whose passes follow each other at even distances, with `count` microbatches under way at once."""
        chunks = self.problem.chunks
        step = _TURN * count // (2 * chunks)
        forward = [chunk * step for chunk in range(chunks)]
        backward = [(2 * chunks - 1 - chunk) * step for chunk in range(chunks)]
        return [*forward, *backward, *(at + step // 2 + 1 for at in backward)]

    def _changed(self, block: Block, random: Random) -> Block | None:
        """Moves a pass, or a stretch of those on the way of a microbatch, or some W; None when that is out of order."""
        at, chunks = list(block), self.problem.chunks
        step = 1 + random.below((_TURN // 20, _TURN // 10, _TURN // 5, _TURN // 2, _TURN)[random.below(5)])
        if random.percent(50):
            step = -step
        way = random.below(5)
        if way == 0:
            at[random.below(3 * chunks)] += step
        elif way == 1:
            first = random.below(chunks)
            for chunk in range(first, min(chunks, first + 1 + random.below(5))):
                at[WEIGHT * chunks + chunk] += step
        else:
            first = random.below(2 * chunks)
            last = 2 * chunks if way == 2 else min(2 * chunks, first + 1 + random.below(5))
            for place in range(first, last):
                if place < chunks:
                    at[place] += step
                    continue
                chunk = 2 * chunks - 1 - place
                at[chunks + chunk] += step
                if way < 4:
                    at[WEIGHT * chunks + chunk] += step
        for chunk in range(chunks):
            forward, backward, weight = at[chunk::chunks]
            if backward <= forward or (not self.fuse and weight <= backward):
                return None
        return at

    def _rows(self, block: Block) -> Rows:
        """The order of every rank."""
        problem, microbatches = self.problem, self.problem.microbatches
        rows = []
        for items in self.items:
            row: list[int] = []
            for _, item, microbatch in sorted(self._times(block, items)):
                row.append(item * microbatches + microbatch)
                if self.fuse and item >= problem.chunks:
                    row.append((item + problem.chunks) * microbatches + microbatch)
            rows.append(row)
        return rows

    def _times(self, block: Block, items: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        for item in items:
            for microbatch in range(self.problem.microbatches):
                yield block[item] + microbatch * _TURN, item, microbatch

    def _run(self, block: Block) -> int:
        """What it costs; never, when it cannot run or does not fit the memory."""
        problem, rows = self.problem, self._rows(block)
        if not fits(problem, Orders(0, rows, self._fused())):
            return _NEVER
        ends: dict[int, int] = {}
        place, clock = [0] * problem.ranks, [0] * problem.ranks
        start: list[Any] = [None] * problem.ranks
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(rows):
                while place[rank] < len(row):
                    number = row[place[rank]]
                    needs, lag = self._input(number)
                    if needs is not None and needs not in ends:
                        break
                    begin = clock[rank] if needs is None else max(clock[rank], ends[needs] + lag)
                    if start[rank] is None:
                        start[rank] = 0 if problem.makespan else begin
                    clock[rank] = ends[number] = begin + self.lengths[number // problem.microbatches]
                    place[rank] += 1
                    progress = True
        if len(ends) < problem.passes:
            return _NEVER
        return max(end - begin for end, begin in zip(clock, start, strict=True))

    def _input(self, number: int) -> tuple[int | None, int]:
        """The pass on another chunk whose output it waits for, and the time that takes."""
        problem = self.problem
        kind, chunk = divmod(number // problem.microbatches, problem.chunks)
        if kind == FORWARD and chunk > 0:
            return number - problem.microbatches, problem.communication[chunk - 1]
        if kind == BACKWARD and chunk < problem.chunks - 1:
            return number + problem.microbatches, problem.communication[chunk]
        return None, 0
