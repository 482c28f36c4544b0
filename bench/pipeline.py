"""Pipelines on two CPU processes: ours and torch.distributed.pipelining's on the same modules, in one interleaved run.

Eight blocks of LayerNorm + MLP 768/3072, microbatches of 256 tokens, one thread per rank, gloo; several steps in a row
with no barrier between them, as in training. "Perfect" is half the time that one process needs for everything while the
other core does the same, once with plain torch and once with zbkern's layers: the second excludes the gain from the
layers themselves. Two of torch's schedules run with zbkern's stage and layers, too, and its ZBV with zbkern's layers in
torch's own stage. Every contestant's gradients are compared with plain backward() first.

    python -m bench.pipeline [--microbatches 4 8] [--rounds 4] [--only zb_h2 ...]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import ranks
from bench.report import add_out, write_json
from zbkern.pipeline import Pipeline, Schedule, schedules
from zbkern.reporting import environment, machine_line, markdown_table

RANKS, BLOCKS, WIDTH, TOKENS, STEPS = 2, 8, 768, 256, 3
LAYERS = " with zbkern's layers"
LAYERS_ALONE = LAYERS + " in torch's stage"
TORCH = {  # its schedules, and what each runs with: nothing of zbkern's, its layers in its stage, its layers alone
    "GPipe": [""],
    "1F1B": ["", LAYERS],
    "Interleaved1F1B": [""],
    "InterleavedZeroBubble": [""],
    "ZBVZeroBubble": ["", LAYERS, LAYERS_ALONE],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Contestant:
    """One engine with one schedule: `step` runs a step on this rank, `blocks` maps block index to this rank's copy."""

    def __init__(self, name: str, step: Callable[[], None], blocks: dict[int, nn.Module], close: Any = None) -> None:
        self.name, self.step, self.blocks, self.close = name, step, blocks, close


def our_contestant(name: str, schedule: Schedule, fill: str, model: nn.Sequential, x: Tensor, y: Tensor) -> Contestant:
    rank, per_chunk = dist.get_rank(), BLOCKS // len(schedule.placement)
    blocks: dict[int, nn.Module] = {}
    chunks = []
    for chunk in schedule.chunks_of(rank):
        part = zbkern.convert(copy.deepcopy(model[chunk * per_chunk : (chunk + 1) * per_chunk]))
        blocks.update({chunk * per_chunk + i: block for i, block in enumerate(part)})
        chunks.append(part)
    pipe = Pipeline(chunks, schedule, nn.functional.mse_loss, fill=fill)
    inputs = x if schedule.placement[0] == rank else None
    targets = y if schedule.placement[-1] == rank else None
    return Contestant(f"zbkern {name}", lambda: pipe.step(inputs, targets), blocks, pipe.close)


def torch_contestant(
    kind: str, variant: str, model: nn.Sequential, x: Tensor, y: Tensor, microbatches: int
) -> Contestant:
    """torch's engine with what `variant` names of zbkern's; see TORCH."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules as stock

    from zbkern.pipeline import torch_pipelining

    rank, stage = dist.get_rank(), (torch_pipelining if variant == LAYERS else pipelining).PipelineStage
    placement = {"ScheduleGPipe": (0, 1), "Schedule1F1B": (0, 1), "ScheduleZBVZeroBubble": (0, 1, 1, 0)}
    ranks = placement.get(kind, (0, 1, 0, 1))
    per_chunk = BLOCKS // len(ranks)
    blocks: dict[int, nn.Module] = {}
    stages = []
    for chunk in (chunk for chunk, home in enumerate(ranks) if home == rank):
        part = copy.deepcopy(model[chunk * per_chunk : (chunk + 1) * per_chunk])
        blocks.update({chunk * per_chunk + i: block for i, block in enumerate(part)})
        stages.append(stage(zbkern.convert(part) if variant else part, chunk, len(ranks), torch.device("cpu")))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:  # the mean over microbatches: no scaling pass after it
        return nn.functional.mse_loss(output, target) / microbatches

    single = len(ranks) == RANKS
    schedule = getattr(stock, kind)(stages[0] if single else stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    arguments = (x,) if ranks[0] == rank else ()
    keywords = {"target": y, "losses": []} if ranks[-1] == rank else {}
    name = f"torch {kind.removeprefix('Schedule')}{variant}"
    return Contestant(name, lambda: schedule.step(*arguments, **keywords), blocks)


def check(contestant: Contestant, model: nn.Sequential) -> None:
    """One step's gradients against plain backward(); raises when they differ by more than fp32 rounding."""
    contestant.step()
    for index, block in contestant.blocks.items():
        for (name, ours), plain in zip(block.named_parameters(), model[index].parameters(), strict=True):
            torch.testing.assert_close(
                ours.grad, plain.grad, rtol=1e-4, atol=1e-7, msg=f"{contestant.name} {index}.{name}"
            )


