"""Batches of unequal sequences: steps planned one by one, next to packs in published schedules, on two CPU processes.

A decoder of width 256, four blocks of attention and MLP; each batch is drawn from one of three distributions of
lengths, scaled down to at most 2048 tokens; gloo, one thread per rank. "the usual way" is the fewest balanced packs
that have at most as many tokens as the longest sequence may have, in 1F1B; "best static" the fastest, for each
distribution, of balanced packs in 1F1B, interleaved 1F1B and ZB-V with one, two or four packs per rank. All run the
same batches in turn, and their losses are compared first. Peak memory is of one more step, as in bench/slices.py.
The last line has, of each distribution, the planned steps' time in parts of the usual way's and of the best static
one's.

    python -m bench.batches [--batches 4] [--rounds 3] [--out FOLDER]
    python -m bench.batches --simulate      # eight ranks and whole lengths, by the costs of docs/batches.md
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import ranks
from bench.report import add_out, write_json
from bench.slices import Allocated
from zbkern.pipeline import Costs, Pipeline, ProfileOptions, Schedule, plan_batch, profile, schedules
from zbkern.planning.planner.batch import sequence_work
from zbkern.reporting import environment, machine_line, markdown_table

RANKS, BLOCKS, WIDTH, HEADS, LONGEST = 2, 4, 256, 4, 2048
MULTIPLE = 32  # tokens


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = zbkern.nn.Attention(WIDTH, HEADS, causal=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, ends: Tensor | None = None, carry: Any = None) -> Tensor:
        """x: [1, tokens, width]; ends: of the sequences of a pack."""
        normed = self.norms[0](x)
        y = self.attention(normed, carry=carry) if ends is None else self.attention(normed[0], ends)[None]
        x = x + y
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Blocks(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, ends: Tensor | None = None, carry: Any = None) -> Tensor:
        for block in self.blocks:
            x = block(x, ends, carry)
        return x


def loss_fn(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The sum over tokens of their mean squared errors, times a weight."""
    expected, weight = target
    return nn.functional.mse_loss(output, expected, reduction="sum") / WIDTH * weight


loss_fn.reduction = "sum"  # type: ignore[attr-defined]


class Step(NamedTuple):
    """A batch in rows, and the schedule that runs them."""

    rows: list[list[int]]
    schedule: Schedule


def balanced(lengths: Sequence[int], count: int, costs: Costs) -> list[list[int]]:
    """The sequences in so many packs, the longest first, each to the pack with the least work."""
    rows: list[list[int]] = [[] for _ in range(count)]
    load = [0.0] * count
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        least = load.index(min(load))
        rows[least].append(number)
        load[least] += sequence_work(costs, lengths[number])
    return [row for row in rows if row]


def static_steps(lengths: Sequence[int], longest: int, costs: Costs) -> dict[str, Step]:
    fewest = max(1, math.ceil(sum(lengths) / longest))
    steps = {}
    for packs in sorted({fewest, *(RANKS * per_rank for per_rank in (1, 2, 4) if RANKS * per_rank >= fewest)}):
        rows = balanced(lengths, packs, costs)
        name = "the usual way" if packs == fewest else f"{packs} packs"
        steps[f"1F1B, {name}"] = Step(rows, schedules.one_f_one_b(RANKS, len(rows)))
        if len(rows) % RANKS == 0:
            steps[f"interleaved, {name}"] = Step(rows, schedules.interleaved(RANKS, len(rows), chunks=2))
        steps[f"ZB-V, {name}"] = Step(rows, schedules.zb_v(RANKS, len(rows)))
    return steps


