"""From layers to a plan: which partition, how many chunks per rank, where they are, and in which order they run.

Every candidate is a partition of the layers on a placement. Of every placement those take part whose constructive
answer is the best; all that may be better than the best known, by their lower bounds, are searched side by side. The
answer is never worse than a published schedule that fits, on an even or on a balanced partition: all are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

from zbkern.pipeline import schedules
from zbkern.pipeline.planner.arguments import Limit, PlanOptions, placement_of, problem_of, rank_limits
from zbkern.pipeline.planner.incumbents import Budget
from zbkern.pipeline.planner.partition import Partition, balanced_partitions, even_partitions, work_of
from zbkern.pipeline.planner.portfolio import SETTINGS
from zbkern.pipeline.planner.published import Published
from zbkern.pipeline.planner.search import Search, choose, in_slices, least_work, search_slices
from zbkern.pipeline.planner.slicing import Slices, slices_to_try
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.schedules.units import amount
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.layers import ModelCosts
from zbkern.pipeline.simulation.needs import least_need


class Candidate(NamedTuple):
    """A partition of the layers on a placement, and what was found for it."""

    partition: Partition
    name: str
    costs: Costs
    search: Search


class ModelSearch:
    """A model on so many ranks: `partition`, `chunks` and `placement` are searched for where they are None."""

    def __init__(
        self,
        model: ModelCosts,
        stages: int,
        microbatches: int,
        chunks: int | None,
        placement: str | Sequence[int] | None,
        memory_limit: Limit,
        slices: Slices,
        options: PlanOptions,
    ) -> None:
        self._model, self._stages, self._microbatches = model, stages, microbatches
        self._chunks, self._placement, self._partition = chunks, placement, options.partition
        self._memory_limit, self._options = memory_limit, options
        whole = replace(model, latency=0.0, bandwidth=math.inf).chunk_costs([0]).per_chunk(1)
        self._slices = slices_to_try(slices, whole, model.tokens, options.slice_tokens, stages, microbatches)
        self._published = Published()
        self._balanced: dict[tuple[int, ...], list[Partition]] = {}  # partitions by placement
        self._refused: list[ScheduleError] = []
        self._limits = rank_limits(memory_limit, stages)

    def run(self, budget: Budget) -> tuple[Candidate, int]:
        """The best candidate, and the rounds that were completed. Raises ScheduleError when none fits the memory."""
        candidates: list[Candidate] = []
        numbers: set[int] = set()
        for slices in self._promising(budget):
            numbers.add(len(slices))  # published schedules are made for whole sequences and one number of slices
            published = self._published if len(numbers - {1}) < 2 else None
            candidates += self._candidates(slices, SETTINGS.partitions_of_slices, budget, bool(candidates), published)
        if not candidates:
            refused = self._refused[0]
            raise refused if self._partition is not None else self._nothing_fits(refused)
        by_search = {each.search: each for each in candidates}
        progress = self._options.progress
        rounds = search_slices(
            list(by_search), budget, lambda number, best: progress(_describe(by_search[best], number))
        )
        progress("")
        return by_search[choose(list(by_search), self._options.steady)], rounds  # of equals fewest slices and chunks

    def _promising(self, budget: Budget) -> list[tuple[int, ...]]:
        """Whole sequences, and the slices whose constructive answer is the best on the most even partition.

        More and more slices are tried until more are worse, of equal times; of the best number also equal lengths.
        """
        whole = [slices for slices in self._slices if len(slices) == 1]
        by_number = [list(group) for number, group in groupby(self._slices, len) if number > 1]
        if sum(map(len, by_number)) <= SETTINGS.slices_kept:
            return self._slices
        reached: dict[tuple[int, ...], float] = {}

        def best(slices: tuple[int, ...]) -> float:
            return reached.get(slices, math.inf)

        def try_all(some: Sequence[tuple[int, ...]]) -> None:
            for slices in some:
                found = self._candidates(slices, 1, budget, bool(reached), None)
                if found:
                    reached[slices] = min(map(_reached, found))

        for others in by_number:
            known = min(reached.values(), default=math.inf)
            try_all(others[:1])
            if best(others[0]) > known:
                break
        try_all(min(by_number, key=lambda others: best(others[0]))[1:])
        return [*whole, *sorted(reached, key=best)[: SETTINGS.slices_kept]]

    def _candidates(
        self, slices: tuple[int, ...], most: int, budget: Budget, others: bool, published: Published | None
    ) -> list[Candidate]:
        """The best of all placements in these slices; of every placement those of `most` partitions, with slices.

        others: there are others, so that the search may end here where its time is over.
        """
        candidates: list[Candidate] = []
        for name, owners in self._placements(len(slices)):
            here: list[Candidate] = []
            partitions = self._partitions(owners)
            for partition in partitions if len(slices) == 1 else self._most_even(partitions, owners)[:most]:
                costs = self._model.chunk_costs(partition, owners)
                limit, objective = self._memory_limit, self._options.objective
                try:
                    problem = problem_of(costs, owners, self._microbatches, limit, objective, slices)
                except ScheduleError as error:
                    self._refused.append(error)
                    continue
                if (candidates or others) and not budget.left:
                    break
                if all(each.search.problem != problem for each in here):  # equal layers divided in another order
                    search = Search(problem, budget, self._options.seed, published)
                    search.construct(SETTINGS.partition_passes)
                    here.append(Candidate(partition, name, costs, search))
            candidates += sorted(here, key=_reached)[: SETTINGS.partitions]
        return candidates

    def _most_even(self, partitions: Sequence[Partition], owners: Sequence[int]) -> list[Partition]:
        """Those whose busiest rank has least to do first."""

        def busiest(partition: Partition) -> float:
            work = [0.0] * self._stages
            for owner, (begin, end) in zip(owners, pairwise([*partition, len(self._model.layers)]), strict=True):
                work[owner] += sum(map(work_of, self._model.layers[begin:end]))
            return max(work)

        return sorted(partitions, key=busiest)

    def _placements(self, slices: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every placement that is asked for, or that may be good where it is not given: its name, and the rank of every
        chunk."""
        stages, placement, layers = self._stages, self._placement, len(self._model.layers)
        chunks = self._chunks_given()
        if (chunks or 1) * stages > layers:
            raise ValueError(
                f"plan: {stages} stages with {chunks or 1} chunks each need as many layers, and costs has {layers}: "
                "lower stages or chunks"
            )
        most = layers // stages if slices == 1 else min(layers // stages, max(2, SETTINGS.most_parts // slices))
        several = [each for each in SETTINGS.chunks_per_rank if each <= most]
        for count in several if chunks is None else [chunks]:
            for name in _PLACEMENTS[min(count, 3)] if placement is None else [placement]:
                schedules.check_counts("plan", stages, self._microbatches, count, slices)
                yield placement_of(name, stages, count)

    def _chunks_given(self) -> int | None:
        """Chunks per rank, where they follow from the arguments."""
        stages, placement, chunks = self._stages, self._placement, self._chunks
        if self._partition is not None:
            count = len(self._partition)
            if count % stages or chunks not in (None, count // stages):
                wanted = f"a multiple of {stages}" if chunks is None else f"{chunks * stages}"
                raise ValueError(f"plan: partition must have chunks x stages entries, {wanted}; got {count}")
            return count // stages
        if chunks is not None or placement is None:
            return chunks
        if not isinstance(placement, str):
            return len(placement) // stages
        # with more chunks in a line, a rank's would follow each other: that is for whoever asks for it
        return {"linear": 1, "v": 2}.get(placement)

    def _partitions(self, owners: Sequence[int]) -> list[Partition]:
        """The one that is given; or even ones, and those that are balanced within the limits."""
        if self._partition is not None:
            return [tuple(self._partition)]
        if (known := self._balanced.get(tuple(owners))) is None:
            balanced = balanced_partitions(self._model, owners, self._microbatches, self._limits)
            known = list(dict.fromkeys([*even_partitions(len(self._model.layers), len(owners)), *balanced]))
            self._balanced[tuple(owners)] = known
        return known

    def _nothing_fits(self, of_one_partition: ScheduleError) -> ScheduleError:
        """Names what the best of all partitions needs, where that is the reason."""
        need, unit = least_need(self._model, self._stages), self._model.memory_unit
        if self._limits is None or not max(self._limits) < need.total:
            return of_one_partition
        return ScheduleError(
            f"plan: no schedule fits memory_limit={amount(max(self._limits), unit)}: "
            f"{need.describe(self._stages, unit)}, which is the smallest limit for one chunk per rank; raise it, take "
            "more stages or smaller microbatches, or offload or recompute"
        )


def _reached(candidate: Candidate) -> float:
    return candidate.search.reached


def _describe(candidate: Candidate, rounds: int) -> str:
    problem, reached = candidate.search.problem, candidate.search.reached
    per_rank = problem.chunks // problem.ranks
    idle = 1 - least_work(problem) / reached if reached else 0.0
    where = f"{per_rank} chunks per rank, {candidate.name}{in_slices(problem)}"
    return f"round {rounds + 1}: {where}: the busiest rank is idle for {idle:.2%}"


_PLACEMENTS: dict[int, Sequence[str | Sequence[int]]] = {1: ["linear"], 2: ["v", "loop"], 3: ["zigzag", "loop"]}
