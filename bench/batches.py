"""Batches of unequal sequences: steps planned one by one, next to packs in published schedules, on two CPU processes.

A decoder of width 256, four blocks of attention and MLP; each batch is drawn from one of three distributions of
lengths, a quarter of the sequences, scaled down to at most 2048 tokens; gloo, one thread per rank. "the usual way" is
the fewest balanced packs that have at most as many tokens as the longest sequence may have, in 1F1B; "best static" the
fastest, for each distribution, of balanced packs in 1F1B, interleaved 1F1B and ZB-V with one, two, four or eight packs
per rank. Planned steps have the memory of the usual way. Besides: microbatches that are padded to their longest
sequence, and torch.distributed.pipelining with the packs of the usual way, which it takes padded to the longest one.
All run the same batches in turn, and their losses are compared first. Peak memory is of one more step, as in
bench/slices.py. The last line has, of each distribution, the planned steps' time in parts of the usual way's and of the
best static one's.

    python -m bench.batches [--batches 3] [--rounds 2] [--longest 2048] [--out FOLDER]
    python -m bench.batches --simulate      # 8 and 16 ranks, whole lengths, by the costs of docs/batches.md
    python -m bench.batches --sleep 8       # the same, run by ranks that sleep: 8 seconds of a perfect step
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import ranks
from bench.batches_simulated import KINDS, STAGES, simulated, slept
from bench.report import add_out, write_json
from bench.slices import Allocated
from zbkern.pipeline import BatchPlan, Costs, Pipeline, ProfileOptions, Schedule, plan_batch, profile, schedules
from zbkern.planning.planner.batch import sequence_work
from zbkern.reporting import environment, machine_line, markdown_table

RANKS, BLOCKS, WIDTH, HEADS, LONGEST = 2, 4, 256, 4, 2048
MULTIPLE = 32  # tokens
MARGIN = 0.95  # of the usual way's memory, for planned steps: plans do not count what is there during a pass alone
USUAL, PLANNED, PADDED, TORCH = "1F1B, the usual way", "planned", "1F1B, padded", "torch 1F1B, the usual packs"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = zbkern.nn.Attention(WIDTH, HEADS, causal=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, ends: Tensor | None = None, carry: Any = None) -> Tensor:
        """x: [rows, tokens, width]; ends: of the sequences of a pack, which is one row."""
        normed = self.norms[0](x)
        y = self.attention(normed, carry=carry) if ends is None else self.attention(normed[0], ends.flatten())[None]
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


def own_blocks(placement: Sequence[int]) -> dict[int, Blocks]:
    """This rank's chunks of the model."""
    torch.manual_seed(0)
    blocks, share = [Block() for _ in range(BLOCKS)], BLOCKS // len(placement)
    mine = [chunk for chunk, owner in enumerate(placement) if owner == dist.get_rank()]
    return {chunk: Blocks(blocks[chunk * share : (chunk + 1) * share]) for chunk in mine}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The sum over tokens of their mean squared errors, times a weight; target: [rows, tokens, width + 1]."""
    expected, weight = target.split((WIDTH, 1), -1)
    return ((output - expected).square() * weight).sum() / WIDTH


loss_fn.reduction = "sum"  # type: ignore[attr-defined]


class Step(NamedTuple):
    """A batch in microbatches of these sequences, and the schedule that runs them. padded: a row for each sequence."""

    rows: list[list[int]]
    schedule: Schedule
    padded: bool = False

    def data(self, sequences: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
        """Inputs, targets and side inputs; the loss is the mean over tokens, and the pipeline's over microbatches."""
        count = sum(map(len, sequences))
        inputs, targets, side = [], [], []
        for row in self.rows:
            own = [sequences[number] for number in row]
            if self.padded:
                x = nn.utils.rnn.pad_sequence(own, batch_first=True)
                counted = nn.utils.rnn.pad_sequence([torch.ones(len(each), 1) for each in own], batch_first=True)
            else:
                x, counted = torch.cat(own)[None], torch.ones(1, sum(map(len, own)), 1)
            inputs.append(x)
            targets.append(torch.cat([x.sin(), counted * len(self.rows) / count], -1))
            packed = len(row) > 1 and not self.padded
            ends = torch.tensor([*accumulate(map(len, own), initial=0)])
            side.append({"ends": ends} if packed else {})
        return inputs, targets, side


