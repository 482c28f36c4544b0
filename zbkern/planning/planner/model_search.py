"""The candidates of a plan: which partition, how many chunks per rank, where they are, and in which slices.

For costs of chunks there is one for each choice of slices. For costs of layers every candidate is a partition of the
layers on a placement. Of every placement those take part whose constructive answer is the best; all that may be better
than the best known, by their lower bounds, are searched side by side. The answer is never worse than a published
schedule that fits, on an even or on a balanced partition: all are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from zbkern import schedules
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.costs.needs import least_need, shortest
from zbkern.planning.planner.partition import balanced_partitions, busiest, even_partitions, slowness_of
from zbkern.planning.planner.portfolio import SETTINGS
from zbkern.planning.planner.problem import DoesNotFit, Problem
from zbkern.planning.planner.request import PlanRequest
from zbkern.planning.planner.search import Search
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.units import amount


class Candidates:
    """Of a request; for layers `partition`, `chunks` and `placement` are searched for where they are None."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._slices = request.slices_to_try()
        self._refused: list[DoesNotFit] = []

    def searches(self) -> list[Search]:
        """Of the best by their constructive answers, fewest chunks first. Raises ScheduleError where none fits."""
        found: list[Search] = []
        for slices in self._slices:
            found += self._searches(slices, SETTINGS.partitions_of_slices)
        if not found:
            raise self._nothing_fits()
        return found

    def promise(self) -> float:
        """Of the constructive answer on the most even partition, with slices of equal times; inf where none fits."""
        found = self._searches(self._slices[0], 1, published=False)
        for each in found:
            each.construct(SETTINGS.partition_passes, shares=())
        return min((each.promise(0) for each in found), default=math.inf)

    def _searches(self, slices: tuple[int, ...], most: int, published: bool = True) -> list[Search]:
        """The best of all placements in these slices; of every placement those of `most` partitions, with slices."""
        candidates: list[Search] = []
        for name, owners in self._placements(len(slices)):
            here: list[Search] = []  # the most promising, the best constructive answer first
            for least, partition, problem in islice(self._fitting(owners, slices), most if len(slices) > 1 else None):
                if len(here) == 3 * SETTINGS.partitions and least >= here[-1].reached:
                    break  # nor is any that comes later better
                if all(each.problem != problem for each in here):  # equal layers divided in another order
                    seed = self._request.options.seed
                    here.append(Search(problem, seed, name, partition, published))
                    if partition is not None:
                        here[-1].construct(SETTINGS.partition_passes, shares=())
                    here = sorted(here, key=lambda each: each.reached)[: 3 * SETTINGS.partitions]
            promising = sorted(here, key=lambda each: each.promise(0, each.least))[: SETTINGS.partitions]
            candidates += dict.fromkeys([*here[:1], *promising])
        return candidates

    def _fitting(
        self, owners: tuple[int, ...], slices: tuple[int, ...]
    ) -> Iterator[tuple[float, tuple[float, ...] | None, Problem]]:
        """The cuts of which one microbatch fits: the least time that it takes, its partition, and its problem."""
        for least, partition, costs in self._cuts(owners):
            try:
                yield least, partition, self._request.problem(FlatCosts.of(costs, owners, slices))
            except DoesNotFit as error:
                self._refused.append(error)

    def _cuts(self, owners: tuple[int, ...]) -> Iterator[tuple[float, tuple[float, ...] | None, Costs]]:
        """Even partitions and those that are balanced within the limits, the most even first; or what is given.

        The least time of each, the first layer of every chunk, and the costs of the chunks.
        """
        model, given = self._request.costs, self._request.options.partition
        if isinstance(model, Costs):
            yield 0.0, None, model
        elif given is not None:
            yield 0.0, tuple(given), model.chunk_costs(given, owners)
        else:
            microbatches, work = self._request.microbatches, [*map(shortest, model.layers)]
            found = even_partitions(len(work), len(owners))
            found += balanced_partitions(model, owners, microbatches, self._request.limits)
            slowness = slowness_of(model, self._request.stages)
            times = ((microbatches * busiest(work, each, owners, slowness), each) for each in {*found})
            for least, starts in sorted(times):
                partition = model._partition_of(starts)
                yield least, partition, model.chunk_costs(partition, owners)

    def _placements(self, slices: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every placement that is asked for, or that may be good where it is not given: its name, and the rank of every
        chunk."""
        request = self._request
        if isinstance(request.costs, Costs):
            yield request.placed(request.chunks_per_rank)
            return
        stages, layers, chunks = request.stages, len(request.costs.layers), request.chunks_told
        most = layers // stages if slices == 1 else min(layers // stages, max(2, SETTINGS.most_parts // slices))
        several = [each for each in SETTINGS.chunks_per_rank if each <= most]
        for count in several if chunks is None else [chunks]:
            for name in _PLACEMENTS[min(count, 3)] if request.placement is None else [request.placement]:
                schedules.check_counts("plan", stages, request.microbatches, count, slices)
                yield request.placed(count, name)

    def _nothing_fits(self) -> ScheduleError:
        """Names what the best of all partitions of layers needs, where that is the reason."""
        model, limits, stages = self._request.costs, self._request.limits, self._request.stages
        least = min(self._refused, key=lambda error: error.least)
        if isinstance(model, Costs) or self._request.options.partition is not None or limits is None:
            return least
        need, unit = least_need(model, stages), model.memory_unit
        if max(limits) >= need.total:
            return least
        return ScheduleError(
            f"plan: no schedule fits memory_limit={amount(max(limits), unit)}: {need.describe(stages, unit)}, which is "
            "the smallest limit for one chunk per rank; raise it, take more stages or smaller microbatches, or offload "
            "or recompute"
        )


_PLACEMENTS = {1: ["linear"], 2: ["v", "loop"], 3: ["zigzag", "loop"]}
