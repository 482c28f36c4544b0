"""Trains a small GPT on real text through a pipeline, after comparing schedules on the machine at hand.

    torchrun --nproc-per-node 2 examples/train_gpt.py                     # measure, compare, train with the best
    torchrun --nproc-per-node 2 examples/train_gpt.py --schedule zb_h1    # train with this one
    torchrun --nproc-per-node 2 examples/train_gpt.py --check             # losses against a plain one-process loop
    torchrun --nproc-per-node 4 examples/train_gpt.py --schedule zb_v --replicas 2    # two pipelines of two stages
    torchrun --nproc-per-node 4 examples/train_gpt.py --schedule zb_v --tensor-parallel 2    # two stages of two ranks

With checkpoints a run can be restarted. The variable is needed because torch 2.13 otherwise keeps one store over
restarts, which still has the addresses of the processes that have ended:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py \\
        --checkpoint-every 50

Ranks use NCCL and bf16 (with --check fp32) where every one has a GPU, else gloo and fp32.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import compare
import torch
import torch.distributed as dist
from text import Text
from trainer import PlainTrainer, Trainer, everywhere, say

from zbkern.pipeline import Costs, Schedule, checkpoint, draw, schedules


def train(arguments: argparse.Namespace, text: Text, schedule: Schedule, costs: Costs | None = None) -> None:
    """Trains for --steps steps, with a log file, checkpoints, and at the end the pictures of the last step.

    costs: of the schedule's chunks; None to measure them for the pictures.
    """
    out, rank = arguments.out, dist.get_rank()
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments, text, schedule, arguments.fill)
    folder, start = out / "checkpoint", 0
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if arguments.resume or restarted:
        loaded = checkpoint.load(folder, trainer.pipe, trainer.optimizer)
        if loaded is not None:
            trainer.learning_rate.load_state_dict(loaded.extra)
            start = loaded.step  # which is the data position, too: the batch depends only on the step
        elif not restarted:
            raise SystemExit(f"--resume: there is no checkpoint in {folder}; run without --resume first")
    say(f"\ntraining with {schedule.name}, steps {start} to {arguments.steps}; log in {out / 'train.log'}")
    tokens = arguments.rows * arguments.microbatches * arguments.replicas * arguments.context
    began, reported = time.perf_counter(), start
    for step in range(start, arguments.steps):
        loss = trainer.step(step)
        done = step + 1
        if done % arguments.log_every == 0 or done == arguments.steps:
            value = everywhere(loss, arguments, trainer.device)
            speed = (done - reported) * tokens / (time.perf_counter() - began)
            began, reported = time.perf_counter(), done
            if rank == 0:
                line = f"step {done:6d}  loss {value:.6f}  {speed:.0f} tokens/s"
                with open(out / "train.log", "a") as log:
                    log.write(line + "\n")
                progress(done, arguments.steps, line)
        if arguments.checkpoint_every and (done % arguments.checkpoint_every == 0 or done == arguments.steps):
            checkpoint.save(folder, done, trainer.pipe, trainer.optimizer, trainer.learning_rate.state_dict())
    if start < arguments.steps:
        save_pictures(arguments, trainer, costs)
    trainer.pipe.close()


def save_pictures(arguments: argparse.Namespace, trainer: Trainer, costs: Costs | None) -> None:
    """The schedule simulated with measured costs, above the last measured step."""
    drift = trainer.pipe.last.drift(costs or compare.measure_costs(arguments, trainer.text, trainer.schedule.placement))
    if dist.get_rank() == 0:
        timelines = [drift.planned, drift.measured]
        titles = [f"{trainer.schedule.name}, planned", f"{trainer.schedule.name}, measured"]
        picture, events = arguments.out / "timeline.svg", arguments.out / "trace.json"
        draw.save(timelines, picture, titles=titles)
        draw.save(timelines, events, titles=titles)
        say(f"planned and measured timeline: {picture}\ntrace for Perfetto (ui.perfetto.dev): {events}")


def check(arguments: argparse.Namespace, text: Text, schedule: Schedule) -> None:
    """Exits with an error unless 20 losses equal the plain loop's to a relative 1e-5."""
    trainer = Trainer(arguments, text, schedule, arguments.fill)
    losses = [everywhere(trainer.step(step), arguments, trainer.device) for step in range(20)]
    trainer.pipe.close()
    plain = PlainTrainer(arguments, text)
    worst = 0.0
    for step, loss in enumerate(losses):
        expected = plain.step(step).item()
        difference = abs(loss - expected) / abs(expected)
        worst = max(worst, difference)
        if not difference <= 1e-5:
            raise SystemExit(
                f"--check: {schedule.name}: the loss of step {step} is {loss!r} and the plain loop's {expected!r}, "
                f"a relative difference of {difference:.1e}; at most 1e-5 was expected"
            )
    say(f"{schedule.name}: 20 losses equal the plain one-process loop's, largest relative difference {worst:.1e}")


