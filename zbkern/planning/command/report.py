"""What `zbkern plan` prints of an Answer: the grid, cut to the width of the terminal, its figures, and a table.

Costs of a known model have more (`model_report`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zbkern.planning.command import model_report
from zbkern.planning.command.answer import Answer
from zbkern.planning.command.tables import grid, lines, table
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.memory import exceeds
from zbkern.planning.costs.needs import least_uneven
from zbkern.planning.planner import Plan
from zbkern.schedules.program import offloads_or_recomputes, recomputed
from zbkern.schedules.units import amount, duration, number

_WORTH_STAGES = 0.01  # of the cost: for less nobody changes the number of stages
SHOWN = 0.001  # of the cost: less idle time than that is not worth a line
_WORTH_A_CHANGE = 1.01  # times as fast
_LEAST_BOUND = 5e-5  # printed as 0.00%, which says nothing
_RECHUNKED = "other numbers of chunks: the same model cut evenly; more work of its first or last chunk is not divided"


def text(answer: Answer, width: int) -> str:
    """All of it, in lines of `width`."""
    setting, parts = answer.question.setting, [describe(answer, width)]
    if answer.published:
        parts.append(_comparison(answer))
    if isinstance(setting, Setting):
        parts = [
            model_report.title(answer.question, setting),
            *parts,
            model_report.assumptions(setting.hardware, width),
        ]
    return "\n\n".join(parts)


def describe(answer: Answer, width: int) -> str:
    """Grid and figures."""
    schedule = answer.plan.schedule
    each = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    title = f"{schedule.name}: {schedule.ranks} ranks, {each} each, {schedule.microbatches} microbatches"
    if len(schedule.slices) > 1:
        title += f" in {len(schedule.slices)} slices each"
    return "\n\n".join([title, grid(schedule, width), lines(_figures(answer), width)])


def _figures(answer: Answer) -> Iterator[tuple[str, str]]:
    question, plan, timeline = answer.question, answer.plan, answer.plan.timeline
    limit, schedule, unit = question.limit, plan.schedule, timeline.memory_unit
    which = "these chunks" if limit is None else "these chunks in this memory"
    if plan.optimal:
        bound = f"optimal: no order of {which} has less"
    elif plan.lower_bound < _LEAST_BOUND:
        bound = f"how much less any order of {which} could have is not known"
    else:
        bound = f"any order of {which} has at least {plan.lower_bound:.2%}"
    yield "bubble", f"{timeline.bubble_rate:.2%} ({bound})"
    yield "cost", duration(timeline.cost, timeline.unit)
    yield "makespan", duration(timeline.makespan, timeline.unit)
    capacity = "no limit" if limit is None else f"limit {amount(limit, unit)}"
    if limit is not None and question.measure:
        capacity += f", {number(limit / question.measure)}x"
    yield "memory", f"{_joined([amount(peak, unit) for peak in timeline.peak_memory])} by rank ({capacity})"
    if len(schedule.slices) > 1:
        whole = sum(schedule.slices)
        tokens = "tokens" if plan.costs.tokens == whole else f"of {whole}"
        yield "slices", f"{' '.join(map(str, schedule.slices))} {tokens}, first to last"
    if plan.costs.speeds is not None:
        yield "speeds", f"{' '.join(map(number, plan.costs.speeds))} by rank, of passes"
    passes = Counter(action.kind for row in schedule.actions for action in row)
    if passes["BW"]:
        yield "backward", f"{passes['BW']} of {passes['BW'] + passes['B']} in one pass, BW, the others as B and W"
    for cause in idle_causes(answer):
        yield "idle", cause
    if answer.errors:
        each = [f"{name} {more:+.1%} ({100 * idle:+.1f})" for name, (more, idle) in answer.errors.items()]
        yield "errors", f"of 10% in one cost change the cost (points of bubble): {', '.join(each)}"
    for option, other in answer.gains.items():
        less = 1 - other.timeline.cost / timeline.cost
        said = f"cost {duration(other.timeline.cost, other.timeline.unit)}, {less:.2%} less"
        yield "try", f"{option}: {said if less >= SHOWN else 'no gain'} (a quick search)"
    if isinstance(question.setting, Setting):
        yield from model_report.figures(question, plan, question.setting)
    elif isinstance(question.costs, ModelCosts):
        yield from model_report.cut(plan, question.costs)
    if answer.usual:
        yield "worth", _worth(answer)


def _worth(answer: Answer) -> str:
    """What a user gains over 1F1B, in words."""
    question, timeline, (usual, *more) = answer.question, answer.plan.timeline, answer.usual
    beside = 1e3 * question.beside
    faster = (usual.cost + beside) / (timeline.cost + beside) if timeline.cost else 1.0
    which = "this plan" if question.schedule is None else question.schedule
    peak = max(usual.peak_memory)
    fits = not exceeds(peak, question.limit)
    if fits and faster < _WORTH_A_CHANGE:
        return f"nothing: 1F1B idles {usual.bubble_rate:.0%} and {which} {timeline.bubble_rate:.0%}, and is no faster"
    said = f"1F1B idles {usual.bubble_rate:.0%}, {which} {timeline.bubble_rate:.0%}: {faster:.3g} times as fast"
    if not fits:
        said += f", where 1F1B needs {amount(peak, usual.memory_unit)} and does not fit"
    if more:
        said += f"; with {more[0].schedule.microbatches} microbatches 1F1B would idle {more[0].bubble_rate:.0%}"
    return said


def idle_causes(answer: Answer) -> list[str]:
    """What the idle time comes from and what would remove it besides what was searched for, the largest share first."""
    question, plan, idle, schedule = answer.question, answer.plan, answer.plan.idle, answer.plan.schedule
    layers = question.costs if isinstance(question.costs, ModelCosts) else None
    chunks = layers is not None and question.chunks is None and question.placement is None  # were searched for
    saving = question.saves_memory or any(offloads_or_recomputes(row) for row in schedule.actions)
    room = "a higher limit" if saving else "a higher limit, offloading or recomputation"
    fill = "more microbatches" if chunks else "more microbatches, or more chunks per rank"
    links = "faster links" if chunks or schedule.chunks == 1 else "faster links, or fewer chunks per rank"
    ways = [*(["more memory"] if question.limit is not None else []), *([] if plan.optimal else ["a longer search"])]
    causes = {
        _about_load(plan, layers): idle.load,
        f"forwards wait for memory: {room}": idle.memory,
        f"messages are on their way: {links}": idle.messages,
        f"warm-up: {fill}": idle.warm_up,
        f"cool-down: {fill}": idle.cool_down,
        "passes wait for other ranks in between"
        + (f": {', or '.join(ways)}" if ways else ", in every order"): idle.dependencies,
    }
    shown = [(-share, cause) for cause, share in causes.items() if share >= SHOWN]
    return [f"{-share:.2%} {cause}" for share, cause in sorted(shown)]


def _about_load(plan: Plan, layers: ModelCosts | None) -> str:
    """With layers, how little it could be by their work alone: in so many stages, and in a number that suits better."""
    cause, stages = f"rank {plan.idle.busiest} has the most work", plan.schedule.ranks
    if plan.costs.speeds is not None:
        return f"{cause} for its speed: divide the model more finely"
    if layers is None:
        recomputes = recomputed(plan.schedule.actions[plan.idle.busiest])
        return f"{cause}, R included: a higher limit" if recomputes else f"{cause}: divide the model more evenly"
    load = least_uneven(layers, stages)
    cause += f"; the most even cut into {stages} has about {load:.0%}"
    # The nearest number of stages, half as many to twice, for which the load may be half as uneven and it matters
    others = (other for by in range(1, stages + 1) for other in (stages - by, stages + by) if 2 * other >= stages)
    for other in others:
        if 1 < other <= len(layers.layers) and least_uneven(layers, other) <= min(load / 2, load - _WORTH_STAGES):
            return f"{cause}, into {other} {least_uneven(layers, other):.0%}"
    return cause


def _joined(amounts: Sequence[str]) -> str:
    """'3 2.5 2', or '24.5, 20 and 18 GB'."""
    units = {amount.partition(" ")[2] for amount in amounts}
    if len(units) == 1 and (unit := units.pop()):
        return " ".join(amount.partition(" ")[0] for amount in amounts) + f" {unit}"
    return (", " if units else " ").join(amounts)


def _comparison(answer: Answer) -> str:
    """A table of the published schedules and of the plan."""
    question = answer.question
    shown = answer.published if question.schedule else [*answer.published, answer.plan.timeline]
    given = shown, question.limit, question.measure
    if not isinstance(question.costs, ModelCosts):
        return f"{table(*given)}\n\n{_RECHUNKED}"
    return table(*given, question.tokens, question.beside, cuts=True)
