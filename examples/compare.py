"""Compares schedules on the machine at hand: measured costs, a few steps of each in turn, one table."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from text import Text
from trainer import (
    PlainTrainer,
    TorchTrainer,
    Trainer,
    batch,
    chunks_of_this_rank,
    device_of_this_rank,
    everywhere,
    mesh,
    model_config,
    say,
)

from zbkern.pipeline import Costs, ProfileOptions, Schedule, ScheduleError, profile, schedules, simulate
from zbkern.reporting import environment, machine_line, markdown_table

CANDIDATES = {"1F1B": ("one_f_one_b", 1), "ZB-H2": ("zb_h2", 1), "ZB-V": ("zb_v", 1), "ZB-V, 2 slices": ("zb_v", 2)}
ROUNDS, STEPS = 2, 2
WHEN = """Idle: the share of a step in which a rank waits, as measured and as planned. Peak MB: of the rank with most.
These are as many microbatches as ranks, where pipelines idle: long sequences are few. With many short ones 1F1B hardly
idles, and nothing is gained: --microbatches 16 --context 128 shows it."""


def build(name: str, stages: int, microbatches: int, slices: int = 1) -> Schedule:
    try:
        return getattr(schedules, name)(stages, microbatches, slices=slices)
    except ScheduleError as error:
        raise SystemExit(f"--schedule {name}: {error}") from error


@dataclass
class Figures:
    """Measurements of one contestant: seconds per step in every round, the share of idle time in each round's last step
    and as planned, and bytes at the peak."""

    name: str
    step: Callable[[int], Any]
    seconds: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    planned: float | None = None
    memory: int = 0


def best(arguments: argparse.Namespace, text: Text) -> tuple[Schedule, Costs]:
    """Prints and saves the table; returns the fastest schedule, and the costs of its chunks. Collective."""
    stages = dist.get_world_size()
    costs: dict[tuple[int, ...], Costs] = {}
    contestants = [Figures("one process", PlainTrainer(arguments, text, convert=True).step)]
    trainers: dict[str, Trainer] = {}
    for name, (kind, slices) in CANDIDATES.items():
        try:
            schedule = getattr(schedules, kind)(stages, arguments.microbatches, slices=slices)
            gpt.chunk(model_config(arguments), 0, len(schedule.placement))
        except ValueError as error:
            say(f"{name} is not compared: {error}")
            continue
        if schedule.placement not in costs:
            costs[schedule.placement] = measure_costs(arguments, text, schedule.placement)
            say(f"measured {describe(costs[schedule.placement])}")
        trainers[name] = Trainer(arguments, text, schedule)
        planned = simulate(schedule, costs[schedule.placement]).bubble_rate
        contestants.append(Figures(name, trainers[name].step, planned=planned))
    if not trainers:
        raise SystemExit(f"no schedule fits {stages} ranks: make --layers a multiple of {stages}")
    if importlib.util.find_spec("numpy") is None:
        say("torch's engine is not compared: without numpy it cannot tell ranks what they send")
    elif "1F1B" in trainers:
        contestants.insert(1, Figures("1F1B, torch's engine", TorchTrainer(arguments, text).step))
    say(f"comparing {len(contestants)} configurations, {ROUNDS} rounds of {STEPS} steps each, in turn")
    check_losses(arguments, contestants)
    for turn in range(ROUNDS):
        for contestant in contestants:
            seconds, memory = run_round(contestant.step, 1 + turn * STEPS)
            contestant.seconds.append(seconds)
            contestant.memory = max(contestant.memory, memory)
            if contestant.name in trainers:
                contestant.idle.append(trainers[contestant.name].pipe.last.gather_timeline().bubble_rate)
    for trainer in trainers.values():
        trainer.pipe.close()
    fastest = min((c for c in contestants if c.name in trainers), key=lambda c: statistics.median(c.seconds))
    if dist.get_rank() == 0:
        report(arguments, contestants)
    schedule = trainers[fastest.name].schedule
    return schedule, costs[schedule.placement]


def check_losses(arguments: argparse.Namespace, contestants: Sequence[Figures]) -> None:
    """Runs the first step of each, which also warms up, and exits where losses differ."""
    losses = {}
    for contestant in contestants:
        loss = contestant.step(0)
        ranks = dist.get_world_size() if contestant.name == "one process" else 1
        losses[contestant.name] = everywhere(loss, arguments, device_of_this_rank()) / ranks
    bound = 1e-2 if torch.cuda.is_available() else 1e-5  # bf16 on a GPU
    if max(losses.values()) > min(losses.values()) * (1 + bound):
        raise SystemExit(f"the losses of the first step differ by more than {bound} of them: {losses}")


def measure_costs(arguments: argparse.Namespace, text: Text, placement: Sequence[int]) -> Costs:
    """Measured costs of this model, cut into chunks for `placement`. Collective."""
    device, count, ranks = device_of_this_rank(), len(placement), mesh(arguments)
    replica, mine = ranks["replica"].get_local_rank(), chunks_of_this_rank(arguments, placement)
    inputs, targets = (part.chunk(arguments.replicas)[replica] for part in batch(arguments, text, 0, device))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return profile(
            list(mine.values()),
            placement,
            gpt.loss_fn,
            inputs if 0 in mine else None,
            targets if count - 1 in mine else None,
            microbatches=arguments.microbatches,
            group=ranks.get_group("stage"),
            device=device,
            options=ProfileOptions(repeats=2, slices=True),
        )


def describe(costs: Costs) -> str:
    flat = costs.per_chunk(len(costs.forward) if isinstance(costs.forward, tuple) else 1)
    rows = zip(flat.forward, flat.backward, flat.weight, strict=True)
    chunks = ", ".join(f"chunk {i} F {f:.1f} B {b:.1f} W {w:.1f}" for i, (f, b, w) in enumerate(rows))
    return f"{chunks} ms; communication {max(flat.communication, default=0.0):.2f} ms"


def run_round(step: Callable[[int], Any], first: int) -> tuple[float, int]:
    """Seconds per step of STEPS steps in a row, and the bytes they added; the largest over all ranks, on every rank."""
    dist.barrier()
    memory = Memory()
    start = time.perf_counter()
    for index in range(first, first + STEPS):
        step(index)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    seconds = (time.perf_counter() - start) / STEPS
    return worst(seconds), int(worst(memory.peak()))


def worst(value: float) -> float:
    """The largest value of all ranks."""
    largest = torch.tensor(value, dtype=torch.float64, device=device_of_this_rank())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


class Memory:
    """Peak memory since construction, above what was in use then: of the GPU, or of this process on Linux."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available() and dist.get_backend() == "nccl"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc: returns what earlier contestants freed to the system
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak, proc(5)
        self.start = self._status("VmRSS")

    def peak(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else self._status("VmHWM")) - self.start

    @staticmethod
    def _status(name: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def report(arguments: argparse.Namespace, contestants: Sequence[Figures]) -> None:
    """Prints the table and writes it as table.md and table.json."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds = {c.name: statistics.median(c.seconds) for c in contestants}
    single, base = seconds["one process"], seconds.get("1F1B", float("nan"))
    head = ["schedule", "step ms", "idle", "planned", "peak MB", "x 1F1B", "x one process"]
    rows = [
        (
            c.name,
            f"{seconds[c.name] * 1e3:.0f}",
            f"{statistics.median(c.idle):.1%}" if c.idle else "",
            "" if c.planned is None else f"{c.planned:.1%}",
            f"{c.memory / 1e6:.0f}",
            f"{base / seconds[c.name]:.2f}",
            f"{single / seconds[c.name]:.2f}",
        )
        for c in sorted(contestants, key=lambda c: -seconds[c.name])
    ]
    machine, table = environment(), markdown_table(head, rows)
    sizes = f"{arguments.microbatches} microbatches of {arguments.rows} x {arguments.context} tokens"
    print(f"\n{sizes}, {dist.get_world_size()} ranks\n\n{table}\n\n{WHEN}\n{machine_line(machine)}", flush=True)
    (arguments.out / "table.md").write_text(f"{table}\n\n{machine_line(machine)}\n")
    figures = [{k: v for k, v in vars(c).items() if k != "step"} for c in contestants]
    (arguments.out / "table.json").write_text(json.dumps({"environment": machine, "figures": figures}, indent=1) + "\n")
