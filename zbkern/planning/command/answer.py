"""From a Question to its Answer: the plan, what saving memory would give, and the published schedules beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zbkern import schedules
from zbkern.planning.command.question import Question, WrongArgument, option, spelt
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.memory import exceeds
from zbkern.planning.costs.needs import fits, least_need
from zbkern.planning.planner import Plan, PlanOptions, plan
from zbkern.planning.planner.annealing import measured
from zbkern.planning.planner.arguments import chunks_per_rank, problem_of
from zbkern.planning.planner.partition import balanced_partitions, even_partitions
from zbkern.planning.planner.plan import judged
from zbkern.planning.planner.problem import ordering_of
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, duration, enough, number

_WORTH_TRYING = 0.01  # of the cost
_COSTS = {"F": "forward", "B": "backward", "W": "weight", "messages": "communication"}
_TENTH = 1.1
_MOST_ACTIONS = 10_000
_MORE = 4  # times as many microbatches, to say what 1F1B idles with them
_QUICK = 2  # rounds of the searches that only tell what an option would give
_TIMES = [2**power for power in range(1, 10)]  # as many, or as few
_WIDEST, _SHORTEST = 64, 256  # tensor parallelism, and tokens, that are worth naming
_LEAST_LIMIT = 1e6  # bytes: a limit below is taken for one in GB


@dataclass(frozen=True)
class Answer:
    """plan: the best that was found. gains: quick plans by the option with which they are faster. published: timelines
    of the published schedules, where they are compared. errors: by how much of itself the cost grows, and by how
    much the bubble rate, where one of the costs is a tenth more. usual: 1F1B of the same microbatches, and of
    some times as many, which idles less; none on one rank."""

    question: Question
    plan: Plan
    gains: Mapping[str, Plan] = field(default_factory=dict)
    published: Sequence[Timeline] = ()
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    usual: Sequence[Timeline] = ()


def answer(question: Question, progress: Callable[[str], None] = lambda line: None) -> Answer:
    """progress: is called with a line about the search. Raises WrongArgument, which says what would fit."""
    found = _searched(question, progress) if question.schedule is None else _named(question)
    waits = found.idle.memory + found.idle.dependencies >= _WORTH_TRYING  # or others may have waited for memory
    ways = _savings(question) if question.schedule is None and waits else {}
    if found.idle.load >= _WORTH_TRYING:
        ways |= _halves(question)
    compare = question.compare or question.setting is not None
    published = _published(question, found) if compare else ()
    return Answer(question, found, _fitting(ways), published, _errors(found), _usual(question, found))


def _usual(question: Question, found: Plan) -> list[Timeline]:
    """Of whole sequences, on the cut that suits it; whether it fits the limit or not."""
    stages = question.stages
    timelines: list[Timeline] = []
    for microbatches in (question.microbatches, _MORE * question.microbatches) if stages > 1 else ():
        if timelines and stages * microbatches > _MOST_ACTIONS:
            break
        schedule, costs = schedules.one_f_one_b(stages, microbatches), question.costs
        if isinstance(costs, ModelCosts):
            timelines.append(_on_its_best_cut(schedule, costs, None))
        else:
            chunks = len(found.schedule.placement)
            timelines.append(simulate(schedule, comparison.rechunk(costs, chunks, stages)))
    return timelines


def _errors(found: Plan) -> dict[str, tuple[float, float]]:
    """Of the schedule as it is; none where simulating it four times takes a second."""
    if sum(map(len, found.schedule.actions)) > _MOST_ACTIONS:
        return {}
    reached, idle, errors = found.timeline.cost, found.bubble_rate, {}
    for name, cost in _COSTS.items():
        given = getattr(found.costs, cost)
        more: Any = [_TENTH * each for each in given] if isinstance(given, Sequence) else _TENTH * given
        timeline = simulate(found.schedule, replace(found.costs, **{cost: more}))
        errors[name] = timeline.cost / reached - 1 if reached else 0.0, timeline.bubble_rate - idle
    return errors


def _searched(question: Question, progress: Callable[[str], None]) -> Plan:
    try:
        return search(question, progress)
    except ScheduleError as error:
        reason = why_not(question) or str(error)
        for saving, other in _fitting(_savings(question)).items():
            reason += f"; it fits with {saving}, cost {duration(other.timeline.cost, other.timeline.unit)}"
        raise WrongArgument("--memory", reason) from error
    except ValueError as error:  # everything else has been checked
        given = {"placement": None, "chunks": None, "slices": 1}
        named = [option(name) for name, default in given.items() if getattr(question, name) != default]
        raise WrongArgument(", ".join([*named, "--stages"]), str(error)) from error


def why_not(question: Question) -> str | None:
    """What does not fit, and what would; None where only a placement or chunks that were given may be in the way."""
    setting, stages, limit = question.setting, question.stages, question.limit
    if setting is None or limit is None:
        return None
    need = least_need(setting.costs, stages)
    if need.total <= limit or (question.saves_memory and fits(setting.costs, stages, limit, saves=True)):
        return None
    options = remedies(question)
    what = f"it fits with {' or '.join(options)}" if options else "no one of the options for sizes makes it fit"
    if 0 < limit < _LEAST_LIMIT and not (question.memory and question.memory[1]):
        what = f"a limit is in bytes: --memory {number(limit)}e9 for as many GB"
    return f"nothing fits in {amount(limit, 'bytes')}: {need.describe(stages, 'bytes')}; {what}"


def remedies(question: Question) -> list[str]:
    """Options for sizes, each of which alone makes the model fit, with the least change of its number.

    What follows from the sizes that were given follows from those that are tried.
    """
    assert question.setting is not None
    model, _, job = question.setting
    stages, placement = question.stages, question.placement
    chunks = question.chunks or (2 if placement == "v" else chunks_per_rank(placement, stages))
    most = (len(model.blocks) + 2 * (1 + model.predictors)) // chunks
    fixed = job.fully_shard or isinstance(placement, tuple)  # the rank of every chunk of so many stages
    tries: dict[str, Sequence[int]] = {
        "stages": () if fixed else range(stages + 1, most + 1),
        "tensor_parallel": [value for by in _TIMES if (value := job.tensor_parallel * by) <= _WIDEST],
        "expert_parallel": [job.expert_parallel * by for by in _TIMES],
        "data_parallel": [job.pipelines * by for by in _TIMES],
        "fully_shard": () if job.fully_shard or stages > 1 else (True,),
        "microbatch_size": [value for by in _TIMES if (value := job.microbatch_size // by) >= 1],
        "sequence": [value for by in _TIMES if (value := job.sequence // by) >= _SHORTEST],
    }
    smallest = {
        name: next((value for value in values if _fits(question, name, value)), 0) for name, values in tries.items()
    }
    return spelt({name: value for name, value in smallest.items() if value})


def _fits(question: Question, name: str, value: int) -> bool:
    """Whether the model would fit with this number instead."""
    setting, stages = question.setting, value if name == "stages" else question.stages
    assert setting is not None
    try:
        if name != "stages":
            changed: dict[str, Any] = {name: value}
            setting = setting._replace(job=replace(setting.job, **changed))
        costs, limit = setting.costs, replace(question, setting=setting).limit
    except ValueError:  # heads or experts that cannot be divided so
        return False
    assert limit is not None
    return fits(costs, stages, limit)


def search(question: Question, progress: Callable[[str], None] = lambda line: None) -> Plan:
    """Raises ScheduleError where nothing fits."""
    names = ("stages", "microbatches", "chunks", "placement", "effort", "recompute", "slices", "speeds")
    given: dict[str, Any] = {name: getattr(question, name) for name in names}
    options = PlanOptions(progress=progress)
    offload = question.offload is not None
    return plan(question.costs, **given, memory_limit=question.limit, offload=offload, options=options)


def _fitting(ways: Mapping[str, Question]) -> dict[str, Plan]:
    """Quick plans, of those for which there is one."""
    plans = {}
    for name, question in ways.items():
        with contextlib.suppress(ScheduleError):
            plans[name] = search(replace(question, effort=min(question.effort, _QUICK)))
    return plans


def _savings(question: Question) -> dict[str, Question]:
    """With --recompute or --offload, where neither was asked for and the costs say what they cost."""
    costs, limit, ways = question.costs, question.limit, {}
    if limit is None or question.saves_memory:
        return {}
    if isinstance(costs, ModelCosts) and not fits(costs, question.stages, limit, saves=True):
        return {}
    if isinstance(costs, ModelCosts) or costs.checkpoint is not None:
        ways["--recompute"] = replace(question, recompute=True)
    if costs.offload_bandwidth is not None and costs.reload_bandwidth is not None:
        ways["--offload"] = replace(question, offload=0.0)
    return ways


def _halves(question: Question) -> dict[str, Question]:
    """With --halves, where the model has some and the question does not."""
    setting = question.setting
    if setting is None:
        return {}
    finer = setting._replace(job=replace(setting.job, halves=True))
    same = len(finer.costs.layers) == len(setting.costs.layers)
    return {} if same else {"--halves": replace(question, setting=finer)}


def _named(question: Question) -> Plan:
    """The schedule that is named, with the lower bound for any order of its chunks in the limit, if there is one."""
    schedule, costs, limit = question.named, question.costs, question.limit
    assert isinstance(costs, Costs)
    peak = max(simulate(schedule, costs).peak_memory)
    if limit is not None and exceeds(peak, limit):
        raise WrongArgument(
            "--memory",
            f"{schedule.name} holds {enough(peak, costs.memory_unit)} on one rank, more than "
            f"{amount(limit, costs.memory_unit)}; raise the limit, or leave --schedule out for a plan within it",
        )
    return judged(schedule, costs, limit, "cost")


def _published(question: Question, found: Plan) -> list[Timeline]:
    """Of the published schedules, in whole sequences and in the plan's slices."""
    costs, sizes = question.costs, (question.stages, question.microbatches)
    timelines = []
    for slices in dict.fromkeys([(1,), found.schedule.slices]):
        if isinstance(costs, ModelCosts):
            timelines += published_timelines(costs, *sizes, question.limit, slices)
        else:
            timelines += comparison.timelines(costs, *sizes, found.schedule.chunks, slices)
    return timelines


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
        problem = problem_of(flat_costs(cut, schedule), microbatches, None, "cost")
        found = measured(problem, orders)
        assert found is not None  # published schedules pass microbatches in order
        held = max(
            peak / problem.memory_scale + always for peak, always in zip(found[1], problem.flat.static, strict=True)
        )
        fits = not exceeds(held, limit)
        tried.append((not fits, found[0].cost / problem.time_scale if fits else held, cut))
    return simulate(schedule, min(tried, key=lambda one: one[:2])[2])
