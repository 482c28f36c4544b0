"""From layers to a plan: which partition, how many chunks per rank, where they are, and in which order they run.

Every candidate is a partition of the layers on a placement. At each level of memory (`levels.py`) every placement has
the partitions on which the published schedules that fit do best. All that may be better than the best known, by their
lower bounds, are searched side by side, each with the same work whatever else was asked for: so the answer is never
worse than that for one number of chunks, for one placement, or for less memory. For this, neither the partitions of a
level nor the levels may depend on the limit. What is left out because nothing of it can be better than the best known
is the only difference: the more is asked for, the better is that, and the more is left out; others then take the place
of a partition that is, and only add answers. Nor is the answer worse than a published schedule that fits, on an even
partition or on one made for any level within the limit: all are measured.
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
    PARTITIONS_EVERY,
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

    @property
    def limits(self) -> list[float] | None:
        """The memory limit of every rank; None for none."""
        return rank_limits(self.memory_limit, self.stages)

    def problem(self, costs: Costs, owners: Sequence[int]) -> Problem:
        return problem_of(costs, owners, self.microbatches, self.memory_limit, self.objective)


Range = tuple[float, float]


@dataclass(frozen=True)
class Window:
    """The levels of memory at which orders are searched for a partition, whatever limit is asked for: ranges, without
    their ends.

    All memory, or from a step that it was made for to the next one; none for what was made for several limits.
    """

    ranges: frozenset[Range] = frozenset([(0.0, math.inf)])

    def __contains__(self, step: float) -> bool:
        return any(low <= step and (step < high or high == math.inf) for low, high in self.ranges)

    def __or__(self, other: Window) -> Window:
        return Window(self.ranges | other.ranges)

    def from_(self, least: float) -> float:
        """The least memory in it that is at least this; infinite where there is none."""
        return min((max(low, least) for low, high in self.ranges if least < high), default=math.inf)


@dataclass(eq=False)
class Cut:
    """A candidate: a partition of the layers on a placement, and what was found for it."""

    partition: Partition
    name: str
    costs: Costs
    ladder: Ladder
    window: Window

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
    shapes, published = list(_shapes(question, chunks, placement, partition)), Published()
    steps = _Steps(question, rules_alone=not budget.allows(0))
    cuts: list[Cut] = []
    refused: list[ScheduleError] = []

    def best() -> float:
        return min((cut.reached for cut in cuts), default=math.inf)

    for name, owners in shapes:
        here: list[Cut] = []
        windows = {tuple(partition): Window()} if partition is not None else _windows(question, owners, steps)
        lowest = math.inf  # with less memory, none fits
        for each, window in windows.items():
            costs = question.model.chunk_costs(each, owners)
            try:
                problem = question.problem(costs, owners)
            except ScheduleError as error:
                refused.append(error)
                continue
            if cuts and not budget.left:
                break
            least = least_limit(problem)
            if window.ranges and window.from_(least) == math.inf:  # it holds more than what it was made for
                window = Window(frozenset([(least, math.inf)]))
            lowest = min(lowest, window.from_(least))
            same = next((cut for cut in here if cut.ladder.problem == problem), None)
            if same is not None:  # as where equal layers are divided in another order
                same.window |= window
            elif least_work(problem) < best():
                ladder = Ladder(problem, keep, work, budget, seed, published)
                here.append(Cut(each, name, costs, ladder, window))
                cuts.append(here[-1])
        _add_levels(here, lowest, steps)
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
    limits = question.limits
    need, unit = least_need(question.model, question.stages), question.model.memory_unit
    if limits is None or not max(limits) < need.total:
        return of_one_partition
    return ScheduleError(
        f"plan: no schedule fits memory_limit={amount(max(limits), unit)}: {need.describe(question.stages, unit)}, "
        "which is the smallest limit for one chunk per rank; raise it, take more stages or smaller microbatches, or "
        "offload or recompute"
    )


class _Steps:
    """The steps of memory of a model. None depends on the limit that is asked for, which only leaves out those above.

    made: those that partitions are made for; ruled: where rules are tried; regular: where there is a search, without
    those that are alone for some placement; short: where it has few rounds.
    """

    def __init__(self, question: Question, rules_alone: bool) -> None:
        """rules_alone: there are no rounds, so that levels without rules are of no use."""
        model, stages = question.model, question.stages
        limits = question.limits
        self.limit = math.inf if limits is None else min(limits)
        self.several = limits is not None and min(limits) < max(limits)

        def every(count: int) -> list[float]:
            return memory_steps(model, stages, question.microbatches, every=count)

        self.made, self.ruled = every(PARTITIONS_EVERY), frozenset(every(SETTINGS.layers_rules_every))
        self.low = self.made[SETTINGS.layers_steps - 1] if len(self.made) >= SETTINGS.layers_steps else 0.0
        steps, usual = every(1), _held_by_1f1b(question)
        often = {step for step in steps if any(math.isclose(each, step) for each in usual)}
        self.short = set(steps) - often - set(every(2))
        between = {each for each in usual if not any(math.isclose(each, step) for step in steps)}
        self.regular = (self.ruled if rules_alone else set(steps)) | between

    def within_limit(self, step: float) -> bool:
        return step <= self.limit * (1 + ROUNDING)


def _windows(question: Question, owners: Sequence[int], steps: _Steps) -> dict[Partition, Window]:
    """Even partitions, which are for all levels of memory, and those made for steps of memory within the limit.

    With several limits there are some more for just these, which take part at no level that a single limit has.
    """
    model, microbatches = question.model, question.microbatches
    windows = {partition: Window() for partition in even_partitions(len(model.layers), len(owners))}
    uniform = None if steps.limit == math.inf else [steps.limit * (1 + ROUNDING)] * question.stages
    next_larger = dict(zip(steps.made, [math.inf, *steps.made], strict=False))
    least = [least_need(model, question.stages).total] * question.stages
    lowest = math.inf
    made: list[tuple[float, float, Partition]] = []
    for step, partition in balanced_by_step(model, owners, microbatches, uniform):
        if step > 0:
            made.append((step, math.inf if step >= steps.low else next_larger[step], partition))
            lowest = step
    # for less than all these steps: what is made for the least memory that the model needs
    made += [(0.0, lowest, each) for step, each in balanced_by_step(model, owners, microbatches, least) if step == 0]
    for begin, end, partition in made:
        window = Window(frozenset([(begin, end)]))
        windows[partition] = windows[partition] | window if partition in windows else window
    if steps.several:
        for _, partition in balanced_by_step(model, owners, microbatches, question.limits):
            windows.setdefault(partition, Window(frozenset()))
    return windows


def _add_levels(cuts: Sequence[Cut], lowest: float, steps: _Steps) -> None:
    """The levels of memory of one placement: each to the ladders of the partitions that are best for it.

    Which these are depends on the level alone: the best published schedule that fits it decides, or else the order of
    the partitions. lowest: the least memory that a partition fits. What published schedules hold that are better than
    all with less are levels, too; and with several limits these.
    """
    regular = steps.regular | {lowest}
    own = {id(cut): set(cut.ladder.published_steps()) for cut in cuts}
    exact = {each for each in set().union(*own.values()) if not any(math.isclose(each, step) for step in regular)}
    last: dict[int, Limits] = {}
    levels = sorted(filter(steps.within_limit, regular | exact), reverse=True)
    for step in [None] * steps.several + levels:
        for place, (cut, limit) in enumerate(_best_for(cuts, step)[: 1 if step in exact else None]):
            if step in exact and step not in own[id(cut)]:
                continue
            if last.get(id(cut)) != limit:
                whole = limit == cut.ladder.limit_of(math.inf)
                is_ruled = whole or (place == 0 and (step is None or step == lowest or step in steps.ruled))
                few = step in steps.short and step != lowest and not whole
                cut.ladder.add_level(limit, is_ruled, *([SETTINGS.layers_few_rounds] if few else []))
            last[id(cut)] = limit


def _best_for(cuts: Sequence[Cut], step: float | None) -> list[tuple[Cut, Limits]]:
    """The partitions for this step of memory, the best first, with its limits there; for None those asked for."""
    found: list[tuple[float, int, Cut, Limits]] = []
    for index, cut in enumerate(cuts):
        if step is None or (step in cut.window and step >= least_limit(cut.ladder.problem)):
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
    if placement == "linear":  # with more chunks, a rank's would follow each other: that is for whoever asks for it
        chunks = 1 if chunks is None else chunks
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
