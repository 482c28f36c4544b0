"""The options of `zbkern plan`, each once: what it takes, what it is for, and which others it goes with."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zbkern import schedules
from zbkern.planning.command.question import LAYOUT_EFFORT
from zbkern.planning.cost_model.software import SOFTWARE
from zbkern.planning.costs.chunks import checked_speeds
from zbkern.planning.costs.json_file import read_text
from zbkern.planning.planner.plan import EFFORT
from zbkern.planning.planner.request import PLACEMENTS, Slices


class Option(NamedTuple):
    """spelling: with the kind of value that it takes, none for what is said by its name alone. needs: the argument
    without which it says nothing. without: those that have an answer of their own for it. reading: what argparse is
    told besides."""

    spelling: str
    text: str
    needs: str = ""
    without: tuple[str, ...] = ()
    reading: Mapping[str, Any] = MappingProxyType({})

    @property
    def argument(self) -> str:
        return self.spelling.split()[0].removeprefix("--").replace("-", "_")

    def add_to(self, parser: Any) -> None:
        name, _, kind = self.spelling.partition(" ")
        how = {"metavar": kind, "type": _READERS[kind]} if kind else {"action": "store_const", "const": True}
        parser.add_argument(name, help=self.text, **{**how, **self.reading})


NEEDS = {
    "gpus": "it goes with --gpus; without, --microbatches says how much a step has",
    "config": "it describes a model's training; give the model with --config, or leave it out",
}
"""Why an option is nothing without this argument."""

WITHOUT = {
    "gpus": "--gpus decides about it; leave one of the two out",
    "config": "--config has the costs of its own model; leave one of the two out",
}
"""Why an option does not go with this argument."""


def _number(kind: Callable[[str], Any], expected: str, least: float = 0, most: float = 1e300) -> Callable[[str], Any]:
    """A reader of such numbers from `least` to `most`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ArgumentTypeError(f"expected {expected}; got {text[:60]!r}")
        return value

    return read


def _memory(text: str) -> tuple[float, bool]:
    """A number, and whether it counts what one microbatch holds in the whole model."""
    read = _number(float, "a limit such as 1.5x, or 60e9 in the unit of activation, bytes")
    return read(text.removesuffix("x")), text.endswith("x")


def _numbers(text: str, words: Iterable[str], expected: str, least: int = 0) -> str | tuple[int, ...]:
    """One of the words, or numbers with commas between them."""
    if text in words:
        return text
    if re.fullmatch(r"\d{1,999}(,\d{1,999})*", text) and min(numbers := tuple(map(int, text.split(",")))) >= least:
        return numbers
    raise ArgumentTypeError(f"expected {expected}; got {text[:60]!r}")


def _placement(text: str) -> str | tuple[int, ...]:
    return _numbers(text, PLACEMENTS, f"{', '.join(PLACEMENTS)} or a rank per chunk")


def _speeds(text: str) -> tuple[float, ...]:
    """Of every rank: numbers with commas between them, or those in a file, a JSON list."""
    try:
        if not re.fullmatch(r"[\d.,e+-]+", text):
            text = read_text(text).strip().removeprefix("[").removesuffix("]")
        return checked_speeds("--speeds", [*map(float, text.split(","))])
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"expected a speed for every rank, such as 1,1,.7,1, or a file: {error}") from error


def _slices(text: str) -> Slices:
    slices = _numbers(text, ["auto"], "auto, a number of slices, or lengths such as 3,2,2", 1)
    return slices[0] if isinstance(slices, tuple) and len(slices) == 1 else slices


_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys("PMNV", _number(int, "a whole number, at least 1", 1)),
    "ROUNDS": _number(int, "a number of rounds from 0 to 99", most=99),
    "GB/s": _number(float, "a bandwidth in GB/s above 0, such as 50", 1e-9),
    "LIMIT": _memory,
    "LIST": _speeds,
    "B": _number(float, "a number of bytes, at least 0"),
    "FILE": Path,
    "NAME": str,
}

