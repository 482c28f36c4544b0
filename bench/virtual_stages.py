"""What is planned and what runs: every schedule on virtual ranks whose compute sleeps, next to its simulation.

The ranks are threads of one process (`LocalTransport`), their compute is a sleep in F, B and W, and messages travel for
as long as the costs say. What then differs from the simulated cost is the engine's own: its loop, its waiting and its
filling. The gradients are counted: every F, B and W must have run once for every microbatch.

    python -m bench.virtual_stages [--stages 32] [--microbatches 64] [--unit 0.1] [--only zb_h1 ...]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bench.report import environment, table, write_json
from zbkern import wgrad
from zbkern.pipeline import Costs, Pipeline, Schedule, schedules, simulate
from zbkern.pipeline.local_transport import LocalTransport

FORWARD, BACKWARD, WEIGHT, COMMUNICATION = 1.0, 1.0, 0.75, 0.1


class Sleep(torch.autograd.Function):
    """The identity; F, B and W take as long as they are told, and W waits where a queue is deferring."""

    @staticmethod
    def forward(ctx, x: Tensor, chunk: Chunk) -> Tensor:
        ctx.chunk = chunk
        time.sleep(chunk.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        chunk = ctx.chunk
        time.sleep(chunk.backward_seconds)
        queue, key = wgrad.current()
        queue.add(wgrad.WGradTask(chunk.sleep_and_add, (dy,), (chunk.weight,)), key)
        return dy, None


class Chunk(nn.Module):
    """A chunk of the model whose weight gradient is the sum of its output gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_seconds = self.backward_seconds = self.weight_seconds = 0.0
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self)

    def sleep_and_add(
        self, segments: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor | None], accumulate: bool
    ) -> None:
        time.sleep(self.weight_seconds * len(segments))
        total = sum(dy.sum() for (dy,) in segments)
        outputs[0].add_(total) if accumulate else outputs[0].fill_(total)


def measure(schedule: Schedule, fill: str, unit: float) -> tuple[float, float]:
    """(simulated, measured) cost in seconds, of a step after one that does not sleep."""
    seconds = [unit * share / schedule.chunks for share in (FORWARD, BACKWARD, WEIGHT)]
    travel = unit * COMMUNICATION
    transports = LocalTransport.ring(schedule.stages, delay=lambda *_: travel)
    costs: list[float] = []
    errors: list[BaseException] = []

    def rank_loop(transport: LocalTransport) -> None:
        modules = [Chunk() for _ in schedule.chunks_of(transport.rank)]
        try:
            with Pipeline(modules, schedule, lambda y, _: y.sum(), transport, fill=fill, timeout=60) as pipe:
                inputs = torch.ones(schedule.microbatches, 1, requires_grad=True)
                pipe.step(inputs, inputs)
                for module in modules:
                    module.forward_seconds, module.backward_seconds, module.weight_seconds = seconds
                pipe.step(inputs, inputs)
                timeline = pipe.gather_timeline()
            for module in modules:
                torch.testing.assert_close(module.weight.grad, torch.full((1,), 2.0))
            if transport.rank == 0:
                costs.append(timeline.cost)
        except BaseException as error:
            errors.append(error)
            transport.fail(f"rank {transport.rank}: {error}")

    threads = [threading.Thread(target=rank_loop, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    simulated = simulate(schedule, Costs(*seconds, communication=travel), fill=fill)
    return simulated.cost, costs[0]


def contestants(stages: int, microbatches: int) -> dict[str, tuple[Callable[[], Schedule], str]]:
    """Name -> (what builds the schedule, how W is filled)."""
    names = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zb_v", "v_half")
    names += ("v_min", "one_f_one_b_v", "dualpipe_v")
    found = {name: (lambda name=name: getattr(schedules, name)(stages, microbatches), "planned") for name in names}
    found["zb_h1 eager"] = (lambda: schedules.zb_h1(stages, microbatches), "eager")
    found["zb_v eager"] = (lambda: schedules.zb_v(stages, microbatches), "eager")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of one F")
    parser.add_argument("--only", nargs="+", default=[], help="names of contestants, such as zb_h2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, figures = [], {}
    for name, (build, fill) in contestants(arguments.stages, arguments.microbatches).items():
        if arguments.only and name not in arguments.only:
            continue
        simulated, measured = measure(build(), fill, arguments.unit)
        rows.append((name, f"{simulated:.3f} s", f"{measured:.3f} s", f"{measured / simulated:.3f}"))
        figures[name] = {"simulated": simulated, "measured": measured}
        print(" ".join(rows[-1]), flush=True)
    print(f"\n{arguments.stages} virtual ranks, {arguments.microbatches} microbatches, F of {arguments.unit:g} s\n")
    print(table(("schedule", "simulated", "measured", "ratio"), rows))
    print(f"\n{environment()}\nwritten to {write_json('virtual_stages', figures)}")


if __name__ == "__main__":
    main()