def balanced(lengths: Sequence[int], count: int, costs: Costs) -> list[list[int]]:
    """The sequences in so many packs, the longest first, each to the pack with the least work."""
    rows: list[list[int]] = [[] for _ in range(count)]
    load = [0.0] * count
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        least = load.index(min(load))
        rows[least].append(number)
        load[least] += sequence_work(costs, lengths[number])
    return [row for row in rows if row]


def usual_packs(lengths: Sequence[int], longest: int, costs: Costs) -> list[list[int]]:
    """Of the usual way: as few as can be."""
    return balanced(lengths, max(1, math.ceil(sum(lengths) / longest)), costs)


def static_steps(lengths: Sequence[int], longest: int, costs: Costs) -> dict[str, Step]:
    usual = usual_packs(lengths, longest, costs)
    steps = {USUAL: Step(usual, schedules.one_f_one_b(RANKS, len(usual)))}
    for packs in (RANKS * per_rank for per_rank in (1, 2, 4, 8) if RANKS * per_rank >= len(usual)):
        rows, name = balanced(lengths, packs, costs), f"{packs} packs"
        steps[f"1F1B, {name}"] = Step(rows, schedules.one_f_one_b(RANKS, len(rows)))
        steps[f"interleaved, {name}"] = Step(rows, schedules.interleaved(RANKS, len(rows), chunks=2))
        steps[f"ZB-V, {name}"] = Step(rows, schedules.zb_v(RANKS, len(rows)))
    return steps


def usual_memory(lengths: Sequence[int], longest: int, costs: Costs) -> float:
    """Of the usual way, on its first rank, which holds a pack for each rank."""
    packs = usual_packs(lengths, longest, costs)
    tokens = sorted((sum(lengths[number] for number in pack) for pack in packs), reverse=True)
    return costs.per_chunk(1).activation[0] * BLOCKS / RANKS * sum(tokens[:RANKS]) / (costs.tokens or 1)


