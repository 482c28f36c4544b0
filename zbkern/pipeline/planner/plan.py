"""plan: the best schedule found for given costs under a memory limit, and how far from the best possible it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from zbkern.pipeline import schedules
from zbkern.pipeline.planner import model_search, robustness
from zbkern.pipeline.planner import offload as memory_saving
from zbkern.pipeline.planner.arguments import (
    PLACEMENTS,
    check_search,
    chunks_per_rank,
    placement_of,
    problem_of,
    rank_limits,
)
from zbkern.pipeline.planner.bounds import cost_bound
from zbkern.pipeline.planner.idle_time import IdleTime, idle_time
from zbkern.pipeline.planner.incumbents import Budget
from zbkern.pipeline.planner.levels import search
from zbkern.pipeline.planner.problem import schedule_of
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.layers import ModelCosts
from zbkern.pipeline.simulation.simulator import simulate
from zbkern.pipeline.simulation.timeline import Timeline

EFFORT = 4
"""The rounds of a search where nothing else is said: mostly three to fifteen seconds on one core."""

_ROUNDING = 1e-9  # relative: a cost this near to its lower bound is the bound


@dataclass(frozen=True)
class Plan:
    """A schedule, its timeline without jitter, and a lower bound on the bubble rate of any schedule of its work.

    costs: of the schedule's chunks. partition: the first layer of every chunk, where `plan` was given layers. idle:
    where the idle time comes from. lower_bound belongs to the objective: to `timeline.bubble_rate` for "cost", and for
    "makespan" to the share of ranks times makespan that is idle; it is of these chunks in this memory, whatever their
    order. optimal: it is proven that no order of these chunks in this memory is better; other cuts of the model may be.
    mean_cost: with jitter, the mean of the objective over the samples; otherwise the objective
    itself. effort: the rounds of search that were completed; `plan(..., effort=)` with the same seed repeats them.
    """

    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    optimal: bool
    mean_cost: float
    effort: int
    costs: Costs
    idle: IdleTime
    partition: tuple[int, ...] | None = None

    @property
    def bubble_rate(self) -> float:
        return self.timeline.bubble_rate


def plan(
    costs: Costs | ModelCosts,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    placement: str | Sequence[int] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    time_limit: float | None = None,
    *,
    partition: Sequence[int] | None = None,
    objective: str = "cost",
    jitter: float = 0.0,
    samples: int = 16,
    seed: int = 0,
    effort: int = EFFORT,
    progress: Callable[[str], None] = lambda line: None,
    offload: bool = False,
    recompute: bool = False,
) -> Plan:
    """The best schedule found for these costs; with those of layers, also how to cut and place the model.

    costs: `Costs` of every chunk, or `ModelCosts` of every layer. With layers, `partition` (the first layer of every
    chunk), `chunks` and `placement` are searched for unless they are given. stages: ranks. chunks: per rank; for
    `Costs` 1 by default, or as many as a placement that is spelt out has. placement: "linear" (neighbouring chunks on
    one rank), "loop" (0..p-1, again 0..p-1), "v" (down, then up), "zigzag" (the V repeated), or the rank of every
    chunk; by default, for `Costs`, linear, v or zigzag for one, two and more chunks; for layers "linear" is one chunk
    per rank where `chunks` is not given. memory_limit: of one rank's
    `peak_memory`, in the unit of `costs.activation` and including what the rank holds all the time, one number or one
    per rank; None for none; the search rounds it down to a level of memory, mostly a sixteenth of what 1F1B holds
    from the next; for layers there are fewer levels above what 1F1B holds, and above twice that only all there is.
    objective: what to minimise, "cost" or "makespan" (see `Timeline`). jitter, samples: the plan has the least mean
    over `samples` simulations in which every pass takes its cost times a normal variate of this deviation, of those
    found for these costs and for slower communication, which leave a late message some slack.

    offload, recompute: where that is faster than an order that fits as it is, the schedule has actions that offload
    activations (and what W needs) to the host and load them back, or that recompute activations; for costs that say
    what these cost. Orders are then searched for the limit, 1.5 and 2 times the limit, and none: four searches, each
    with two rounds less, which is a quarter of the work, so that `effort` means as much work as without these.

    The search is a sequence of `effort` rounds, each twice as long as the one before, for layers first four times (0:
    the constructive answer alone, about a second or less), which are counted in work: for one `seed` the plan is the
    same on every machine, however busy it is. At every effort, for the same other arguments: more effort is never
    worse, and neither is a higher limit for all ranks (without offload, recompute and jitter), as the search is made
    within levels of memory that do not depend on the limit, and the plan is the best of all levels within it. For
    layers no number of chunks and no placement that takes part (1 chunk in a line, or 2, 3, 4, 6 or 8 in a V, a zigzag
    or a loop) has a better plan when it is given; a partition that is given may have one. Limits of several sizes get a
    search of their own: their plan is never worse than that for the least of them, and may be worse with more for some.

    `time_limit`, in seconds, ends the search sooner; the plan then depends on the machine. Where zbkern was installed
    without a C++ compiler there is the constructive answer alone, from fewer rules, and a warning says so. Every
    published schedule that fits takes part, for layers on even and on balanced partitions, so that none of them is
    better (within `time_limit`, as long as there is time to make the next one). The answer is checked and simulated
    when the time is over, which takes some 10 microseconds a pass. progress: is called with a line about the search
    before every round, and with an empty one at the end. Sources: arXiv 2401.10241, 2405.15362.

    Raises ScheduleError when no schedule fits the limit (it names the least that one fits), ValueError or TypeError for
    other arguments.
    """
    if not isinstance(costs, (Costs, ModelCosts)):
        raise TypeError(f"plan: costs must be a zbkern.pipeline.Costs or ModelCosts; got {type(costs).__name__}")
    if placement is not None and not isinstance(placement, Sequence):
        raise TypeError(
            f"plan: placement must be one of {PLACEMENTS} or a list with the rank of every chunk; got "
            f"{type(placement).__name__} {placement!r}"
        )
    schedules.check_counts("plan", stages, microbatches, 1 if chunks is None else chunks)
    check_search(objective, jitter, samples, seed, time_limit, effort)
    if (offload or recompute) and jitter:
        raise ValueError(f"plan: jitter must be 0 with offload or recompute, placed by exact times; got {jitter}")
    if (offload or recompute) and memory_limit is not None:
        again = partial(plan, costs, stages, microbatches, chunks, placement, partition=partition, objective=objective)
        share = None if time_limit is None else time_limit / len(memory_saving.MORE_MEMORY)
        again = partial(again, time_limit=share, seed=seed, progress=progress)
        return memory_saving.search(
            lambda limit: again(memory_limit=limit, effort=max(0, effort - 2)),
            *(memory_limit, objective, offload, recompute),
        )
    if time_limit == 0:
        effort, time_limit = 0, None
    seconds = float("inf") if time_limit is None else time_limit
    share = seconds / (2 + len(robustness.SLACKS)) if jitter else seconds  # one part is for the simulations
    whole, budget, kept = Budget(effort, seconds), Budget(effort, share), 8 if jitter else 1
    if isinstance(costs, ModelCosts):
        question = model_search.Question(costs, stages, microbatches, memory_limit, objective)
        cut, rounds = model_search.search(question, chunks, placement, partition, kept, budget, seed, progress)
        problem, pool, name, found_costs = cut.ladder.problem, cut.ladder.pool, cut.name, cut.costs
        partition = cut.partition
    elif partition is not None:
        raise TypeError("plan: partition divides layers: give ModelCosts with it, or Costs without")
    else:
        chunks = chunks_per_rank(placement, stages) if chunks is None else chunks
        name, owners = placement_of(placement, stages, chunks)
        problem, found_costs = problem_of(costs, owners, microbatches, memory_limit, objective), costs
        pool, rounds = search(problem, kept, budget, seed, progress)
    slack = robustness.with_slack(problem, jitter, share, effort, seed) if jitter else ()
    plans = [schedule_of(orders, problem, f"plan-{name}") for orders in [*pool.orders, *slack]]
    schedule, mean = plans[0], None
    if jitter:
        schedule, mean = robustness.most_robust(plans, found_costs, objective, jitter, samples, seed, whole)
    timeline = simulate(schedule, found_costs)
    reached = timeline.cost if objective == "cost" else timeline.makespan
    least = min(cost_bound(problem) / problem.time_scale, reached)
    optimal = reached - least <= _ROUNDING * reached
    available = stages * least
    lower = max(0.0, 1.0 - sum(timeline.busy) / available) if available > 0 else 0.0
    idle = idle_time(timeline, found_costs, objective, rank_limits(memory_limit, stages))
    mean = reached if mean is None else mean
    return Plan(schedule, timeline, lower, optimal, mean, rounds, found_costs, idle, partition and tuple(partition))
