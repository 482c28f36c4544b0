"""Plans that stay good when passes take random times.

In the best plan for given costs, many passes start at the very moment at which their message arrives; one late pass
then delays all ranks. Planning with slower communication than there is leaves slack, often at no cost: with 8 stages,
16 microbatches, one chunk and 1.5 times the memory of 1F1B, passes that vary by 10% add 3.3% to the cost of the best
plan, and 1.2% to that of a plan with slack which is as good without variation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zbkern.pipeline.planner import levels
from zbkern.pipeline.planner.incumbents import Budget
from zbkern.pipeline.planner.problem import Ordering, Problem
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.simulator import simulate

SLACKS = (2, 4, 8)  # of a message, in deviations of the mean pass


def with_slack(problem: Problem, jitter: float, seconds: float, effort: int, seed: int) -> Iterator[Ordering]:
    """Orders found with slower messages; `seconds` or `effort` for each slack."""
    mean = (sum(problem.forward) + sum(problem.backward) + sum(problem.weight)) // (3 * problem.chunks)
    for slack in SLACKS:
        added = int(slack * jitter * mean)
        hops = zip(problem.communication, problem.placement, problem.placement[1:], strict=False)
        slower = replace(problem, communication=tuple(lag + added * (here != there) for lag, here, there in hops))
        pool, _ = levels.search(slower, 2, Budget(effort, seconds), seed)
        yield from pool.orders


def most_robust(
    schedules: Sequence[Schedule],
    costs: Costs,
    objective: str,
    jitter: float,
    samples: int,
    seed: int,
    budget: Budget,
) -> tuple[Schedule, float]:
    """The schedule with the least mean over sampled costs, and that mean.

    All are compared on the same samples: fewer than `samples`, but at least one, where the time is over before.
    """

    def reached(schedule: Schedule, sample: int) -> float:
        run = simulate(schedule, costs, jitter=jitter, seed=seed + sample)
        return run.cost if objective == "cost" else run.makespan

    sums = [0.0] * len(schedules)
    for sample in range(samples):
        if sample and not budget.left:
            break
        for index, schedule in enumerate(schedules):
            sums[index] += reached(schedule, sample)
    best = schedules[min(range(len(sums)), key=sums.__getitem__)]
    return best, sum(reached(best, sample) for sample in range(samples)) / samples
