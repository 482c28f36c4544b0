"""From a Question to its Answer: the plan, what other options would give, and published schedules beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zbkern.planning.command.published import published_timelines
from zbkern.planning.command.question import Question, WrongArgument
from zbkern.planning.command.remedies import halves, in_slices, savings, why_not
from zbkern.planning.planner import Plan, PlanOptions
from zbkern.planning.planner.plan import best_plan
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.units import duration

_WORTH_TRYING = 0.01  # of the cost
_COSTS = {"F": "forward", "B": "backward", "W": "weight", "messages": "communication"}
_TENTH = 1.1
_MOST_ACTIONS = 10_000
_MORE = 4  # times as many microbatches, to say what 1F1B idles with them
_QUICK = 2  # rounds of the searches that only tell what an option would give


@dataclass(frozen=True)
class Answer:
    """A plan, and what is told beside it, which is worked out when it is asked for."""

    question: Question
    plan: Plan

    @cached_property
    def gains(self) -> dict[str, Plan]:
        """Quick plans by the option that may be faster: cuts inside blocks and slices, where ranks idle, and what saves
        memory, where passes wait for it."""
        idle, ways = self.plan.idle, {}
        waits = idle.memory + idle.dependencies >= _WORTH_TRYING  # or others may have waited for memory
        if self.question.schedule is None and waits:
            ways = savings(self.question)
        if self.plan.bubble_rate >= _WORTH_TRYING:
            ways |= halves(self.question) | in_slices(self.question)
        return _fitting(ways)

    @cached_property
    def published(self) -> list[Timeline]:
        """Of the published schedules, where they are compared: in whole sequences, and in the plan's slices."""
        question, schedule = self.question, self.plan.schedule
        if not question.compare:
            return []
        sizes = question.stages, question.microbatches, question.limit
        timelines: list[Timeline] = []
        for slices in dict.fromkeys([(1,), schedule.slices]):
            timelines += published_timelines(question.costs, *sizes, slices, schedule.chunks)
        return timelines

    @cached_property
    def usual(self) -> list[Timeline]:
        """1F1B of the same microbatches, and of some times as many, which idles less, whether they fit the limit or
        not; none on one rank."""
        question, stages = self.question, self.question.stages
        timelines: list[Timeline] = []
        for count in (question.microbatches, _MORE * question.microbatches) if stages > 1 else ():
            if not timelines or stages * count <= _MOST_ACTIONS:
                given = question.costs, stages, count, None, 1, self.plan.schedule.chunks
                timelines += published_timelines(*given, ["one_f_one_b"])
        return timelines

    @cached_property
    def errors(self) -> dict[str, tuple[float, float]]:
        """By how much of itself the cost grows, and by how much the bubble rate, where one of the costs is a tenth
        more; none where simulating the schedule four times takes a second."""
        schedule, costs, timeline = self.plan.schedule, self.plan.costs, self.plan.timeline
        if sum(map(len, schedule.actions)) > _MOST_ACTIONS:
            return {}
        errors = {}
        for name, cost in _COSTS.items():
            given = getattr(costs, cost)
            more: Any = [_TENTH * each for each in given] if isinstance(given, Sequence) else _TENTH * given
            other = simulate(schedule, replace(costs, **{cost: more}))
            growth = other.cost / timeline.cost - 1 if timeline.cost else 0.0
            errors[name] = growth, other.bubble_rate - timeline.bubble_rate
        return errors


def answer(question: Question, progress: Callable[[str], None] = lambda line: None) -> Answer:
    """progress: is called with a line about the search. Raises WrongArgument, which says what would fit."""
    try:
        return Answer(question, search(question, progress))
    except ScheduleError as error:
        if question.schedule is not None:
            ways = "raise the limit, or leave --schedule out for a plan within it"
            raise WrongArgument("--memory", f"{error}; {ways}") from error
        reason = why_not(question) or str(error)
        for saving, other in _fitting(savings(question)).items():
            reason += f"; it fits with {saving}, cost {duration(other.timeline.cost, other.timeline.unit)}"
        raise WrongArgument("--memory", reason) from error


def search(question: Question, progress: Callable[[str], None] = lambda line: None) -> Plan:
    """The best plan, or that of the schedule that is named. Raises ScheduleError where nothing fits."""
    request = replace(question.request, memory_limit=question.limit, options=PlanOptions(progress=progress))
    return best_plan(request)


def _fitting(ways: Mapping[str, Question]) -> dict[str, Plan]:
    """Quick plans, of those for which there is one."""
    plans = {}
    for name, question in ways.items():
        with contextlib.suppress(ScheduleError):
            plans[name] = search(replace(question, effort=min(question.effort, _QUICK)))
    return plans
