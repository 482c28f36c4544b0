"""A head over all ranks, by simulation: what steps would gain if every rank computed its part of the vocabulary.

The last rank has the head today, and layers are cut around it. Here the head's time is divided among the blocks, which
every rank has as many of, and its collectives are taken to be hidden: the gain is at most this. Costs are computed from
configurations; nothing is measured. Both plans may cut inside blocks.

    python -m bench.shared_head [--effort 1] [--model llama-3-8b ...]
"""

from __future__ import annotations

from dataclasses import replace

from bench.models import CASES
from bench.report import searched
from zbkern.pipeline import ModelCosts, plan
from zbkern.reporting import markdown_table

MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b", "gpt-oss-120b", "gemma-2-9b")
PER_STAGE = 4  # microbatches
_TIMES = ("forward", "backward", "weight", "overhead", "split_overhead", "merge_saving")


def shared(costs: ModelCosts, blocks: range) -> ModelCosts:
    """With the time of the head, the last layer, divided among these layers."""
    *others, head = costs.layers
    layers = [
        replace(each, **{name: getattr(each, name) + getattr(head, name) / len(blocks) for name in _TIMES})
        if number in blocks
        else each
        for number, each in enumerate(others)
    ]
    return replace(costs, layers=(*layers, replace(head, **dict.fromkeys(_TIMES, 0.0))))


def main() -> None:
    arguments = searched(__doc__, MODELS)
    rows = []
    for name in arguments.model:
        case = CASES[name]
        costs = case.setting(name, "h100", halves=True).costs
        sizes = {"stages": case.stages, "microbatches": PER_STAGE * case.stages, "effort": arguments.effort}
        found = [plan(each, **sizes) for each in (costs, shared(costs, range(1, len(costs.layers) - 1)))]
        one, two = (each.timeline.cost for each in found)
        each_takes = [layer.forward + layer.backward + layer.weight for layer in costs.layers]
        head = each_takes[-1] / sum(each_takes)
        idle = [f"{each.bubble_rate:.1%}" for each in found]
        rows.append((f"{name}, {case.stages}", f"{head:.1%}", *idle, f"{one / two - 1:+.1%}"))
    print(markdown_table(["model, stages", "head's share of the work", "idle", "idle, shared", "gain"], rows))


if __name__ == "__main__":
    main()
