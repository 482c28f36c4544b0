"""A pipeline on one GPU: four stages on disjoint groups of its multiprocessors, planned and measured.

Each stage is a thread of this process whose stream has 32 multiprocessors of its own, so bubbles, kernel launches and
queues are real. L2, memory and power are shared: what that costs is measured first, with one to four groups busy. Costs
are those of a step with all groups busy; every schedule is simulated with them, next to its measured step. Before any
figure, every schedule's gradients are compared with those of a plain loop.

    CUDA_DEVICE_MAX_CONNECTIONS=32 python -m bench.virtual_stages [--rounds 9] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import zbkern
from bench import partitions, ranks, report
from build_tools.kernels.jobs import name_kernels
from zbkern.pipeline import Costs, Pipeline, Schedule, draw, plan, schedules, simulate
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.simulation import step_costs
from zbkern.planning.simulation.timeline import Timeline
from zbkern.reporting import markdown_table

STAGES, MULTIPROCESSORS = 4, 32
WIDTH, TOKENS = 2048, 4096
Runs = Iterator[Callable[[], None]]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of a norm: bf16 gradients are rounded at every microbatch


class StreamTransport(LocalTransport):
    """Messages between streams of one device: the receiver's stream waits for the sender's, and no host does."""

    def send(self, peer: int, tag: Any, message: Any) -> None:
        super().send(peer, tag, (message, None if peer == self.rank else _event()))

    def ready(self, tag: Any) -> bool:
        found = self._mailbox.peek(tag)
        return found is not None and (found[0][1] is None or found[0][1].query())

    def receive(self, peer: int, tag: Any, timeout: float) -> Any:
        message, departure = super().receive(peer, tag, timeout)
        if departure is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(departure)
            for leaf in pytree.tree_leaves(message):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)
        return message


def _event() -> torch.cuda.Event | None:
    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None


class Block(nn.Module):
    """Two linears with an activation between them, and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def interference(streams: Sequence[Any], width: int, tokens: int, device: torch.device) -> list[float]:
    """Time of one group's matmuls with 1, 2, ... groups busy, over its time alone."""
    a, b = torch.randn(tokens, width, device=device), torch.randn(width, 4 * width, device=device)
    a, b = (tensor.to(torch.bfloat16) for tensor in (a, b))
    out = [torch.empty(tokens, 4 * width, device=device, dtype=a.dtype) for _ in streams]
    found = []
    for busy in range(1, len(streams) + 1):
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(streams[0])
            for _ in range(40):
                for stream, target in zip(streams[:busy], out, strict=False):
                    with torch.cuda.stream(stream):
                        torch.mm(a, b, out=target)
            end.record(streams[0])
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        found.append(statistics.median(times))
    return [time / found[0] for time in found]


class Row(NamedTuple):
    """A schedule: its simulated cost in seconds, and the step of median cost."""

    name: str
    simulated: float
    measured: Timeline


