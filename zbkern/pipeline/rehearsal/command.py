"""`zbkern rehearse`: a plan for many GPUs, run rank by rank on the device at hand, with random weights and tokens."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.schedule import Schedule

_ABOUT = (
    "Runs every rank of a plan alone, one after the other, on the device at hand: the real chunks with random weights, "
    "W, optimizer, slices. Messages from other ranks are made up in the right shapes. It prints how long passes take "
    "and the most memory that each rank holds, and the step that all ranks would make together."
)


def add_to(commands: Any) -> None:
    """Adds `rehearse` to the subparsers of the command line."""
    parser = commands.add_parser("rehearse", help="run a plan rank by rank on one device", description=_ABOUT)
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="the model's folder or config.json")
    add("--plan", type=Path, required=True, metavar="FILE", help="the .csv that zbkern plan --out has written")
    add(
        "--ranks",
        type=_ranks,
        metavar="R,R",
        help="such as 0,3,7; others are as fast as the nearest chunk (default all)",
    )
    add("--sequence", type=int, metavar="N", help="tokens of a sequence (default: as planned, else 4096)")
    add("--microbatch-size", type=int, metavar="N", help="sequences of a microbatch (default: as planned, else 1)")
    add("--memory", type=float, metavar="BYTES", help="what a rank may hold, such as 80e9 (default: what this GPU has)")
    add("--costs", type=Path, metavar="FILE", help="costs of the plan's chunks, to show planned times beside measured")
    add("--latency", type=float, default=0.0, metavar="US", help="microseconds of a message besides its bytes")
    add(
        "--bandwidth",
        type=float,
        default=math.inf,
        metavar="GB/s",
        help="of a message between two ranks (default: messages take no time)",
    )
    add("--compare", action="store_true", help="also 1F1B and interleaved 1F1B, simulated with what was measured")
    parser.set_defaults(run=run)


def _ranks(text: str) -> list[int]:
    """Numbers with commas between them."""
    if not all(each.isdecimal() for each in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers of ranks, such as 0,3,7; got {text[:60]!r}")
    return [int(each) for each in text.split(",")]


def run(arguments: argparse.Namespace) -> int:
    """Does what the parsed arguments say, and returns the exit status."""
    try:
        print(_rehearsed(arguments))
    except (ScheduleError, TypeError, ValueError, OSError) as error:
        print(f"zbkern rehearse: {error}", file=sys.stderr)
        return 2
    return 0


def _rehearsed(arguments: argparse.Namespace) -> str:
    import torch
    from transformers import AutoConfig

    import zbkern
    from zbkern.pipeline import Costs, Optimizer, Pipeline, cut, simulate, token_loss, token_targets
    from zbkern.pipeline.rehearsal.rehearse import rehearse
    from zbkern.pipeline.rehearsal.table import table

    schedule, partition, speeds, sizes = _plan(arguments.plan)
    if not arguments.config.exists():
        raise ValueError(f"--config: there is no {arguments.config}; give the model's folder or its config.json")
    config = AutoConfig.from_pretrained(arguments.config)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    def chunks_of(rank: int) -> list[torch.nn.Module]:
        chunks: list[torch.nn.Module] = []
        for chunk in cut(config, schedule, partition, rank=rank, device=device):
            chunks.append(zbkern.convert(chunk.bfloat16() if on_gpu else chunk))
            for parameter in chunk.parameters() if on_gpu else ():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        return chunks

    def optimizer(pipe: Pipeline) -> Optimizer:
        parameters = dict.fromkeys(each for chunk in pipe.modules.values() for each in chunk.parameters())
        adam = torch.optim.AdamW([*parameters], lr=1e-4)
        return Optimizer(adam, pipe, max_norm=1.0, master_weights=on_gpu, undo="inverse")

    rows = arguments.microbatch_size or sizes.get("microbatch_size", 1)
    shape = rows * schedule.microbatches, arguments.sequence or sizes.get("sequence", 4096)
    tokens = torch.randint(config.get_text_config().vocab_size, shape, device=device)
    found = rehearse(
        chunks_of,
        schedule,
        token_loss,
        tokens,
        token_targets(tokens, schedule.microbatches),
        ranks=arguments.ranks,
        optimizer=optimizer,
        latency=arguments.latency * 1e-6,
        bandwidth=arguments.bandwidth * 1e9,
        speeds=speeds,
    )
    memory = arguments.memory or (torch.cuda.mem_get_info()[1] if on_gpu else None)
    planned = simulate(schedule, Costs.load(arguments.costs)) if arguments.costs else None
    replicas = sizes.get("data_parallel", 1)
    shared = f"\noptimizer states are whole here: {replicas} pipelines share those of the plan" * (replicas > 1)
    return table(found, tokens.numel(), memory, planned, arguments.compare) + shared


class _Plan(NamedTuple):
    """partition: the first layer of each chunk, speeds: of the ranks, None where the file does not say. sizes: by the
    name of an option of `zbkern plan`, what it was planned for."""

    schedule: Schedule
    partition: list[float] | None
    speeds: list[float] | None
    sizes: dict[str, int]


_LEFT_OUT = ("tensor_parallel", "expert_parallel", "context_parallel", "fully_shard", "fp8")


def _plan(path: Path) -> _Plan:
    """Raises ScheduleError, or ValueError for a plan of what a rank alone has not."""
    text = path.read_text(encoding="utf-8")
    schedule = Schedule.from_csv(text)
    comments = [line[1:].partition(":") for line in text.splitlines() if line.startswith("#")]
    said = {name.strip(): value.strip() for name, _, value in comments}
    for name in _LEFT_OUT:
        if name in said:
            raise ValueError(
                f"--plan: {path} is for {name} {said[name]}, and a rank that runs alone has whole layers, in bf16 or "
                "float32: plan without it, or rehearse a rank's share of the model in Python, with "
                "zbkern.pipeline.rehearse"
            )
    if schedule.own_slices:
        raise ValueError(
            f"--plan: {path} cuts each sequence in its own way, as plan_batch does: rehearse it in Python, with "
            "zbkern.pipeline.rehearse and the inputs of that batch"
        )
    sizes = {name: int(value) for name, value in said.items() if value.isdecimal()}
    return _Plan(schedule, _numbers(path, said, "partition"), _numbers(path, said, "speeds"), sizes)


def _numbers(path: Path, said: dict[str, str], name: str) -> list[float] | None:
    try:
        return [float(each) for each in said[name].split()] if name in said else None
    except ValueError as error:
        raise ValueError(f"--plan: {name} in {path} must be numbers with spaces between; got {said[name]!r}") from error
