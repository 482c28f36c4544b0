"""plan: the best schedule found for given costs under a memory limit, and how far from the best possible it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zbkern.planning.costs.chunks import Costs, checked_speeds
from zbkern.planning.costs.flat import FlatCosts, flat_costs
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.memory import Limit, exceeds
from zbkern.planning.planner import native
from zbkern.planning.planner.annealing import measured, timeline_of
from zbkern.planning.planner.beside import best_beside
from zbkern.planning.planner.bounds import cost_bound
from zbkern.planning.planner.idle_time import IdleTime, idle_time
from zbkern.planning.planner.incumbents import ROUNDING
from zbkern.planning.planner.lane_bounds import lanes_bound
from zbkern.planning.planner.model_search import Candidates
from zbkern.planning.planner.offload import MORE_MEMORY, fit, variants
from zbkern.planning.planner.portfolio import SETTINGS
from zbkern.planning.planner.problem import Problem, problem_of, schedule_of, serial_ordering
from zbkern.planning.planner.published import MANY, generators_of
from zbkern.planning.planner.request import Placement, PlanOptions, PlanRequest, Slices
from zbkern.planning.planner.search import choose, search_all
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, enough

EFFORT = 4
"""The rounds of a search where nothing else is said: mostly one to ten seconds on one core."""


@dataclass(frozen=True)
class Plan:
    """A schedule, its timeline, and a lower bound on the bubble rate of any schedule of its work.

    timeline: as simulated. costs: of the schedule's chunks. objective: what was minimised, "cost" or "makespan" (see
    `Timeline`); bound: no order of these chunks within `limits`, the memory of every rank, takes less; other cuts of
    the model may. effort: the rounds of search that were completed; `plan(..., effort=)` with the same seed repeats
    them. partition: the first layer of every chunk, where `plan` was given layers, as `cut` takes it, and layers: the
    names of all of them.
    """

    timeline: Timeline
    costs: Costs
    objective: str
    bound: float
    limits: tuple[float, ...] | None = field(compare=False)
    effort: int = 0
    partition: tuple[float, ...] | None = None
    layers: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        bound = "optimal" if self.optimal else f"at least {self.lower_bound:.1%}"
        where = "" if self.partition is None else f", cut before layers {[*self.partition]}"
        return f"<Plan: {self.schedule}, {self.timeline}, {bound}{where}>"

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """What each rank holds at most, with what it holds all the time."""
        return self.timeline.peak_memory

    @property
    def bubble_rate(self) -> float:
        """The share of time in which ranks are idle (`Timeline.bubble_rate`)."""
        return self.timeline.bubble_rate

    @cached_property
    def _reached(self) -> float:
        """The objective."""
        found: float = getattr(self.timeline, self.objective)
        return found

    @cached_property
    def lower_bound(self) -> float:
        """The share of the ranks' time that is idle where the objective is at its bound."""
        least = min(self.bound, self._reached)
        return max(0.0, 1.0 - sum(self.timeline.busy) / (self.schedule.ranks * least)) if least > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no order is better."""
        return self._reached - min(self.bound, self._reached) <= ROUNDING * self._reached

    @cached_property
    def idle(self) -> IdleTime:
        """Where the idle time comes from."""
        return idle_time(self.timeline, flat_costs(self.costs, self.schedule), self.objective, self.limits)


def plan(
    costs: Costs | ModelCosts,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    placement: Placement = None,
    memory_limit: Limit = None,
    *,
    speeds: Sequence[float] | None = None,
    effort: int = EFFORT,
    offload: bool = False,
    recompute: bool = False,
    slices: Slices = 1,
    options: PlanOptions = PlanOptions(),  # noqa: B008  # it is frozen
) -> Plan:
    """The best schedule found for these costs; with those of layers, also how to cut and place the model.

    Args:
        costs: `Costs` of every chunk, or `ModelCosts` of every layer: then partition, `chunks` and `placement` are
            searched for unless they are given.
        stages: ranks.
        microbatches: of a step, whole sequences.
        chunks: per rank; by default as many as the placement has ("v" has two, one that is spelt out its own), and for
            `Costs` else 1.
        placement: "linear" (neighbouring chunks on one rank), "loop" (0..p-1, again 0..p-1), "v" (down, then up),
            "zigzag" (the V repeated), or the rank of every chunk; for `Costs` linear, v or zigzag by default, for 1, 2
            and more chunks; for layers "linear" is one chunk per rank where `chunks` is not given.
        memory_limit: of one rank's `peak_memory`, in the unit of `costs.activation` and including what the rank holds
            all the time: one number, one per rank, or None for none.
        speeds: one number per rank: 1 takes the times of the costs, .7 takes 1/.7 times as long; layers are cut so that
            each rank has what it can carry. By default those of the costs, where they are of so many ranks.
        effort: rounds of search, each of twice the work of the one before (0: the constructive answer alone, about a
            second or less). Work is counted, and not time, so that the plan is the same on every machine, however busy.
            More effort is never worse, but by 0.3% for a plan that slow ranks delay less (`PlanOptions.steady`). Of up
            to 100,000 passes, orders and cuts for 1F1B's memory and for 1.5 times as much are candidates where there is
            more; beside these two, more memory can be worse by chance, as by 2% without rounds and by 0.3% with four.
        offload, recompute: where that is faster than an order that fits as it is, the schedule has actions that offload
            activations (and what W needs) to the host and load them back, or that recompute activations; for costs that
            say what these cost.
        slices: of every sequence: a number, whose lengths are then equal, or longer where there is less context so that
            all take as long, whichever is better; the length of each; or "auto" to choose a number, too, with a plan
            that is no worse than that of whole sequences.
        options: what few need to set.

    Every published schedule that fits takes part, for layers on even and on balanced partitions, so that none is
    better. The answer is checked and simulated. Sources: arXiv 2401.10241, 2405.15362.

    Raises ScheduleError when no schedule fits the limit (it names the least that one fits), ValueError or TypeError for
    other arguments, RuntimeError where zbkern was installed without a C++ compiler.
    """
    if speeds is not None:
        costs = replace(costs, speeds=checked_speeds("plan", speeds, stages))
    return best_plan(
        PlanRequest(
            costs=costs,
            stages=stages,
            microbatches=microbatches,
            chunks=chunks,
            placement=placement,
            memory_limit=memory_limit,
            effort=effort,
            offload=offload,
            recompute=recompute,
            slices=slices,
            options=options,
        )
    )


def best_plan(request: PlanRequest) -> Plan:
    """What `plan` returns for these arguments, or the published schedule that is named."""
    if request.schedule is not None:
        return _judged(request)
    native.check(request.function)
    limits = request.limits
    if not (request.offload or request.recompute) or limits is None:
        return _searched(request)
    plans: list[Plan] = []
    errors: list[ScheduleError] = []
    shorter = replace(request, effort=max(0, request.effort - 2))
    for factor in MORE_MEMORY:
        more = None if factor is None else [factor * limit for limit in limits]
        try:
            plans.append(_searched(replace(shorter, memory_limit=more)))
        except ScheduleError as error:
            errors.append(error)
    return _saving(request, limits, plans, errors)


def _searched(request: PlanRequest) -> Plan:
    """The plan of an order that fits as it is: with each of some numbers of slices as if it were given, or one."""
    if request.slices != "auto":
        return _ordered(request)
    plans: list[Plan] = []
    refused: list[ScheduleError] = []
    for number in (1, *_best_numbers(request)):
        try:
            plans.append(_ordered(replace(request, slices=number)))
        except ScheduleError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    return min(plans, key=lambda each: each._reached)


def _best_numbers(request: PlanRequest) -> list[int]:
    """Of slices, by their constructive answers: more and more are tried until twice the best number are worse."""
    reached: dict[int, float] = {}
    for number in request.numbers_to_try():
        quick = replace(request, slices=number, effort=0)
        if number > 2 * min(reached, key=reached.__getitem__, default=number):
            break
        reached[number] = Candidates(quick).promise()
    fitting = [number for number in sorted(reached, key=reached.__getitem__) if reached[number] < math.inf]
    return fitting[: SETTINGS.numbers_searched]


def _ordered(request: PlanRequest) -> Plan:
    """Of the candidates the best order, with slices as they are given. Raises ScheduleError where none is found."""
    costs, options = request.costs, request.options
    candidates = Candidates(request).searches()
    rounds = search_all(candidates, request.effort, options.progress)
    found = choose(candidates, options.steady, rounds, request.effort)
    problem, orders, name = found.problem, found.best.orders, f"plan-{found.name}"
    if orders is None:
        raise _too_many_messages(request, problem)
    if problem.passes > MANY and len(problem.slices) == 1:
        timeline = timeline_of(orders, problem, name)
    else:
        timeline = simulate(schedule_of(orders, problem, name), problem.flat.given)
    if problem.has_network:
        others = best_beside(problem, request.limits)
        timeline = min((timeline, *others), key=lambda each: getattr(each, options.objective))
    made = _plan_of(timeline, problem.flat, request.limits, options.objective, found.bound)
    layers = None if isinstance(costs, Costs) else tuple(layer.name for layer in costs.layers)
    return replace(made, effort=rounds, partition=found.partition, layers=layers)


def _too_many_messages(request: PlanRequest, problem: Problem) -> ScheduleError:
    """The error where not even one microbatch after the other fits: no order has fewer messages that wait."""
    limits, unit, static = request.limits, request.costs.memory_unit, problem.flat.static
    assert limits is not None
    least = math.inf
    for fuse in (False, True):
        found = measured(problem, serial_ordering(problem, fuse))
        assert found is not None
        held = (peak / problem.memory_scale + always for peak, always in zip(found.peaks, static, strict=True))
        least = min(least, max(held))
    return ScheduleError(
        f"plan: no schedule fits memory_limit={amount(max(limits), unit)}: one microbatch after the other holds "
        f"{enough(least, unit)} with its messages"
    )


def _judged(request: PlanRequest) -> Plan:
    """The schedule that is named, with `Costs` of its chunks, beside the lower bound for any order of them within the
    limit. Raises ScheduleError where it does not fit."""
    costs, limits, objective = request.costs, request.limits, request.options.objective
    assert isinstance(costs, Costs)
    assert request.schedule is not None
    assert not isinstance(request.slices, str)
    schedule = comparison.build(request.schedule, request.stages, request.microbatches, request.chunks, request.slices)
    timeline, unit = simulate(schedule, costs), costs.memory_unit
    for peak, most in sorted(zip(timeline.peak_memory, limits or [], strict=False), reverse=True):
        if exceeds(peak, most):
            held = f"{enough(peak, unit)} on one rank, more than {amount(most, unit)}"
            raise ScheduleError(f"{schedule.name} holds {held}")
    flat = flat_costs(costs, schedule)
    return _plan_of(timeline, flat, limits, objective, _bound(flat, schedule.microbatches, limits, objective))


def _bound(flat: FlatCosts, microbatches: int, limit: Limit, objective: str) -> float:
    """What no order of these chunks within the limit is below, where passes run one after the other."""
    problem = problem_of(flat, microbatches, limit, objective)
    return cost_bound(problem) / problem.time_scale


def _plan_of(timeline: Timeline, flat: FlatCosts, limits: Sequence[float] | None, objective: str, bound: float) -> Plan:
    """bound: of passes one after the other; costs with network time have another one."""
    if flat.has_network:
        bound = min(bound, lanes_bound(flat, len(timeline.schedule.units)))
    return Plan(timeline, flat.given, objective, bound, None if limits is None else tuple(limits))


def _saving(request: PlanRequest, limits: Sequence[float], plans: Sequence[Plan], errors: list[ScheduleError]) -> Plan:
    """The best of these plans and of the published schedules with their placement, made to fit.

    Its lower bound is that of unlimited memory, which no offload and no recomputation can be below.
    """
    objective = request.options.objective
    orders = [(plan, timeline) for plan in plans for timeline in variants(plan.schedule, plan.costs)]
    for plan in {(plan.schedule.placement, plan.schedule.slices): plan for plan in plans}.values():
        for make in generators_of(plan.schedule.placement):
            schedule = make(len(limits), plan.schedule.microbatches, slices=plan.schedule.slices)
            orders += [(plan, timeline) for timeline in variants(schedule, plan.costs)]
    best: Plan | None = None
    fitted_before: list[tuple[Schedule, Costs]] = []
    for plan, timeline in sorted(orders, key=lambda order: getattr(order[1], objective)):
        if best is not None and getattr(timeline, objective) >= best._reached:
            break
        order = replace(timeline.schedule, name=""), plan.costs
        if order in fitted_before:
            continue
        fitted_before.append(order)
        try:
            fitted = fit(
                timeline.schedule,
                plan.costs,
                limits,
                offload=request.offload,
                recompute=request.recompute,
                objective=objective,
                fully_shard=request.options.fully_shard,
            )
        except ScheduleError as error:
            errors.append(error)
            continue
        if best is None or getattr(fitted, objective) < best._reached:
            best = replace(plan, timeline=fitted)
    if best is None:
        raise ScheduleError(f"{errors[-1]}; without, {errors[0]}")
    flat = flat_costs(best.costs, best.schedule)
    found = _plan_of(best.timeline, flat, limits, objective, _bound(flat, best.schedule.microbatches, None, objective))
    return replace(found, effort=best.effort, partition=best.partition, layers=best.layers)
