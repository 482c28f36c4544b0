"""From layers to a plan: which partition, how many chunks per rank, where they are, and in which order they run.

Every candidate is a partition of the layers on a placement. The published schedules and a few rules say quickly how
good it can be; the best few get searches of their own, side by side, and after every round the worst of them leave.
Then layers move between chunks under the best order found, which is timed again: it can make up for a rank that has
more work than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zbkern.pipeline import schedules
from zbkern.pipeline.planner.annealing import with_cost
from zbkern.pipeline.planner.arguments import Limit, placement_of, problem_of, rank_limits
from zbkern.pipeline.planner.bounds import cost_bound
from zbkern.pipeline.planner.incumbents import Budget, Pool
from zbkern.pipeline.planner.partition import Partition, balanced_partitions, even_partitions
from zbkern.pipeline.planner.portfolio import SETTINGS, Search, add_published, add_serial, construct
from zbkern.pipeline.planner.problem import Ordering, Problem, fits
from zbkern.pipeline.planner.published import Published
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.layers import ModelCosts

Shape = tuple[str, tuple[int, ...]]  # the name of a placement, and the rank of every chunk


@dataclass(frozen=True)
class Question:
    """What is asked for: a model on so many ranks, within a memory limit, and what to minimise."""

    model: ModelCosts
    stages: int
    microbatches: int
    memory_limit: Limit
    objective: str

    def problem(self, costs: Costs, owners: Sequence[int]) -> Problem:
        return problem_of(costs, owners, self.microbatches, self.memory_limit, self.objective)


@dataclass(eq=False)
class Cut:
    """A candidate: a partition of the layers (None where only the costs of chunks are known), and its best orders."""

    partition: Partition | None
    name: str
    costs: Costs
    problem: Problem
    pool: Pool
    search: Search | None = None

    @property
    def reached(self) -> float:
        """The objective, in the unit of the costs."""
        orders = self.pool.orders
        return orders[0].cost / self.problem.time_scale if orders else float("inf")

    @property
    def bound(self) -> float:
        return self.pool.bound / self.problem.time_scale


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
    published = Published()
    shapes = list(_shapes(question, chunks, placement, partition))
    cuts = _first_answers(question, shapes, partition, keep, budget, seed, published)
    rounds = 0
    while budget.allows(rounds):
        progress(_describe(_best(cuts), rounds))
        cuts = _kept(cuts, rounds)
        for cut in cuts:
            if cut.search is None:
                cut.pool.bound = cost_bound(cut.problem)
                most = SETTINGS.trial_passes // SETTINGS.searched[0]
                cut.search = Search(cut.problem, cut.pool, budget, seed, published, most)
            if cut.search.open:
                cut.search.round()
        if partition is None:
            known = {(cut.problem.placement, cut.partition) for cut in cuts}
            moved = [_recut(question, cut, budget) for cut in _best_of_every_placement(cuts)]
            cuts += [cut for cut in moved if (cut.problem.placement, cut.partition) not in known]
        rounds += budget.left > 0
        if not any(cut.search is None or cut.search.open for cut in cuts):
            break
    progress("")
    return _best(cuts), rounds


def _best(cuts: Sequence[Cut]) -> Cut:
    return min(cuts, key=lambda cut: cut.reached)


def _best_of_every_placement(cuts: Sequence[Cut]) -> list[Cut]:
    """The best first."""
    found: dict[tuple[int, ...], Cut] = {}
    for cut in sorted(cuts, key=lambda cut: cut.reached):
        found.setdefault(cut.problem.placement, cut)
    return list(found.values())


def _kept(cuts: Sequence[Cut], rounds: int) -> list[Cut]:
    """Those that are worth another round: near the best, and as many as it has room for, of every placement first."""
    last = len(SETTINGS.searched) - 1
    best = _best(cuts)
    most = best.reached * (1 + SETTINGS.margins[min(rounds, last)])
    first = _best_of_every_placement(cuts)
    others = sorted((cut for cut in cuts if cut not in first), key=lambda cut: cut.reached)
    near = [cut for cut in [*first, *others] if cut.reached <= most and (cut is best or cut.bound < best.reached)]
    return near[: SETTINGS.searched[min(rounds, last)]]


def _describe(cut: Cut, rounds: int) -> str:
    per_rank = cut.problem.chunks // cut.problem.ranks
    work = max(map(cut.problem.work, range(cut.problem.ranks))) / cut.problem.time_scale
    idle = 1 - work / cut.reached if cut.reached else 0.0
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


def _first_answers(
    question: Question,
    shapes: Sequence[Shape],
    partition: Sequence[int] | None,
    keep: int,
    budget: Budget,
    seed: int,
    published: Published,
) -> list[Cut]:
    """The best one or two partitions of every shape, with the best that is quickly found for them."""
    found: list[Cut] = []
    refused: ScheduleError | None = None
    for name, owners in shapes:
        here: list[Cut] = []
        for each in _partitions(question, owners, partition):
            costs = question.model.chunk_costs(each, owners)
            try:
                problem = question.problem(costs, owners)
            except ScheduleError as error:
                refused = refused or error
                continue
            cut = Cut(each, name, costs, problem, Pool(problem, keep))
            most = max(map(problem.work, range(question.stages))) / problem.time_scale
            if any(other.reached <= most for other in here):
                continue
            add_published(problem, cut.pool, budget, published)
            if not here:
                construct(problem, cut.pool, budget, SETTINGS.first_passes)
            if not cut.pool.orders:
                add_serial(problem, cut.pool, budget)
            here.append(cut)
            if not budget.left:
                break
        found += sorted(here, key=lambda cut: cut.reached)[:2]
    if not found:
        assert refused is not None
        raise refused
    return found


def _partitions(question: Question, owners: Sequence[int], given: Sequence[int] | None) -> list[Partition]:
    if given is not None:
        return [tuple(given)]
    model, limits = question.model, rank_limits(question.memory_limit, question.stages)
    balanced = balanced_partitions(model, owners, question.microbatches, limits)
    return list(dict.fromkeys([*balanced, *even_partitions(len(model.layers), len(owners))]))


def _recut(question: Question, cut: Cut, budget: Budget) -> Cut:
    """`cut` with layers moved between chunks, where its best order is better then; timed again, not searched."""
    owners, layers = cut.problem.placement, len(question.model.layers)
    best = cut
    tries = max(1, SETTINGS.recut_passes // cut.problem.passes)
    improved = True
    while improved:
        improved = False
        for moved in _neighbours(best.partition or (), layers):
            if tries == 0 or not budget.left:
                break
            trial = _retimed(question, moved, owners, best)
            tries -= trial is not None
            if trial is not None and trial.reached < best.reached * (1 - 1e-9):
                best, improved = trial, True
                break
    return best


def _retimed(question: Question, partition: Partition, owners: Sequence[int], cut: Cut) -> Cut | None:
    """The best order of `cut` on another partition; None where that has a rank with too much work or memory."""
    costs = question.model.chunk_costs(partition, owners)
    try:
        problem = question.problem(costs, owners)
    except ScheduleError:
        return None
    orders: Ordering = cut.pool.orders[0]
    if max(map(problem.work, range(problem.ranks))) / problem.time_scale >= cut.reached or not fits(problem, orders):
        return None
    found = Cut(partition, cut.name, costs, problem, Pool(problem, cut.pool.keep))
    found.pool.add(with_cost(problem, replace(orders, cost=0)))
    return found


def _neighbours(partition: Partition, layers: int) -> Iterator[Partition]:
    """One cut moved by a layer, then two next to each other, so that a chunk passes one on."""
    ends = (*partition[1:], layers)
    for width in (1, 2):
        for first in range(1, len(partition) - width + 1):
            for step in (1, -1):
                moved = list(partition)
                for index in range(first, first + width):
                    moved[index] += step
                if all(a < b for a, b in zip(moved, [*moved[1:], ends[-1]], strict=True)):
                    yield tuple(moved)
