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

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import engines, ranks
from bench.engines import LAYERS, LAYERS_ALONE, plain_step
from bench.report import add_out, write_json
from zbkern.pipeline import Schedule, schedules
from zbkern.reporting import environment, machine_line, markdown_table

RANKS, BLOCKS, WIDTH, TOKENS, STEPS = 2, 8, 768, 256, 3
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


def run(microbatches: int, rounds: int, only: list[str]) -> dict[str, list[float]]:
    """On every rank: name -> seconds per step of every round."""
    torch.manual_seed(0)
    model = [Block() for _ in range(BLOCKS)]
    x, y = torch.randn(microbatches * TOKENS, WIDTH), torch.randn(microbatches * TOKENS, WIDTH)

    converted = [zbkern.convert(copy.deepcopy(block)) for block in model]
    plain_step(model, x, y, microbatches)
    contestants = []
    for name, schedule, fill in our_schedules(microbatches):
        if not only or name in only:
            contestants.append(engines.ours(name, schedule, model, x, y, fill=fill))
    for name, variants in TORCH.items():
        for variant in variants if not only or name in only else []:
            contestants.append(engines.torchs(name, model, x, y, microbatches, variant))
    for contestant in contestants:
        engines.check(contestant, model)
    entries = [
        ("one process", lambda: plain_step(model, x, y, microbatches)),
        ("one process" + LAYERS, lambda: plain_step(converted, x, y, microbatches)),
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
