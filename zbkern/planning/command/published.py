"""Every published schedule on the cut of a model's layers that suits it, to compare a plan with."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern import schedules
from zbkern.planning.command.question import Question
from zbkern.planning.planner.annealing import measured
from zbkern.planning.planner.arguments import problem_of
from zbkern.planning.planner.partition import balanced_partitions, even_partitions
from zbkern.planning.planner.problem import ordering_of
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.planning.simulation.memory import static_of_ranks
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.schedule import Schedule

_ROUNDING = 1e-9  # relative: sums of fractions of one number differ in the last digits


def published_timelines(
    costs: ModelCosts, stages: int, microbatches: int, limit: float | None, slices: int | Sequence[int] = 1
) -> list[Timeline]:
    """Of every published schedule, on that of the even and balanced partitions on which it is fastest and fits.

    Where it fits on none, on that of some on which it holds least. Schedules with more chunks than the model has layers
    are left out.
    """
    made = [comparison.build(name, stages, microbatches, slices=slices) for name in schedules.NAMES]
    return [_on_its_best_cut(each, costs, limit) for each in made if len(each.placement) <= len(costs.layers)]


def step_time(question: Question) -> float:
    """Seconds of a step with the schedule that is asked for, on the cut that suits it."""
    assert question.setting is not None
    passes = _on_its_best_cut(question.named, question.setting.costs, None).makespan
    return passes / 1e3 + question.setting.beside(question.stages)


def _on_its_best_cut(schedule: Schedule, costs: ModelCosts, limit: float | None) -> Timeline:
    microbatches, limits = schedule.microbatches, None if limit is None else [limit] * schedule.ranks
    balanced = balanced_partitions(costs, schedule.placement, microbatches, limits)
    even = even_partitions(len(costs.layers), len(schedule.placement))
    cuts = [
        costs.chunk_costs(costs.partition_of(each), schedule.placement) for each in dict.fromkeys([*balanced, *even])
    ]
    orders, tried = ordering_of(schedule), []
    for cut in cuts:
        problem = problem_of(cut, schedule.placement, microbatches, None, "cost", schedule.slices)
        found = measured(problem, orders)
        assert found is not None  # published schedules pass microbatches in order
        static = static_of_ranks(cut.per_chunk(problem.chunks), schedule.placement)
        held = max(peak / problem.memory_scale + always for peak, always in zip(found[1], static, strict=True))
        fits = limit is None or not exceeds(held, limit)
        tried.append((not fits, found[0].cost / problem.time_scale if fits else held, cut))
    return simulate(schedule, min(tried, key=lambda one: one[:2])[2])


def exceeds(peak: float, limit: float) -> bool:
    return peak > limit * (1 + _ROUNDING)
