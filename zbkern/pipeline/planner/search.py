"""Local search: simulated annealing over the order of every rank, W included.

A move takes one pass of one rank to an earlier or later place of its row, as far as order and memory there allow. Half
of the moves take their pass from the critical path; a fifth move a wave: the same pass of the microbatch in the
neighbouring chunks, or of the next microbatches on the rank, since a better order mostly needs one change in many
places. What is minimised is the largest span plus `spread` times the mean span: the largest alone is blind to most
moves, and the mean alone would rather fill a gap on every rank than end the last pass a little earlier.

`_Annealer` is the specification, and the fallback where no compiler was: it runs the whole schedule for every move.
csrc/planner_anneal.cpp makes the same moves a thousand times faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from zbkern.pipeline.planner.lists import compiled
from zbkern.pipeline.planner.problem import BACKWARD, FORWARD, WEIGHT, Orders, Problem
from zbkern.pipeline.planner.randomness import Random


def anneal(
    problem: Problem,
    start: Orders,
    *,
    seed: int = 0,
    temperatures: Sequence[int] = (),
    moves: int = 0,
    spread: int = 3,
    target: int = 0,
    seconds: float = float("inf"),
) -> tuple[Orders, bool]:
    """The best orders found from `start`, and whether the search came to its end before `seconds` were over.

    temperatures: one after the other, in units of time, `moves` tried at each. spread: the weight of the mean span
    beside the largest. target: a cost at which to stop; a lower bound, say. With no moves it works out the cost of
    `start`. Raises ValueError when `start` cannot run.
    """
    scaled = [problem.ranks * temperature for temperature in temperatures]
    if compiled is not None:
        found, finished = compiled.anneal(
            problem, start.rows, start.fused, seed, scaled, moves, spread, target, problem.may_fuse, seconds
        )
        return Orders(*found), finished
    return _Annealer(problem, start).anneal(seed, scaled, moves, spread, target, seconds)


class _Annealer:
    def __init__(self, problem: Problem, start: Orders) -> None:
        self.problem = problem
        self.rows = [list(row) for row in start.rows]
        self.fused = list(start.fused)
        passes, chunks, microbatches = problem.passes, problem.chunks, problem.microbatches
        self.needs: list[int | None] = [None] * passes  # the pass whose output it waits for
        self.lag, self.length, self.memory_of = [0] * passes, [0] * passes, [0] * passes
        for chunk in range(chunks):
            for microbatch in range(microbatches):
                forward, backward = self._number(FORWARD, chunk, microbatch), self._number(BACKWARD, chunk, microbatch)
                if chunk > 0:
                    self.needs[forward], self.lag[forward] = forward - microbatches, problem.communication[chunk - 1]
                if chunk < chunks - 1:
                    self.needs[backward], self.lag[backward] = backward + microbatches, problem.communication[chunk]
                self.length[forward], self.memory_of[forward] = problem.forward[chunk], problem.activation[chunk]
                self._set_backward(chunk, microbatch)
        self.starts = [[0] * len(row) for row in self.rows]
        self.ends = [0] * passes
        self.spans = [0] * problem.ranks
        trial = self._run()
        if trial is None:
            raise ValueError("anneal: the orders to start from cannot run")
        self._commit(trial)

    def anneal(
        self, seed: int, temperatures: Sequence[int], moves: int, spread: int, target: int, seconds: float
    ) -> tuple[Orders, bool]:
        self.spread = spread
        random, deadline = Random(seed), time.monotonic() + seconds
        best = self._snapshot()
        energy = self._energy(self.spans)
        for temperature in temperatures:
            for _ in range(moves):
                if best.cost <= target:
                    return best, True
                if time.monotonic() > deadline:
                    return best, False
                move = self._propose(random)
                if move is None:
                    continue
                threshold = energy + (temperature >> 16) * random.exponential()
                trial = self._run()
                if trial is None or self._energy(trial[2]) > threshold:
                    self._undo(move)
                    continue
                self._commit(trial)
                energy = self._energy(self.spans)
                if max(self.spans) < best.cost:
                    best = self._snapshot()
        return best, True

    def _snapshot(self) -> Orders:
        return Orders(max(self.spans), [list(row) for row in self.rows], list(self.fused))

    def _energy(self, spans: Sequence[int]) -> int:
        return self.problem.ranks * max(spans) + self.spread * sum(spans)

    def _number(self, kind: int, chunk: int, microbatch: int) -> int:
        return (kind * self.problem.chunks + chunk) * self.problem.microbatches + microbatch

    def _parts(self, number: int) -> tuple[int, int, int]:
        """Kind, chunk and microbatch."""
        rest, microbatch = divmod(number, self.problem.microbatches)
        return (*divmod(rest, self.problem.chunks), microbatch)

    def _set_backward(self, chunk: int, microbatch: int) -> None:
        problem, fused = self.problem, self.fused[chunk * self.problem.microbatches + microbatch]
        backward, weight = self._number(BACKWARD, chunk, microbatch), self._number(WEIGHT, chunk, microbatch)
        self.length[backward] = problem.fused[chunk] if fused else problem.backward[chunk]
        self.length[weight] = 0 if fused else problem.weight[chunk]
        self.memory_of[backward] = (0 if fused else problem.held[chunk]) - problem.activation[chunk]
        self.memory_of[weight] = 0 if fused else -problem.held[chunk]

    def _run(self) -> tuple[list[list[int]], list[int], list[int]] | None:
        """Start of every position, end of every pass and span of every rank; None for a deadlock."""
        problem, ranks = self.problem, range(self.problem.ranks)
        starts: list[list[int]] = [[] for _ in ranks]
        ends: list[Any] = [None] * problem.passes
        clock = [0] * problem.ranks
        left, progress = problem.passes, True
        while progress:
            progress = False
            for rank in ranks:
                row = self.rows[rank]
                for k in range(len(starts[rank]), len(row)):
                    number, needs = row[k], self.needs[row[k]]
                    if needs is not None:
                        if ends[needs] is None:
                            break
                        clock[rank] = max(clock[rank], ends[needs] + self.lag[number])
                    starts[rank].append(clock[rank])
                    clock[rank] += self._length_at(row, k)
                    ends[number] = clock[rank]
                    left -= 1
                    progress = True
        if left:
            return None
        spans = [clock[rank] - (0 if problem.makespan else starts[rank][0]) for rank in ranks]
        return starts, ends, spans

    def _length_at(self, row: Sequence[int], k: int) -> int:
        length, group = self.length[row[k]], row[k] // self.problem.microbatches
        follows = k > 0 and row[k - 1] // self.problem.microbatches == group and self.length[row[k - 1]] > 0
        if length > 0 and follows and group >= WEIGHT * self.problem.chunks:
            length -= self.problem.merge_saving[group - WEIGHT * self.problem.chunks]
        return length

    def _commit(self, trial: tuple[list[list[int]], list[int], list[int]]) -> None:
        self.starts, self.ends, self.spans = trial
        self.critical: list[tuple[int, int]] = []

    def _critical_path(self) -> list[tuple[int, int]]:
        """The passes, as (rank, position), that decide when the rank with the largest span ends."""
        path = []
        rank = self.spans.index(max(self.spans))
        k = len(self.rows[rank]) - 1
        while k >= 0:
            path.append((rank, k))
            if k > 0 and self.ends[self.rows[rank][k - 1]] == self.starts[rank][k]:
                k -= 1
                continue
            needs = self.needs[self.rows[rank][k]]
            if needs is None:
                break
            rank = self._home(needs)
            k = self.rows[rank].index(needs)
        return path

    def _home(self, number: int) -> int:
        return self.problem.placement[self._parts(number)[1]]

    def _propose(self, random: Random) -> list[tuple[int, int, int]] | None:
        """Makes a random move; how to undo it, or None when there was nothing to move."""
        problem = self.problem
        if problem.may_fuse and random.percent(10):
            chunk, microbatch = random.below(problem.chunks), random.below(problem.microbatches)
            move = [(-1, chunk, microbatch)]
            self._toggle(chunk, microbatch)
            if max(self._memory(problem.placement[chunk])) > problem.limit[problem.placement[chunk]]:
                self._undo(move)
                return None
            return move
        critical = random.percent(50)
        if critical:
            if not self.critical:
                self.critical = self._critical_path()
            rank, k = self.critical[random.below(len(self.critical))]
        else:
            rank = random.below(problem.ranks)
            k = random.below(len(self.rows[rank]))
        distance = 1
        while distance < 8 and random.percent(60):
            distance += 1
        kind, chunk, microbatch = self._parts(self.rows[rank][k])
        # On the critical path W makes room by moving later, and the others gain by moving earlier.
        later = random.percent((70 if kind == WEIGHT else 15) if critical else 50)
        count, chunk_step, microbatch_step = 1, 0, 0
        if random.percent(20):
            count = 2
            while count < problem.microbatches and random.percent(80):
                count += 1
            direction = random.below(3)
            if direction == 2:
                microbatch_step = -1 if later else 1
            else:
                chunk_step = -1 if direction else 1
        move = []
        while count and 0 <= chunk < problem.chunks and 0 <= microbatch < problem.microbatches:
            home = problem.placement[chunk]
            at = self.rows[home].index(self._number(kind, chunk, microbatch))
            goal = min(at + distance, len(self.rows[home]) - 1) if later else max(at - distance, 0)
            to = self._reach(home, at, goal)
            if to != at:
                self._shift(home, at, to)
                move.append((home, at, to))
            count, chunk, microbatch = count - 1, chunk + chunk_step, microbatch + microbatch_step
        return move or None

    def _undo(self, move: Sequence[tuple[int, int, int]]) -> None:
        for rank, at, to in reversed(move):
            if rank < 0:
                self._toggle(at, to)
            else:
                self._shift(rank, to, at)

    def _shift(self, rank: int, at: int, to: int) -> None:
        self.rows[rank].insert(to, self.rows[rank].pop(at))

    def _toggle(self, chunk: int, microbatch: int) -> None:
        self.fused[chunk * self.problem.microbatches + microbatch] ^= 1
        self._set_backward(chunk, microbatch)

    def _memory(self, rank: int) -> list[int]:
        """What the rank holds after each pass."""
        held, now = [], 0
        for number in self.rows[rank]:
            now += self.memory_of[number]
            held.append(now)
        return held

    def _must_precede(self, before: int, after: int) -> bool:
        size = self.problem.microbatches
        if before // size == after // size or self.needs[after] == before:  # microbatches pass in order
            return True
        kind = self._parts(before)[0]
        same = after - before == self.problem.chunks * size  # chunk and microbatch
        return kind != WEIGHT and self._parts(after)[0] == kind + 1 and same

    def _reach(self, rank: int, at: int, goal: int) -> int:
        """The farthest place towards `goal` that order and memory of the rank let the pass at `at` move to."""
        row, memory, limit = self.rows[rank], self._memory(rank), self.problem.limit[rank]
        number, change, k = row[at], self.memory_of[row[at]], at
        while k > goal and not self._must_precede(row[k - 1], number):
            if change > 0 and max(memory[k - 1], memory[k - 2] if k > 1 else 0) + change > limit:
                break
            k -= 1
        while k < goal and not self._must_precede(number, row[k + 1]):
            if change < 0 and memory[k + 1] - change > limit:
                break
            k += 1
        return k


def grown(problem: Problem, orders: Orders, microbatches: int) -> list[Orders]:
    """Orders for more microbatches: each rank repeats its part of the middle, from several places. Costs are not known.

    orders are for fewer microbatches. A rank's part is a stretch that runs every kind of pass of each of its chunks
    once, nearest to the same time on all ranks; where all ranks are busy throughout it, repeating it costs no bubble.
    """
    small = len(orders.fused) // problem.chunks
    annealer = _Annealer(problem.with_microbatches(small), orders)
    rows = [[number // small for number in row] for row in annealer.rows]  # kind and chunk
    found: list[Orders] = []
    end = max(annealer.ends)
    for eighth in range(2, 7):
        time_ = end * eighth // 8
        repeated = []
        for rank, row in enumerate(rows):
            size = 3 * len(problem.chunks_of(rank))
            places = [k for k in range(len(row) - size + 1) if len(set(row[k : k + size])) == size]
            if not places:
                return found
            starts = annealer.starts[rank]
            k = min(places, key=lambda k: abs(starts[k] - time_))
            repeated.append(row[:k] + row[k : k + size] * (microbatches - small) + row[k:])
        found.append(
            Orders(0, [_numbered(row, microbatches) for row in repeated], [0] * (problem.chunks * microbatches))
        )
    return found


def _numbered(row: Sequence[int], microbatches: int) -> list[int]:
    count: dict[int, int] = {}
    numbered = []
    for group in row:
        microbatch = count.get(group, 0)
        count[group] = microbatch + 1
        numbered.append(group * microbatches + microbatch)
    return numbered
