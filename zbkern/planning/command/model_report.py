"""What `zbkern plan --config` prints besides: the model, the cut, the speed of a step, and what is assumed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from zbkern.planning.command.question import Question
from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.exactness import how_exact
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.costs.flat import flat_costs
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.planner import Plan
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, number


def title(question: Question, setting: Setting) -> str:
    """The model, and on what it is trained."""
    architecture, hardware, job = setting
    total, active = architecture.parameters(), architecture.parameters(active=True)
    size = f"{number(total / 1e9)} billion parameters"
    size += f", {number(active / 1e9)} of them for a token" if active < total else ""
    model = f"{question.name} ({architecture.kind}): {size}, {len(architecture.blocks)} layers"
    if architecture.left_out:
        model += f"; left out: what {', '.join(architecture.left_out)} describes"
    parallel = {"tensor": job.tensor_parallel, "expert": job.expert_parallel, "context": job.context_parallel}
    parallel["data"] = job.pipelines
    beside = "".join(f", {kind} parallel {count}" for kind, count in parallel.items() if count > 1)
    return (
        f"{model}\n{question.stages} stages{beside} on {job.gpus(question.stages)} x {hardware.title}; "
        f"{question.microbatches} microbatches of {job.microbatch_size} x {job.sequence} tokens"
    )


def figures(question: Question, found: Plan, setting: Setting) -> Iterator[tuple[str, str]]:
    """The costs of a layer, the cut, and how long a step takes."""
    seconds = found.timeline.cost / 1e3 + question.beside
    rate, (each, share) = question.tokens / seconds, question.speed(seconds)
    flat = flat_costs(found.costs, found.schedule)
    static = max(always - ahead for always, ahead in zip(flat.static, flat.ahead, strict=True))
    yield "layer", _block_costs(setting)
    yield from cut(found, setting.costs, f": {_counted(setting.architecture)}")
    yield "static", f"{amount(static, 'bytes')} at most by rank: weights, gradients, optimizer states, logits"
    yield "messages", f"{amount(max(flat.ahead), 'bytes')} at most by rank: those that wait there to be taken"
    yield (
        "step",
        f"{number(seconds)} s, {rate:,.0f} tokens/s, {each:,.0f} per GPU, {share:.1%} of the peak flops; "
        f"{number(question.beside)} s of it are the optimizer's step and what is not hidden of traffic between "
        "pipelines",
    )
    yield "exact", how_exact(*setting, split=splits(found.schedule))


def cut(plan: Plan, costs: ModelCosts, which: str = "") -> Iterator[tuple[str, str]]:
    """How many layers every chunk has, and what `zbkern.pipeline.cut` takes for it; which: what counts as a layer."""
    starts, last = list(plan.partition or ()), costs._partition_of([-1])[0]
    sizes = [end - start for start, end in pairwise([*starts, int(last) + 1])]
    yield "cut", f"{' '.join(map(number, sizes))} layers by chunk{which}"
    yield "cut", f"partition={starts}"


def splits(schedule: Schedule) -> bool:
    """Whether some backwards are two passes."""
    return any(action.kind == "W" for row in schedule.actions for action in row)


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


def assumptions(gpu: Hardware, width: int) -> str:
    """What programs get of a GPU, which no datasheet says; where the rest is told; and where the peaks are from."""
    corrected = f", then corrected by {gpu.calibration.source}" if gpu.calibration.source else ""
    kernel = f" ({gpu.attention})" if gpu.attention else ""
    hidden = "none" if gpu.tensor_exposed_share == 1 else f"{1 - gpu.tensor_exposed_share:.0%} at most"
    text = (
        f"Computed from flops and bytes with shares fitted to published runs{corrected}, and not measured: programs "
        f"get {gpu.matmul_share:.0%} of the GPU's peak in W's large products, "
        f"{gpu.matmul_share * gpu.forward_backward_share:.0%} in those of F and B, {gpu.attention_forward_share:.0%} "
        f"and {gpu.attention_backward_share:.0%} in F and B of attention{kernel}, {gpu.memory_share:.0%} of its "
        f"memory's bandwidth and {gpu.network_share:.0%} of the links'. Software: {gpu.software}, with which tensor "
        f"parallelism gets {gpu.tensor_share:.0%} of the links' bandwidth, and computing hides {hidden} of this time. "
        "docs/cost_model.md says what else is assumed."
    )
    source = f"Peaks: {gpu.source or 'of a table that names no source'}."
    return "\n".join(textwrap.fill(each, width) for each in (text, source))
