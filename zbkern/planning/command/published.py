"""Published schedules with the costs of chunks, which are cut evenly, or of layers, each on the cut that suits it."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern import schedules
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.memory import exceeds
from zbkern.planning.planner.annealing import measured
from zbkern.planning.planner.partition import balanced_partitions, even_partitions
from zbkern.planning.planner.problem import ordering_of, problem_of
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.schedule import Schedule


def published_timelines(
    costs: Costs | ModelCosts,
    stages: int,
    microbatches: int,
    limit: float | None,
    slices: int | Sequence[int] = 1,
    chunks: int = 1,
    names: Sequence[str] = schedules.NAMES,
) -> list[Timeline]:
    """Of every published schedule, or those of these names.

    Costs are of so many `chunks` per rank (see `comparison.timelines`). Of layers, each schedule has that of the even
    and balanced partitions on which it is fastest and fits; where it fits on none, that of some on which it holds
    least. Those with more chunks than there are layers are left out.
    """
    if isinstance(costs, Costs):
        return comparison.timelines(costs, stages, microbatches, chunks, slices, names)
    made = [comparison.build(name, stages, microbatches, slices=slices) for name in names]
    return [on_best_cut(each, costs, limit) for each in made if len(each.placement) <= len(costs.layers)]


def on_best_cut(schedule: Schedule, costs: ModelCosts, limit: float | None) -> Timeline:
    """On that of the cuts of `published_timelines`."""
    microbatches, limits = schedule.microbatches, None if limit is None else [limit] * schedule.ranks
    balanced = balanced_partitions(costs, schedule.placement, microbatches, limits)
    even = even_partitions(len(costs.layers), len(schedule.placement))
    cuts = [
        costs.chunk_costs(costs._partition_of(each), schedule.placement) for each in dict.fromkeys([*balanced, *even])
    ]
    orders, tried = ordering_of(schedule), []
    for cut in cuts:
        problem = problem_of(flat_costs(cut, schedule), microbatches, None, "cost")
        found = measured(problem, orders)
        assert found is not None  # published schedules pass microbatches in order
        held = max(
            peak / problem.memory_scale + always for peak, always in zip(found[1], problem.flat.static, strict=True)
        )
        fits = not exceeds(held, limit)
        tried.append((not fits, found[0].cost / problem.time_scale if fits else held, cut))
    return simulate(schedule, min(tried, key=lambda one: one[:2])[2])
