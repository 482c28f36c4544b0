"""The options of `zbkern plan`: what each is for, and how its text is read."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zbkern import schedules
from zbkern.planning.command.question import LAYOUT_EFFORT
from zbkern.planning.planner.arguments import PLACEMENTS, Slices
from zbkern.planning.planner.plan import EFFORT

_ABOUT = (
    "Finds the order of forwards (F), input gradients (B) and weight gradients (W) with the least idle time within a "
    "memory limit, and prints it with a lower bound; --compare shows published schedules beside it. Costs are measured "
    "(--costs), or computed from a model's configuration (--config)."
)


def _number(kind: Callable[[str], Any], expected: str, least: float = 0, most: float = 1e300) -> Callable[[str], Any]:
    """A reader of such numbers from `least` to `most`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {expected}; got {text[:60]!r}")
        return value

    return read


def _memory(text: str) -> tuple[float, bool]:
    """A number, and whether it counts what one microbatch holds in the whole model."""
    read = _number(float, "a limit such as 1.5x, or 60e9 in the unit of activation, bytes")
    return read(text.removesuffix("x")), text.endswith("x")


def _placement(text: str) -> str | tuple[int, ...]:
    if text in PLACEMENTS:
        return text
    if re.fullmatch(r"\d+(,\d+)*", text):
        return tuple(map(int, text.split(",")))
    raise argparse.ArgumentTypeError(f"expected {', '.join(PLACEMENTS)} or a rank per chunk; got {text!r}")


def _slices(text: str) -> Slices:
    if text == "auto":
        return text
    if re.fullmatch(r"\d+(,\d+)*", text) and all(lengths := [int(each) for each in text.split(",")]):
        return lengths[0] if len(lengths) == 1 else tuple(lengths)
    raise argparse.ArgumentTypeError(f"expected auto, a number of slices, or lengths such as 3,2,2; got {text[:60]!r}")


_OPTIONS = {
    "--stages P": "pipeline ranks, p",
    "--microbatches M": "microbatches per step, m",
    "--gpus N": "with --config and --batch, instead of --stages and --microbatches: searches the layouts of so many "
    "GPUs (tensor, pipeline, data and expert parallelism, size of a microbatch, recomputation), and prints the best "
    "five; with --stages, --tensor-parallel and so on also the best layout of these sizes, and why it loses",
    "--batch N": "with --gpus: sequences per step, of all pipelines",
    "--costs FILE": "JSON file that Costs.save wrote, of one chunk or of every chunk, or ModelCosts.save, of every "
    "layer, for a plan that cuts them into chunks; without it every pass takes 1",
    "--memory LIMIT": "the most a rank may hold: 1.5x is 1.5 times what one microbatch holds in the whole model (1F1B "
    "needs 1x, and the costs' static memory besides), a plain number is in the unit of the costs' activation, bytes "
    "with --config; without it there is no limit, with --config what the GPU has beside the context and its groups",
    "--chunks V": "chunks per rank (default 1, or those of --schedule; what is best for costs of layers)",
    "--placement NAME": f"where the chunks are: {', '.join(PLACEMENTS)}, or the rank of every chunk, such as 0,1,1,0",
    "--effort ROUNDS": f"rounds of search, each twice as long as the one before (default {EFFORT}, about ten seconds "
    f"in all; with --gpus {LAYOUT_EFFORT}; 0: the quick answer alone); the plan depends on it and not on how fast or "
    "busy the machine is",
    "--offload GB/s": "activations may go to the host and come back, at so many GB/s in each direction (memory per "
    "time for costs without units); with --config the number can be left out, and is that of the table of hardware",
    "--recompute": "activations may be recomputed; --costs of chunks must have the checkpoint, what an F keeps then",
    "--slices N": "sequences go through the pipeline in slices: as many as are best (auto), a number, whose lengths "
    "are chosen, or lengths such as 3,2,2, in any unit; for causal models, see docs/long_context.md",
    "--schedule NAME": f"this schedule instead of a search: {', '.join(schedules.NAMES)}",
    "--compare": "also a table of all published schedules and the plan",
    "--out FILE": "files to write, by suffix: .svg .html (pictures), .json (a trace for Perfetto), .csv, .torch.csv "
    "(without comments, for torch.distributed.pipelining), .txt (the whole grid), .py (with --config: a program that "
    "trains the model so, for torchrun)",
    "--config FILE": "plan for a model that was never run: its folder or config.json, as transformers writes it; "
    "--costs and --schedule do not go with it, and the table of published schedules is always printed",
    "--gpu NAME": "with --config: a GPU in the table of hardware (default h100)",
    "--hardware FILE": "with --config: a table of your own, in the form of zbkern/planning/cost_model/hardware.json",
    "--attention NAME": "with --config: the kernel of attention, one of the table for the GPU (default: the first)",
    "--calibrate FILE": "with --config: corrects what is computed by what was measured: blocks of the model, as "
    "profile_layers and ModelCosts.save wrote them, of the sizes given here (with --gpus: one sequence on one GPU); or "
    'a step of a training run, {"seconds": 12.3}, 1F1B with the sizes given here, or with those beside the seconds',
    "--tensor-parallel N": "with --config: GPUs that share every layer (default 1)",
    "--expert-parallel N": "with --config: GPUs that share the experts (default 1)",
    "--context-parallel N": "with --config: GPUs that share the tokens of every sequence (default 1)",
    "--data-parallel N": "with --config: pipelines that share the optimizer's state (default: as few as experts need)",
    "--sequence N": "with --config: tokens of a sequence (default 4096)",
    "--microbatch-size N": "with --config: sequences of a microbatch (default 1)",
    "--fp8": 'with --config: F and B of linears in FP8, as recipe="fp8_blockwise" of zbkern.convert',
    "--fully-shard": "with --config and --stages 1: data-parallel GPUs share weights and gradients, too, gathered "
    "layer by layer (FSDP, ZeRO-3); with --gpus it is tried anyway, and can be named to compare with",
    "--halves": "with --config: stages may also begin between attention and MLP of a block",
}
"""Every option, with the kind of value that it takes, and what it is for."""

_READERS = {
    **dict.fromkeys("PMNV", _number(int, "a whole number, at least 1", 1)),
    "ROUNDS": _number(int, "a number of rounds from 0 to 99", most=99),
    "GB/s": _number(float, "a bandwidth in GB/s above 0, such as 50", 1e-9),
    "LIMIT": _memory,
    "FILE": Path,
    "NAME": str,
}
_DIFFERENT: dict[str, dict[str, Any]] = {
    "--placement": {"type": _placement},
    "--slices": {"type": _slices},
    "--schedule": {"choices": schedules.NAMES},
    "--offload": {"nargs": "?", "const": 0.0},
    "--out": {"nargs": "+", "action": "extend", "default": []},
}


def add_to(commands: Any) -> argparse.ArgumentParser:
    """Adds `plan` to the subparsers of the command line, and returns its own."""
    what = "find a schedule for given costs and memory, compare schedules, draw them"
    parser: argparse.ArgumentParser = commands.add_parser("plan", help=what, description=_ABOUT)
    for option, text in _OPTIONS.items():
        name, _, kind = option.partition(" ")
        how: dict[str, Any] = (
            {"metavar": kind, "type": _READERS[kind]} if kind else {"action": "store_const", "const": True}
        )
        parser.add_argument(name, help=text, **how | _DIFFERENT.get(name, {}))
    return parser
