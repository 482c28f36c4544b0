"""What the search works on: a planning problem in integers, and orders as lists of numbers.

Times and memory are scaled to integers, so that sums do not depend on their order, nor plans on the compiler. A pass
is one number, (kind * chunks + chunk) * microbatches + microbatch, and the microbatches of a chunk pass in order: they
cost the same, so that no other order is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zbkern.pipeline.planner import native
from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.costs import ChunkCosts, Costs

FORWARD, BACKWARD, WEIGHT = range(3)
Rows = list[list[int]]

_TIME_SCALE = 2.0**46  # of all work done one pass after the other
_MEMORY_SCALE = 2.0**52  # of all microbatches at once, so that numbers do not depend on the limit
_SLACK = 1e-9  # relative, of a limit: sums of fractions of one number differ in the last digits


@dataclass(frozen=True)
class Problem:
    """A planning problem: one entry per chunk, per edge (`communication`, 0 within a rank) or per rank (`limit`).

    One unit of time here is 1 / time_scale of the costs'. limit: beside what each rank holds all the time.
    """

    ranks: int
    chunks: int
    microbatches: int
    placement: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    fused: tuple[int, ...]
    communication: tuple[int, ...]
    activation: tuple[int, ...]
    held: tuple[int, ...]
    merge_saving: tuple[int, ...]
    limit: tuple[int, ...]
    makespan: bool
    time_scale: float

    @classmethod
    def build(
        cls,
        costs: ChunkCosts,
        placement: Sequence[int],
        microbatches: int,
        limit: Sequence[float],
        makespan: bool,
    ) -> Problem:
        """limit: one number per rank, in the unit of `costs.activation`."""
        serial = microbatches * (
            sum(costs.forward) + sum(costs.backward) + sum(costs.weight) + 2 * sum(costs.communication)
        )
        time_scale = _TIME_SCALE / serial if serial > 1e-200 else 1.0
        unlimited = microbatches * sum(map(max, costs.activation, costs.held))
        memory_scale = _MEMORY_SCALE / unlimited if unlimited > 1e-200 else 1.0

        def times(values: Sequence[float]) -> tuple[int, ...]:
            return tuple(round(value * time_scale) for value in values)

        def memory(values: Sequence[float]) -> tuple[int, ...]:
            return tuple(round(value * memory_scale) for value in values)

        backward, weight, fused = times(costs.backward), times(costs.weight), times(costs.fused)
        # A split without overhead must stay so when all three are rounded, or fusing would seem to gain a little.
        parts = zip(fused, backward, weight, strict=True)
        fused = tuple(b + w if abs(both - b - w) <= 1 else both for both, b, w in parts)
        edges = zip(costs.communication, placement, placement[1:], strict=False)
        return cls(
            ranks=max(placement) + 1,
            chunks=len(placement),
            microbatches=microbatches,
            placement=tuple(placement),
            forward=times(costs.forward),
            backward=backward,
            weight=weight,
            fused=fused,
            communication=times([0.0 if here == there else latency for latency, here, there in edges]),
            activation=memory(costs.activation),
            held=memory(costs.held),
            merge_saving=times(costs.merge_saving),
            limit=memory([min(value, unlimited) * (1 + _SLACK) for value in limit]),
            makespan=makespan,
            time_scale=time_scale,
        )

    @property
    def passes(self) -> int:
        return 3 * self.chunks * self.microbatches

    @property
    def fused_is_faster(self) -> bool:
        """Whether some fused backward is faster than its two halves."""
        parts = zip(self.fused, self.backward, self.weight, strict=True)
        return any(fused < backward + weight for fused, backward, weight in parts)

    @property
    def may_fuse(self) -> bool:
        """Whether fusing a backward may gain time, or memory: B leaves more than it found, and memory is short.

        Otherwise B and W one right after the other do as well: both hold no more, and B's result is there sooner.
        """
        if self.fused_is_faster:
            return True
        memory = [0] * self.ranks  # of all microbatches at once
        for chunk, rank in enumerate(self.placement):
            memory[rank] += self.microbatches * max(self.activation[chunk], self.held[chunk])
        short = any(limit < all_ for limit, all_ in zip(self.limit, memory, strict=True))
        return short and any(held > found for held, found in zip(self.held, self.activation, strict=True))

    @property
    def saves(self) -> bool:
        return any(self.merge_saving)

    def chunks_of(self, rank: int) -> Sequence[int]:
        return self._chunks_by_rank[rank]

    @cached_property
    def _chunks_by_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for chunk, rank in enumerate(self.placement):
            found[rank].append(chunk)
        return found

    def work(self, rank: int) -> int:
        """The least time that `rank` can spend in passes."""
        total = 0
        for chunk in self.chunks_of(rank):
            saved = self.merge_saving[chunk] * (self.microbatches - 1)
            backward = self.microbatches * (self.backward[chunk] + self.weight[chunk]) - saved
            total += self.microbatches * self.forward[chunk]
            total += min(backward, self.microbatches * self.fused[chunk])
        return total

    @property
    def costs(self) -> Costs:
        """The costs in these integers, which a simulation counts with exactly."""
        parts = zip(self.backward, self.weight, self.fused, strict=True)
        return Costs(
            self.forward,
            self.backward,
            self.weight,
            self.communication,
            self.activation,
            self.held,
            split_overhead=[backward + weight - fused for backward, weight, fused in parts],
            merge_saving=self.merge_saving,
        )

    def with_microbatches(self, microbatches: int) -> Problem:
        return replace(self, microbatches=microbatches)


@dataclass(frozen=True)
class Ordering:
    """An order of every rank, its cost, and which backwards are fused: fused[chunk * microbatches + microbatch].

    The W of a fused backward stays in its row, as a pass of no length and no memory.
    """

    cost: int
    rows: Rows
    fused: list[int]


def within(peaks: Sequence[float], limit: Sequence[int]) -> bool:
    """Whether no rank exceeds its limit."""
    return all(peak <= most for peak, most in zip(peaks, limit, strict=True))


def serial_ordering(problem: Problem, fuse: bool) -> Ordering:
    """One microbatch after the other, each W right after its B: fits whenever anything does. Its cost is not known."""
    chunks, microbatches = problem.chunks, problem.microbatches
    rows: Rows = [[] for _ in range(problem.ranks)]
    for microbatch in range(microbatches):
        for chunk in range(chunks):
            rows[problem.placement[chunk]].append((FORWARD * chunks + chunk) * microbatches + microbatch)
        for chunk in reversed(range(chunks)):
            for kind in (BACKWARD, WEIGHT):
                rows[problem.placement[chunk]].append((kind * chunks + chunk) * microbatches + microbatch)
    return Ordering(0, rows, [int(fuse)] * (chunks * microbatches))


def ordering_of(schedule: Schedule) -> Ordering:
    """A published schedule as orders: without parts of W, and the microbatches of a chunk in order. No cost yet."""
    chunks, microbatches = len(schedule.placement), schedule.microbatches
    fused = [0] * (chunks * microbatches)
    first = {(kind, chunk): (number * chunks + chunk) * microbatches
             for number, kind in enumerate("FBW") for chunk in range(chunks)}  # fmt: skip
    rows: Rows = []
    for actions in schedule.actions:
        row: list[int] = []
        for kind, chunk, microbatch, _ in actions:
            if kind == "BW":
                fused[chunk * microbatches + microbatch] = 1
                row += (first["B", chunk] + microbatch, first["W", chunk] + microbatch)
            else:
                row.append(first[kind, chunk] + microbatch)
        rows.append(row)
    return Ordering(0, rows, fused)


def grouped(orders: Ordering) -> Ordering:
    """The orders with W that follow each other grouped by chunk, which is free. The cost is the old one.

    Without the compiled core they stay as they are: those of a published schedule.
    """
    return orders if native.core is None else replace(orders, rows=native.core.grouped(orders.rows, orders.fused))


def schedule_of(orders: Ordering, problem: Problem, name: str) -> Schedule:
    """Orders as a schedule, validated and with W grouped."""
    half, rows = problem.chunks * problem.microbatches, []
    for row in grouped(orders).rows:
        actions: list[Action] = []
        for number in row:
            kind, rest = divmod(number, half)
            chunk, microbatch = divmod(rest, problem.microbatches)
            if kind != WEIGHT:
                actions.append(
                    Action("F" if kind == FORWARD else "BW" if orders.fused[rest] else "B", chunk, microbatch)
                )
            elif not orders.fused[rest]:
                actions.append(Action("W", chunk, microbatch))
        rows.append(actions)
    return Schedule.build(rows, problem.placement, problem.microbatches, name)
