"""Passes beside each other under a network of chosen latency: what is left of the all-to-alls of experts, on CPU ranks.

Every all-to-all takes so much longer that all of them are 25 %, and then 40 %, of a step in turn; no core computes
meanwhile. With 2 ranks, one stage of expert-parallel layers: F beside B, and W in all collectives. With 4, two stages
of two expert ranks: the pairs of DualPipe-V, in zbkern and in torch's own engine, and a plan. All ways take their steps
in turn in one run. No figure without a check that the gradients are those of the first way. A turn is what two passes
that only take turns cost the host. The last line has, for each share, the time of zbkern's best way beside each other,
over that without latency, and over the best way in turn.

    python -m bench.overlap [--ranks 2] [--microbatches 8] [--tokens 512] [--rounds 5] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import ranks, report
from bench.overlap_planned import costs_of
from bench.overlap_torch import TorchPairs
from zbkern import testing
from zbkern.pipeline import Action, Pipeline, Schedule, plan, schedules
from zbkern.pipeline.runtime.overlap.passes import Passes
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.reporting import environment, machine_line

WIDTH, HIDDEN, LAYERS = 256, 1024, 4
EXPERT_RANKS = 2
SHARES = (0.25, 0.40)
TURNS = 200  # of a round


class Way(NamedTuple):
    name: str
    schedule: Schedule
    wgrads_per_collective: int | Literal["eager"] = 0
    is_torchs: bool = False

    @property
    def is_beside(self) -> bool:
        return bool(self.schedule.beside) and not self.is_torchs


class Network:
    """torch's all_to_all_single, that ends `latency` seconds after its start at the earliest."""

    def __init__(self) -> None:
        self.latency, self.count = 0.0, 0
        self._call = dist.all_to_all_single
        dist.all_to_all_single = self.all_to_all_single

    def all_to_all_single(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return _Late(self._call(*arguments, **named), time.perf_counter() + self.latency)


class _Late:
    def __init__(self, work: Any, end: float) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._end and self._work.is_completed()


class Layer(nn.Module):
    """kind: `zbkern.nn.ExpertParallel`, or what stands in for it."""

    def __init__(
        self, group: Any = None, width: int = WIDTH, kind: type[zbkern.nn.ExpertParallel] = zbkern.nn.ExpertParallel
    ) -> None:
        super().__init__()
        hidden = HIDDEN // WIDTH * width
        self.up, self.down = zbkern.nn.Linear(width, hidden), zbkern.nn.Linear(hidden, width)
        experts = zbkern.nn.Experts(width, hidden // 2, num_experts=2)
        router = zbkern.nn.Linear(width, 2 * EXPERT_RANKS, bias=False)
        self.experts = kind(experts, router, top_k=2, group=group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.experts(x)


def one_stage(microbatches: int, beside: bool) -> Schedule:
    """F of each microbatch before B of the one before, and beside it; W one microbatch late."""
    row, ranges = [Action("F", 0, 0)], []
    for number in range(microbatches):
        if number + 1 < microbatches:
            ranges.append((len(row), len(row) + 2))
            row.append(Action("F", 0, number + 1))
        row.append(Action("B", 0, number))
        if number:
            row.append(Action("W", 0, number - 1))
    row.append(Action("W", 0, microbatches - 1))
    return Schedule.build([row], [0], microbatches, beside=[ranges] if beside else ())


def ways_of(stages: int, microbatches: int) -> list[Way]:
    if stages == 1:
        turns, pairs = (one_stage(microbatches, beside) for beside in (False, True))
        return [
            Way("in turn", turns),
            Way("in turn, W in collectives", turns, 2),
            Way("F beside B", pairs),
            Way("F beside B, 1 W", pairs, 1),
            Way("F beside B and W", pairs, "eager"),
        ]
    pairs = schedules.dualpipe_v(stages, microbatches)
    return [
        Way("1F1B", schedules.one_f_one_b(stages, microbatches)),
        Way("ZB-V, W in collectives", schedules.zb_v(stages, microbatches), 2),
        Way("DualPipe-V in turn", replace(pairs, beside=())),
        Way("DualPipe-V's pairs", pairs),
        Way("DualPipe-V's pairs and W", pairs, "eager"),
        Way("plan", plan(costs_of(max(SHARES), 2), stages, microbatches, 2, "v").schedule),
        Way("torch's DualPipe-V, two threads", pairs, is_torchs=True),
    ]


def mean_square(y: Tensor, _: Tensor) -> Tensor:
    return y.square().mean()


class Contest:
    """Ways to run the same layers, by number, whose steps take turns. ready: waits until all have ended before."""

    def __init__(
        self,
        ways: Sequence[Way],
        pipes: Sequence[Pipeline | TorchPairs],
        layers: Sequence[Mapping[int, nn.Module]],
        batch: Sequence[Tensor],
        network: Any,
        ready: Callable[[], Any],
    ) -> None:
        self._ways, self._pipes, self._layers, self._batch = ways, pipes, layers, batch
        self._network, self._ready = network, ready

    def rows(self, rounds: int, agree: Callable[[float], float] = float) -> list[dict[str, Any]]:
        """Of each share and way. agree: on the latency, where ranks have measured others."""
        for index in range(len(self._ways)):
            self._step(index)
        self._compare()
        self._network.count = 0
        self._step(0)
        collectives = self._network.count
        found = []
        for share in SHARES:
            self._network.latency = 0.0  # not that of the share before, which the base would have in it
            base = statistics.median(self._step(0) for _ in range(3))
            found += self._rows_of(share, agree(base * share / (1 - share) / collectives), rounds)
        return found

    def _rows_of(self, share: float, latency: float, rounds: int) -> list[dict[str, Any]]:
        times: list[list[float]] = [[] for _ in self._ways]
        without: list[float] = []
        for _ in range(rounds):
            self._network.latency = 0.0
            without.append(min(self._step(index) for index, way in enumerate(self._ways) if not way.is_beside))
            self._network.latency = latency
            for index, each in enumerate(times):
                each.append(self._step(index))
        self._compare()
        zero, rows = statistics.median(without), []
        for way, each in zip(self._ways, times, strict=True):
            took = statistics.median(each)
            row = {"share": share, "latency_ms": 1e3 * latency, "way": way.name, "beside": way.is_beside}
            rows.append({**row, "step_ms": 1e3 * took, "without_ms": 1e3 * zero, "of_without": took / zero})
        return rows

    def _step(self, index: int) -> float:
        for layer in self._layers[index].values():
            layer.zero_grad()
        self._ready()
        start = time.perf_counter()
        self._pipes[index].step(self._batch, self._batch)
        self._ready()
        return time.perf_counter() - start

    def _compare(self) -> None:
        first = self._layers[0]
        for found in self._layers[1:]:
            for number in found.keys() & first.keys():  # V schedules have other layers in the same place
                for mine, other in zip(found[number].parameters(), first[number].parameters(), strict=True):
                    testing.assert_close(mine.grad, other.grad)


def pipeline_of(way: Way, chunks: Sequence[nn.Module], group: Any) -> Pipeline:
    pipe = Pipeline(chunks, way.schedule, mean_square, group, timeout=300)
    pipe.queue.merge, pipe.queue.wgrads_per_collective = False, way.wgrads_per_collective
    return pipe


def measure(stages: int, microbatches: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (stages, EXPERT_RANKS), mesh_dim_names=("stage", "expert"))
    stage = mesh["stage"].get_local_rank()
    generator = torch.Generator().manual_seed(mesh["expert"].get_local_rank())
    xs = [torch.randn(tokens, WIDTH, generator=generator) for _ in range(microbatches)]
    ways, layers = ways_of(stages, microbatches), []
    pipes: list[Pipeline | TorchPairs] = []
    for way in ways:
        count = len(way.schedule.placement)
        size = LAYERS * stages // count
        chunks, found = [], {}
        for chunk in way.schedule.chunks_of(stage):
            part = nn.Sequential()
            for number in range(chunk * size, (chunk + 1) * size):
                torch.manual_seed(100 * number + mesh["expert"].get_local_rank())
                found[number] = Layer(mesh.get_group("expert"))
                part.append(found[number])
            chunks.append(part)
        group = LocalTransport.ring(1)[0] if stages == 1 else mesh.get_group("stage")
        if way.is_torchs:
            pipes.append(TorchPairs(chunks, microbatches, xs[0], mean_square, group))
        else:
            pipes.append(pipeline_of(way, chunks, group))
        layers.append(found)

    def agree(latency: float) -> float:
        shared = torch.tensor(latency)
        dist.broadcast(shared, 0)
        return shared.item()

    rows = Contest(ways, pipes, layers, xs, Network(), dist.barrier).rows(rounds, agree)
    for pipe in pipes:
        pipe.close()
    return rows


def turn_us(rounds: int = 20) -> float:
    """Host time of a turn: the least of rounds of two passes that do nothing else."""
    passes, took = Passes(torch.device("cpu")), []
    for _ in range(rounds):
        start = time.perf_counter()
        passes.run([_turns, _turns], [])
        took.append(time.perf_counter() - start)
    passes.close()
    return 1e6 * min(took) / (2 * TURNS)


def _turns() -> None:
    for _ in range(TURNS):
        zbkern.in_flight()


def last_line(rows: Sequence[dict[str, Any]]) -> str:
    words = []
    for share in SHARES:
        beside, turns = (
            min(row["of_without"] for row in rows if row["share"] == share and row["beside"] is each)
            for each in (True, False)
        )
        words += [f"{share:.0%}", f"{beside:.2f}", f"{beside / turns:.2f}"]
    return " ".join(words)


COLUMNS = (
    "all-to-alls, share: {share:.0%}; latency, ms: {latency_ms:.1f}; way: {way}; step, ms: {step_ms:.0f}; "
    "/ without latency: {of_without:.2f}"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, what in (
        ("ranks", 2, "2, or 4: two stages"),
        ("microbatches", 8, "microbatches of a step"),
        ("tokens", 512, "tokens of a microbatch on each rank"),
        ("rounds", 5, "timed rounds"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    report.add_out(parser)
    o = parser.parse_args(arguments)
    if o.ranks not in (2, 4):
        parser.error(f"--ranks must be 2 or 4; got {o.ranks}")
    found = ranks.run(o.ranks, measure, o.ranks // EXPERT_RANKS, o.microbatches, o.tokens, o.rounds)
    print(machine_line(environment()), end="\n\n")
    title = (
        f"{LAYERS} expert-parallel layers a stage, {o.microbatches} microbatches of {o.tokens} tokens, {o.ranks} ranks"
    )
    print(report.table(title, COLUMNS, found))
    print(f"\na turn: {turn_us():.0f} us of the host")
    print("\n" + report.write_json("overlap", found, o.out))
    print(last_line(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