class Runner:
    """The stages' threads: every schedule has its Pipeline in each of them, and they step when told."""

    def __init__(self, model: list[nn.Module], x: Tensor, target: Tensor, streams: Sequence[Any]) -> None:
        self.model, self.x, self.target, self.streams = model, x, target, streams

    def run(self, candidates: dict[str, tuple[Schedule, str]], rounds: int) -> dict[str, list[Timeline]]:
        """Name -> the timelines of its steps, one of each candidate in turn, after two that warm up and are checked."""
        rings = {name: StreamTransport.ring(STAGES) for name in candidates}
        found: dict[str, list[Timeline]] = {name: [] for name in candidates}

        def stage(rank: int) -> None:
            with contextlib.ExitStack() as stack:
                if self.x.is_cuda:
                    stack.enter_context(torch.cuda.stream(self.streams[rank]))
                    partitions.tell_cublas(MULTIPROCESSORS)
                pipes = {}
                for name, (schedule, fill) in candidates.items():
                    parts = [self._part(schedule, chunk) for chunk in schedule.chunks_of(rank)]
                    ring, loss_fn = rings[name][rank], nn.functional.mse_loss
                    pipe = Pipeline(parts, schedule, loss_fn, ring, fill=fill, timeout=60)
                    pipes[name] = stack.enter_context(pipe)
                for index in range(-2, rounds):
                    for name, pipe in pipes.items():
                        pipe.step(self.x, self.target)
                        timeline = pipe.last.gather_timeline()  # after it, all stages are at the same place again
                        if index == -2:
                            self._check(name, pipe)
                        elif index >= 0 and rank == 0:
                            found[name].append(timeline)

        ranks.run_in_threads([*rings.values()], stage)
        return found

    def _layers(self, schedule: Schedule, chunk: int) -> range:
        each = len(self.model) // len(schedule.placement)
        return range(chunk * each, (chunk + 1) * each)

    def _part(self, schedule: Schedule, chunk: int) -> nn.Module:
        blocks = [copy.deepcopy(self.model[layer]) for layer in self._layers(schedule, chunk)]
        return zbkern.convert(nn.Sequential(*blocks))

    def _check(self, name: str, pipe: Pipeline) -> None:
        """Gradients of this stage's part against those of the plain loop, which the model holds."""
        for chunk, module in pipe.modules.items():
            plain = nn.Sequential(*[self.model[layer] for layer in self._layers(pipe.schedule, chunk)])
            for (key, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
                expected = theirs.grad.float()
                difference = float((ours.grad.float() - expected).norm() / expected.norm())
                if not difference < TOLERANCE[ours.dtype]:
                    raise AssertionError(
                        f"{name}, chunk {chunk}, {key}: gradients differ by {difference:.2g} of their norm"
                    )


def launches(kernels: Any, width: int = WIDTH, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> Runs:
    """What the stages launch of ours, on operands without values, for gpu_prepare to compile ahead: W of one block or
    weight at a time, over one microbatch or several that were merged, which write a gradient or add to it; norms."""

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    with _of_a_stage():
        partials = new(2, kernels.norm_partials(tokens, width, torch.device("cpu")), width, dtype=torch.float32)
    x, gain, rows = new(tokens, width), new(width), new(tokens, dtype=torch.float32)
    runs: list[Callable[[], None]] = [
        lambda: kernels.norm_fwd(x, gain, gain, 1e-5, x, rows, rows),
        lambda: kernels.norm_dgrad(x, x, gain, rows, rows, x, partials),
    ]
    shapes = (4 * width, width), (width, 4 * width)
    for weights, count, add in itertools.product((shapes, shapes[:1], shapes[1:]), (1, 2, 3, 4, 8), (False, True)):
        layers = [([(new(tokens, k), new(tokens, n))] * count, (new(n, k), new(n))) for n, k in weights]
        runs.append(partial(kernels.linear_wgrads, layers, add))
        runs.append(partial(kernels.norm_wgrad, [(partials,)] * count, (gain, gain), add))
    for run in runs:
        yield _of_a_stage()(run)


@contextlib.contextmanager
def _of_a_stage() -> Iterator[None]:
    """Inside, kernels see a stage's multiprocessors, on whatever machine."""
    from zbkern.kernels.triton import matmul_tile as triton_matmul_tile

    machine = (triton_matmul_tile._machine(torch.device("cpu"))[0], MULTIPROCESSORS)
    triton_matmul_tile.plan.cache_clear()
    try:
        with mock.patch.object(triton_matmul_tile, "_machine", return_value=machine):
            yield
    finally:
        triton_matmul_tile.plan.cache_clear()


def plain_gradients(model: list[nn.Module], x: Tensor, target: Tensor, microbatches: int) -> None:
    """Into `.grad`, by a loop over microbatches without any pipeline."""
    for inputs, targets in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        (nn.functional.mse_loss(nn.Sequential(*model)(inputs), targets) / microbatches).backward()


def compare(runner: Runner, microbatches: int, rounds: int) -> tuple[dict[str, Costs], list[Row]]:
    """The measured costs of a stage's passes, and what every schedule took next to its simulation with them."""
    flat = schedules.zb_h1(STAGES, microbatches), "planned"
    folded = schedules.zb_v(STAGES, microbatches), "planned"
    steps = runner.run({"one chunk": flat, "two chunks": folded}, 3)
    memory = {"one chunk": Costs(), "two chunks": Costs(activation=0.5)}  # of a stage; W holds as much
    costs = {name: step_costs.costs(timelines, memory[name]) for name, timelines in steps.items()}
    one, two = costs.values()
    size = {"stages": STAGES, "microbatches": microbatches, "memory_limit": STAGES}
    candidates: dict[str, tuple[Schedule, str]] = {
        "1F1B": (schedules.one_f_one_b(STAGES, microbatches), "planned"),
        "ZB-H1": flat,
        "ZB-H1, eager": (flat[0], "eager"),
        "ZB-H2": (schedules.zb_h2(STAGES, microbatches), "planned"),
        "ZB-V": folded,
        "planned, memory of 1F1B": (plan(one, **size).schedule, "planned"),
        "planned in a V, memory of 1F1B": (plan(two, **size, chunks=2, placement="v").schedule, "planned"),
    }
    timelines = runner.run(candidates, rounds)
    rows = []
    for name, (schedule, fill) in candidates.items():
        simulated = simulate(schedule, one if schedule.chunks == 1 else two, fill=fill)
        took = sorted(timelines[name], key=lambda timeline: timeline.cost)
        rows.append(Row(name, simulated.cost, took[len(took) // 2]))
    return costs, rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every schedule")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a microbatch")
    report.add_out(parser)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("cannot run: this needs a CUDA GPU (bench.sleeping_ranks runs the engine without one)")
        return 2
    if os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32") != "32":
        print("CUDA_DEVICE_MAX_CONNECTIONS is not 32: streams may share a queue, and wait for each other")
    name_kernels()
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = [Block(options.width).to(device, torch.bfloat16) for _ in range(2 * STAGES)]
    size = options.microbatches * options.tokens, options.width
    x, target = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    plain_gradients(model, x, target, options.microbatches)
    with partitions.partitions(STAGES, MULTIPROCESSORS, device) as streams, partitions.told(MULTIPROCESSORS):
        factors = interference(streams, options.width, options.tokens, device)
        report.write_json("virtual_stages", {"interference": factors}, options.out)
        costs, rows = compare(Runner(model, x, target, streams), options.microbatches, options.rounds)
    busy = ", ".join(f"{count}: {factor:.3f}" for count, factor in enumerate(factors, 1))
    print(f"{STAGES} stages of {MULTIPROCESSORS} multiprocessors each")
    print(f"time of a matmul over its time alone, by the number of busy groups: {busy}\n")
    print(show(rows))
    figures = {
        "interference": factors,
        "costs": {name: dataclasses.asdict(each) for name, each in costs.items()},
        "schedules": [{"name": r.name, "simulated": r.simulated, "measured": r.measured.cost} for r in rows],
    }
    print("\n" + report.write_json("virtual_stages", figures, options.out))
    if options.out is not None:
        draw.save([row.measured for row in rows], options.out / "virtual_stages.svg", [row.name for row in rows])
    return 0


def show(rows: Sequence[Row]) -> str:
    """The table: costs in milliseconds, and speed over the first row's schedule."""
    first = rows[0]
    cells = [
        (
            *(row.name, f"{1e3 * row.simulated:.2f}", f"{1e3 * row.measured.cost:.2f}"),
            f"{row.measured.cost / row.simulated:.3f}",
            f"{first.simulated / row.simulated:.3f}",
            f"{first.measured.cost / row.measured.cost:.3f}",
        )
        for row in rows
    ]
    header = ("schedule", "simulated, ms", "measured, ms", "ratio", f"speed over {first.name}, simulated", "measured")
    return markdown_table(header, cells)


if __name__ == "__main__":
    sys.exit(main())
