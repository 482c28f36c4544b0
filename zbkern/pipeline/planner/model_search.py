"""From layers to a plan: which partition, how many chunks per rank, where they are, and in which order they run.

Every candidate is a partition of the layers on a placement. Of every placement those take part whose constructive
answer is the best; all that may be better than the best known, by their lower bounds, are searched side by side. The
answer is never worse than a published schedule that fits, on an even or on a balanced partition: all are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zbkern.pipeline import schedules
from zbkern.pipeline.planner.arguments import Limit, PlanOptions, placement_of, problem_of, rank_limits
from zbkern.pipeline.planner.incumbents import ROUNDING, Budget
from zbkern.pipeline.planner.partition import Partition, balanced_partitions, even_partitions
from zbkern.pipeline.planner.portfolio import SETTINGS
from zbkern.pipeline.planner.published import Published
from zbkern.pipeline.planner.search import Search, least_work, search_all
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
        options: PlanOptions,
    ) -> None:
        self._model, self._stages, self._microbatches = model, stages, microbatches
        self._chunks, self._placement, self._partition = chunks, placement, options.partition
        self._memory_limit, self._options = memory_limit, options
        self._limits = rank_limits(memory_limit, stages)

    def run(self, budget: Budget) -> tuple[Candidate, int]:
        """The best candidate, and the rounds that were completed. Raises ScheduleError when none fits the memory."""
        candidates: list[Candidate] = []
        refused: list[ScheduleError] = []
        published = Published()
        for name, owners in self._placements():
            here: list[Candidate] = []
            for partition in self._partitions(owners):
                costs = self._model.chunk_costs(partition, owners)
                try:
                    problem = problem_of(costs, owners, self._microbatches, self._memory_limit, self._options.objective)
                except ScheduleError as error:
                    refused.append(error)
                    continue
                if candidates and not budget.left:
                    break
                if all(each.search.problem != problem for each in here):  # equal layers divided in another order
                    search = Search(problem, budget, self._options.seed, published)
                    search.construct(SETTINGS.partition_passes)
                    here.append(Candidate(partition, name, costs, search))
            candidates += sorted(here, key=_reached)[: SETTINGS.partitions]
        if not candidates:
            raise refused[0] if self._partition is not None else self._nothing_fits(refused[0])
        by_search = {each.search: each for each in candidates}
        progress = self._options.progress
        rounds = search_all(list(by_search), budget, lambda number, best: progress(_describe(by_search[best], number)))
        progress("")
        best = min(map(_reached, candidates))  # of equals that with the fewest chunks
        return next(each for each in candidates if _reached(each) <= best * (1 + ROUNDING)), rounds

    def _placements(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every placement that is asked for, or that may be good where it is not given: its name, and the rank of every
        chunk."""
        stages, placement, layers = self._stages, self._placement, len(self._model.layers)
        chunks = self._chunks_given()
        if (chunks or 1) * stages > layers:
            raise ValueError(
                f"plan: {stages} stages with {chunks or 1} chunks each need as many layers, and costs has {layers}: "
                "lower stages or chunks"
            )
        several = [each for each in SETTINGS.chunks_per_rank if each * stages <= layers]
        for count in several if chunks is None else [chunks]:
            for name in _PLACEMENTS[min(count, 3)] if placement is None else [placement]:
                schedules.check_counts("plan", stages, self._microbatches, count)
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
        balanced = balanced_partitions(self._model, owners, self._microbatches, self._limits)
        return list(dict.fromkeys([*even_partitions(len(self._model.layers), len(owners)), *balanced]))

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
    return f"round {rounds + 1}: {per_rank} chunks per rank, {candidate.name}: the busiest rank is idle for {idle:.2%}"


_PLACEMENTS: dict[int, Sequence[str | Sequence[int]]] = {1: ["linear"], 2: ["v", "loop"], 3: ["zigzag", "loop"]}
