"""A pipeline of processes on one GPU: each rank has a share of its multiprocessors, and every schedule runs for real.

Bubbles, launches, interpreters and queues are those of a pipeline; L2, memory and power are shared. MPS gives every
process its share, in a daemon with folders of its own, which changes no setting of the GPU. Without it processes take
turns, and times mean nothing: each schedule is then timed once. Messages are copies between the processes
(bench/shared_memory.py), since NCCL refuses two ranks on a GPU. Every schedule's loss and gradients are compared with
one process first. Beside its step stand the step that is simulated with its costs, and the one that is rehearsed, by
all processes at once. The last two rows are of one batch of unequal sequences, in as many packs as other rows have
microbatches, and as `plan_batch` has it. FOLDER/one_gpu.json is written anew after every schedule. One that fails costs
only its own row, unless a process has died or waits for ever.

torch's own 1F1B runs where torch can send: on a CPU, and on a GPU if NCCL takes several ranks there
(NCCL_MULTI_RANK_GPU_ENABLE=1, from NCCL 2.30 on).

    CUDA_DEVICE_MAX_CONNECTIONS=32 python -m bench.one_gpu --ranks 4 --seconds 200 [--out FOLDER]
    python -m bench.one_gpu --ranks 2 --tiny        # on a CPU: the same program, whose times mean nothing
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import zbkern
from bench import engines, report
from bench.shared_memory import shared_memory_transport
from bench.virtual_stages import Block
from zbkern.pipeline import BatchPlan, Costs, Pipeline, Schedule, plan, plan_batch, rehearse, schedules, simulate
from zbkern.planning.simulation import step_costs
from zbkern.planning.simulation.timeline import Timeline
from zbkern.reporting import markdown_table

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of a norm: bf16 gradients are rounded at every microbatch
WARM_UP, LAST_SECONDS = 2, 15  # steps; what another schedule needs at least
_MPS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/nvidia/bin")
LOSS = nn.MSELoss(reduction="sum")  # of each slice by itself


class Stack(nn.Sequential):
    """Blocks, whose tokens need nothing of earlier slices."""

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        return super().forward(x)


@contextlib.contextmanager
def shares(ranks: int) -> Iterator[str]:
    """Inside, processes that begin have a rank's share of the multiprocessors; yields what came of it."""
    control = shutil.which("nvidia-cuda-mps-control", path=os.pathsep.join([os.environ.get("PATH", ""), *_MPS]))
    if control is None or not torch.cuda.is_available():
        yield "no MPS: nvidia-cuda-mps-control or the GPU is not there, so times mean nothing"
        return
    with tempfile.TemporaryDirectory() as folder:
        percent = str(100 // ranks)
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **places}
        began = subprocess.run([control, "-d"], env=environment, capture_output=True, text=True, timeout=20)
        if began.returncode != 0:
            yield f"no MPS, so times mean nothing: {(began.stderr or began.stdout)[-200:].strip()}"
            return
        os.environ.update(places, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=percent)
        os.environ["CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING"] = "1"  # processes are told their share
        try:
            yield f"MPS, {percent}% of the multiprocessors for each rank"
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit\n", env=environment, capture_output=True, text=True, timeout=20)


