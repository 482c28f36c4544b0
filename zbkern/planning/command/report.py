"""What `zbkern plan` prints of an Answer: the grid, cut to the width of the terminal, its figures, and a table.

Costs of a known model have a title, the cut and the speed of a step, and what is assumed besides.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zbkern.planning.command.answer import Answer
from zbkern.planning.command.question import Question
from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.exactness import how_exact
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.memory import exceeds
from zbkern.planning.costs.needs import least_uneven
from zbkern.planning.planner import Plan
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules import grid as grids
from zbkern.schedules.program import offloads_or_recomputes, recomputed
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, duration, number

_MARGIN = 10  # columns of the names of figures
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
    if setting is not None:
        parts = [_title(answer.question, setting), *parts, _assumptions(setting.hardware, width)]
    return "\n\n".join(parts)


def describe(answer: Answer, width: int) -> str:
    """Grid and figures."""
    schedule = answer.plan.schedule
    each = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    title = f"{schedule.name}: {schedule.ranks} ranks, {each} each, {schedule.microbatches} microbatches"
    if len(schedule.slices) > 1:
        title += f" in {len(schedule.slices)} slices each"
    return "\n\n".join([title, grid(schedule, width), lines(_figures(answer), width)])


def lines(figures: Iterable[tuple[str, str]], width: int) -> str:
    """Names, and texts beside them in lines of `width`, in which no word is divided; a name is said once for all."""
    room, said, before = max(width, 2 * _MARGIN), [], ""
    for name, text in figures:
        first = f"{'' if name == before else name:<{_MARGIN - 1}} "
        wrap = textwrap.TextWrapper(room, first, " " * _MARGIN, break_long_words=False, break_on_hyphens=False)
        said.append(wrap.fill(text))
        before = name
    return "\n".join(said)


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
    if question.setting is not None:
        yield from _of_model(question, plan, question.setting)
    elif isinstance(question.costs, ModelCosts):
        yield from _cut(plan, question.costs)
    if answer.usual:
        yield "worth", _worth(answer)


def _worth(answer: Answer) -> str:
    """What a user gains over 1F1B, in words."""
    question, timeline, (usual, *more) = answer.question, answer.plan.timeline, answer.usual
    beside = 0.0 if question.setting is None else 1e3 * question.setting.beside(question.stages)
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


def _cut(plan: Plan, costs: ModelCosts, which: str = "") -> Iterator[tuple[str, str]]:
    """How many layers every chunk has, and what `zbkern.pipeline.cut` takes for it; which: what counts as a layer."""
    starts, last = list(plan.partition or ()), costs.partition_of([-1])[0]
    sizes = [end - start for start, end in pairwise([*starts, int(last) + 1])]
    yield "cut", f"{' '.join(map(number, sizes))} layers by chunk{which}"
    yield "cut", f"partition={starts}"


def splits(schedule: Schedule) -> bool:
    """Whether some backwards are two passes."""
    return any(action.kind == "W" for row in schedule.actions for action in row)


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


def grid(schedule: Schedule, width: int) -> str:
    """The grid of `Schedule.to_text`; one wider than `width` is cut in the middle, and a line below says so."""
    cells = grids.cells_of(schedule)
    column, margin = grids.widths(cells)
    shown, total = grids.lines(cells, column, margin), len(cells[0])
    if max(map(len, shown)) > width:
        room = max(2, (width - margin) // column - 1)  # less the column of dots
        first, last = room - room // 2, total - room // 2
        shown = grids.lines([[*row[:first], "..", *row[last:]] for row in cells], column, margin)
        left_out = f"columns {first} to {last - 1} of {total} left out"
        shown.append(f"({left_out}: a wider terminal shows more, --out plan.txt all)")
    return "\n".join(shown)


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
    rows = []
    for timeline in timelines:
        name, bubble, peak = timeline.schedule.name, timeline.bubble_rate, max(timeline.peak_memory)
        if len(timeline.schedule.slices) > 1:
            name += f", {len(timeline.schedule.slices)} slices"
        memory, makespan = amount(peak, timeline.memory_unit), duration(timeline.makespan, timeline.unit)
        cells = [f"{bubble:.2%}", makespan, memory, f"{peak / whole:.2f}x" if whole else ""]
        if tokens:
            seconds = timeline.cost / 1e3 + beside
            cells = [f"{number(seconds)} s", f"{tokens / seconds:,.0f}", f"{bubble:.2%}", memory]
        over = exceeds(peak, limit)
        if over and cuts:
            cells = [each if each == memory else "" for each in cells]
        note = ("at least: does not fit" if cuts else "over the limit") if over else ""
        order = over and cuts, timeline.cost if tokens else round(bubble, 9), peak
        rows.append((order, [name, str(timeline.schedule.chunks), *cells, note]))
    rows.sort(key=lambda row: row[0])
    return columns([["schedule", "chunks", *ends, ""], *(row for _, row in rows)])


def columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.rjust) -> str:
    """A line per row; justify: of all cells but the first, which are on the left."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[row[0].ljust(first), *map(justify, row[1:], widths)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def _joined(amounts: Sequence[str]) -> str:
    """'3 2.5 2', or '24.5, 20 and 18 GB'."""
    units = {amount.partition(" ")[2] for amount in amounts}
    if len(units) == 1 and (unit := units.pop()):
        return " ".join(amount.partition(" ")[0] for amount in amounts) + f" {unit}"
    return (", " if units else " ").join(amounts)


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
    total, active = architecture.parameters(), architecture.parameters(active=True)
    size = f"{number(total / 1e9)} billion parameters"
    size += f", {number(active / 1e9)} of them for a token" if active < total else ""
    model = f"{question.model} ({architecture.kind}): {size}, {len(architecture.blocks)} layers"
    if architecture.left_out:
        model += f"; left out: what {', '.join(architecture.left_out)} describes"
    parallel = {"tensor": job.tensor_parallel, "expert": job.expert_parallel, "context": job.context_parallel}
    parallel["data"] = job.pipelines
    beside = "".join(f", {kind} parallel {count}" for kind, count in parallel.items() if count > 1)
    return (
        f"{model}\n{question.stages} stages{beside} on {job.gpus(question.stages)} x {hardware.title}; "
        f"{question.microbatches} microbatches of {job.microbatch_size} x {job.sequence} tokens"
    )


