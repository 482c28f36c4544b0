"""Host time of an action: our engine and torch's on tiny stages, where almost nothing is computed.

Every chunk is one Linear of 8 features on one row, so that what is measured is the engine's loop, autograd and, with
two ranks, messages through gloo. "plain" is the same work in a loop without any engine. Every contestant's gradients
are compared with plain backward() first.

    python -m bench.host_time [--microbatches 64] [--rounds 15]
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from bench import engines, ranks
from bench.engines import Contestant, plain_step
from bench.report import add_out, write_json
from zbkern.pipeline import StepOptions, schedules
from zbkern.reporting import environment, machine_line, markdown_table

WIDTH = 8


def contestants(model: list[nn.Module], microbatches: int) -> list[Contestant]:
    size = dist.get_world_size()
    x, y = torch.randn(2, microbatches, WIDTH)
    line, vee = model[:size], model[: 2 * size]
    h1, recorded = schedules.zb_h1(size, microbatches), StepOptions(record=True)
    flat = [
        engines.ours("1F1B", schedules.one_f_one_b(size, microbatches), line, x, y),
        engines.ours("ZB-H1", h1, line, x, y),
        engines.ours("ZB-H1, recorded", h1, line, x, y, options=recorded),
        engines.torchs("1F1B", line, x, y, microbatches),
    ]
    folded = [
        engines.ours("ZB-V", schedules.zb_v(size, microbatches), vee, x, y),
        engines.torchs("ZBVZeroBubble", vee, x, y, microbatches),
    ]
    for layers, found in ((line, flat), (vee, folded)):
        expected = copy.deepcopy(layers)
        plain_step(expected, x, y, microbatches)
        for contestant in found:
            engines.check(contestant, expected)
    plain = []
    if size == 1:
        for name, layers in (("plain, one layer", model[:1]), ("plain, two layers", model[:2])):
            step = lambda layers=layers: plain_step(layers, x, y, microbatches)  # noqa: E731
            plain.append(Contestant(name, step, {}, 2 * microbatches * len(layers)))
    return [*flat, *folded, *plain]


def run(microbatches: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: name -> microseconds per action of every round."""
    torch.manual_seed(0)
    entries = contestants([nn.Linear(WIDTH, WIDTH) for _ in range(2 * dist.get_world_size())], microbatches)
    times: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for _ in range(rounds):
        for entry in entries:
            gc.collect()  # else it pays for what the one before has left
            dist.barrier()
            start = time.perf_counter()
            entry.step()
            times[entry.name].append((time.perf_counter() - start) * 1e6 / entry.actions)
    for entry in entries:
        entry.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    add_out(parser)
    arguments = parser.parse_args()
    figures = {}
    for size in (1, 2):
        times = ranks.run(size, run, arguments.microbatches, arguments.rounds)
        figures[f"{size} ranks"] = times
        rows = [(name, f"{statistics.median(each):.1f}") for name, each in times.items()]
        print(f"\n{size} rank{'s' * (size > 1)}, {arguments.microbatches} microbatches, gradients equal backward()\n")
        print(markdown_table(("contestant", "us per action"), rows), flush=True)
    print(f"\n{machine_line(environment())}\n{write_json('host_time', figures, arguments.out)}")


if __name__ == "__main__":
    main()
