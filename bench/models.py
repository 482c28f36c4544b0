"""What a plan gains over 1F1B and over the best published schedule that fits, for models that everybody knows.

Costs are those of `zbkern plan --config`: a model of flops and bytes on a GPU, and no measurement. Every schedule gets
the memory that 1F1B needs on its best partition, times --memory, and partitions of its own: the plan in whole blocks as
all published ones, and then also in halves.

    python -m bench.models [--gpu h100] [--only llama-3-8b] [--effort 4] [--context]

--context: long sequences instead, whole and in slices (`bench/context.py`).
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Any

from bench import context, report
from bench.context import Case
from zbkern.pipeline import plan
from zbkern.planning.command.published import published_timelines
from zbkern.planning.cost_model.job import Job
from zbkern.reporting import markdown_table

CASES = {
    "llama-3-8b": Case(8, Job(8192)),
    "llama-3-70b": Case(8, Job(8192, tensor_parallel=8)),
    "llama-3-405b": Case(16, Job(4096, tensor_parallel=8, data_parallel=8)),
    "qwen3-235b": Case(8, Job(4096, tensor_parallel=4, expert_parallel=8, data_parallel=8)),
    "deepseek-v3": Case(16, Job(4096, tensor_parallel=4, expert_parallel=64, data_parallel=16), True),
    "gpt-oss-120b": Case(8, Job(4096, expert_parallel=8)),
    "gemma-2-9b": Case(8, Job(8192, tensor_parallel=2)),
}


def figures(name: str, gpu: str, microbatches_per_stage: int, memory: float, effort: int) -> dict[str, Any]:
    """One row of the table; times in ms, memory in bytes."""
    case = CASES[name]
    setting = case.setting(name, gpu)
    costs, microbatches = setting.costs, microbatches_per_stage * case.stages
    unlimited = {each.schedule.name: each for each in published_timelines(costs, case.stages, microbatches, None)}
    baseline = unlimited["one_f_one_b"]
    limit = memory * max(baseline.peak_memory)
    published = published_timelines(costs, case.stages, microbatches, limit)
    fitting = [each for each in published if max(each.peak_memory) <= limit * (1 + 1e-9)]
    best = min(fitting, key=lambda each: each.cost)
    found = plan(costs, case.stages, microbatches, memory_limit=limit, effort=effort)
    finer = case.setting(name, gpu, halves=True)
    halves = plan(finer.costs, case.stages, microbatches, memory_limit=limit, effort=effort)
    blocks = costs.layers[1 : 1 + len(setting.architecture.blocks)]
    return {
        "model": name,
        "stages": case.stages,
        "microbatches": microbatches,
        "limit": limit,
        "fits_gpu": limit <= setting.limit,
        "layer": [blocks[0].forward, blocks[0].backward, blocks[0].weight],
        "held": sum(layer.held or 0.0 for layer in blocks) / sum(layer.activation for layer in blocks),
        "one_f_one_b": baseline.cost,
        "best": best.schedule.name,
        "best_cost": best.cost,
        "plan": found.timeline.cost,
        "plan_name": found.schedule.name,
        "plan_chunks": found.schedule.chunks,
        "bubble": found.timeline.bubble_rate,
        "lower_bound": found.lower_bound,
        "partition": found.partition,
        "halves": halves.timeline.cost,
        "halves_name": halves.schedule.name,
        "halves_chunks": halves.schedule.chunks,
        "halves_bubble": halves.timeline.bubble_rate,
        "halves_partition": halves.partition,
    }


def row(found: dict[str, Any]) -> list[str]:
    return [
        found["model"],
        f"{found['stages']}, {found['microbatches']}",
        f"{found['limit'] / 1e9:.0f} GB" + ("" if found["fits_gpu"] else " (!)"),
        f"{found['held']:.2f}",
        f"{found['one_f_one_b']:.0f}",
        f"{found['best']}, {found['best_cost']:.0f}",
        f"{found['plan_name']} x{found['plan_chunks']}, {found['plan']:.0f}",
        f"{found['bubble']:.1%}",
        f"{found['one_f_one_b'] / found['plan'] - 1:.1%}",
        f"{found['best_cost'] / found['plan'] - 1:.1%}",
        f"{found['halves_name']} x{found['halves_chunks']}, {found['halves']:.0f}",
        f"{found['halves_bubble']:.1%}",
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100", help="in zbkern/planning/cost_model/hardware.json (default h100)")
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), help="these models")
    parser.add_argument("--per-stage", type=int, nargs="+", help="microbatches per stage (default 4, of context 1 4)")
    parser.add_argument("--context", action="store_true", help="long sequences, whole and in slices")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(context.TOKENS), help="with --context: lengths")
    parser.add_argument("--memory", type=float, default=1.0, help="times what 1F1B needs (default 1)")
    parser.add_argument("--effort", type=int, default=4, help="rounds of the search (default 4)")
    report.add_out(parser)
    options = parser.parse_args(arguments)
    if options.context:
        return _of_context(options)
    found = []
    for name, per_stage in product(options.only, options.per_stage or [4]):
        found.append(figures(name, options.gpu, per_stage, options.memory, options.effort))
        print(" | ".join(row(found[-1])), file=sys.stderr, flush=True)
    head = [
        "model",
        "p, m",
        "limit",
        "held",
        "1F1B, ms",
        "best published, ms",
        "plan, ms",
        "bubble",
        "> 1F1B",
        "> best",
        "plan in halves, ms",
        "its bubble",
    ]
    print(markdown_table(head, [row(each) for each in found]))
    print("\nA model of flops and bytes, and no measurement. held: of the activation of all blocks, between B and W.")
    print("(!): more than a GPU has beside what the runtime takes, so that something would have to be recomputed.")
    print("\n" + report.write_json("models", {"gpu": options.gpu, "rows": found}, options.out))
    return 0


def _of_context(options: argparse.Namespace) -> int:
    options.per_stage = options.per_stage or [1, 4]
    found = context.table(options)
    print(markdown_table(context.HEAD, [context.row(each) for each in found]))
    print("\nShares of idle time, in a model of flops and bytes: no measurement. xN: chunks per rank.")
    print("(!): more than a GPU has beside what the runtime takes, so that something would have to be recomputed.")
    print("\n" + report.write_json("context", {"gpu": options.gpu, "rows": found}, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