def progress(done: int, total: int, line: str) -> None:
    """A bar on a terminal; a line each time elsewhere."""
    if not sys.stdout.isatty():
        print(line, flush=True)
        return
    filled = 30 * done // total
    end = "\n" if done == total else ""
    print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {line}", end=end, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="file or folder of text; default: the sources of Python's standard library")
    parser.add_argument(
        "--schedule", choices=schedules.NAMES, help="train with this one; default: compare, take the best"
    )
    parser.add_argument("--fill", choices=["planned", "eager"], default="planned", help="where weight gradients run")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default 150)")
    parser.add_argument("--microbatches", type=int, help="per step (default: as many as stages)")
    parser.add_argument("--slices", type=int, default=1, help="of each sequence, one after another; needs --schedule")
    parser.add_argument("--replicas", type=int, default=1, help="pipelines side by side; needs --schedule")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of a stage; needs --schedule")
    parser.add_argument("--rows", type=int, default=1, help="sequences per microbatch (default 1)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (default 4)")
    parser.add_argument("--width", type=int, default=512, help="features of a token (default 512)")
    parser.add_argument("--heads", type=int, default=8, help="attention heads (default 8)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence (default 1024)")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding, across ranks")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 0.001)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for log, table, pictures, checkpoints")
    parser.add_argument("--log-every", type=int, default=10, help="steps between log lines (default 10)")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the latest checkpoint in --out, with any schedule"
    )
    parser.add_argument("--check", action="store_true", help="compare 20 losses with a plain one-process loop and exit")
    arguments = parser.parse_args()
    numbers = ("steps", "microbatches", "slices", "replicas", "tensor_parallel", "rows", "layers", "width", "heads")
    for name in (*numbers, "context", "log_every"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    if arguments.width % (2 * arguments.heads):
        parser.error(f"--width must be a multiple of 2 x --heads; got {arguments.width} and {arguments.heads}")
    if arguments.heads % arguments.tensor_parallel:
        parser.error(f"--tensor-parallel must divide --heads; got {arguments.tensor_parallel} and {arguments.heads}")
    for name in ("replicas", "tensor_parallel", "slices"):
        if getattr(arguments, name) > 1 and not (arguments.schedule or arguments.check):
            option = name.replace("_", "-")
            parser.error(f"--{option} needs --schedule: compare schedules on the ranks of one pipeline first")
    if arguments.replicas > 1 and arguments.tensor_parallel > 1:
        parser.error("--replicas and --tensor-parallel exclude each other: DistributedDataParallel takes no DTensors")
    return arguments


def start_ranks() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("train_gpt.py must be started by torchrun: torchrun --nproc-per-node 2 examples/train_gpt.py")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))


def main() -> None:
    arguments = parse()
    start_ranks()
    text = Text(arguments.data, arguments.seed)
    say(f"{len(text.bytes) / 1e6:.1f} MB of text from {text.source}, {dist.get_world_size()} ranks")
    stages, rest = divmod(dist.get_world_size(), arguments.replicas * arguments.tensor_parallel)
    if rest:
        option = "replicas" if arguments.replicas > 1 else "tensor-parallel"
        value = arguments.replicas * arguments.tensor_parallel
        raise SystemExit(f"--{option} {value} does not divide {dist.get_world_size()} ranks")
    arguments.microbatches = arguments.microbatches or stages
    if arguments.check or arguments.schedule:
        schedule = compare.build(arguments.schedule or "zb_h1", stages, arguments.microbatches, arguments.slices)
    if arguments.check:
        check(arguments, text, schedule)
    elif arguments.schedule:
        train(arguments, text, schedule)
    else:
        train(arguments, text, *compare.best(arguments, text))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
