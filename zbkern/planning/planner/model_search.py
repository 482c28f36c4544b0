"""From layers to a plan: which partition, how many chunks per rank, where they are, and in which order they run.

Every candidate is a partition of the layers on a placement. Of every placement those take part whose constructive
answer is the best; all that may be better than the best known, by their lower bounds, are searched side by side. The
answer is never worse than a published schedule that fits, on an even or on a balanced partition: all are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from zbkern import schedules
from zbkern.planning.planner.arguments import DoesNotFit, Request, placement_of
from zbkern.planning.planner.incumbents import Budget
from zbkern.planning.planner.partition import Partition, balanced_partitions, busiest, even_partitions
from zbkern.planning.planner.portfolio import SETTINGS
from zbkern.planning.planner.problem import Problem
from zbkern.planning.planner.published import Published
from zbkern.planning.planner.search import Search, most_promising
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.planning.simulation.needs import least_need, shortest
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.units import amount


class ModelSearch:
    """A model on so many ranks: `partition`, `chunks` and `placement` are searched for where they are None."""

    def __init__(self, request: Request, model: ModelCosts, budget: Budget) -> None:
        self._request, self._model, self._budget = request, model, budget
        self._slices, self._limits = request.slices_to_try(), request.limits
        self._published = Published()
        self._balanced: dict[tuple[int, ...], list[Partition]] = {}  # partitions by placement
        self._refused: list[DoesNotFit] = []

    def candidates(self) -> list[Search]:
        """The best by their constructive answers, fewest chunks first. Raises ScheduleError for none."""
        found: list[Search] = []
        for slices in self._slices:
            found += self._candidates(slices, SETTINGS.partitions_of_slices, bool(found), self._published)
        if not found:
            given = self._request.options.partition is not None
            least = min(self._refused, key=lambda error: error.least)
            raise least if given else self._nothing_fits(least)
        return found

    def promise(self) -> float:
        """Of the constructive answer on the most even partition, with slices of equal times; inf where none fits."""
        return min((each.promise(0) for each in self._candidates(self._slices[0], 1, False, None)), default=math.inf)

    def _candidates(
        self, slices: tuple[int, ...], most: int, others: bool, published: Published | None
    ) -> list[Search]:
        """The best of all placements in these slices; of every placement those of `most` partitions, with slices.

        others: there are others, so that the search may end here where its time is over.
        """
        candidates: list[Search] = []
        for name, owners in self._placements(len(slices)):
            here: list[Search] = []  # the most promising, the best constructive answer first
            for least, partition, problem in islice(self._fitting(owners, slices), most if len(slices) > 1 else None):
                if (candidates or others) and not self._budget.left:
                    break
                if len(here) == 3 * SETTINGS.partitions and least >= here[-1].reached:
                    break  # nor is any that comes later better
                if all(each.problem != problem for each in here):  # equal layers divided in another order
                    seed = self._request.options.seed
                    here.append(Search(problem, self._budget, seed, published, name, partition))
                    here[-1].construct(SETTINGS.partition_passes, shares=())
                    here = sorted(here, key=lambda each: each.reached)[: 3 * SETTINGS.partitions]
            candidates += dict.fromkeys([*here[:1], *most_promising(here, SETTINGS.partitions)])
        return candidates

    def _fitting(
        self, owners: tuple[int, ...], slices: tuple[int, ...]
    ) -> Iterator[tuple[float, tuple[float, ...], Problem]]:
        """The partitions of which one microbatch fits, the most even first, each after the least time that it takes."""
        work, microbatches = [*map(shortest, self._model.layers)], self._request.microbatches
        with_least = [(microbatches * busiest(work, each, owners), each) for each in self._partitions(owners)]
        for least, partition in sorted(with_least, key=lambda pair: pair[0]):
            firsts = self._model.partition_of(partition)
            try:
                problem = self._request.problem(self._model.chunk_costs(firsts, owners), owners, slices)
                yield least, firsts, problem
            except DoesNotFit as error:
                self._refused.append(error)

    def _placements(self, slices: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every placement that is asked for, or that may be good where it is not given: its name, and the rank of every
        chunk."""
        stages, placement, layers = self._request.stages, self._request.placement, len(self._model.layers)
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
                schedules.check_counts("plan", stages, self._request.microbatches, count, slices)
                yield placement_of(name, stages, count)

    def _chunks_given(self) -> int | None:
        """Chunks per rank, where they follow from the arguments."""
        stages, placement, chunks = self._request.stages, self._request.placement, self._request.chunks
        if self._request.options.partition is not None:
            count = len(self._request.options.partition)
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

    def _partitions(self, owners: tuple[int, ...]) -> list[Partition]:
        """The one that is given; or even ones, and those that are balanced within the limits."""
        if (given := self._request.options.partition) is not None:
            self._model.chunk_costs(given)  # which refuses what is none
            return [tuple(map(self._model.partition_of(range(len(self._model.layers))).index, given))]
        if owners not in self._balanced:
            found = even_partitions(len(self._model.layers), len(owners))
            for limits in self._limits_to_try():
                found += balanced_partitions(self._model, owners, self._request.microbatches, limits)
            self._balanced[owners] = list(dict.fromkeys(found))
        return self._balanced[owners]

    def _limits_to_try(self) -> list[list[float] | None]:
        """The limit of every rank, and where there is more these shares of what 1F1B holds."""
        layers, stages = self._model.layers, self._request.stages
        static, held = (sum(getattr(layer, name) for layer in layers) for name in ("static", "activation"))
        given = self._limits or [math.inf] * stages
        tighter = [[min(limit, static / stages + share * held) for limit in given] for share in SETTINGS.shares]
        return [self._limits, *(limits for limits in tighter if limits != given)]

    def _nothing_fits(self, of_one_partition: ScheduleError) -> ScheduleError:
        """Names what the best of all partitions needs, where that is the reason."""
        need, unit = least_need(self._model, self._request.stages), self._model.memory_unit
        if self._limits is None or not max(self._limits) < need.total:
            return of_one_partition
        return ScheduleError(
            f"plan: no schedule fits memory_limit={amount(max(self._limits), unit)}: "
            f"{need.describe(self._request.stages, unit)}, which is the smallest limit for one chunk per rank; raise "
            "it, take more stages or smaller microbatches, or offload or recompute"
        )


_PLACEMENTS: dict[int, Sequence[str | Sequence[int]]] = {1: ["linear"], 2: ["v", "loop"], 3: ["zigzag", "loop"]}
