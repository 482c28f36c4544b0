"""Rehearsed steps beside real ones: each rank of a pipeline alone, and all of them together as gloo processes.

The blocks of bench.pipeline, two for each rank, microbatches of 256 tokens, AdamW, one thread per rank. Every schedule
runs as a pipeline, several steps in a row, and is rehearsed by every process at the same time, in turns. Where ranks
have no core each, blocks sleep for most of a pass, as a host does whose GPU computes: ranks that share a core compute
faster while others wait. What messages take is measured first, by messages of the pipelines' size from each rank to
the next: how long they are on their way, and how much processor time either rank spends on one while it computes.
Memory is what microbatches hold at most, with weights, gradients and states. The last line has the worst of all
schedules: rehearsed over real.

    python -m bench.rehearse [--ranks 2] [--microbatches 8] [--rounds 4] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import ranks
from bench.pipeline import TOKENS, WIDTH, Block
from bench.report import add_out, write_json
from bench.sleeping_ranks import Sleep
from zbkern.pipeline import Pipeline, Schedule, StepOptions, schedules
from zbkern.pipeline.rehearsal.rehearse import peak_bytes, rehearse
from zbkern.pipeline.runtime.measure.links import slowest_link
from zbkern.pipeline.transport.base import Note
from zbkern.pipeline.transport.distributed import DistributedTransport
from zbkern.reporting import environment, machine_line, markdown_table

STEPS = 2  # in a row, of a pipeline and of a rehearsal
MESSAGES = 20  # to measure by
NARROW, SLEEP = 64, (0.010, 0.010, 0.008)  # of blocks that sleep: their width, and seconds of F, B and W
NAMES = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "interleaved")


class Sleeping(nn.Module):
    """Computes little, and sleeps: a pass of another process on the same core makes it no longer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sum = nn.Linear(NARROW, NARROW), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x + nn.functional.gelu(self.linear(x)), self.sum, SLEEP)


class Link(NamedTuple):
    """What `rehearse` takes: seconds, and bytes per second."""

    latency: float
    bandwidth: float
    host_bandwidth: float


def link(block: nn.Module, message: Tensor) -> Link:
    """Of messages as large as this one, an input of the block; on every rank."""
    transport = DistributedTransport(None)
    size = message.numel() * message.element_size()
    ahead = slowest_link(transport, message.device, 60.0, size)
    rates = [size / _processor_time(transport, block, message, turn) for turn in range(3)]
    found = Link(ahead.latency / 1e3, ahead.bandwidth * 1e3, median(transport.gather(median(rates))))
    transport.close()
    return found


@torch.no_grad()
def _processor_time(transport: DistributedTransport, block: nn.Module, message: Tensor, turn: int) -> float:
    """Of all threads of this process for a message that it sends or receives, while passes of a block run.

    Each turn sends one to the next rank, and receives one from the last.
    """
    transport.begin("link")
    sent = [message.clone() for _ in range(MESSAGES)]  # none is in a cache when its turn comes
    start, passes = time.process_time(), 0.0
    for at, each in enumerate(sent):
        tag = Note(turn * MESSAGES + at, "a message")
        transport.send((transport.rank + 1) % transport.size, tag, each)
        begun = time.thread_time()
        block(message)  # behind which the other message has come: to wait for it takes processor time, too
        passes += time.thread_time() - begun
        transport.receive((transport.rank - 1) % transport.size, tag, 60.0)
    return (time.process_time() - start - passes) / (2 * MESSAGES)


def adam(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for chunk in pipe.modules.values() for each in chunk.parameters()], lr=1e-3)


def run(names: list[str], block: type[nn.Module], microbatches: int, rounds: int) -> list[dict[str, Any]]:
    """On every rank: by schedule, seconds of a step and bytes of the fullest rank, rehearsed and real."""
    torch.manual_seed(0)
    model = [block() for _ in range(2 * dist.get_world_size())]
    shape = microbatches * TOKENS, WIDTH if block is Block else NARROW
    batch = torch.randn(shape), torch.randn(shape)
    rows, ahead = [], link(model[0], batch[0][:TOKENS])
    for name in names:
        schedule = getattr(schedules, name)(dist.get_world_size(), microbatches)
        each = len(model) // len(schedule.placement)

        def chunks_of(rank: int, schedule: Schedule = schedule, each: int = each) -> list[nn.Module]:
            parts = [model[chunk * each : (chunk + 1) * each] for chunk in schedule.chunks_of(rank)]
            return [zbkern.convert(nn.Sequential(*copy.deepcopy(part))) for part in parts]

        rows.append({"schedule": name, **_compared(schedule, chunks_of, batch, rounds, ahead), **ahead._asdict()})
    return rows


def _compared(
    schedule: Schedule, chunks_of: Callable[[int], list[nn.Module]], batch: tuple[Any, Any], rounds: int, ahead: Link
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
            step_of = chunks_of, schedule, nn.functional.mse_loss, *batch
            found = rehearse(*step_of, optimizer=adam, repeats=STEPS, **ahead._asdict())
            rehearsed.append(found.seconds)
            memory.append(max(rank.peak_bytes for rank in found.ranks.values()))
    return {
        "real_ms": 1e3 * median(real),
        "rehearsed_ms": 1e3 * median(rehearsed),
        "step": median(ours / theirs for ours, theirs in zip(rehearsed, real, strict=True)),
        "memory": median(memory) / held,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[*NAMES], choices=NAMES)
    add_out(parser)
    arguments = parser.parse_args(argv)
    block = Block if arguments.ranks <= len(os.sched_getaffinity(0)) else Sleeping
    rows = ranks.run(arguments.ranks, run, arguments.only, block, arguments.microbatches, arguments.rounds)
    forms = {"real_ms": ".0f", "rehearsed_ms": ".0f", "step": ".2f", "memory": ".2f"}
    cells = [(row["schedule"], *(format(row[name], form) for name, form in forms.items())) for row in rows]
    header = ("schedule", "real step, ms", "rehearsed, ms", "rehearsed / real", "memory, rehearsed / real")
    said = f"{machine_line(environment())}; {arguments.ranks} ranks{', sleeping' * (block is Sleeping)}"
    size = TOKENS * (WIDTH if block is Block else NARROW) * 4
    way, processor = rows[0]["latency"] + size / rows[0]["bandwidth"], size / rows[0]["host_bandwidth"]
    said += f"\na message: {size} bytes, {1e3 * way:.2f} ms on its way, {1e3 * processor:.2f} ms of either processor"
    print(f"{said}\n\n{markdown_table(header, cells)}\n")
    print(write_json("rehearse", rows, arguments.out))
    step, memory = (max((row[name] for row in rows), key=lambda ratio: abs(ratio - 1)) for name in ("step", "memory"))
    print(f"step {step:.2f} memory {memory:.2f}")


if __name__ == "__main__":
    main()
