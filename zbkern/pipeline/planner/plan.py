"""plan: the best schedule found for given costs under a memory limit, and how far from the best possible it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real

from zbkern.pipeline import schedules
from zbkern.pipeline.planner import bounds, portfolio, robustness
from zbkern.pipeline.planner import offload as memory_saving
from zbkern.pipeline.planner.incumbents import Budget, Pool
from zbkern.pipeline.planner.problem import Problem, schedule_of
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.schedules.units import amount
from zbkern.pipeline.simulation.costs import ChunkCosts, Costs
from zbkern.pipeline.simulation.memory import static_of_ranks
from zbkern.pipeline.simulation.simulator import simulate
from zbkern.pipeline.simulation.timeline import Timeline

PLACEMENTS = ("linear", "loop", "v", "zigzag")
OBJECTIVES = ("cost", "makespan")

_SEEDS = 2**32  # each search makes seeds of its own of 64 bits from it
_ROUNDING = 1e-9  # relative: a cost this near to its lower bound is the bound


@dataclass(frozen=True)
class Plan:
    """A schedule, its timeline without jitter, and a lower bound on the bubble rate of any schedule of its work.

    lower_bound belongs to the objective: to `timeline.bubble_rate` for "cost", and for "makespan" to the share of ranks
    times makespan that is idle. optimal: it is proven that no order of these chunks in this memory is better; other
    cuts of the model may be. mean_cost: with jitter, the mean of the objective over the samples; otherwise the
    objective itself. effort: the rounds of search that were completed; `plan(..., effort=)` with the same seed
    repeats them.
    """

    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    optimal: bool
    mean_cost: float
    effort: int = 0

    @property
    def bubble_rate(self) -> float:
        return self.timeline.bubble_rate


def plan(
    costs: Costs,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    placement: str | Sequence[int] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    time_limit: float = 10.0,
    *,
    objective: str = "cost",
    jitter: float = 0.0,
    samples: int = 16,
    seed: int = 0,
    effort: int | None = None,
    offload: bool = False,
    recompute: bool = False,
) -> Plan:
    """The best schedule found in about `time_limit` seconds on one core; with 0, the constructive answer alone.

    costs: of every chunk; see `Costs`. stages: ranks. chunks: per rank, 1 by default, or as many as a placement that is
    spelt out has. placement: "linear" (neighbouring chunks on one rank), "loop" (0..p-1, again 0..p-1), "v" (down, then
    up), "zigzag" (the V repeated), or the rank of every chunk; by default linear, v or zigzag for one, two and more
    chunks. memory_limit: of one rank's `peak_memory`, in the unit of `costs.activation`, one number or one per rank;
    None for none. objective: what to minimise, "cost" or "makespan" (see `Timeline`). jitter, samples: the plan has the
    least mean over `samples` simulations in which every pass takes its cost times a normal variate of this deviation,
    of those found for these costs and for slower communication, which leave a late message some slack.

    offload, recompute: where that is faster than an order that fits as it is, the schedule has actions that offload
    activations (and what W needs) to the host and load them back, or that recompute activations; for costs that say
    what these cost. The time is then divided between orders that need the limit, and more.

    The search is a sequence of rounds, each twice as long as the one before, that depends on `seed` alone; the clock
    only decides where it ends. So two runs may differ when the clock stops them at different moments, and a longer one
    is never worse than a shorter. `effort`, a number of rounds (0: the constructive answer alone, a second or so for a
    large problem), ends it instead of the clock: then the plan is the same on every machine. Where zbkern was installed
    without a C++ compiler there is the constructive answer alone, from fewer rules, and a warning says so. Every
    published schedule that fits takes part, so that none of them is better: within `time_limit` as long as there is
    time to make the next one, and without a clock up to 40,000 passes (F, B and W of all microbatches and chunks).
    The answer is checked and simulated when the time is over, which takes some 10 microseconds a pass. Sources: arXiv
    2401.10241, 2405.15362.

    Raises ScheduleError when no schedule fits the limit (it names the least that one fits), ValueError or TypeError for
    other arguments.
    """
    if not isinstance(costs, Costs):
        raise TypeError(f"plan: costs must be a zbkern.pipeline.Costs; got {type(costs).__name__}")
    if placement is not None and not isinstance(placement, Sequence):
        raise TypeError(
            f"plan: placement must be one of {PLACEMENTS} or a list with the rank of every chunk; got "
            f"{type(placement).__name__} {placement!r}"
        )
    if (offload or recompute) and jitter:
        raise ValueError(f"plan: jitter must be 0 with offload or recompute, placed by exact times; got {jitter}")
    if (offload or recompute) and memory_limit is not None:
        again = partial(plan, costs, stages, microbatches, chunks, placement, objective=objective, jitter=jitter)
        again = partial(again, samples=samples, seed=seed, effort=effort, time_limit=time_limit / 4)
        return memory_saving.search(
            lambda limit: again(memory_limit=limit), lambda _: costs, memory_limit, objective, offload, recompute
        )
    if chunks is None:
        chunks = chunks_per_rank(placement, stages)
    schedules.check_counts("plan", stages, microbatches, chunks)
    _check_search(objective, jitter, samples, seed, time_limit, effort)
    if time_limit == 0 and effort is None:
        effort = 0
    share = time_limit / (2 + len(robustness.SLACKS)) if jitter else time_limit  # one part is for the simulations
    whole, budget = Budget(time_limit, effort), Budget(share, effort)
    name, owners = placement_of(placement, stages, chunks)
    flat = costs.per_chunk(len(owners))
    unlimited = microbatches * sum(map(max, flat.activation, flat.held))
    static = static_of_ranks(flat, owners)
    limits = _limits(memory_limit, static, unlimited)
    _check_room(flat, owners, limits, static, costs.memory_unit)
    limits = [min(limit, unlimited) for limit in limits]
    problem = Problem.build(flat, owners, microbatches, limits, objective == "makespan")
    bound = bounds.cost_bound(problem)
    pool = Pool(8 if jitter else 1, bound)
    rounds = portfolio.search(problem, pool, budget, seed)
    found = [*pool.orders, *(robustness.with_slack(problem, jitter, share, effort, seed) if jitter else ())]
    plans = [schedule_of(orders, problem, f"plan-{name}") for orders in found]
    schedule, mean = plans[0], None
    if jitter:
        schedule, mean = robustness.most_robust(plans, costs, objective, jitter, samples, seed, whole)
    timeline = simulate(schedule, costs)
    reached = timeline.cost if objective == "cost" else timeline.makespan
    least = min(bound / problem.time_scale, reached)
    optimal = reached - least <= _ROUNDING * reached
    available = stages * least
    lower = max(0.0, 1.0 - sum(timeline.busy) / available) if available > 0 else 0.0
    return Plan(schedule, timeline, lower, optimal, reached if mean is None else mean, rounds)


def _check_search(
    objective: str, jitter: float, samples: int, seed: int, time_limit: float, effort: int | None
) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"plan: objective must be one of {OBJECTIVES}; got {objective!r}")
    counts = {"samples": (samples, 1), "seed": (seed, 0), "effort": (0 if effort is None else effort, 0)}
    for name, (count, least) in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"plan: {name} must be an int; got {type(count).__name__} {count!r}")
        if count < least:
            raise ValueError(f"plan: {name} must be at least {least}; got {count}")
    if seed >= _SEEDS:
        raise ValueError(f"plan: seed must be below {_SEEDS}; got {seed}")
    for name, value in (("jitter", jitter), ("time_limit", time_limit)):
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"plan: {name} must be a number; got {type(value).__name__} {value!r}")
        if not value >= 0:
            raise ValueError(f"plan: {name} must be at least 0; got {value}")
    if jitter == math.inf:
        raise ValueError("plan: jitter must be finite; got inf")


def chunks_per_rank(placement: str | Sequence[int] | None, stages: int) -> int:
    """How many chunks a rank has where that is not said: as a placement that is spelt out has it, else one."""
    if placement is None or isinstance(placement, str) or not isinstance(stages, int) or stages < 1:
        return 1
    return max(1, len(placement) // stages)


def placement_of(given: str | Sequence[int] | None, stages: int, chunks: int) -> tuple[str, tuple[int, ...]]:
    """Name, and the rank of every chunk."""
    down = range(stages)
    if given is None:
        given = "linear" if chunks == 1 else "v" if chunks == 2 else "zigzag"
    if not isinstance(given, str):
        owners = tuple(given)
        if len(owners) != stages * chunks or any(owners.count(rank) != chunks for rank in down):
            counts = {owners.count(rank) for rank in down}
            if len(counts) == 1 and len(owners) == stages * (each := counts.pop()) > 0:
                raise ValueError(
                    f"plan: placement {owners} names {len(owners)} chunks, {each} of each of {stages} ranks, and "
                    f"chunks={chunks}; leave chunks out, or give chunks={each}"
                )
            raise ValueError(
                f"plan: placement must name every rank below {stages} {chunks} times, once per chunk of each "
                f"(chunks={chunks}); got {owners}"
            )
        return "custom", owners
    if given not in PLACEMENTS:
        raise ValueError(f"plan: placement must be one of {PLACEMENTS} or the rank of every chunk; got {given!r}")
    if given == "v" and chunks != 2:
        raise ValueError(f'plan: placement "v" needs chunks=2 (or "zigzag" for more); got {chunks}')
    if given == "linear":
        return given, tuple(rank for rank in down for _ in range(chunks))
    if given == "loop":
        return given, tuple(rank for _ in range(chunks) for rank in down)
    return given, tuple(rank for turn in range(chunks) for rank in (reversed(down) if turn % 2 else down))


def _limits(given: float | Sequence[float] | None, static: Sequence[float], unlimited: float) -> list[float]:
    """What microbatches may take on every rank: the limit, less what is there all the time."""
    stages = len(static)
    if given is None:
        return [unlimited] * stages
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * stages
    for limit in each:
        if not isinstance(limit, Real) or isinstance(limit, bool):
            raise TypeError(
                f"plan: memory_limit must be one number or one per rank; got {type(limit).__name__} {limit!r}"
            )
    try:
        limits = [float(limit) for limit in each]
    except OverflowError:
        raise ValueError("plan: memory_limit must be below 1e308, or None for no limit; got a larger int") from None
    if len(limits) != stages:
        raise ValueError(f"plan: memory_limit must be one number or one per rank ({stages}); got {len(limits)}")
    if any(not limit >= 0 for limit in limits):
        raise ValueError(f"plan: memory_limit must be at least 0; got {given}")
    return [limit - held for limit, held in zip(limits, static, strict=True)]


def _check_room(
    flat: ChunkCosts, owners: Sequence[int], limits: Sequence[float], static: Sequence[float], unit: str | None
) -> None:
    """One microbatch must fit: a rank holds it in all of its chunks when its last forward there has run.

    A B that is not fused may leave more than it found; W then runs before the next B.
    """
    fused = any(both < b + w for both, b, w in zip(flat.fused, flat.backward, flat.weight, strict=True))
    needs = [0.0] * len(limits)
    for rank in range(len(limits)):
        before = 0.0
        for chunk in (chunk for chunk, owner in enumerate(owners) if owner == rank):
            held = 0.0 if fused else flat.held[chunk]
            needs[rank] = max(needs[rank], before + max(flat.activation[chunk], held))
            before += flat.activation[chunk]
    least = max(need + always for need, always in zip(needs, static, strict=True))
    for rank, (need, limit, always) in enumerate(zip(needs, limits, static, strict=True)):
        if need > limit * (1 + _ROUNDING):
            besides = f" beside the {amount(always, unit)} that are there all the time" if always else ""
            raise ScheduleError(
                f"plan: no schedule fits memory_limit={amount(limit + always, unit)} on rank {rank}: one microbatch in "
                f"all chunks of a rank holds {amount(need, unit)}{besides}; the smallest limit that any schedule fits "
                f"is {amount(least, unit)}"
            )