def padded_step(lengths: Sequence[int]) -> Step:
    """Four microbatches per rank of equally many sequences, as they come."""
    count = min(4 * RANKS, len(lengths))
    rows = [[*range(len(lengths) * i // count, len(lengths) * (i + 1) // count)] for i in range(count)]
    return Step(rows, schedules.one_f_one_b(RANKS, count), padded=True)


class Runner:
    """This rank's chunks for every placement, in a pipeline each, and in torch's."""

    def __init__(self) -> None:
        self._pipes: dict[tuple[int, ...], tuple[list[nn.Module], Pipeline]] = {}
        self._of_torch = own_blocks(range(RANKS))[dist.get_rank()]

    def ours(self, step: Step, sequences: Sequence[Tensor]) -> Callable[[], Tensor | None]:
        placement = step.schedule.placement
        if placement not in self._pipes:
            modules: list[nn.Module] = [zbkern.convert(chunk) for chunk in own_blocks(placement).values()]
            self._pipes[placement] = modules, Pipeline(modules, step.schedule, loss_fn)
        modules, pipe = self._pipes[placement]
        data = step.data(sequences)

        def run() -> Tensor | None:
            for module in modules:
                module.zero_grad()
            return pipe.step(*data, schedule=step.schedule)

        return run

    def of_torch(self, step: Step, sequences: Sequence[Tensor]) -> Callable[[], Tensor | None]:
        """torch's 1F1B, which takes microbatches of one shape: packs are filled up, with one sequence more of weight 0.

        A stage per shape; its first step, which finds out shapes, is not counted.
        """
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules as stock

        inputs, targets, side = step.data(sequences)
        tokens, most = max(x.shape[1] for x in inputs), max(map(len, step.rows))
        x, y = (
            torch.cat([nn.functional.pad(t, (0, 0, 0, tokens - t.shape[1])) for t in all_])
            for all_ in (inputs, targets)
        )
        whole = [torch.tensor([0, each.shape[1]]) for each in inputs]
        ends = [each.get("ends", alone) for each, alone in zip(side, whole, strict=True)]
        filled = torch.stack([torch.cat([each, each.new_full((most + 2 - len(each),), tokens)]) for each in ends])
        rank, model = dist.get_rank(), self._of_torch
        stage = pipelining.PipelineStage(model, rank, RANKS, torch.device("cpu"))
        schedule = stock.Schedule1F1B(
            stage, len(inputs), loss_fn=lambda *given: loss_fn(*given) / len(inputs), scale_grads=False
        )

        def run() -> Tensor | None:
            model.zero_grad()
            losses: list[Tensor] = []
            arguments = (x,) if rank == 0 else ()
            schedule.step(*arguments, ends=filled, **({"target": y, "losses": losses} if rank == RANKS - 1 else {}))
            return torch.stack(losses).sum() if losses else None

        return run

    def close(self) -> None:
        for _, pipe in self._pipes.values():
            pipe.close()


def measured_costs(longest: int) -> Costs:
    """Of one block, by chunks of a V, for a sequence of half of the longest."""
    placement, microbatches = (0, 1, 1, 0), 2 * RANKS  # both ranks are busy, as in a step
    modules = [zbkern.convert(Blocks([chunk.blocks[0]])) for chunk in own_blocks(placement).values()]
    x = torch.randn(microbatches, longest // 2, WIDTH)
    y = torch.cat([x.sin(), torch.ones(*x.shape[:2], 1)], -1)
    options = ProfileOptions(repeats=2, slices=True)
    found = profile(modules, placement, loss_fn, x, y, microbatches, options=options)
    flat = found.per_chunk(len(placement))
    names = ("forward", "backward", "weight", "attention_forward", "attention_backward", "overhead")
    names += ("activation", "held", "carried", "carried_gradients")
    means = {name: statistics.mean(getattr(flat, name)) for name in names}
    means["communication"] = max(flat.communication)  # the middle edge joins chunks of one rank
    apart = statistics.mean(b + w - both for b, w, both in zip(flat.backward, flat.weight, flat.fused, strict=True))
    return Costs(**means, split_overhead=max(0.0, apart), tokens=found.tokens)


class Figures:
    """Of one distribution."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}  # of each batch, the median of its rounds
        self.peak_bytes: dict[str, int] = {}
        self.predicted: list[float] = []  # seconds of planned steps, and of planning them
        self.planning: list[float] = []


def run(batches: int, rounds: int, longest: int) -> dict[str, Any]:
    """On every rank: kind -> what Figures has."""
    runner, figures = Runner(), {}
    for kind, lengths_of in KINDS.items():
        costs = measured_costs(longest)  # anew: what else runs on this machine changes within minutes
        scale, generator, found = longest / lengths_of.longest, random.Random(100), Figures()
        share = lengths_of._replace(count=lengths_of.count * RANKS // STAGES)
        for _ in range(batches):
            lengths = share.draw(generator, scale)
            limit = MARGIN * usual_memory(lengths, longest, costs)
            start = time.process_time()
            plan = plan_batch(lengths, costs, RANKS, memory_limit=limit, multiple=MULTIPLE)
            found.planning.append(time.process_time() - start)
            found.predicted.append(plan.makespan / 1e3)
            steps = contestants(runner, lengths, longest, costs, plan)
            for name, seconds in compared(kind, steps, rounds).items():
                found.seconds.setdefault(name, []).append(seconds)
        for name, step in steps.items():
            with Allocated() as allocated:
                step()
            everywhere: list[Any] = [None] * RANKS
            dist.all_gather_object(everywhere, allocated.most)
            found.peak_bytes[name] = max(everywhere)
        figures[kind] = vars(found)
    runner.close()
    return figures


def contestants(
    runner: Runner, lengths: list[int], longest: int, costs: Costs, plan: BatchPlan
) -> dict[str, Callable[[], Tensor | None]]:
    sequences = [torch.randn(length, WIDTH) for length in lengths]
    dist.broadcast(together := torch.cat(sequences), 0)
    sequences = [*together.split(lengths)]
    steps = static_steps(lengths, longest, costs)
    ours = {**steps, PADDED: padded_step(lengths), PLANNED: Step([list(row) for row in plan.rows], plan.schedule)}
    found = {name: runner.ours(step, sequences) for name, step in ours.items()}
    if len(steps[USUAL].rows) < RANKS:
        return found  # torch's 1F1B takes no fewer microbatches than ranks
    return {**found, TORCH: runner.of_torch(steps[USUAL], sequences)}


def compared(kind: str, steps: dict[str, Callable[[], Tensor | None]], rounds: int) -> dict[str, float]:
    """Name -> seconds of a step, the median of rounds in which all take turns. Padding, many times as slow, has one.

    Raises AssertionError where the losses of a first round, which is not counted, differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            if name == PADDED and turn not in (0, rounds):
                continue
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - start)
            elif loss is not None:
                losses[name] = loss.item()
    if losses and max(losses.values()) > min(losses.values()) * (1 + 1e-4):
        raise AssertionError(f"{kind}: the losses of a batch differ: {losses}")
    return {name: statistics.median(found) for name, found in seconds.items()}


def best_static(seconds: dict[str, list[float]]) -> str:
    """The fastest with a fixed number of packs in all batches, of zbkern's own engine."""
    every = max(map(len, seconds.values()))
    others = (PLANNED, PADDED, TORCH)
    return min(
        (name for name in seconds if name not in others and len(seconds[name]) == every),
        key=lambda name: sum(seconds[name]),
    )


def show(kind: str, figures: dict[str, Any]) -> tuple[float, float]:
    """Prints a table; the planned steps' time in parts of the usual way's and of the best static one's."""
    seconds, peaks = figures["seconds"], figures["peak_bytes"]
    best, planned, every = best_static(seconds), sum(seconds[PLANNED]), len(seconds[PLANNED])
    rows = [
        (
            name,
            f"{sum(seconds[name]):.2f} s",
            f"{sum(seconds[name]) / sum(seconds[USUAL]):.3f}",
            f"{sum(seconds[name]) / sum(seconds[best]):.3f}",
            f"{peaks[name] / 1e6:.0f} MB" if name in peaks else "",
        )
        for name in sorted(seconds, key=lambda name: sum(seconds[name]))
        if len(seconds[name]) == every
    ]
    planning = statistics.median(figures["planning"])
    print(
        f"\n{kind}: {every} batches; measured {planned / sum(figures['predicted']):.2f} of predicted; to plan takes "
        f"{1e3 * planning:.0f} ms of one core, {planning * every / planned:.1%} of a step\n"
    )
    print(markdown_table(("steps", "time", "of the usual", "of the best static", "peak"), rows), flush=True)
    return planned / sum(seconds[USUAL]), planned / sum(seconds[best])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest sequence there may be")
    parser.add_argument("--simulate", action="store_true", help="no steps: 8 and 16 ranks, simulated")
    parser.add_argument("--sleep", type=float, help="eight ranks that sleep: seconds of a step without any wait")
    add_out(parser)
    arguments = parser.parse_args(argv)
    batches = arguments.batches
    if arguments.simulate:
        simulated(batches)
        return
    if arguments.sleep is not None:
        torch.set_num_threads(1)
        figures = slept(batches, arguments.sleep)
        print(f"\n{machine_line(environment())}\n{write_json('batches_asleep', figures, arguments.out)}")
        return
    figures = ranks.run(RANKS, run, batches, arguments.rounds, arguments.longest)
    last = []
    for kind, found in figures.items():
        usual, best = show(kind, found)
        last.append(f"{kind} {usual:.2f} {best:.2f}")
    print(f"\n{machine_line(environment())}\n{write_json('batches', figures, arguments.out)}")
    print(" ".join(last))


if __name__ == "__main__":
    main()