def run(microbatches: int, rounds: int, only: list[str]) -> dict[str, list[float]]:
    """On every rank: name -> seconds per step of every round."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x, y = torch.randn(microbatches * TOKENS, WIDTH), torch.randn(microbatches * TOKENS, WIDTH)

    def one_process(model: nn.Module) -> None:
        for inputs, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (nn.functional.mse_loss(model(inputs), targets) / microbatches).backward()

    one_process(model)
    converted = zbkern.convert(copy.deepcopy(model))
    contestants = []
    for name, schedule, fill in our_schedules(microbatches):
        if not only or name in only:
            contestants.append(our_contestant(name, schedule, fill, model, x, y))
    for kind, variants in TORCH.items():
        for variant in variants if not only or kind in only else []:
            contestants.append(torch_contestant(f"Schedule{kind}", variant, model, x, y, microbatches))
    for contestant in contestants:
        check(contestant, model)
    entries = [
        ("one process", lambda: one_process(model)),
        ("one process" + LAYERS, lambda: one_process(converted)),
        *((c.name, c.step) for c in contestants),
    ]
    times: dict[str, list[float]] = {name: [] for name, _ in entries}
    for done in range(rounds):
        for name, step in entries:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            times[name].append((time.perf_counter() - start) / STEPS)
        if dist.get_rank() == 0 and sys.stderr.isatty():
            print(f"\r{microbatches} microbatches: round {done + 1} of {rounds}", end="", file=sys.stderr)
    for contestant in contestants:
        if contestant.close:
            contestant.close()
    return times


def our_schedules(m: int) -> list[tuple[str, Schedule, str]]:
    return [
        ("gpipe", schedules.gpipe(RANKS, m), "planned"),
        ("one_f_one_b", schedules.one_f_one_b(RANKS, m), "planned"),
        ("zb_h1", schedules.zb_h1(RANKS, m), "planned"),
        ("zb_h2", schedules.zb_h2(RANKS, m), "planned"),
        ("zb_h2 eager", schedules.zb_h2(RANKS, m), "eager"),
        ("zb_v", schedules.zb_v(RANKS, m), "planned"),
        ("zb_v eager", schedules.zb_v(RANKS, m), "eager"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[], help="schedules, such as zb_h2 or 1F1B")
    add_out(parser)
    arguments = parser.parse_args()
    figures = {}
    for microbatches in arguments.microbatches:
        times = ranks.run(RANKS, run, microbatches, arguments.rounds, arguments.only)
        single = [times.pop("one process" + variant) for variant in ("", LAYERS)]
        perfect = [statistics.median(seconds) / 2 * 1e3 for seconds in single]
        rows = []
        for name, seconds in sorted(times.items(), key=lambda item: statistics.median(item[1])):
            ratios = [[one / 2 / own for one, own in zip(each, seconds, strict=True)] for each in single]
            medians = [f"{statistics.median(each):.3f}" for each in ratios]
            rows.append((name, f"{statistics.median(seconds) * 1e3:.0f} ms", *medians))
            figures[f"{microbatches} microbatches, {name}"] = {
                "seconds": seconds,
                "of_perfect": ratios[0],
                "of_perfect_with_layers": ratios[1],
            }
        print(
            f"\n{microbatches} microbatches, perfect {perfect[0]:.0f} ms a step, {perfect[1]:.0f} ms{LAYERS}; "
            "gradients equal plain backward()\n"
        )
        print(markdown_table(("contestant", "step", "of perfect", LAYERS.strip()), rows), flush=True)
    print(f"\n{machine_line(environment())}\n{write_json('pipeline', figures, arguments.out)}")


if __name__ == "__main__":
    main()
