"""Batches of unequal sequences on eight and sixteen ranks, by the costs of docs/batches.md: plans simulated, and run by
eight ranks that sleep instead of computing.

Lengths are drawn from the three distributions of bench/batches.py, which are those of its command. A share is that of
perfect speed, where no rank waits and no pass has an overhead, with the barrier of an optimizer step.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import ranks, sleeping_ranks
from zbkern.pipeline import Action, Costs, Pipeline, plan_batch, schedules
from zbkern.pipeline.transport.mailbox import Tag
from zbkern.planning.planner.batch import BatchPlan
from zbkern.reporting import markdown_table

STAGES = 8
TOKENS = 40_000  # of a sequence whose attention takes as long as its linears
OVERHEAD, SPLIT, MESSAGE, CARRIED = 144, 0.02, 0.03, 0.05


class Kind(NamedTuple):
    """Lengths of a log-normal distribution, cut off at `longest`."""

    count: int
    median: int
    sigma: float
    longest: int

    def draw(self, generator: random.Random, scale: float = 1.0) -> list[int]:
        drawn = (generator.lognormvariate(math.log(self.median), self.sigma) for _ in range(self.count))
        return [max(round(64 * scale) or 1, min(round(self.longest * scale), round(each * scale))) for each in drawn]


KINDS = {
    "SFT": Kind(256, 1000, 1.1, 32768),
    "RL": Kind(128, 6000, 1.0, 65536),
    "tail": Kind(128, 2000, 1.6, 131072),
}


def costs() -> Costs:
    """Of half a stage, a chunk of a V: times in tokens of a stage's F, memory in tokens of its activations."""
    apart = SPLIT * (2 * TOKENS + 2.5 * TOKENS) / 2 + OVERHEAD
    return Costs(
        TOKENS + OVERHEAD,
        3.5 * TOKENS / 2 + apart,
        TOKENS / 2 + OVERHEAD,
        MESSAGE * TOKENS,
        1.05 * TOKENS / 2,
        1.15 * TOKENS / 2,
        split_overhead=apart,
        attention_forward=TOKENS / 2,
        attention_backward=2.5 * TOKENS / 2,
        overhead=OVERHEAD,
        carried=CARRIED * TOKENS / 2,
        tokens=TOKENS,
    )


def perfect(lengths: Sequence[int]) -> float:
    return sum(3 * length + 3.5 * length * length / TOKENS for length in lengths)


def plans(kind: Kind, part: float, batches: int, stages: int = STAGES) -> list[tuple[list[int], BatchPlan, float]]:
    """Of each batch the lengths, the plan within `part` of the memory of 1F1B with the longest, and its seconds."""
    found = []
    for seed in range(batches):
        lengths = kind.draw(random.Random(100 + seed))
        start = time.process_time()
        plan = plan_batch(lengths, costs(), stages, memory_limit=stages * kind.longest * part)
        found.append((lengths, plan, time.process_time() - start))
    return found


def simulated(batches: int) -> None:
    """Prints the shares of packs in the best published schedule, and of plans in less and less memory."""
    rows = []
    for stages, (name, kind) in product((STAGES, 2 * STAGES), KINDS.items()):
        found = [plans(kind, part, batches, stages) for part in (1.0, 0.25, 1.3 / stages)]
        packs = [perfect(lengths) / plan.published[1] for lengths, plan, _ in found[0] if plan.published is not None]
        means = [packs, *([perfect(lengths) / plan.makespan for lengths, plan, _ in each] for each in found)]
        planning = 1e3 * statistics.median(seconds for each in found for *_, seconds in each)
        rows.append((f"{stages}", name, *(f"{statistics.mean(each):.2f}" for each in means), f"{planning:.0f} ms"))
    memory = "slices and packs", "in a quarter of the memory", "in 1.3 of the longest"
    print(markdown_table(("ranks", "lengths", "packs, ZB-V", *memory, "to plan"), rows))


class Chunk(sleeping_ranks.Chunk):
    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        return super().forward(x)


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


total.reduction = "sum"  # type: ignore[attr-defined]


def asleep(plan: BatchPlan, seconds: float) -> float:
    """The makespan of a step whose passes sleep as long as planned, where a unit of time takes so many seconds.

    Every W must have run once, which the gradients show.
    """
    schedule, unit_tokens = plan.schedule, [length for cut in plan.schedule.own_slices for length in cut]

    def travel(sender: int, receiver: int, tag: Any) -> float:
        return seconds * MESSAGE * unit_tokens[tag.unit] if isinstance(tag, Tag) else 0.0

    ring = ranks.delayed_ring(schedule.ranks, travel)
    inputs = [torch.ones(1, sum(cut), requires_grad=True) for cut in schedule.own_slices]

    def step(rank: int) -> float:
        modules = {chunk: Chunk() for chunk in schedule.chunks_of(rank)}
        with Pipeline(modules.values(), schedules.zb_v(STAGES, 1), total, ring[rank], timeout=600) as pipe:
            pipe.step(inputs, inputs, schedule=schedule)  # in which nothing sleeps
            taken = {each.action: seconds * (each.end - each.start) for each in plan.timeline.events[rank]}
            for kind, chunk, unit in schedule.actions[rank]:
                if kind == "F":
                    f, b, both, w = (taken.get(Action(each, chunk, unit), 0.0) for each in ("F", "B", "BW", "W"))
                    modules[chunk].durations.append((f, b + both, w))
            pipe.step(inputs, inputs, schedule=schedule)
            timeline = pipe.last.gather_timeline()
        for module in modules.values():
            expected = torch.full((1,), 2.0 * sum(unit_tokens) / len(inputs))
            torch.testing.assert_close(module.weight.grad, expected, rtol=1e-4, atol=0)
        return timeline.makespan

    return ranks.run_in_threads([ring], step)


def slept(batches: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Prints and returns shares of perfect speed, simulated and asleep, of batches that take so long at least."""
    figures, rows = {}, []
    for name, kind in KINDS.items():
        found = []
        for lengths, plan, _ in plans(kind, 1.0, batches):
            found.append((perfect(lengths) / plan.makespan, seconds / asleep(plan, seconds / perfect(lengths))))
        figures[name] = found
        rows.append((name, *(f"{statistics.mean(each):.3f}" for each in zip(*found, strict=True))))
    print(markdown_table(("lengths", "simulated", "asleep"), rows))
    return figures