_STAGES = (
    Option("--stages P", "pipeline ranks, p"),
    Option("--microbatches M", "microbatches per step, m"),
    Option(
        "--gpus N",
        "with --config and --batch, instead of --stages and --microbatches: searches the layouts of so many GPUs "
        "(tensor, pipeline, data and expert parallelism, size of a microbatch, recomputation), and prints the best "
        "five; with --stages, --tensor-parallel and so on also the best layout of these sizes, and why it loses",
    ),
    Option("--batch N", "with --gpus: sequences per step, of all pipelines", needs="gpus"),
    Option(
        "--costs FILE",
        "JSON file that Costs.save wrote, of one chunk or of every chunk, or ModelCosts.save, of every layer, for a "
        "plan that cuts them into chunks; without it every pass takes 1",
        without=("gpus", "config"),
    ),
    Option(
        "--memory LIMIT",
        "the most a rank may hold: 1.5x is 1.5 times what one microbatch holds in the whole model (1F1B needs 1x, and "
        "the costs' static memory besides), a plain number is in the unit of the costs' activation, bytes with "
        "--config; without it there is no limit, with --config what the GPU has beside the context and its groups",
        without=("gpus",),
    ),
    Option(
        "--chunks V",
        "chunks per rank (default 1, or those of --schedule; what is best for costs of layers)",
        without=("gpus",),
    ),
    Option(
        "--placement NAME",
        f"where the chunks are: {', '.join(PLACEMENTS)}, or the rank of every chunk, such as 0,1,1,0",
        without=("gpus",),
        reading={"type": _placement},
    ),
    Option(
        "--effort ROUNDS",
        f"rounds of search, each twice as long as the one before (default {EFFORT}, about ten seconds in all; with "
        f"--gpus {LAYOUT_EFFORT}; 0: the quick answer alone); the plan depends on it and not on how fast or busy the "
        "machine is",
    ),
    Option(
        "--offload GB/s",
        "activations may go to the host and come back, at so many GB/s in each direction (memory per time for costs "
        "without units); with --config the number can be left out, and is that of the table of hardware",
        without=("gpus",),
        reading={"nargs": "?", "const": 0.0},
    ),
    Option(
        "--recompute",
        "activations may be recomputed; --costs of chunks must have the checkpoint, what an F keeps then",
        without=("gpus",),
    ),
    Option(
        "--slices N",
        "sequences go through the pipeline in slices: as many as are best (auto), a number, whose lengths are chosen, "
        "or lengths such as 3,2,2, in any unit; for causal models, see docs/long_context.md",
        without=("gpus",),
        reading={"type": _slices},
    ),
    Option(
        "--speeds LIST",
        "of the ranks, one number for each, such as 1,1,.7,1, or a file with them: a rank of .7 takes 1/.7 times as "
        "long; layers are cut so that each has what it can carry (default: those in --costs, else equal)",
        without=("gpus",),
    ),
    Option(
        "--schedule NAME",
        f"this schedule instead of a search: {', '.join(schedules.NAMES)}",
        without=("gpus", "config"),
        reading={"choices": schedules.NAMES},
    ),
    Option("--compare", "also a table of all published schedules and the plan", without=("gpus",)),
    Option(
        "--out FILE",
        "files to write, by suffix: .svg .html (pictures), .json (a trace for Perfetto), .csv, .torch.csv (without "
        "comments, for torch.distributed.pipelining), .txt (the whole grid), .py (with --config: a program that trains "
        "the model so, for torchrun)",
        reading={"nargs": "+", "action": "extend", "default": []},
    ),
    Option(
        "--config FILE",
        "plan for a model that was never run: its folder or config.json, as transformers writes it; --costs and "
        "--schedule do not go with it, and the table of published schedules is always printed",
    ),
)
_MODELS = (
    Option(
        "--costs-out FILE",
        "with --config: also writes the costs of every layer that are computed, with --gpus those of the first layout; "
        "plans from them, as --costs, are the same",
    ),
    Option("--gpu NAME", "with --config: a GPU in the table of hardware (default h100)"),
    Option(
        "--hardware FILE",
        "with --config: a table of your own, in the form of zbkern/planning/cost_model/hardware.json",
    ),
    Option(
        "--attention NAME",
        "with --config: the kernel of attention, one of the table for the GPU (default: the first)",
    ),
    Option(
        "--software NAME",
        f"with --config: what runs the model, which decides about shares of the peaks: {', '.join(SOFTWARE)} (default "
        "torch, as zbkern's programs; megatron overlaps tensor parallelism with products)",
        reading={"choices": [*SOFTWARE]},
    ),
    Option(
        "--calibrate FILE",
        "with --config: corrects what is computed by what was measured: blocks of the model, as profile_layers and "
        "ModelCosts.save wrote them, of the sizes given here (with --gpus: one sequence on one GPU); or a step of a "
        'training run, {"seconds": 12.3}, 1F1B with the sizes given here, or with those beside the seconds',
    ),
    Option("--tensor-parallel N", "with --config: GPUs that share every layer (default 1)"),
    Option("--expert-parallel N", "with --config: GPUs that share the experts (default 1)"),
    Option(
        "--context-parallel N",
        "with --config: GPUs that share the tokens of every sequence (default 1)",
        without=("gpus",),
    ),
    Option(
        "--data-parallel N",
        "with --config: pipelines that share the optimizer's state (default: as few as experts need)",
    ),
    Option("--sequence N", "with --config: tokens of a sequence (default 4096)"),
    Option("--microbatch-size N", "with --config: sequences of a microbatch (default 1)"),
    Option("--fp8", "with --config: F and B of linears in FP8, W in bf16"),
    Option(
        "--fully-shard",
        "with --config and --stages 1: data-parallel GPUs share weights and gradients, too, gathered layer by layer "
        "(FSDP, ZeRO-3); with --gpus it is tried anyway, and can be named to compare with",
    ),
    Option("--weight-bytes B", "with --config: bytes of a weight and its gradient (default 6: bf16, and fp32)"),
    Option(
        "--optimizer-bytes B",
        "with --config: bytes of the optimizer's state for a parameter, which replicas share (default 12: AdamW's "
        "moments and an fp32 master; 8 for AdamW in fp32, 6 in 8 bits with a master; a snapshot has 12 more)",
    ),
    Option(
        "--overlap",
        "with --config: passes may run beside each other during the all-to-alls of expert parallelism",
    ),
    Option("--halves", "with --config: stages may also begin between attention and MLP of a block"),
)
OPTIONS = (*_STAGES, *(each._replace(needs="config") for each in _MODELS))
"""All of them, in the order in which --help has them."""