class Model:
    """This rank's chunks for one placement, in a pipeline."""

    def __init__(self, schedule: Schedule) -> None:
        torch.manual_seed(0)
        blocks = [Block() for _ in range(BLOCKS)]
        share = BLOCKS // len(schedule.placement)
        chunks = schedule.chunks_of(dist.get_rank())
        self.modules = [zbkern.convert(Blocks(blocks[chunk * share : (chunk + 1) * share])) for chunk in chunks]
        self.pipe = Pipeline(self.modules, schedule, loss_fn)

    def step(self, sequences: Sequence[Tensor], step: Step) -> Tensor | None:
        rows = [torch.cat([sequences[number] for number in row])[None] for row in step.rows]
        ends = [list(accumulate((len(sequences[number]) for number in row), initial=0)) for row in step.rows]
        side = [{"ends": torch.tensor(each)} if len(each) > 2 else {} for each in ends]
        for module in self.modules:
            module.zero_grad()
        weight = torch.tensor(len(rows) / sum(map(len, sequences)))  # the pipeline takes the mean over rows
        targets = [(row.sin(), weight) for row in rows]
        return self.pipe.step(rows, targets, side, schedule=step.schedule)


def measured_costs() -> Costs:
    """Of one block, by chunks of a V, for a sequence of half of the longest."""
    placement = (0, 1, 1, 0)
    torch.manual_seed(0)
    modules = [zbkern.convert(Blocks([Block()])) for owner in placement if owner == dist.get_rank()]
    x = torch.randn(2, LONGEST // 2, WIDTH)
    targets = [(row, torch.tensor(1.0)) for row in x.chunk(2)]
    found = profile(modules, placement, loss_fn, x, targets, 2, options=ProfileOptions(repeats=4, slices=True))
    flat = found.per_chunk(len(placement))
    names = ("forward", "backward", "weight", "attention_forward", "attention_backward", "overhead", "activation")
    means = {name: statistics.mean(getattr(flat, name)) for name in (*names, "held", "carried")}
    return Costs(**means, tokens=found.tokens)


def run(batches: int, rounds: int) -> dict[str, Any]:
    """Kind -> name -> seconds of each batch, the median of its rounds, and peak bytes; the plans' predictions."""
    costs, models, figures = measured_costs(), {}, {}
    for kind, lengths_of in KINDS.items():
        scale, generator = LONGEST / lengths_of.longest, random.Random(100)
        times: dict[str, list[float]] = {}
        peaks: dict[str, int] = {}
        predicted: dict[str, list[float]] = {}
        for _ in range(batches):
            lengths = lengths_of.draw(generator, scale)
            steps = static_steps(lengths, LONGEST, costs)
            planned = plan_batch(lengths, costs, RANKS, multiple=MULTIPLE)
            steps["planned"] = Step([list(row) for row in planned.rows], planned.schedule)
            predicted.setdefault("planned", []).append(planned.makespan)
            torch.manual_seed(len(times))
            sequences = [torch.randn(length, WIDTH) for length in lengths]
            seconds: dict[str, list[float]] = {name: [] for name in steps}
            losses = {}
            for turn in range(rounds + 1):
                for name, step in steps.items():
                    placement = step.schedule.placement
                    if placement not in models:
                        models[placement] = Model(step.schedule)
                    dist.barrier()
                    start = time.perf_counter()
                    loss = models[placement].step(sequences, step)
                    dist.barrier()
                    if turn:
                        seconds[name].append(time.perf_counter() - start)
                    elif loss is not None:
                        losses[name] = loss.item()
            if losses and max(losses.values()) > min(losses.values()) * (1 + 1e-4):
                raise AssertionError(f"{kind}: the losses of a batch differ: {losses}")
            for name, found in seconds.items():
                times.setdefault(name, []).append(statistics.median(found))
        for name, step in steps.items():
            with Allocated() as allocated:
                models[step.schedule.placement].step(sequences, step)
            everywhere: list[Any] = [None] * RANKS
            dist.all_gather_object(everywhere, allocated.most)
            peaks[name] = max(everywhere)
        figures[kind] = {"seconds": times, "peak_bytes": peaks, "predicted_ms": predicted}
    for model in models.values():
        model.pipe.close()
    return figures


def best_static(figures: dict[str, Any]) -> str:
    whole = {name: sum(found) for name, found in figures["seconds"].items() if name != "planned"}
    every = max(map(len, figures["seconds"].values()))
    return min((name for name in whole if len(figures["seconds"][name]) == every), key=lambda name: whole[name])


def show(kind: str, figures: dict[str, Any]) -> tuple[float, float]:
    """Prints a table; the planned steps' time in parts of the usual way's and of the best static one's."""
    seconds, peaks = figures["seconds"], figures["peak_bytes"]
    usual, best = "1F1B, the usual way", best_static(figures)
    every = len(seconds["planned"])
    rows = [
        (
            name,
            f"{sum(seconds[name]):.2f} s",
            f"{sum(seconds[name]) / sum(seconds[usual]):.3f}",
            f"{sum(seconds[name]) / sum(seconds[best]):.3f}",
            f"{peaks[name] / 1e6:.0f} MB" if name in peaks else "",
        )
        for name in sorted(seconds, key=lambda name: sum(seconds[name]))
        if len(seconds[name]) == every
    ]
    measured = sum(seconds["planned"]) * 1e3 / sum(figures["predicted_ms"]["planned"])
    print(f"\n{kind}: {every} batches, at most {LONGEST} tokens a sequence; measured {measured:.2f} of predicted\n")
    print(markdown_table(("steps", "time", "of the usual", "of the best static", "peak"), rows), flush=True)
    return sum(seconds["planned"]) / sum(seconds[usual]), sum(seconds["planned"]) / sum(seconds[best])


def simulated(batches: int) -> None:
    """Shares of perfect speed on eight ranks, by the costs of docs/batches.md: times in tokens of a stage's F."""
    stages, tokens, overhead, split = 8, 40_000, 144, 0.02
    attention = tokens * tokens / 40_000

    def shares(kind: Kind, part: float) -> tuple[list[float], list[float], list[float]]:
        found, published, milliseconds = [], [], []
        for seed in range(batches):
            lengths = kind.draw(random.Random(100 + seed))
            apart = split * (2 * tokens + 2.5 * attention) / 2 + overhead
            costs = Costs(
                (tokens + attention) / 2 + overhead,
                (tokens + 2.5 * attention) / 2 + apart,
                tokens / 2 + overhead,
                0.03 * tokens,
                1.05 * tokens / 2,
                1.15 * tokens / 2,
                split_overhead=apart,
                attention_forward=attention / 2,
                attention_backward=2.5 * attention / 2,
                overhead=overhead,
                carried=0.05 * tokens / 2,
                tokens=tokens,
            )
            start = time.process_time()
            plan = plan_batch(lengths, costs, stages, memory_limit=stages * kind.longest * part)
            milliseconds.append(1e3 * (time.process_time() - start))
            perfect = sum(3 * length + 3.5 * length * length / 40_000 for length in lengths)
            found.append(perfect / plan.makespan)
            published += [] if plan.published is None else [perfect / plan.published[1]]
        return found, published, milliseconds

    rows = []
    for name, kind in KINDS.items():
        whole, quarter = shares(kind, 1.0), shares(kind, 0.25)
        means = [statistics.mean(each) for each in (whole[1], whole[0], quarter[0])]
        planning = statistics.median(whole[2] + quarter[2])
        rows.append((name, *(f"{mean:.2f}" for mean in means), f"{planning:.0f} ms"))
    head = ("lengths", "packs, ZB-V", "slices and packs", "in a quarter of the memory", "to plan")
    print(markdown_table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate", action="store_true", help="no steps: eight ranks, simulated")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.simulate:
        simulated(arguments.batches)
        return
    figures = ranks.run(RANKS, run, arguments.batches, arguments.rounds)
    last = []
    for kind, found in figures.items():
        usual, best = show(kind, found)
        last.append(f"{kind} {usual:.2f} {best:.2f}")
    print(f"\n{machine_line(environment())}\n{write_json('batches', figures, arguments.out)}")
    print(" ".join(last))


if __name__ == "__main__":
    main()
