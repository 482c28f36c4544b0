"""What `zbkern plan --gpus` answers where somebody has published a layout, and where that layout stands.

Costs are those of `zbkern plan --config` on H100s: a model of flops and bytes, and no measurement.

    python -m bench.layouts [--only llama-3-8b] [--out bench/results]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench import report
from zbkern.planning.command import layouts
from zbkern.planning.command.question import LayoutQuestion
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.software import under
from zbkern.reporting import markdown_table

CONFIGURATIONS = Path(__file__).parent / "configurations"


class Case(NamedTuple):
    """GPUs, sequences a step and tokens of each, and the layout that `source` has published for them."""

    gpus: int
    batch: int
    sequence: int
    published: Mapping[str, int]
    source: str


CASES = {
    "llama-3-8b": Case(
        16, 128, 8192, {"tensor_parallel": 2, "data_parallel": 8, "fully_shard": False}, "Megatron Bridge"
    ),
    "llama-3-70b": Case(64, 512, 8192, {"tensor_parallel": 8, "stages": 4, "data_parallel": 2}, "Megatron Bridge"),
    "llama-3-405b": Case(
        2048, 2048, 8192, {"tensor_parallel": 8, "stages": 16, "data_parallel": 16}, "arXiv 2407.21783"
    ),
    "deepseek-v3": Case(
        2048, 15360, 4096, {"stages": 16, "data_parallel": 128, "expert_parallel": 64}, "arXiv 2412.19437"
    ),
    "gpt-oss-120b": Case(
        64,
        512,
        4096,
        {"tensor_parallel": 1, "fully_shard": True, "expert_parallel": 64, "microbatch_size": 2},
        "NeMo Automodel",
    ),
}


def figures(name: str) -> dict[str, Any]:
    """One row of the table."""
    case = CASES[name]
    model, gpu = load_architecture(CONFIGURATIONS / f"{name}.json"), under(load_hardware("h100"), "megatron")
    question = LayoutQuestion(model, gpu, case.gpus, case.batch, case.sequence, own=case.published)
    best, *others = found = layouts.search(question)
    place = next((place for place, each in enumerate(found) if each.layout.has(case.published)), None)
    layer = best.layout.costs.layers[1]
    return {
        "model": name,
        "sizes": [case.gpus, case.batch, case.sequence],
        "source": case.source,
        "best": layouts.name(best.layout),
        "seconds": best.seconds,
        "layer": [layer.forward, layer.backward, layer.weight],
        "options": best.layout.options,
        "others": [layouts.why(best, each) for each in others],
        "place": place,
        "published": layouts.why_not(question) if place is None else layouts.name(found[place].layout),
        "why": layouts.why(best, found[place]).partition(": ")[2] if place else "",
    }


def row(found: dict[str, Any]) -> list[str]:
    gpus, batch, sequence = found["sizes"]
    places = ["first", "second", "third", "fourth", "fifth", "behind those"]
    place = "" if found["place"] is None else places[found["place"]]
    return [
        f"{found['model']}, {gpus:,}, {batch:,}, {sequence // 1024}K",
        found["best"],
        f"{found['published']} ({found['source']})",
        ", ".join(filter(None, (place, found["why"]))),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), help="these models")
    report.add_out(parser)
    options = parser.parse_args(arguments)
    found = []
    for name in options.only:
        found.append(figures(name))
        print(" | ".join(row(found[-1])), file=sys.stderr, flush=True)
    print(markdown_table(["model, GPUs, batch, sequence", "best", "published", "it is"], [*map(row, found)]))
    print("\n" + report.write_json("layouts", {"rows": found}, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
