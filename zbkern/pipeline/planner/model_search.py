"""From layers to a plan: which partition, how many chunks per rank, where they are, and in which order they run.

Every candidate is a partition of the layers on a placement. At each level of memory (`levels.py`) every placement has
the partition on which the published schedules that fit do best. All that may be better than the best known, by their
lower bounds, are searched side by side, each with the same work whatever else was asked for: so the answer is never
worse than that for one number of chunks, for one placement, or for less memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add

from zbkern.pipeline import schedules
from zbkern.pipeline.planner.annealing import measured
from zbkern.pipeline.planner.arguments import Limit, placement_of, problem_of, rank_limits
from zbkern.pipeline.planner.incumbents import Budget
from zbkern.pipeline.planner.levels import ROUNDING, Ladder, Limits, least_limit, least_work, search_ladders
from zbkern.pipeline.planner.partition import (
    Partition,
    balanced_by_step,
    even_partitions,
    memory_steps,
)
from zbkern.pipeline.planner.portfolio import SETTINGS
from zbkern.pipeline.planner.problem import Problem, ordering_of
from zbkern.pipeline.planner.published import Published
from zbkern.pipeline.planner.rounds import Work
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.schedules.units import amount
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.layers import ModelCosts
from zbkern.pipeline.simulation.needs import least_need

Shape = tuple[str, tuple[int, ...]]  # the name of a placement, and the rank of every chunk


@dataclass(frozen=True)
class Question:
    """What is asked for: a model on so many ranks, within a memory limit, and what to minimise."""

    model: ModelCosts
    stages: int
    microbatches: int
    memory_limit: Limit
    objective: str

    @property
    def is_large(self) -> bool:
        return self.microbatches * self.stages > SETTINGS.layers_large

    def problem(self, costs: Costs, owners: Sequence[int]) -> Problem:
        return problem_of(costs, owners, self.microbatches, self.memory_limit, self.objective)


@dataclass(eq=False)
class Cut:
    """A candidate: a partition of the layers on a placement, and what was found for it."""

    partition: Partition
    name: str
    costs: Costs
    ladder: Ladder
    step: float  # of memory, from which on it takes part

    @property
    def reached(self) -> float:
        return self.ladder.reached


def search(
    question: Question,
    chunks: int | None,
    placement: str | Sequence[int] | None,
    partition: Sequence[int] | None,
    keep: int,
    budget: Budget,
    seed: int,
    progress: Callable[[str], None],
) -> tuple[Cut, int]:
    """The best candidate, and the rounds that were completed. keep: how many orders each has at most.

    Raises ScheduleError when no candidate fits the memory.
    """
    *short, last = SETTINGS.layers_rounds
    work = Work(
        SETTINGS.layers_rules,
        (*short, last // 4 if question.is_large else last),
        SETTINGS.layers_gains,
        SETTINGS.layers_closes,
        SETTINGS.layers_long_runs,
        SETTINGS.layers_fewer,
        *SETTINGS.layers_more_rules,
    )
    published, every = Published(), 1 if budget.allows(0) else SETTINGS.layers_rules_every
    cuts: list[Cut] = []
    refused: list[ScheduleError] = []

    def best() -> float:
        return min((cut.reached for cut in cuts), default=math.inf)

    shapes = list(_shapes(question, chunks, placement, partition))
    usual = _held_by_1f1b(question)
    for name, owners in shapes:
        here: list[Cut] = []
        lowest = math.inf  # the least limit that an even partition fits
        for step, each in _partitions(question, owners, partition, best):
            costs = question.model.chunk_costs(each, owners)
            try:
                problem = question.problem(costs, owners)
            except ScheduleError as error:
                refused.append(error)
                continue
            if cuts and not budget.left:
                break
            lowest = lowest if step else min(lowest, least_limit(problem))
            same = next((cut for cut in here if cut.ladder.problem == problem), None)
            if same is not None:  # as where equal layers are divided in another order
                same.step = min(same.step, step)
            elif least_work(problem) < best():
                here.append(Cut(each, name, costs, Ladder(problem, keep, work, budget, seed, published), step))
                cuts.append(here[-1])
        _add_levels(question, here, lowest, every, usual)
    if not cuts:
        raise refused[0] if partition is not None else _nothing_fits(question, refused[0])
    for cut in sorted(cuts, key=lambda cut: cut.reached):
        cut.ladder.construct(best)
    by_ladder = {id(cut.ladder): cut for cut in cuts}
    rounds = search_ladders(
        [cut.ladder for cut in cuts],
        budget,
        lambda rounds, ladder: progress(_describe(by_ladder[id(ladder)], rounds)),
    )
    progress("")
    return min(cuts, key=lambda cut: cut.reached), rounds


def _nothing_fits(question: Question, of_one_partition: ScheduleError) -> ScheduleError:
    """Names what the best of all partitions needs, where that is the reason."""
    limits = rank_limits(question.memory_limit, question.stages)
    need, unit = least_need(question.model, question.stages), question.model.memory_unit
    if limits is None or not max(limits) < need.total:
        return of_one_partition
    return ScheduleError(
        f"plan: no schedule fits memory_limit={amount(max(limits), unit)}: {need.describe(question.stages, unit)}, "
        "which is the smallest limit for one chunk per rank; raise it, take more stages or smaller microbatches, or "
        "offload or recompute"
    )


def _partitions(
    question: Question, owners: Sequence[int], given: Sequence[int] | None, best: Callable[[], float]
) -> Iterator[tuple[float, Partition]]:
    """Partitions with the step of memory from which on they take part: for even ones none.

    Those for so little memory that they cannot be better than the best known are left out.
    """
    if given is not None:
        yield 0.0, tuple(given)
        return
    model, limits = question.model, rank_limits(question.memory_limit, question.stages)
    for partition in even_partitions(len(model.layers), len(owners)):
        yield 0.0, partition
    least_step = _least_step(question, best())
    balanced = {
        partition: step
        for step, partition in balanced_by_step(model, owners, question.microbatches, limits, least_step)
    }  # of several steps the last, which is the least
    for partition, step in balanced.items():
        yield step, partition


def _least_step(question: Question, best: float) -> float:
    """With less memory than this on every rank no orders are better than `best`, whatever the partition.

    Every layer keeps its activation from its F to its B, which comes after those of all later layers.
    """
    kept = later = static = 0.0
    tied: set[str | None] = set()
    for layer in reversed(question.model.layers):
        later += layer.forward + layer.backward + min(0.0, layer.weight - layer.split_overhead)
        kept += layer.activation * later
        static += 0.0 if layer.tied is not None and layer.tied in tied else layer.static
        tied.add(layer.tied)
    in_flight = question.microbatches * kept / best if best > 0 else 0.0
    return (in_flight + static) / question.stages * (1 - ROUNDING)


def _add_levels(question: Question, cuts: Sequence[Cut], lowest: float, every: int, usual: Sequence[float]) -> None:
    """The levels of memory of one placement: each to the ladder of the partition that is best for it.

    Which that is depends on the level alone: the best published schedule that fits it decides, or else the order of the
    partitions. With several limits, or one below all steps, there is a level for just these. usual: further steps of
    memory; there, and at every second of the others, the search has all its rounds.
    """
    limits = rank_limits(question.memory_limit, question.stages)
    least = _least(limits)
    given = question.model, question.stages, question.microbatches, least
    ruled = {lowest, *memory_steps(*given, SETTINGS.layers_rules_every)}
    regular = {lowest, *memory_steps(*given, every)}
    between = {each for each in usual if not any(math.isclose(each, step) for step in regular)}
    often = {step for step in regular if any(math.isclose(each, step) for each in usual)}
    short = regular - often - {lowest, *memory_steps(*given, 2)}
    steps = {step for step in regular | between if step <= least * (1 + ROUNDING)}
    own = {id(cut): set(cut.ladder.published_steps()) for cut in cuts}
    exact = {each for each in set().union(*own.values()) if not any(math.isclose(each, step) for step in steps)}
    last: dict[int, Limits] = {}
    several = limits is not None and min(limits) < max(limits)
    for step in [None] * several + sorted(steps | exact, reverse=True):
        for place, (cut, limit) in enumerate(_best_for(cuts, step)[: 1 if step in exact else None]):
            if step in exact and step not in own[id(cut)]:
                continue
            if last.get(id(cut)) != limit:
                whole = limit == cut.ladder.limit_of(math.inf)
                is_ruled = whole or (place == 0 and (step is None or step in ruled))
                few = step in short and not whole
                cut.ladder.add_level(limit, is_ruled, *([SETTINGS.layers_few_rounds] if few else []))
            last[id(cut)] = limit
    if not last:
        for cut, limit in _best_for(cuts, None):
            cut.ladder.add_level(limit, ruled=True)


def _best_for(cuts: Sequence[Cut], step: float | None) -> list[tuple[Cut, Limits]]:
    """The partitions for this step of memory, the best first, with its limits there; for None those asked for."""
    found: list[tuple[float, int, Cut, Limits]] = []
    for index, cut in enumerate(cuts):
        if step is None or step >= max(cut.step, least_limit(cut.ladder.problem)):
            limit = cut.ladder.problem.limit if step is None else cut.ladder.limit_of(step)
            found.append((cut.ladder.known_within(limit), index, cut, limit))
    found.sort(key=lambda each: each[:2])
    return [each[2:] for each in found[: SETTINGS.partitions]]


def _held_by_1f1b(question: Question) -> list[float]:
    """What 1F1B holds on an even partition, on the balanced one, and on the fastest: limits often asked for."""
    question, placement = replace(question, memory_limit=None), tuple(range(question.stages))
    orders = ordering_of(schedules.one_f_one_b(question.stages, question.microbatches))
    even = even_partitions(len(question.model.layers), question.stages)
    _, balanced = next(balanced_by_step(question.model, placement, question.microbatches, None))
    found: list[tuple[float, float]] = []  # the objective, and the most that a rank holds
    for partition in [balanced, *even]:
        problem = question.problem(question.model.chunk_costs(partition, placement), placement)
        timed = measured(problem, orders)
        if timed is not None:
            most = max(map(add, timed[1], problem.static))
            found.append((timed[0].cost / problem.time_scale, most / problem.memory_scale))
    steps: list[float] = []
    for _, held in (*found[:2], min(found)):
        if not any(math.isclose(held, step) for step in steps):
            steps.append(held)
    return steps


def _least(limits: Sequence[float] | None) -> float:
    return math.inf if limits is None else min(limits)


def _describe(cut: Cut, rounds: int) -> str:
    problem = cut.ladder.problem
    per_rank = problem.chunks // problem.ranks
    idle = 1 - least_work(problem) / cut.reached if cut.reached else 0.0
    return f"round {rounds + 1}: {per_rank} chunks per rank, {cut.name}: the busiest rank is idle for {idle:.2%}"


def _shapes(
    question: Question, chunks: int | None, placement: str | Sequence[int] | None, partition: Sequence[int] | None
) -> Iterator[Shape]:
    """Every placement that is asked for, or that may be good where it is not given."""
    stages, layers = question.stages, len(question.model.layers)
    if partition is not None:
        if len(partition) % stages or chunks not in (None, len(partition) // stages):
            raise ValueError(
                f"plan: partition must have chunks x stages entries, a multiple of {stages}"
                + (f", {chunks * stages}" if chunks is not None else "")
                + f"; got {len(partition)}"
            )
        chunks = len(partition) // stages
    if placement is not None and not isinstance(placement, str):
        chunks = len(placement) // stages if chunks is None else chunks
    if placement == "v":
        chunks = 2 if chunks is None else chunks
    if (chunks or 1) * stages > layers:
        raise ValueError(
            f"plan: {stages} stages with {chunks or 1} chunks each need as many layers, and costs has {layers}: lower "
            "stages or chunks"
        )
    several = [each for each in SETTINGS.chunks_per_rank if each * stages <= layers]
    for count in several if chunks is None else [chunks]:
        for name in _PLACEMENTS[min(count, 3)] if placement is None else [placement]:
            schedules.check_counts("plan", stages, question.microbatches, count)
            yield placement_of(name, stages, count)


_PLACEMENTS: dict[int, Sequence[str | Sequence[int]]] = {1: ["linear"], 2: ["v", "loop"], 3: ["zigzag", "loop"]}
