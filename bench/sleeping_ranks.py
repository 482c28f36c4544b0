"""Planned and measured: every schedule on virtual ranks that sleep instead of computing, next to its simulation.

The ranks are threads of one process (`LocalTransport`), their layers sleep in F, B and W, and messages take as
long as the costs say. The difference to the simulated cost is then that of the engine: its loop, waiting and filling.
The gradients are checked: W must have run once for every microbatch.

    python -m bench.sleeping_ranks [--stages 32] [--microbatches 32] [--unit 0.2] [--only zb_h1 ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bench import ranks
from bench.report import add_out, write_json
from zbkern import wgrad
from zbkern.pipeline import Costs, Pipeline, Schedule, schedules, simulate
from zbkern.reporting import environment, machine_line, markdown_table

FORWARD, BACKWARD, WEIGHT, COMMUNICATION = 1.0, 1.0, 0.75, 0.1  # in units of --unit seconds, of all chunks of a rank
NAMES = ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zb_v", "v_half", "v_min"]
NAMES += ["one_f_one_b_v", "dualpipe_v", "zb_h1 eager", "zb_v eager"]


class Sleep(torch.autograd.Function):
    """The identity; F, B and W sleep, and W is deferred inside `defer`. The weight's gradient is the sum of dy."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, seconds: Sequence[float]) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight, (_, backward, length) = ctx.weight, ctx.seconds
        time.sleep(backward)
        if wgrad.current() is None:  # BW
            time.sleep(length)
            return dy, dy.sum().view(1), None

        def launch(segments: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor], accumulate: bool) -> None:
            time.sleep(length)
            total = sum(dy.sum() for (dy,) in segments)
            outputs[0].add_(total) if accumulate else outputs[0].fill_(total)

        queue, key = wgrad.current()
        queue.add(wgrad.WGradTask(launch, (dy,), (weight,)), key)
        return dy, None, None


class Chunk(nn.Module):
    """`durations`: of F, B and W of each microbatch in turn; without them nothing sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.durations: list[Sequence[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self.durations.pop(0) if self.durations else (0.0, 0.0, 0.0))


def measure(schedule: Schedule, fill: str, unit: float) -> tuple[float, float]:
    """(simulated, measured) cost in seconds, of a step after one that does not sleep.

    Eager filling depends on what has arrived. With equal costs messages often arrive exactly when needed, which never
    happens on a real clock: so its simulated cost is the mean over five samples in which passes vary by 0.1%.
    """
    seconds = [unit * share / schedule.chunks for share in (FORWARD, BACKWARD, WEIGHT)]
    travel = unit * COMMUNICATION
    ring = ranks.delayed_ring(schedule.ranks, lambda *_: travel)

    def step(rank: int) -> float:
        modules = [Chunk() for _ in schedule.chunks_of(rank)]
        with Pipeline(modules, schedule, lambda y, _: y.sum(), ring[rank], fill=fill, timeout=60) as pipe:
            inputs = torch.ones(schedule.microbatches, 1, requires_grad=True)
            pipe.step(inputs, inputs)
            for module in modules:
                module.durations = [seconds] * schedule.microbatches
            pipe.step(inputs, inputs)
            timeline = pipe.last.gather_timeline()
        for module in modules:
            torch.testing.assert_close(module.weight.grad, torch.full((1,), 2.0))
        return timeline.cost

    found = ranks.run_in_threads([ring], step)
    costs = Costs(*seconds, communication=travel)
    samples = [{"jitter": 0.001, "seed": sample} for sample in range(5)] if fill == "eager" else [{}]
    return statistics.mean(simulate(schedule, costs, fill=fill, **sample).cost for sample in samples), found


def every_schedule(
    stages: int, microbatches: int, unit: float, only: Sequence[str] | None
) -> dict[str, tuple[float, float]]:
    """Name -> (simulated, measured) cost."""
    found = {}
    for name in only or NAMES:
        schedule = getattr(schedules, name.split()[0])(stages, microbatches)
        found[name] = measure(schedule, "eager" if "eager" in name else "planned", unit)
    rows = [(name, f"{a:.3f} s", f"{b:.3f} s", f"{b / a:.3f}") for name, (a, b) in found.items()]
    print(markdown_table(("schedule", "simulated", "measured", "ratio"), rows))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--unit", type=float, default=0.2, help="seconds of F of one microbatch on one rank")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help="of: " + ", ".join(NAMES))
    add_out(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    size = (arguments.stages, arguments.microbatches, arguments.unit)
    print(f"\n{size[0]} virtual ranks, {size[1]} microbatches, F of {size[2]:g} s\n")
    figures = every_schedule(*size, arguments.only)
    print(f"\n{machine_line(environment())}\n{write_json('sleeping_ranks', figures, arguments.out)}")


if __name__ == "__main__":
    main()
