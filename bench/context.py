"""What slices give at long context, for models that everybody knows: `python -m bench.models --context`.

As many microbatches of one sequence as stages, and four times as many. Every schedule gets the memory that 1F1B needs
on its best partition; of Seq1F1B the best number of slices of equal lengths is taken. The last column is a plan whose
microbatches have a quarter of what those of 1F1B have, beside weights, gradients and optimizer states. The numbers of
stages are ones into which the layers divide evenly at 131,072 tokens: what ranks wait for the one with the most work no
order can change, so that it has a column of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from zbkern.pipeline import ScheduleError, Timeline, plan, schedules, simulate
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.software import under
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.planner import Plan
from zbkern.planning.planner.partition import balanced_partitions, even_partitions

CONFIGURATIONS = Path(__file__).parent / "configurations"
TOKENS = (8192, 32768, 131072, 524288)
NUMBERS = (2, 4, 8, 16, 32)
QUARTER = 0.25


class Case(NamedTuple):
    """How a model is trained: stages, and the parallelism beside them, of tensors as Megatron overlaps it."""

    stages: int
    job: Job
    hides_messages: bool = False  # of experts, as their authors do

    def setting(self, name: str, gpu: str, **sizes: Any) -> Setting:
        """sizes: of the Job, in place of the case's."""
        hardware = under(load_hardware(gpu), "megatron")
        if self.hides_messages:
            hardware = replace(hardware, exposed_share=0.0, tensor_exposed_share=0.0, hiding_share=1.0)
        return Setting(load_architecture(CONFIGURATIONS / f"{name}.json"), hardware, replace(self.job, **sizes))


CASES = {
    "llama-3-8b": Case(11, Job(tensor_parallel=8)),
    "llama-3-70b": Case(9, Job(tensor_parallel=8)),
    "llama-3-405b": Case(16, Job(tensor_parallel=8, data_parallel=8)),
    "deepseek-v3": Case(16, Job(tensor_parallel=4, expert_parallel=64, data_parallel=16), True),
    "gpt-oss-120b": Case(7, Job(tensor_parallel=8, expert_parallel=32, data_parallel=4)),
}
HEAD = [
    *("model", "p, m", "tokens", "limit", "1F1B", "interleaved", "Seq1F1B"),
    *("plan, whole", "plan", "idle for load", "faster than 1F1B", "than whole", "in a quarter"),
]


def rows(gpu: str, names: list[str], tokens: list[int], per_stage: list[int], effort: int) -> Iterator[dict[str, Any]]:
    for name, length, each in product(names, tokens, per_stage):
        yield figures(name, gpu, length, each, effort)


def figures(name: str, gpu: str, tokens: int, microbatches_per_stage: int, effort: int) -> dict[str, Any]:
    """One row of the table; times in ms, memory in bytes."""
    case = CASES[name]
    setting = case.setting(name, gpu, sequence=tokens)
    costs, stages, microbatches = setting.costs, case.stages, microbatches_per_stage * case.stages
    baseline = _fastest(costs, "one_f_one_b", stages, microbatches, None)
    assert baseline is not None
    limit, static = max(baseline.peak_memory), _static(costs, stages)
    sliced = [_fastest(costs, "one_f_one_b", stages, microbatches, limit, number) for number in NUMBERS]
    seq1f1b = min(filter(None, sliced), key=lambda each: each.cost, default=None)
    whole = _planned(costs, stages, microbatches, limit, effort, 1)
    found = _planned(costs, stages, microbatches, limit, effort, "auto")
    quarter = _planned(costs, stages, microbatches, static + QUARTER * (limit - static), effort, "auto")
    assert whole is not None
    assert found is not None
    return {
        "model": name,
        "stages": stages,
        "microbatches": microbatches,
        "tokens": tokens,
        "limit": limit,
        "fits_gpu": limit <= setting.limit,
        "layer": [costs.layers[1].forward, costs.layers[1].backward, costs.layers[1].weight],
        "one_f_one_b": _of(baseline),
        "interleaved": _of(_fastest(costs, "interleaved", stages, microbatches, limit)),
        "seq1f1b": _of(seq1f1b),
        "whole": _of(whole.timeline),
        "plan": {**(_of(found.timeline) or {}), "load": found.idle.load, "lower_bound": found.lower_bound},
        "quarter": None if quarter is None else {**(_of(quarter.timeline) or {}), "load": quarter.idle.load},
    }


def _static(costs: ModelCosts, stages: int) -> float:
    """Of the fullest rank of 1F1B: weights, gradients and optimizer states."""
    partition = balanced_partitions(costs, range(stages), stages, None)[0]
    return max(FlatCosts.of(costs.chunk_costs(partition), range(stages)).static)


def _planned(
    costs: ModelCosts, stages: int, microbatches: int, limit: float, effort: int, slices: int | str
) -> Plan | None:
    try:
        return plan(costs, stages, microbatches, memory_limit=limit, effort=effort, slices=slices)
    except ScheduleError:
        return None


def _fastest(
    costs: ModelCosts, name: str, stages: int, microbatches: int, limit: float | None, slices: int = 1
) -> Timeline | None:
    """Of a published schedule, on even and balanced partitions that fit; None where it does not fit."""
    schedule = getattr(schedules, name)(stages, microbatches, slices=slices)
    chunks = len(schedule.placement)
    if chunks > len(costs.layers):
        return None
    limits = None if limit is None else [limit] * stages
    partitions = [
        *balanced_partitions(costs, schedule.placement, microbatches, limits)[:2],
        *even_partitions(len(costs.layers), chunks)[:1],
    ]
    found = [simulate(schedule, costs.chunk_costs(each, schedule.placement)) for each in dict.fromkeys(partitions)]
    fitting = [each for each in found if limit is None or max(each.peak_memory) <= limit * (1 + 1e-9)]
    return min(fitting, key=lambda each: each.cost, default=None)


def _of(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    schedule = timeline.schedule
    return {
        "name": schedule.name,
        "chunks": schedule.chunks,
        "slices": len(schedule.slices),
        "cost": timeline.cost,
        "idle": timeline.bubble_rate,
        "peak": max(timeline.peak_memory),
    }


def row(found: dict[str, Any]) -> list[str]:
    best, baseline = found["plan"], found["one_f_one_b"]["cost"]
    return [
        found["model"],
        f"{found['stages']}, {found['microbatches']}",
        f"{found['tokens'] // 1024}K",
        f"{found['limit'] / 1e9:.0f} GB" + ("" if found["fits_gpu"] else " (!)"),
        *(cell(found[name]) for name in ("one_f_one_b", "interleaved", "seq1f1b", "whole", "plan")),
        f"{best['load']:.1%}",
        f"{baseline / best['cost'] - 1:.0%}",
        f"{found['whole']['cost'] / best['cost'] - 1:.0%}",
        cell(found["quarter"]),
    ]


def cell(found: dict[str, Any] | None) -> str:
    """The share of idle time, chunks per rank and slices."""
    if found is None:
        return "does not fit"
    ways = [f"x{found['chunks']}"] * (found["chunks"] > 1) + [f"{found['slices']} slices"] * (found["slices"] > 1)
    return f"{found['idle']:.1%}" + (f" ({', '.join(ways)})" if ways else "")


def table(options: Any) -> list[dict[str, Any]]:
    """All rows, each shown when it is there."""
    names = [name for name in options.only if name in CASES]
    found = []
    for each in rows(options.gpu, names, options.tokens, options.per_stage, options.effort):
        found.append(each)
        print(" | ".join(row(each)), file=sys.stderr, flush=True)
    return found
