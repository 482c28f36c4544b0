"""Rehearsed steps beside real ones: each rank of a pipeline alone, and all of them together as gloo processes.

The blocks of bench.pipeline, microbatches of 256 tokens, AdamW, one thread per rank. Every schedule runs as a pipeline,
several steps in a row, and is rehearsed by every process at the same time, in turns. Memory is what microbatches hold
at most, with weights, gradients and states. The last line has the worst of all schedules: rehearsed over real.

    python -m bench.rehearse [--ranks 2] [--microbatches 8] [--rounds 4] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zbkern
from bench import ranks
from bench.pipeline import BLOCKS, TOKENS, WIDTH, Block
from bench.report import add_out, write_json
from zbkern.pipeline import Pipeline, Schedule, StepOptions, schedules
from zbkern.pipeline.rehearsal.rehearse import peak_bytes, rehearse
from zbkern.reporting import environment, machine_line, markdown_table

STEPS = 4
NAMES = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "interleaved")


def adam(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for chunk in pipe.modules.values() for each in chunk.parameters()], lr=1e-3)


def run(names: list[str], microbatches: int, rounds: int) -> list[dict[str, Any]]:
    """On every rank: by schedule, seconds of a step and bytes of the fullest rank, rehearsed and real."""
    torch.manual_seed(0)
    model = [Block() for _ in range(BLOCKS)]
    batch = torch.randn(microbatches * TOKENS, WIDTH), torch.randn(microbatches * TOKENS, WIDTH)
    rows = []
    for name in names:
        schedule = getattr(schedules, name)(dist.get_world_size(), microbatches)
        each = BLOCKS // len(schedule.placement)

        def chunks_of(rank: int, schedule: Schedule = schedule, each: int = each) -> list[nn.Module]:
            parts = [model[chunk * each : (chunk + 1) * each] for chunk in schedule.chunks_of(rank)]
            return [zbkern.convert(nn.Sequential(*copy.deepcopy(part))) for part in parts]

        rows.append({"schedule": name, **_compared(schedule, chunks_of, batch, rounds)})
    return rows


def _compared(
    schedule: Schedule, chunks_of: Callable[[int], list[nn.Module]], batch: tuple[Any, Any], rounds: int
) -> dict[str, Any]:
    real, rehearsed, memory = [], [], []
    with Pipeline(chunks_of(dist.get_rank()), schedule, nn.functional.mse_loss) as pipe:
        optimizer = adam(pipe)

        def step() -> None:
            pipe.step(*batch)
            optimizer.step()
            optimizer.zero_grad()

        held = max(pipe.gather(peak_bytes(pipe, optimizer, step, StepOptions())))
        for _ in range(rounds):
            step()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            real.append((time.perf_counter() - start) / STEPS)
            found = rehearse(chunks_of, schedule, nn.functional.mse_loss, *batch, optimizer=adam, repeats=STEPS)
            rehearsed.append(found.seconds)
            memory.append(max(rank.peak_bytes for rank in found.ranks.values()))
    return {
        "real_ms": 1e3 * median(real),
        "rehearsed_ms": 1e3 * median(rehearsed),
        "step": median(ours / theirs for ours, theirs in zip(rehearsed, real, strict=True)),
        "memory": median(memory) / held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[*NAMES], choices=NAMES)
    add_out(parser)
    arguments = parser.parse_args()
    rows = ranks.run(arguments.ranks, run, arguments.only, arguments.microbatches, arguments.rounds)
    forms = {"real_ms": ".0f", "rehearsed_ms": ".0f", "step": ".2f", "memory": ".2f"}
    cells = [(row["schedule"], *(format(row[name], form) for name, form in forms.items())) for row in rows]
    header = ("schedule", "real step, ms", "rehearsed, ms", "rehearsed / real", "memory, rehearsed / real")
    print(f"{machine_line(environment())}\n\n{markdown_table(header, cells)}\n")
    print(write_json("rehearse", rows, arguments.out))
    step, memory = (max((row[name] for row in rows), key=lambda ratio: abs(ratio - 1)) for name in ("step", "memory"))
    print(f"step {step:.2f} memory {memory:.2f}")


if __name__ == "__main__":
    main()
