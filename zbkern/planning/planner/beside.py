"""Orders in which passes run beside each other: the list scheduler runs what a rank is ready for together.

A rank that is free takes a B and an F whose inputs have arrived, and lets W fill what is left of their network time.
What it waits for, how many passes run together, and how many microbatches are begun are choices of a rule. All are
tried, the best ones are changed at random, and simulation chooses. Passes of a group take turns
(`simulation/turns.py`), so that a group takes the longer of what it computes and communicates, and little more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from zbkern.planning.costs.memory import exceeds
from zbkern.planning.planner.list_scheduler import Rule, best_rules, refine
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.portfolio import SETTINGS
from zbkern.planning.planner.problem import Problem, schedule_of
from zbkern.planning.planner.published import generators_of
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline

_WORK = 1_000_000  # passes that rules are tried on, and that each of the best is changed on: about a second in all
_REFINED = 3  # of the fastest
_CHOICES = (0, 1), (False, True), (3.0, 2.0, 1.5, 1.25), (80, 60, 40, 20, 0), (2, 3)


def best_beside(problem: Problem, limits: Sequence[float] | None) -> Iterator[Timeline]:
    """The fastest orders with passes beside each other that fit, the published ones of this placement among them.

    limits: the memory of every rank.
    """
    costs = problem.flat.given
    tries = min(_WORK // problem.passes, SETTINGS.rule_tries)
    rules = _rules(problem)[: max(1, tries)]
    found = [
        refine(problem, rules[number], Effort(0, (0,), tries)) for _, number in best_rules(problem, rules, _REFINED)
    ]
    made = [schedule_of(each[0], problem, "plan-beside") for each in found if each is not None]
    for make in generators_of(problem.placement):
        made.append(make(problem.ranks, problem.microbatches, slices=problem.slices))
    for schedule in made:
        if schedule.beside:
            timeline = simulate(schedule, costs)
            if limits is None or not any(map(exceeds, timeline.peak_memory, limits)):
                yield timeline


def _rules(problem: Problem) -> list[Rule]:
    """fuse: of a B beside an F. begun: microbatches that are begun and not through their last B, by the ranks."""
    every, chunks, slices = problem.ranks, problem.chunks, len(problem.slices)
    patience = (2,) * every
    rules = []
    for fuse, alike, begun, waits, most in product(*_CHOICES):
        caps = round(begun * every) * slices, *[problem.units] * (chunks - 1)
        none, fused = (0,) * every, (fuse,) * chunks
        rules.append(Rule(none, patience, none, none, caps, fused, False, slices > 1, most, waits, alike))
    return rules
