"""Compares schedules on the machine at hand: measured costs, a few steps of each in turn, one table."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from trainer import PlainTrainer, Trainer, batch, chunks_of_this_rank, device_of_this_rank, mesh, say

from zbkern.pipeline import Costs, ProfileOptions, Schedule, ScheduleError, Timeline, profile, schedules, simulate
from zbkern.reporting import environment, machine_line, markdown_table

CANDIDATES = ("one_f_one_b", "zb_h1", "zb_h2", "zb_v")
ROUNDS, STEPS = 3, 2


def build(name: str, stages: int, microbatches: int) -> Schedule:
    try:
        return getattr(schedules, name)(stages, microbatches)
    except ScheduleError as error:
        raise SystemExit(f"--schedule {name}: {error}") from error


@dataclass
class Figures:
    """Measurements of one contestant: seconds per step in every round, and in each round's last step those in which a
    rank is busy and idle, mean over ranks; planned share of idle time, memory and bytes held by W."""

    name: str
    step: Callable[[int], Any]
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    planned_bubble: float | None = None
    memory: int = 0
    held: int | None = None

    @property
    def bubble(self) -> float | None:
        """The measured share of idle time, None for one process."""
        return statistics.median(map(idle_share, self.busy, self.idle)) if self.busy else None


def idle_share(busy: float, idle: float) -> float:
    return idle / (busy + idle)


def best(arguments: argparse.Namespace, text: Text) -> tuple[Schedule, Costs]:
    """Prints and saves the table; returns the fastest schedule, and the costs of its chunks. Collective."""
    stages = dist.get_world_size()
    costs = {}
    contestants = [Figures("one process", PlainTrainer(arguments, text, convert=True).step)]
    trainers: dict[str, Trainer] = {}
    for name in CANDIDATES:
        try:
            schedule = getattr(schedules, name)(stages, arguments.microbatches)
            gpt.chunk(gpt.Config(arguments.layers, arguments.width, arguments.heads), 0, len(schedule.placement))
        except ValueError as error:
            say(f"{name} is not compared: {error}")
            continue
        if schedule.placement not in costs:
            costs[schedule.placement] = measure_costs(arguments, text, schedule.placement)
            say(f"measured {describe(costs[schedule.placement])}")
        trainers[name] = Trainer(arguments, text, schedule)
        planned = simulate(schedule, costs[schedule.placement]).bubble_rate
        contestants.append(Figures(name, trainers[name].step, planned_bubble=planned))
    if not trainers:
        raise SystemExit(f"no schedule fits {stages} ranks: make --layers a multiple of {stages}")
    say(f"comparing {len(contestants)} configurations, {ROUNDS} rounds of {STEPS} steps each, in turn")
    for contestant in contestants:  # to warm up
        contestant.step(0)
    for turn in range(ROUNDS):
        for contestant in contestants:
            seconds, memory = run_round(contestant.step, 1 + turn * STEPS)
            contestant.seconds.append(seconds)
            contestant.memory = max(contestant.memory, memory)
            if contestant.name in trainers:
                note_idle_time(contestant, trainers[contestant.name].pipe.gather_timeline())
    for name, trainer in trainers.items():
        contestant = next(c for c in contestants if c.name == name)
        contestant.held = int(worst(trainer.pipe.queue.peak_bytes))
        trainer.pipe.close()
    fastest = min(contestants[1:], key=lambda c: statistics.median(c.seconds))
    if dist.get_rank() == 0:
        report(arguments, contestants)
    schedule = trainers[fastest.name].schedule
    return schedule, costs[schedule.placement]


def note_idle_time(figures: Figures, timeline: Timeline) -> None:
    busy = sum(timeline.busy) / len(timeline.busy)
    figures.busy.append(busy)
    figures.idle.append(timeline.cost - busy)


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
            options=ProfileOptions(repeats=2),
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
    tokens = arguments.rows * arguments.microbatches * arguments.context
    seconds = {c.name: statistics.median(c.seconds) for c in contestants}
    single, base = seconds["one process"], seconds.get("one_f_one_b", float("nan"))
    head = ["schedule", "step ms", "busy ms", "idle ms", "idle", "planned", "peak MB", "W held MB"]
    head += ["tokens/s", "x 1F1B", "x one process"]
    rows = [
        (
            c.name,
            f"{seconds[c.name] * 1e3:.0f}",
            f"{statistics.median(c.busy) * 1e3:.0f}" if c.busy else "",
            f"{statistics.median(c.idle) * 1e3:.0f}" if c.idle else "",
            "" if c.bubble is None else f"{c.bubble:.1%}",
            "" if c.planned_bubble is None else f"{c.planned_bubble:.1%}",
            f"{c.memory / 1e6:.0f}",
            "" if c.held is None else f"{c.held / 1e6:.1f}",
            f"{tokens / seconds[c.name]:.0f}",
            f"{base / seconds[c.name]:.2f}",
            f"{single / seconds[c.name]:.2f}",
        )
        for c in sorted(contestants, key=lambda c: -seconds[c.name])
    ]
    machine, table = environment(), markdown_table(head, rows)
    print(f"\n{table}\n{machine_line(machine)}", flush=True)
    (arguments.out / "table.md").write_text(f"{table}\n\n{machine_line(machine)}\n")
    figures = [{k: v for k, v in vars(c).items() if k != "step"} for c in contestants]
    (arguments.out / "table.json").write_text(json.dumps({"environment": machine, "figures": figures}, indent=1) + "\n")
