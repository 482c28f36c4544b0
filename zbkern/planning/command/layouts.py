"""`zbkern plan --gpus`: how to lay a model out on so many GPUs, and which schedule runs it there.

Every layout that can work is estimated from the most work of a rank and the memory that is left for microbatches; the
best few are planned, first quickly and for few microbatches, then as they will run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from zbkern.planning.command.answer import search as plan_of
from zbkern.planning.command.model_report import splits
from zbkern.planning.command.question import BYTES, SIZES, LayoutQuestion, Question, spelt
from zbkern.planning.command.report import SHOWN
from zbkern.planning.command.tables import columns, lines
from zbkern.planning.cost_model.exactness import how_exact
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.needs import SAVING_CHUNKS, fits, least_need, least_work, without_network
from zbkern.planning.planner import Plan
from zbkern.planning.simulation.simulator import simulate
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.program import recomputed
from zbkern.schedules.units import amount, number

_MICROBATCH_SIZES = (1, 2, 4, 8)
_MOST_STAGES = 64
_PLANNED = 24  # layouts at most, after the estimate
_SHOWN = 5
_WORTH_A_PLAN = 0.95  # of the time of a plan for another microbatch: plans are seldom as fast as their estimates
_LONG = 16_384  # tokens, from which slices are tried: their plans take long to find, and shorter ones gain little
_SLICES = 4  # of a sequence, for which memory is estimated: a rank then holds so many more, each so much smaller
_FASTER = 0.995  # of the time, by a quick plan: less may be by chance
_PER_STAGE = 3  # microbatches of the quick plans: enough for the warm-up, a steady part and the cool-down
_ROOMY = 0.6  # of the memory of 1F1B: with less, recomputing some microbatches may be faster


@dataclass(frozen=True, kw_only=True)
class Layout(Question):
    """A model on GPUs: stages times tensor_parallel times data_parallel of them."""

    setting: Setting

    @cached_property
    def costs(self) -> ModelCosts:
        return self.setting.costs

    @property
    def limit(self) -> float:
        return self.setting.limit

    @property
    def job(self) -> Job:
        return self.setting.job

    @property
    def options(self) -> dict[str, int]:
        """Its sizes by the arguments of `zbkern plan` that give them."""
        sizes = {name: getattr(self.job, name) for name in SIZES}
        return {"stages": self.stages, "microbatches": self.microbatches, **sizes}

    def has(self, sizes: Mapping[str, int]) -> bool:
        return all(self.options[name] == size for name, size in sizes.items())


class Planned(NamedTuple):
    """A layout with its plan."""

    layout: Layout
    plan: Plan
    parts: dict[str, float]  # of the step: seconds by what takes them

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def search(question: LayoutQuestion, progress: Callable[[str], None] = lambda line: None) -> list[Planned]:
    """The best layouts, the fastest first, and last the best that has the sizes of `own`, if it fits and is not there.

    None where nothing fits. progress: is called with a line about the search.
    """
    own = question.own
    estimates = [found for found in map(estimate, layouts(question)) if found is not None]

    def best(estimates: list[tuple[float, Layout]], most: int) -> list[Planned]:
        """So many at most, the fastest first."""
        few = sorted(_quick(estimates, progress), key=lambda pair: pair[0])[:most]
        answers = []
        for index, (_, layout) in enumerate(few):
            progress(f"plan {index + 1} of {len(few)}: {name(layout)}")
            answers.append(planned(replace(_finest(layout), effort=question.effort)))
        return sorted((each for each in answers if each is not None), key=lambda each: each.seconds)

    answers = best(estimates, _SHOWN)
    if own and not any(each.layout.has(own) for each in answers):
        answers += best([(seconds, layout) for seconds, layout in estimates if layout.has(own)], 1)
    progress("")
    return answers


def why_not(question: LayoutQuestion) -> str:
    """Why no layout with the sizes of `own` was found: that which holds least, or that there is none."""
    given = ", ".join(spelt(question.own))
    which = [each for each in layouts(question) if each.has(question.own)]
    try:
        needs = [(least_need(each.costs, each.stages), each) for each in which]
    except ValueError as error:
        return f"{given}: {error}"
    if not needs:
        sizes = f"{question.gpus} GPUs and {question.batch} sequences"
        return f"{given}: {sizes} cannot be divided so, or tensor parallelism leaves its node"
    need, layout = min(needs, key=lambda pair: pair[0].total)
    return f"{name(layout)}: does not fit: {need.describe(layout.stages, 'bytes')}"


def _quick(estimates: list[tuple[float, Layout]], progress: Callable[[str], None]) -> list[tuple[float, Layout]]:
    """Seconds of a step by a quick plan for few microbatches, of each way to divide the model the best microbatch.

    An estimate is hardly ever above its plan, so that those above the fastest plan need none.
    """
    found: dict[tuple[int, int, int], tuple[float, Layout]] = {}
    plans = 0
    for estimated, layout in sorted(estimates, key=lambda pair: pair[0]):
        job = layout.job
        fastest = min((seconds for seconds, _ in found.values()), default=math.inf)
        if plans == _PLANNED or (len(found) >= _SHOWN and estimated > fastest):
            break
        division = layout.stages, job.tensor_parallel, job.expert_parallel
        if division in found:
            seconds, other = found[division]
            # where only the other recomputes: that is the least exact part of an estimate
            if estimated >= seconds * (1.0 if other.recompute and not layout.recompute else _WORTH_A_PLAN):
                continue
        progress(f"layout {plans + 1}: {name(layout)}")
        few = min(layout.microbatches, _PER_STAGE * layout.stages)
        answer = planned(replace(layout, microbatches=few, effort=0))
        if layout.recompute and _sliced(layout):
            finer = replace(layout, slices="auto", recompute=False)
            sliced = planned(replace(finer, microbatches=few, effort=0))
            if sliced is not None and (answer is None or sliced.seconds < answer.seconds):
                answer, layout = sliced, finer
        if answer is not None:
            plans += 1
            rest = (layout.microbatches - few) * max(answer.plan.timeline.busy) / few / 1e3
            seconds = answer.seconds + rest
            if division not in found or seconds < found[division][0]:
                found[division] = seconds, layout
    return [*found.values()]


def _finest(layout: Layout) -> Layout:
    """With cuts inside blocks, slices, or both, where quick plans are faster by them; slices hold less, and may do
    without recomputing."""
    if layout.stages == 1:
        return layout
    fastest = _quick_seconds(layout)
    job = replace(layout.job, halves=True)
    changes: list[dict[str, Any]] = [{"setting": layout.setting._replace(job=job)}]
    changes += [{"slices": "auto"}] if _sliced(layout) else []
    for change in changes:
        for recompute in dict.fromkeys([False, layout.recompute]):
            found = replace(layout, **change, recompute=recompute)
            seconds = _quick_seconds(found)
            if seconds < _FASTER * fastest:
                fastest, layout = seconds, found
    return layout


def _sliced(layout: Layout) -> bool:
    """Whether slices of its sequences are worth a try."""
    return layout.stages > 1 and layout.job.sequence >= _LONG


def _quick_seconds(layout: Layout) -> float:
    """Of a step; infinite where nothing fits."""
    answer = planned(replace(layout, effort=0))
    return math.inf if answer is None else answer.seconds


def layouts(question: LayoutQuestion) -> Iterator[Layout]:
    """All that divide: tensor parallelism within a node, heads and experts whole, sequences among pipelines."""
    architecture, hardware, gpus, batch, sequence, fp8, halves, overlap = question[:8]
    counts = {block.experts.count for block in architecture.blocks if block.experts}
    blocks = len(architecture.blocks)
    for tensor in _divisors(min(gpus, hardware.gpus_per_node)):
        for stages in _divisors(gpus // tensor) if gpus % tensor == 0 else ():
            data = gpus // tensor // stages
            if stages > min(blocks, _MOST_STAGES) or batch % data:
                continue
            experts = [each for each in _divisors(tensor * data) if all(count % each == 0 for count in counts)]
            for expert in experts if counts else [1]:
                for size, shard in product(_MICROBATCH_SIZES, (False, True) if data > stages == 1 else (False,)):
                    if batch // data % size == 0:
                        job = Job(sequence, size, tensor, expert, data, 1, fp8, shard, halves and stages > 1)
                        job = replace(job, overlap=overlap, **{name: getattr(question, name) for name in BYTES})
                        setting = Setting(architecture, hardware, job)
                        yield Layout(stages=stages, microbatches=batch // data // size, setting=setting)


def estimate(layout: Layout) -> tuple[float, Layout] | None:
    """Seconds per step, and the layout, which recomputes where that is worth a try.

    None where the layout cannot work, or does not fit even if activations are recomputed.

    With the memory of 1F1B a zero-bubble schedule idles little; with a third of it for about two thirds of p
    microbatches (V-Min, arXiv 2405.15362), which is no faster than recomputing as many as do not fit.
    """
    stages, microbatches, limit = layout.stages, layout.microbatches, layout.limit
    try:
        costs = layout.costs
    except ValueError:  # heads that cannot be divided so
        return None
    whole = fits(costs, stages, limit)
    if not whole and not fits(costs, stages, limit, saves=True):
        return None
    least = least_need(costs, stages)
    room = limit - least.static - least.message
    needed = sum(layer.activation for layer in costs.layers) * min(1.0, microbatches / stages)
    missing = max(0.0, 1 - room / needed)
    work = least_work(without_network(costs), stages)
    waiting = missing * stages * work
    sliced = max(0.0, 1 - room * stages * _SLICES / (needed * (stages + _SLICES - 1))) if _sliced(layout) else missing
    again = sliced * microbatches * sum(layer.forward for layer in costs.layers) / stages
    through = sum(layer.forward + layer.backward for layer in costs.layers)  # a microbatch, and back
    step = max(microbatches * work, through) + (min(waiting, again) if whole else again)
    if not whole or missing > 1 - _ROOMY:
        chunks = min(SAVING_CHUNKS, len(costs.layers)) if stages == 1 else None
        layout = replace(layout, recompute=True, chunks=chunks)
    return step / 1e3 + layout.beside, layout


def planned(layout: Layout) -> Planned | None:
    """None where nothing fits."""
    try:
        found = plan_of(layout)
    except ScheduleError:
        return None
    setting, microbatches = layout.setting, layout.microbatches
    gpu = replace(setting.hardware, exposed_share=0.0, hiding_share=1.0, link_bandwidth=1e30, network_bandwidth=1e30)
    silent = setting._replace(hardware=gpu, job=replace(setting.job, fully_shard=False)).costs
    work, computing = (microbatches * least_work(each, layout.stages) / 1e3 for each in (layout.costs, silent))
    timeline, schedule = found.timeline, found.schedule
    busy, rank = max(zip(timeline.busy, range(schedule.ranks), strict=True))
    in_turn = simulate(replace(schedule, beside=()), found.costs).busy[rank] if schedule.beside else busy
    parts = {
        "computing": computing,
        "messages of tensor and expert parallelism, and of weights that are sharded": work - computing,
        "uneven stages, passes of more chunks, and recomputation": in_turn / 1e3 - work,
        "messages that passes beside each other hide": (busy - in_turn) / 1e3,
        "idle time": (timeline.cost - busy) / 1e3,
        "the optimizer and traffic between pipelines": layout.beside,
    }
    return Planned(layout, found, parts)


def describe(question: LayoutQuestion, answers: list[Planned], width: int) -> str:
    """A table of the answers, why the others are not the first, and the options that plan the first by itself."""
    rows, best = [["layout", "schedule", "step", "tokens/s/GPU", "of peak", "memory", "behind"]], answers[0]
    for layout, found, parts in answers:
        seconds = sum(parts.values())
        schedule, (tokens, share) = f"{found.schedule.name} x{found.schedule.chunks}", layout.speed(seconds)
        if any(map(recomputed, found.schedule.actions)) and "saving" not in schedule:
            schedule += ", recomputes"
        if len(found.schedule.slices) > 1:
            schedule += f", {len(found.schedule.slices)} slices"
        schedule += ", beside" * any(found.schedule.beside)
        schedule += ", halves" * layout.job.halves
        memory, behind = amount(max(found.timeline.peak_memory), "bytes"), seconds / best.seconds - 1
        step = f"{number(seconds)} s", f"{tokens:,.0f}", f"{share:.1%}"
        rows.append([name(layout), schedule, *step, memory, f"{behind:.1%}"])
    figures = [
        ("exact", f"of the first: {how_exact(*best.layout.setting, split=splits(best.plan.schedule))}"),
        *(("behind", why(best, other)) for other in answers[1:]),
        ("first", f"alone, searched for longer, with its assumptions: {_options(best)}"),
    ]
    short = "" if question.sequence >= _LONG else f", and slices of sequences below {_LONG:,} tokens: --slices auto"
    figures.append(("not tried", f"context parallelism: --stages with --context-parallel plans it{short}"))
    if question.own and not any(each.layout.has(question.own) for each in answers):
        figures.append(("yours", why_not(question)))
    return f"{columns(rows, str.ljust)}\n\n{lines(figures, width)}"


def name(layout: Layout) -> str:
    """tp 8, pp 4, dp 2, 64 microbatches of 1."""
    job = layout.job
    data = "fsdp" if job.fully_shard else "dp"
    sizes = {"tp": job.tensor_parallel, "pp": layout.stages, data: job.data_parallel, "ep": job.expert_parallel}
    parallel = ", ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1)
    return f"{parallel or 'one GPU'}, {layout.microbatches} microbatches of {job.microbatch_size}"


def why(best: Planned, other: Planned) -> str:
    """What takes the other layout longer, the largest part first, as shares of the best one's step."""
    differences = sorted(((other.parts[part] - best.parts[part]) / best.seconds, part) for part in best.parts)
    more = [f"{share:.1%} more of {part}" for share, part in reversed(differences) if share >= SHOWN]
    less = [f"{-share:.1%} less of {part}" for share, part in differences if -share >= SHOWN]
    behind = f"{other.seconds / best.seconds - 1:.1%} behind"
    return f"{name(other.layout)}: {behind}: {'; '.join([*more, *less]) or 'no part differs by 0.1%'}"


def _options(answer: Planned) -> str:
    """Of `zbkern plan` instead of --gpus and --batch."""
    sizes: dict[str, Any] = {**answer.layout.options, "recompute": any(map(recomputed, answer.plan.schedule.actions))}
    del sizes["context_parallel"]
    if answer.layout.slices != 1:
        sizes["slices"] = "auto"
    sizes["overlap"] = answer.layout.job.overlap
    sizes = {name: size for name, size in sizes.items() if name not in BYTES or size != getattr(Job, name)}
    if sizes["stages"] == 1:
        sizes["chunks"] = answer.plan.schedule.chunks
    return " ".join(spelt(sizes))


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]