def _of_model(question: Question, found: Plan, setting: Setting) -> Iterator[tuple[str, str]]:
    """The costs of a layer, the cut, and how long a step takes."""
    beside = setting.beside(question.stages)
    seconds = found.timeline.cost / 1e3 + beside
    rate, (each, share) = setting.tokens(question.microbatches) / seconds, question.speed(seconds)
    static = max(flat_costs(found.costs, found.schedule).static)
    yield "layer", _block_costs(setting)
    yield from _cut(found, setting.costs, f": {_counted(setting.architecture)}")
    yield "static", f"{amount(static, 'bytes')} at most by rank: weights, gradients, optimizer states, logits"
    yield (
        "step",
        f"{number(seconds)} s, {rate:,.0f} tokens/s, {each:,.0f} per GPU, {share:.1%} of the peak flops; "
        f"{number(beside)} s of it are the optimizer's step and what is not hidden of traffic between pipelines; "
        f"{how_exact(*setting, split=splits(found.schedule))}",
    )


def _counted(architecture: Architecture) -> str:
    """Which layers a partition counts, by the names that `cut` has for them."""
    embedding, blocks, norm = architecture.names
    counted = f"{embedding}, {blocks}.0 to {len(architecture.blocks) - 1}, {norm} with the head"
    if further := architecture.predictor_names:
        counted += (
            f", then {', '.join(further)}, each with a head, which models of the transformers library do not have: "
            "docs/models.md adds one; num_nextn_predict_layers 0 in config.json, or --out launch.py, plans without"
        )
    return counted


def _block_costs(setting: Setting) -> str:
    """The costs of one block, by which the ratios can be judged."""
    whole = setting._replace(job=replace(setting.job, halves=False))
    block = whole.costs.layers[1 + len(setting.architecture.blocks) // 2]
    times = f"F {number(block.forward)}, B {number(block.backward)}, W {number(block.weight)} ms"
    held = f", {block.held / block.activation:.2f} times that from B to W" if block.activation else ""
    return f"{block.name}: {times}; {amount(block.activation, 'bytes')} from F to B{held}"


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
