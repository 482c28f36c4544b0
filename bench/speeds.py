"""Ranks of different speeds, by simulation: what a cut by speed gains over the plan for equal ranks, in a V.

Costs are computed from configurations; nothing is measured. Of the plans for equal ranks the one that these ranks run
fastest counts: with whole blocks, and with halves.

    python -m bench.speeds [--effort 1] [--model llama-3-8b ...]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.report import searched
from zbkern.pipeline import plan, simulate
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.reporting import markdown_table

MODELS = {"llama-3-70b": 8, "llama-3-8b": 1}  # with so many GPUs in tensor parallelism
STAGES, MICROBATCHES = 8, 64
CASES = {
    "one rank 30% slow": (0.7, *[1.0] * 7),
    "half of the ranks 40% slow": (*[1.0] * 4, *[0.6] * 4),
    "one rank 10% slow": (0.9, *[1.0] * 7),
}


def main() -> None:
    arguments = searched(__doc__, MODELS)
    rows = []
    for name in arguments.model:
        architecture = load_architecture(Path(__file__).parent / "configurations" / f"{name}.json")
        for halves in (False, True):
            job = Job(sequence=8192, tensor_parallel=MODELS[name], halves=halves)
            costs = Setting(architecture, load_hardware("h100"), job).costs
            given = {"stages": STAGES, "microbatches": MICROBATCHES, "placement": "v", "effort": arguments.effort}
            equal = plan(costs, **given)
            cells = []
            for speeds in CASES.values():
                as_it_is = simulate(equal.schedule, replace(equal.costs, speeds=speeds)).cost
                cells.append(
                    f"{1 - plan(costs, **given, speeds=speeds).timeline.cost / as_it_is:.1%}".replace("%", " %")
                )
            rows.append((f"{name}, {'halves' if halves else 'whole blocks'}", *cells))
    print(markdown_table(["model", *CASES], rows))


if __name__ == "__main__":
    main()
