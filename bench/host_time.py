"""What an action costs the host: engines on tiny stages, where next to nothing is computed; ours and torch's.

Every chunk is one Linear of 8 features on one row, so that what is measured is the engine's loop, autograd and, with
two ranks, messages through gloo. "plain" is the same work in a loop without any engine. Every contestant's gradients
are compared with plain backward() first.

    python -m bench.host_time [--microbatches 64] [--rounds 15]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import ranks
from bench.report import add_out, write_json
from zbkern.pipeline import Pipeline, Schedule, schedules
from zbkern.reporting import environment, machine_line, markdown_table

WIDTH = 8


class Contestant(NamedTuple):
    """One engine with one schedule. actions: how many F, B, W and BW this rank runs in a step."""

    name: str
    step: Callable[[], Any]
    actions: int
    layers: dict[int, nn.Module]
    close: Callable[[], None] | None = None


def our_contestant(
    name: str, schedule: Schedule, model: list[nn.Module], x: Tensor, y: Tensor, **options: Any
) -> Contestant:
    rank = dist.get_rank()
    layers = {chunk: zbkern.convert(copy.deepcopy(model[chunk])) for chunk in schedule.chunks_of(rank)}
    pipe = Pipeline(layers.values(), schedule, nn.functional.mse_loss, **options)
    return Contestant(f"zbkern {name}", lambda: pipe.step(x, y), len(schedule.actions[rank]), layers, pipe.close)


def torch_contestant(
    kind: str, placement: tuple[int, ...], passes: int, model: list[nn.Module], x: Tensor, y: Tensor, microbatches: int
) -> Contestant:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules as stock

    rank, count = dist.get_rank(), len(placement)
    layers = {chunk: copy.deepcopy(model[chunk]) for chunk in range(count) if placement[chunk] == rank}
    stages = [pipelining.PipelineStage(part, chunk, count, torch.device("cpu")) for chunk, part in layers.items()]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) / microbatches

    single = count == dist.get_world_size()
    schedule = getattr(stock, kind)(stages[0] if single else stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    arguments = (x,) if placement[0] == rank else ()
    keywords = {"target": y, "losses": []} if placement[-1] == rank else {}
    return Contestant(
        f"torch {kind.removeprefix('Schedule')}",
        lambda: schedule.step(*arguments, **keywords),
        passes * microbatches * len(layers),
        layers,
    )


def plain_step(layers: list[nn.Module], x: Tensor, y: Tensor, microbatches: int) -> None:
    for inputs, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        for layer in layers:
            inputs = layer(inputs)
        (nn.functional.mse_loss(inputs, targets) / microbatches).backward()


def contestants(model: list[nn.Module], microbatches: int) -> list[Contestant]:
    size = dist.get_world_size()
    x, y = torch.randn(2, microbatches, WIDTH)
    line, vee = tuple(range(size)), (*range(size), *reversed(range(size)))
    found = []
    for name, build in (("1F1B", schedules.one_f_one_b), ("ZB-H1", schedules.zb_h1), ("ZB-V", schedules.zb_v)):
        found.append(our_contestant(name, build(size, microbatches), model, x, y))
    found.append(our_contestant("ZB-H1, recorded", schedules.zb_h1(size, microbatches), model, x, y, record=True))
    found.append(torch_contestant("Schedule1F1B", line, 2, model, x, y, microbatches))
    found.append(torch_contestant("ScheduleZBVZeroBubble", vee, 3, model, x, y, microbatches))
    for contestant in found:
        chunks = 2 * size if "V" in contestant.name else size
        check(contestant, model[:chunks], x, y, microbatches)
    if size == 1:
        for name, layers in (("plain, one layer", model[:1]), ("plain, two layers", model[:2])):
            step = lambda layers=layers: plain_step(layers, x, y, microbatches)  # noqa: E731
            found.append(Contestant(name, step, 2 * microbatches * len(layers), {}))
    return found


def check(contestant: Contestant, model: list[nn.Module], x: Tensor, y: Tensor, microbatches: int) -> None:
    """One step's gradients against plain backward(); raises when they differ by more than fp32 rounding."""
    expected = copy.deepcopy(model)
    plain_step(expected, x, y, microbatches)
    contestant.step()
    for chunk, layer in contestant.layers.items():
        torch.testing.assert_close(layer.weight.grad, expected[chunk].weight.grad, rtol=1e-4, atol=1e-7)


def run(microbatches: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: name -> microseconds per action of every round."""
    torch.manual_seed(0)
    entries = contestants([nn.Linear(WIDTH, WIDTH) for _ in range(2 * dist.get_world_size())], microbatches)
    times: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for _ in range(rounds):
        for entry in entries:
            dist.barrier()
            start = time.perf_counter()
            entry.step()
            times[entry.name].append((time.perf_counter() - start) * 1e6 / entry.actions)
    for entry in entries:
        if entry.close is not None:
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
