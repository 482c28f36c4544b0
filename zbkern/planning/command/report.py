"""What `zbkern plan` prints of an Answer: the grid, cut to the width of the terminal, its figures, and a table.

Costs of a known model have a title, the cut and the speed of a step, and what is assumed besides.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from zbkern.planning.command.answer import Answer
from zbkern.planning.command.published import exceeds
from zbkern.planning.command.question import Question, Setting
from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.exactness import how_exact
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.model_costs import parameters, predictors
from zbkern.planning.planner import Plan
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.planning.simulation.memory import static_of_ranks
from zbkern.planning.simulation.needs import least_uneven
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules import grid as grids
from zbkern.schedules.program import offloads_or_recomputes, recomputed
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, duration, number

_MARGIN = 10  # columns of the names of figures
_WORTH_STAGES = 0.01  # of the cost: for less nobody changes the number of stages
SHOWN = 0.001  # of the cost: less idle time than that is not worth a line
_LEAST_BOUND = 5e-5  # printed as 0.00%, which says nothing
_RECHUNKED = (
    "other numbers of chunks: the same model cut evenly; what its first or last chunk has beyond others stays whole"
)


def text(answer: Answer, width: int) -> str:
    """All of it, in lines of `width`."""
    question, costs, setting = answer.question, answer.question.costs, answer.question.setting
    lines = [describe(answer, width), *_gains(answer, width)]
    if setting is not None:
        lines += _step(question, answer.plan, setting, width)
    elif isinstance(costs, ModelCosts):
        lines.append(cut(answer.plan, costs, width))
    parts = [] if setting is None else [_title(question, setting)]
    parts.append("\n".join(lines))
    if answer.published:
        parts.append(_comparison(answer))
    if setting is not None:
        parts.append(_assumptions(setting.hardware, width))
    return "\n\n".join(parts)


def describe(answer: Answer, width: int) -> str:
    """Grid and figures."""
    question, plan = answer.question, answer.plan
    limit, whole = question.limit, question.measure
    schedule, timeline = plan.schedule, plan.timeline
    each = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    title = f"{schedule.name}: {schedule.ranks} ranks, {each} each, {schedule.microbatches} microbatches"
    if len(schedule.slices) > 1:
        title += f" in {len(schedule.slices)} slices each"
    which = "these chunks" if limit is None else "these chunks in this memory"
    if plan.optimal:
        bound = f"optimal: no order of {which} has less"
    elif plan.lower_bound < _LEAST_BOUND:
        bound = f"how much less any order of {which} could have is not known"
    else:
        bound = f"any order of {which} has at least {plan.lower_bound:.2%}"
    capacity = "no limit"
    if limit is not None:
        capacity = f"limit {amount(limit, timeline.memory_unit)}" + (f", {number(limit / whole)}x" if whole else "")
    peaks = [amount(peak, timeline.memory_unit) for peak in timeline.peak_memory]
    memory = f"{_joined(peaks)} by rank ({capacity})"
    spans = {name: duration(getattr(timeline, name), timeline.unit) for name in ("cost", "makespan")}
    figures = {"bubble": f"{timeline.bubble_rate:.2%} ({bound})", **spans, "memory": memory}
    lines = [figure(name, text, width) for name, text in figures.items()]
    if len(schedule.slices) > 1:
        unit = "tokens" if plan.costs.tokens == sum(schedule.slices) else f"of {sum(schedule.slices)}"
        lines.append(figure("slices", f"{' '.join(map(str, schedule.slices))} {unit}, first to last", width))
    lines += fused_lines(schedule) + idle_lines(answer, width) + _error_lines(answer, width)
    return "\n\n".join([title, grid(schedule, width), "\n".join(lines)])


def figure(name: str, text: str, width: int) -> str:
    """`name`, and `text` beside it, in lines of `width`; no word is divided."""
    room = max(width, 2 * _MARGIN)
    indented = " " * _MARGIN
    first = f"{name:<{_MARGIN - 1}} "
    return textwrap.fill(
        text, room, initial_indent=first, subsequent_indent=indented, break_long_words=False, break_on_hyphens=False
    )


def cut(plan: Plan, costs: ModelCosts, width: int, which: str = "") -> str:
    """How many layers every chunk has, and what `zbkern.pipeline.cut` takes for it; which: what counts as a layer."""
    starts, last = list(plan.partition or ()), costs.partition_of([-1])[0]
    sizes = [end - start for start, end in pairwise([*starts, int(last) + 1])]
    text = f"{' '.join(map(number, sizes))} layers by chunk{which}"
    return figure("cut", text, width) + "\n" + figure("", f"partition={starts}", width)


def fused_lines(schedule: Schedule) -> list[str]:
    """How many backwards are one pass, where some are."""
    kinds = [action.kind for row in schedule.actions for action in row]
    fused = kinds.count("BW")
    if not fused:
        return []
    return [f"{'backward':<9} {fused} of {fused + kinds.count('B')} in one pass, BW, the others as B and W"]


def splits(schedule: Schedule) -> bool:
    """Whether some backwards are two passes."""
    return any(action.kind == "W" for row in schedule.actions for action in row)


def idle_lines(answer: Answer, width: int) -> list[str]:
    """What the idle time comes from and what would remove it besides what was searched for, the largest share first."""
    question, plan = answer.question, answer.plan
    idle, schedule = plan.idle, plan.schedule
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
    shown = sorted((-share, cause) for cause, share in causes.items() if share >= SHOWN)
    return [figure("" if line else "idle", f"{-share:.2%} {cause}", width) for line, (share, cause) in enumerate(shown)]


def _error_lines(answer: Answer, width: int) -> list[str]:
    """What an error of a tenth of each cost changes."""
    if not answer.errors:
        return []
    each = [f"{name} {more:+.1%} ({100 * idle:+.1f})" for name, (more, idle) in answer.errors.items()]
    text = f"of 10% in one cost change the cost (points of bubble): {', '.join(each)}"
    return [figure("errors", text, width)]


def _about_load(plan: Plan, layers: ModelCosts | None) -> str:
    """With layers, how little it could be by their work alone: in so many stages, and in a number that suits better."""
    cause, stages = f"rank {plan.idle.busiest} has the most work", plan.schedule.ranks
    if layers is None:
        recomputes = recomputed(plan.schedule.actions[plan.idle.busiest])
        return f"{cause}, R included: a higher limit" if recomputes else f"{cause}: divide the model more evenly"
    better = _more_even_stages(layers, stages)
    text = f"{cause}; the most even cut into {stages} has about {least_uneven(layers, stages):.0%}"
    return text if better is None else f"{text}, into {better} {least_uneven(layers, better):.0%}"


def _more_even_stages(layers: ModelCosts, stages: int) -> int | None:
    """The nearest number of stages, half as many to twice, for which the load may be half as uneven and it matters."""
    others = (other for by in range(1, stages + 1) for other in (stages - by, stages + by) if 2 * other >= stages)
    load = least_uneven(layers, stages)
    enough = min(load / 2, load - _WORTH_STAGES)
    even = (each for each in others if 1 < each <= len(layers.layers) and least_uneven(layers, each) <= enough)
    return next(even, None)


def grid(schedule: Schedule, width: int) -> str:
    """The grid of `Schedule.to_text`; one wider than `width` is cut in the middle, and a line below says so."""
    cells = grids.cells_of(schedule.actions, schedule.placement)
    column, margin = grids.widths(cells)
    whole, total = grids.lines(cells, column, margin), len(cells[0])
    if max(map(len, whole)) <= width:
        return "\n".join(whole)
    room = max(2, (width - margin) // column - 1)  # less the column of dots
    first, last = room - room // 2, room // 2
    shown = grids.lines([[*row[:first], "..", *row[total - last :]] for row in cells], column, margin)
    note = (
        f"(columns {first} to {total - last - 1} of {total} left out: a wider terminal shows more, --out plan.txt all)"
    )
    return "\n".join([*shown, note])


def table(
    timelines: Sequence[Timeline],
    limit: float | None,
    whole: float = 0.0,
    tokens: int = 0,
    beside: float = 0.0,
    cuts: bool = False,
) -> str:
    """A line per timeline, with the memory of the rank that holds most; whole: as for `describe`.

    The least idle first; with the tokens of a step, for times in ms, the fastest. beside: seconds of a step that no
    pass has. cuts: every one has a cut of its own, that which holds least where none fits: it says nothing about how
    fast the others are, and has no times.
    """
    ends = ["step", "tokens/s", "bubble", "memory"] if tokens else ["bubble", "makespan", "memory", "of 1x"]
    rows = [["schedule", "chunks", *ends, ""]]
    for timeline in sorted(timelines, key=lambda each: _order(each, limit if cuts else None, tokens)):
        peak, seconds = max(timeline.peak_memory), timeline.cost / 1e3 + beside
        name, chunks = timeline.schedule.name, str(timeline.schedule.chunks)
        if len(timeline.schedule.slices) > 1:
            name += f", {len(timeline.schedule.slices)} slices"
        bubble, memory = f"{timeline.bubble_rate:.2%}", amount(peak, timeline.memory_unit)
        over = "over the limit" if limit is not None and exceeds(peak, limit) else ""
        if tokens:
            cells = [f"{number(seconds)} s", f"{tokens / seconds:,.0f}", bubble, memory]
        else:
            makespan = duration(timeline.makespan, timeline.unit)
            cells = [bubble, makespan, memory, f"{peak / whole:.2f}x" if whole else ""]
        if over and cuts:
            cells, over = ["" if each != memory else memory for each in cells], "at least: does not fit"
        rows.append([name, chunks, *cells, over])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:-1]), over]).rstrip()
        for first, *cells, over in rows
    )


def _order(timeline: Timeline, limit: float | None, tokens: int) -> tuple[bool, float, float]:
    speed = timeline.cost if tokens else round(timeline.bubble_rate, 9)
    peak = max(timeline.peak_memory)
    return limit is not None and exceeds(peak, limit), speed, peak


def _joined(amounts: Sequence[str]) -> str:
    """'3 2.5 2', or '24.5, 20 and 18 GB'."""
    units = {amount.partition(" ")[2] for amount in amounts}
    if len(units) == 1 and (unit := units.pop()):
        return " ".join(amount.partition(" ")[0] for amount in amounts) + f" {unit}"
    return (", " if units else " ").join(amounts)


def _gains(answer: Answer, width: int) -> list[str]:
    """What saving memory, and finer cuts, would give."""
    lines: list[str] = []
    for option, other in answer.gains.items():
        less = 1 - other.timeline.cost / answer.plan.timeline.cost
        said = f"cost {duration(other.timeline.cost, other.timeline.unit)}, {less:.2%} less"
        said = f"{option}: {said if less >= SHOWN else 'no gain'} (a quick search)"
        lines.append(figure("" if lines else "try", said, width))
    return lines


def _comparison(answer: Answer) -> str:
    """A table of the published schedules and of the plan."""
    question, costs, setting = answer.question, answer.question.costs, answer.question.setting
    shown = answer.published if question.schedule else [*answer.published, answer.plan.timeline]
    given = shown, question.limit, question.measure
    if not isinstance(costs, ModelCosts):
        return f"{table(*given)}\n\n{_RECHUNKED}"
    if setting is None:
        return table(*given, cuts=True)
    return table(*given, setting.tokens(question.microbatches), setting.beside(question.stages), cuts=True)


def _title(question: Question, setting: Setting) -> str:
    """The model, and on what it is trained."""
    architecture, hardware, job = setting
    total, active = parameters(architecture)
    size = f"{number(total / 1e9)} billion parameters"
    if active < total:
        size += f", {number(active / 1e9)} of them for a token"
    parallel = {kind: getattr(job, f"{kind}_parallel") for kind in ("tensor", "expert", "context", "data")}
    beside = "".join(f", {kind} parallel {count}" for kind, count in parallel.items() if count > 1)
    model = f"{question.model} ({architecture.kind}): {size}, {len(architecture.blocks)} layers"
    if architecture.left_out:
        model += f"; left out: what {', '.join(architecture.left_out)} describes"
    return (
        f"{model}\n{question.stages} stages{beside} on {job.gpus(question.stages)} x {hardware.title}; "
        f"{question.microbatches} microbatches of {job.microbatch_size} x {job.sequence} tokens"
    )


def _step(question: Question, found: Plan, setting: Setting, width: int) -> list[str]:
    """The costs of a layer, the cut, and how long a step takes."""
    chunks = cut(found, setting.costs, width, f": {_counted(setting.architecture)}")
    beside = setting.beside(question.stages)
    seconds = found.timeline.cost / 1e3 + beside
    rate = setting.tokens(question.microbatches) / seconds
    each, share = question.speed(seconds)
    placement = found.schedule.placement
    static = amount(max(static_of_ranks(found.costs.per_chunk(len(placement)), placement)), "bytes")
    return [
        figure("layer", _block_costs(setting), width),
        chunks,
        figure("static", f"{static} at most by rank: weights, gradients, optimizer states", width),
        figure(
            "step",
            f"{number(seconds)} s, {rate:,.0f} tokens/s, {each:,.0f} per GPU, {share:.1%} of the peak "
            "flops; "
            f"{number(beside)} s of it are the optimizer's step and what is not hidden of traffic between pipelines; "
            f"{how_exact(*setting, split=splits(found.schedule))}",
            width,
        ),
    ]


def _counted(architecture: Architecture) -> str:
    """Which layers a partition counts, by the names that `cut` has for them."""
    embedding, blocks, norm = architecture.names
    found = f"{embedding}, {blocks}.0 to {len(architecture.blocks) - 1}, {norm} with the head"
    further = predictors(architecture)
    if not further:
        return found
    return (
        f"{found}, then {', '.join(further)}, each with a head, which models of the transformers library do not have: "
        "docs/models.md adds one; num_nextn_predict_layers 0 in config.json, or --out launch.py, plans without"
    )


def _block_costs(setting: Setting) -> str:
    """The costs of one block, by which the ratios can be judged."""
    whole = setting._replace(job=replace(setting.job, halves=False))
    block = whole.costs.layers[1 + len(setting.architecture.blocks) // 2]
    times = ", ".join(
        f"{name} {number(each)}" for name, each in (("F", block.forward), ("B", block.backward), ("W", block.weight))
    )
    held = f", {block.held / block.activation:.2f} times that from B to W" if block.activation else ""
    return f"{block.name}: {times} ms; {amount(block.activation, 'bytes')} from F to B{held}"


def _assumptions(gpu: Hardware, width: int) -> str:
    """What programs get of a GPU, which no datasheet says; where the rest is told; and where the peaks are from."""
    corrected = f", then corrected by {gpu.calibration.source}" if gpu.calibration.source else ""
    kernel = f" ({gpu.attention})" if gpu.attention else ""
    text = (
        f"Computed from flops and bytes with shares fitted to published runs{corrected}, and not measured: programs "
        f"get {gpu.matmul_share:.0%} of the GPU's peak in W's large products, "
        f"{gpu.matmul_share * gpu.forward_backward_share:.0%} in those of F and B, {gpu.attention_forward_share:.0%} "
        f"and {gpu.attention_backward_share:.0%} in F and B of attention{kernel}, {gpu.memory_share:.0%} of its "
        f"memory's bandwidth and {gpu.network_share:.0%} of the links'. docs/cost_model.md says what else is assumed."
    )
    source = f"Peaks: {gpu.source or 'of a table that names no source'}."
    return "\n".join(textwrap.fill(each, width) for each in (text, source))
