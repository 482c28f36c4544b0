"""`zbkern plan`: what is asked on a command line becomes a Question, and its Answer is printed and written to files.

An error is one line that names the argument and what to do about it, and exit status 2.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from zbkern import schedules
from zbkern.planning import draw
from zbkern.planning.command import from_config, launch, layouts, report
from zbkern.planning.command.answer import answer
from zbkern.planning.command.question import (
    BYTES,
    LAYOUT_EFFORT,
    SIZES,
    LayoutQuestion,
    Question,
    WrongArgument,
    option,
)
from zbkern.planning.costs.chunks import ChunkCosts, Costs, checked_speeds
from zbkern.planning.costs.json_file import read_text
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.planner import Plan, native
from zbkern.planning.planner.arguments import PLACEMENTS, Slices
from zbkern.planning.planner.plan import EFFORT
from zbkern.planning.simulation import comparison
from zbkern.schedules.actions import ScheduleError

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


OPTIONS = {
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
    "--speeds LIST": "of the ranks, one number for each, such as 1,1,.7,1, or a file with them: a rank of .7 takes "
    "1/.7 times as long; layers are cut so that each has what it can carry (default: those in --costs, else equal)",
    "--schedule NAME": f"this schedule instead of a search: {', '.join(schedules.NAMES)}",
    "--compare": "also a table of all published schedules and the plan",
    "--out FILE": "files to write, by suffix: .svg .html (pictures), .json (a trace for Perfetto), .csv, .torch.csv "
    "(without comments, for torch.distributed.pipelining), .txt (the whole grid), .py (with --config: a program that "
    "trains the model so, for torchrun)",
    "--config FILE": "plan for a model that was never run: its folder or config.json, as transformers writes it; "
    "--costs and --schedule do not go with it, and the table of published schedules is always printed",
    "--costs-out FILE": "with --config: also writes the costs of every layer that are computed, with --gpus those of "
    "the first layout; plans from them, as --costs, are the same",
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
    "--weight-bytes B": "with --config: bytes of a weight and its gradient (default 6: bf16, and fp32)",
    "--optimizer-bytes B": "with --config: bytes of the optimizer's state for a parameter, which replicas share "
    "(default 12: AdamW's moments and an fp32 master; 8 for AdamW in fp32, 6 in 8 bits with a master; a snapshot has "
    "12 more)",
    "--halves": "with --config: stages may also begin between attention and MLP of a block",
}
"""Every option, with the kind of value that it takes, and what it is for."""

_READERS = {
    **dict.fromkeys("PMNV", _number(int, "a whole number, at least 1", 1)),
    "ROUNDS": _number(int, "a number of rounds from 0 to 99", most=99),
    "GB/s": _number(float, "a bandwidth in GB/s above 0, such as 50", 1e-9),
    "LIMIT": _memory,
    "LIST": _speeds,
    "B": _number(float, "a number of bytes, at least 0"),
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

SUFFIXES = (".svg", ".html", ".json", ".torch.csv", ".csv", ".txt", ".py")
_DECIDED = (
    *("context_parallel", "costs", "memory", "chunks", "placement"),
    *("schedule", "slices", "speeds", "offload", "recompute", "compare"),
)
"""Arguments that a search of layouts has answers for."""


def add_to(commands: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    what = "find a schedule for given costs and memory, compare schedules, draw them"
    parser = commands.add_parser("plan", help=what, description=_ABOUT)
    for each, text in OPTIONS.items():
        name, _, kind = each.partition(" ")
        how: dict[str, Any] = (
            {"metavar": kind, "type": _READERS[kind]} if kind else {"action": "store_const", "const": True}
        )
        parser.add_argument(name, help=text, **how | _DIFFERENT.get(name, {}))
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Does what the parsed arguments say, and returns the exit status."""
    try:
        _check(arguments)
        question, found = _of_stages(arguments) if arguments.gpus is None else _of_gpus(arguments)
        for path in arguments.out:
            _write(path, question, found, arguments.config)
            print(f"wrote {path}")
        if arguments.costs_out is not None:
            with _writing("--costs-out", arguments.costs_out):
                print(f"wrote {question.costs.save(arguments.costs_out)}")
    except WrongArgument as error:
        print(f"zbkern plan: argument {error}", file=sys.stderr)
        return 2
    return 0


def _of_stages(arguments: Namespace) -> tuple[Question, Plan]:
    """Plans for so many stages and microbatches, prints and compares."""
    given = _given(arguments, [each.name for each in fields(Question)])
    if arguments.config is None:
        question = Question(**given, measured=_costs(arguments.costs))
    else:
        question = Question(**given, setting=from_config.setting(vars(arguments)), model=arguments.config.name)
    _check_question(question, arguments.costs)
    found = answer(question, _show_progress)
    print(report.text(found, _width()))
    return question, found.plan


def _of_gpus(arguments: Namespace) -> tuple[Question, Plan]:
    """Searches layouts, prints the best, and returns the first and its plan."""
    model, gpu = from_config.read(vars(arguments))
    given = _given(arguments, ("gpus", "batch", "sequence", "fp8", "halves", "effort", *BYTES))
    question = LayoutQuestion(model, gpu, own=_given(arguments, from_config.CHOSEN), **given)
    found = layouts.search(question, _show_progress)
    if not found:
        step = f"{question.gpus} GPUs fits {question.batch} sequences of {question.sequence} tokens per step"
        raise WrongArgument("--gpus", f"no layout of {step}: more GPUs, or another --batch, may do")
    print(layouts.describe(question, found, _width()))
    return found[0].layout, found[0].plan