def candidates(ranks: int, microbatches: int) -> dict[str, Schedule]:
    """Those that need no costs."""
    return {
        "1F1B": schedules.one_f_one_b(ranks, microbatches),
        "interleaved 1F1B": schedules.interleaved(ranks, microbatches, 2),
        "ZB-H1": schedules.zb_h1(ranks, microbatches),
        "ZB-H2": schedules.zb_h2(ranks, microbatches),
        "ZB-V": schedules.zb_v(ranks, microbatches),
        "ZB-V, slices": schedules.zb_v(ranks, max(ranks, microbatches // 2), slices=2),
    }


class Batch(NamedTuple):
    """Inputs and targets of microbatches: a tensor of all, or a list where they are not equally long."""

    inputs: Any
    targets: Any

    def microbatches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        parts = (each.chunk(count) if isinstance(each, Tensor) else each for each in self)
        return zip(*parts, strict=True)


def unequal_lengths(tokens: int, most: int) -> list[int]:
    """Of sequences, many short ones and some of up to four times `tokens`, in all as many as that often fit in."""
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < most * tokens:
        lengths.append(max(8, round(4 * tokens * draw.random() ** 3) // 8 * 8))
    return lengths


def packed(lengths: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of sequences in each of so many packs: each goes into the shortest, the longest first."""
    packs: list[list[int]] = [[] for _ in range(min(count, len(lengths)))]
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        min(packs, key=lambda pack: sum(lengths[each] for each in pack)).append(number)
    return packs


class Rank:
    """One process, which has the whole model to compare with."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = [Block(options.width).to(device, dtype) for _ in range(2 * options.ranks)]
        self.lengths = unequal_lengths(options.tokens, options.microbatches)
        shape = options.microbatches, options.tokens, options.width
        self.batch = Batch(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)))
        self.sequences = [
            torch.randn(2, 1, length, options.width, device=device, dtype=dtype) for length in self.lengths
        ]

    def batch_of(self, packs: Sequence[Sequence[int]]) -> Batch:
        """The unequal sequences, packed."""
        rows = [torch.cat([self.sequences[number] for number in pack], 2) for pack in packs]
        return Batch([x for x, _ in rows], [y for _, y in rows])

    def chunks(self, schedule: Schedule, rank: int) -> list[nn.Module]:
        each = len(self.model) // len(schedule.placement)
        parts = [self.model[chunk * each : (chunk + 1) * each] for chunk in schedule.chunks_of(rank)]
        return [zbkern.convert(Stack(*copy.deepcopy(part))) for part in parts]

    def run(self) -> Iterator[dict[str, Any]]:
        """A row for every schedule, the same on all ranks, as long as there is time."""
        measured: dict[str, Costs] = {}
        known = candidates(self.options.ranks, self.options.microbatches)
        for name, schedule in known.items():
            if not self.has_time():
                return
            yield self.row(name, partial(self.measure, name, schedule, measured))
        if self.torch_can_send and self.has_time():
            yield self.row("torch's 1F1B", self.measure_torch)
        size = self.options.ranks, self.options.microbatches
        for name, of, more in (("plan", "ZB-H1", {}), ("plan in a V", "ZB-V", {"chunks": 2, "placement": "v"})):
            if of not in measured or not self.has_time():
                continue
            found = from_first(partial(plan, measured[of], *size, memory_limit=size[0], effort=1, **more))
            yield self.row(name, lambda name=name, found=found: self.measure(name, found().schedule, measured))
        if "1F1B" in measured and "ZB-V" in measured and self.has_time():
            packs = packed(self.lengths, self.options.microbatches)
            usual = schedules.one_f_one_b(self.options.ranks, len(packs))
            yield self.row("unequal, 1F1B", partial(self.measure, "", usual, {}, self.batch_of(packs)))
        if "ZB-V" in measured and self.has_time():
            costs = replace(measured["ZB-V"], tokens=self.options.tokens)
            shortest = max(8, self.options.tokens // 4)  # slices: what a pass takes besides its tokens is not measured
            planned = from_first(lambda: plan_batch(self.lengths, costs, self.options.ranks, multiple=shortest))
            yield self.row("unequal, planned", lambda: self.measure_planned(planned()))

    def has_time(self) -> bool:
        answer = [self.options.end - time.monotonic() > LAST_SECONDS]
        dist.broadcast_object_list(answer)
        return answer[0]

    def row(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured; with "wrong" where that has failed on a rank."""
        faults: list[str | None] = [None] * dist.get_world_size()
        row, fault = {}, None
        try:
            row = measure()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"[:300]
        dist.all_gather_object(faults, fault)
        wrong = next(filter(None, faults), None)
        return {"schedule": name, **(row if wrong is None else {"wrong": wrong})}

    def measure(
        self, name: str, schedule: Schedule, measured: dict[str, Costs], batch: Batch | None = None
    ) -> dict[str, Any]:
        """Of a schedule of the equal microbatches, whose costs are noted, or of another batch."""
        row, timelines = self.timed(schedule, batch or self.batch)
        if batch is None:
            costs = step_costs.costs(timelines, Costs(activation=1 / schedule.chunks))  # memory: of a rank
            simulated = simulate(schedule, costs)
            row |= {"simulated": simulated.cost, "simulated idle": simulated.bubble_rate}
            measured[name] = costs
        return row

    def measure_planned(self, planned: BatchPlan) -> dict[str, Any]:
        row, _ = self.timed(planned.schedule, self.batch_of(planned.rows))
        return {**row, "simulated": planned.timeline.cost, "simulated idle": planned.timeline.bubble_rate}

    @property
    def torch_can_send(self) -> bool:
        return self.device.type == "cpu" or "nccl" in dist.get_backend_config()

    def measure_torch(self) -> dict[str, Any]:
        count, plain = self.options.microbatches, copy.deepcopy(self.model)
        engines.plain_step(plain, *self.batch, count)
        contestant = engines.torchs("1F1B", self.model, *self.batch, count)
        contestant.step()
        pairs = [
            (f"layer {number}, {key}", ours.grad, other.grad)
            for number, layer in contestant.layers.items()
            for (key, ours), other in zip(layer.named_parameters(), plain[number].parameters(), strict=True)
        ]
        if wrong := self.difference(pairs):
            raise AssertionError(wrong)
        seconds = []
        for _ in range(WARM_UP + self.options.rounds):
            self.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            contestant.step()
            self.synchronize()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        return {"step": median(seconds[WARM_UP:])}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, schedule: Schedule, batch: Batch) -> tuple[dict[str, Any], list[Timeline]]:
        """A row, and the timelines of its steps."""
        rank = dist.get_rank()
        transport = shared_memory_transport(self.device)
        with (
            contextlib.closing(transport),
            Pipeline(self.chunks(schedule, rank), schedule, LOSS, transport, timeout=60) as pipe,
        ):
            wrong = pipe.gather(self.wrong(pipe, batch, pipe.step(*batch)))
            if any(wrong):
                raise AssertionError(next(filter(None, wrong)))
            for _ in range(WARM_UP):
                pipe.step(*batch)
            timelines, hosts = [], []
            for _ in range(self.options.rounds):
                pipe.gather(None)
                begin = time.perf_counter()
                pipe.step(*batch)
                hosts.append(time.perf_counter() - begin)
                timelines.append(pipe.last.gather_timeline())
            host = max(pipe.gather(median(hosts)))
        rehearsed = rehearse(
            lambda rank: self.chunks(schedule, rank), schedule, LOSS, *batch, device=self.device, repeats=3
        ).timeline.cost
        middle = sorted(timelines, key=lambda timeline: timeline.cost)[len(timelines) // 2]
        return {"step": middle.cost, "rehearsed": rehearsed, "idle": middle.bubble_rate, "host": host}, timelines

    def wrong(self, pipe: Pipeline, batch: Batch, loss: Tensor | None) -> str:
        """Where the step's loss or gradients are not those of one process: "" for nowhere."""
        whole, count = copy.deepcopy(self.model), pipe.schedule.microbatches
        total = 0.0
        for x, y in batch.microbatches(count):
            part = LOSS(nn.Sequential(*whole)(x), y) / count
            part.backward()
            total += part.item()
        pairs = [] if loss is None else [("loss", loss.detach(), torch.tensor(total, device=self.device))]
        each = len(whole) // len(pipe.schedule.placement)
        for chunk, module in pipe.modules.items():
            theirs = nn.Sequential(*whole[chunk * each : (chunk + 1) * each])
            named = zip(module.named_parameters(), theirs.parameters(), strict=True)
            pairs += [(f"chunk {chunk}, {key}", ours.grad, other.grad) for (key, ours), other in named]
            module.zero_grad()
        return self.difference(pairs)

    def difference(self, pairs: list[tuple[str, Tensor, Tensor]]) -> str:
        for what, ours, expected in pairs:
            differs = float((ours.float() - expected.float()).norm() / expected.float().norm())
            if not differs < TOLERANCE[expected.dtype]:
                return f"{what}: differs by {differs:.2g} of its norm from one process"
        return ""


def from_first(make: Callable[[], Any]) -> Callable[[], Any]:
    """Gives on all ranks what the first has made; raises there what it has raised."""
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [make()]
        except Exception as error:
            made = [RuntimeError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(made)

    def give() -> Any:
        if isinstance(made[0], RuntimeError):
            raise made[0]
        return made[0]

    return give


def run(rank: int, options: argparse.Namespace, port: int, rows: Any) -> None:
    """A process. rows: where rank 0 puts each row as it comes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    both = device.type == "cuda" and "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ
    backend = "cpu:gloo,cuda:nccl" if both else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=options.ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        print(f"rank {rank} is told of {count} multiprocessors", flush=True)
    for row in Rank(options, device).run():
        if rank == 0:
            rows.put(row)
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096, help="of a microbatch")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of every schedule")
    parser.add_argument("--seconds", type=float, default=200.0, help="no schedule begins later than shortly before")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    report.add_out(parser)
    options = parser.parse_args(argv)
    if options.tiny:
        options.width, options.tokens, options.rounds, options.microbatches = 64, 32, 3, 2 * options.ranks
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # under MPS the default is 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options.end = time.monotonic() + options.seconds  # that clock is the machine's, of all processes
    saved: dict[str, Any] = {"ranks": options.ranks, "rows": []}
    with shares(options.ranks) as saved["how"]:
        print(saved["how"], flush=True)
        if not saved["how"].startswith("MPS"):
            options.rounds = 1
        try:
            for row in _rows(options, port):
                saved["rows"].append(row)
                figures = ", ".join(f"{key} {row[key]:.5g}" for key in row if key not in ("schedule", "wrong"))
                print(f"{row['schedule']}: {row.get('wrong', figures)}", flush=True)
                report.write_json("one_gpu", saved, options.out)
            saved["ended"] = "as it should"
        except (mp.ProcessRaisedException, mp.ProcessExitedException, TimeoutError) as error:
            saved["ended"] = str(error)[-1000:]
            print(error, file=sys.stderr)
    right = [row for row in saved["rows"] if "wrong" not in row]
    print("\n" + table(right) if right else "no schedule was measured")
    print("\n" + report.write_json("one_gpu", saved, options.out))
    return 0 if right == saved["rows"] and right and saved["ended"] == "as it should" else 1


def _rows(options: argparse.Namespace, port: int) -> Iterator[dict[str, Any]]:
    """What the processes have measured, as it comes. Raises the error of one that ends early, and TimeoutError."""
    context = mp.get_context("spawn")
    queue = context.Manager().Queue()
    processes = mp.spawn(run, (options, port, queue), options.ranks, join=False)
    try:
        over = False
        while not over:
            if time.monotonic() > options.end + LAST_SECONDS:
                raise TimeoutError("the processes were ended: they had waited for too long")
            try:
                over = processes.join(0.5)
            finally:  # also what came before an error
                while not queue.empty():
                    yield queue.get()
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds, and speed over 1F1B with the same batch."""
    cells = []
    for row in rows:
        first = next(
            each for each in rows if each["schedule"].startswith("unequal") == row["schedule"].startswith("unequal")
        )
        cells.append(
            (
                row["schedule"],
                *(
                    f"{1e3 * row[name]:.2f}" if name in row else ""
                    for name in ("step", "simulated", "rehearsed", "host")
                ),
                *(f"{row[name]:.1%}" if name in row else "" for name in ("idle", "simulated idle")),
                *(
                    f"{first[name] / row[name]:.3f}" if name in row and name in first else ""
                    for name in ("step", "simulated", "rehearsed")
                ),
            )
        )
    speeds = [f"speed over 1F1B{what}" for what in ("", ", simulated", ", rehearsed")]
    return markdown_table(
        ("schedule", "step, ms", "simulated", "rehearsed", "host", "idle", "simulated idle", *speeds), cells
    )


if __name__ == "__main__":
    sys.exit(main())
