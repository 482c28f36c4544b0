"""How far orders are delayed where ranks are slower or faster than planned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from zbkern.planning.planner.annealing import measured
from zbkern.planning.planner.problem import Ordering, Problem


def at_speeds(problem: Problem, count: int, seed: int) -> list[Problem]:
    """The same with the passes of each rank up to 20% faster or slower: so many samples, in which each rank has each of
    so many speeds once."""
    generator = random.Random(seed)
    speeds = [sorted(range(count), key=lambda _: generator.random()) for _ in range(problem.ranks)]
    factors = [[8 * count + 4 * speed + 2 for speed in of_ranks] for of_ranks in zip(*speeds, strict=True)]
    return [_scaled(problem, each, 10 * count) for each in factors]


def delayed(samples: Sequence[Problem], orders: Ordering) -> float:
    """The mean cost in these samples, in the unit of the costs."""
    found = [measured(sample, orders) for sample in samples]
    return fmean(each[0].cost for each in found if each is not None) / samples[0].time_scale


def _scaled(problem: Problem, factors: Sequence[int], unit: int) -> Problem:
    """The times of each rank's passes times its factor / unit."""
    found = []
    for rank, each in zip(problem.placement, problem.by_chunk, strict=True):
        times = {name: getattr(each, name) for name in ("forward", "backward", "weight", "fused", "merge_saving")}
        scaled = {name: tuple(time * factors[rank] // unit for time in of_pass) for name, of_pass in times.items()}
        found.append(each._replace(**scaled))
    return replace(problem, by_chunk=tuple(found))