def _given(arguments: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The arguments of these names that were given."""
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def _costs(path: Path | None) -> Costs | ModelCosts:
    if path is None:
        return Costs()
    with from_config.reading("--costs", path):
        text = read_text(path)
        return (ModelCosts if '"layers"' in text else Costs).from_json(text)


def _refuse(wrong: bool, argument: str, why: str) -> None:
    if wrong:
        raise WrongArgument(argument, why)


def _check_question(question: Question, path: Path | None) -> None:
    """Raises WrongArgument where arguments do not go together, and where nothing can be saved, or need be."""
    name, costs, saving = question.schedule, question.costs, "--recompute" if question.offload is None else "--offload"
    if name is not None:
        cut = "--costs has layers, which are cut differently for every schedule; --compare shows them all"
        _refuse(isinstance(costs, ModelCosts), "--schedule", cut)
        own = f"{name} has its own; leave out --placement, or --schedule"
        _refuse(question.placement is not None, "--placement", own)
        _refuse(question.slices == "auto", "--slices", f"{name} is as it is told: give a number, or lengths")
        others = f"leave --chunks out, or use {' or '.join(comparison.INTERLEAVED)}"
        chunks = question.named.chunks
        _refuse(question.chunks not in (None, chunks), "--chunks", f"{name} has {chunks} per rank; {others}")
    try:
        parts = question.parts
    except ValueError as error:
        raise WrongArgument("--costs", f"{path}: {error}; --stages and --chunks say how many") from error
    if question.saves_memory:
        _refuse(name is not None, saving, f"{name} is as published; leave --schedule or {saving} out")
        why = "without a limit nothing needs less memory; give one with --memory"
        _refuse(question.limit is None, saving, why)
        unknown = question.recompute and isinstance(parts, ChunkCosts) and parts.checkpoint is None
        why = "--costs must have checkpoint, what an F keeps; zbkern's profile measures it"
        _refuse(unknown, "--recompute", why)
        unknown = question.setting is None or costs.offload_bandwidth is None
        where = "only --config has a table of hardware, and host_bandwidth must be in it"
        _refuse(question.offload == 0 and unknown, "--offload", f"expected GB/s, such as --offload 50; {where}")


def _show_progress(line: str) -> None:
    """Shows how far a search is, in one line of a terminal that the next call writes over; "" ends it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _check(arguments: Namespace) -> None:
    """Raises WrongArgument for what is missing or does not go together: before the search, so that it comes at once."""
    costs = [] if arguments.costs_out is None else [("--costs-out", arguments.costs_out)]
    for name, path in (*(("--out", path) for path in arguments.out), *costs):
        nowhere = f"cannot write {path}: there is no folder {path.parent}; create it first"
        _refuse(not path.parent.is_dir(), name, nowhere)
    for path in arguments.out:
        _refuse(not path.name.endswith(SUFFIXES), "--out", f"{path} must end in one of {', '.join(SUFFIXES)}")
        program = path.suffix == ".py" and arguments.config is None
        _refuse(program, "--out", f"{path}: a program trains a model; give it with --config")
    compiled = "a search is compiled, and zbkern was installed without a C++ compiler: install one, then zbkern again"
    _refuse(native.core is None and arguments.schedule is None, "--schedule", f"{compiled}, or name a schedule")
    layouts, with_model = arguments.gpus is not None, arguments.config is not None
    needed = "it is needed; or give --config, --gpus and --batch, and it is searched for"
    needed = "--gpus needs it: layouts are for a model and for so many sequences a step" if layouts else needed
    for name in ("config", "batch") if layouts else ("stages", "microbatches"):
        _refuse(getattr(arguments, name) is None, option(name), needed)
    of_models = ("costs_out", "gpu", "hardware", "attention", "calibrate", *SIZES)
    for applies, names, why in (
        (not layouts, ("batch",), "it goes with --gpus; without, --microbatches says how much a step has"),
        (layouts, _DECIDED, "--gpus decides about it; leave one of the two out"),
        (with_model, ("costs", "schedule"), "--config has the costs of its own model; leave one of the two out"),
        (not with_model, of_models, "it describes a model's training; give the model with --config, or leave it out"),
    ):
        for name in names if applies else ():
            _refuse(getattr(arguments, name) is not None, option(name), why)
    if layouts:
        return
    count = arguments.stages if arguments.speeds is None else len(arguments.speeds)
    _refuse(count != arguments.stages, "--speeds", f"it must have one number per rank, {arguments.stages}; got {count}")
    try:
        given = arguments.slices
        slices = 1 if given in (None, "auto") else given if isinstance(given, int) else len(given)
        schedules.check_counts("plan", arguments.stages, arguments.microbatches, arguments.chunks or 1, slices)
    except ScheduleError as error:
        raise WrongArgument("--stages", str(error)) from error


def _write(path: Path, question: Question, found: Plan, config: Path) -> None:
    schedule = found.schedule
    with _writing("--out", path):
        if path.suffix == ".py" and question.setting is not None:
            launch.write(path, found, question.setting, config)
        elif path.suffix == ".txt":
            path.write_text(schedule.to_text() + "\n", encoding="utf-8")
        elif path.suffix == ".csv":
            header = not path.name.endswith(".torch.csv")
            cut = f"# partition: {' '.join(map(str, found.partition))}\n" if header and found.partition else ""
            path.write_text(cut + schedule.to_csv(header=header), encoding="utf-8")
        else:
            draw.save([found.timeline], path, costs=[found.costs], limit=question.limit)


@contextlib.contextmanager
def _writing(argument: str, path: Path) -> Iterator[None]:
    """Raises WrongArgument for a file that cannot be written, and for a program that there cannot be."""
    try:
        yield
    except OSError as error:
        raise WrongArgument(argument, f"cannot write {path}: {error.strerror}; choose another path") from error
    except ValueError as error:
        raise WrongArgument(argument, f"{path}: {error}") from error
