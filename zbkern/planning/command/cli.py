"""`zbkern plan`: what is asked on a command line becomes a Question, and its Answer is printed and written to files.

An error is one line that names the argument and what to do about it, and exit status 2.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from zbkern import schedules
from zbkern.planning import draw
from zbkern.planning.command import from_config, launch, layouts, plan_options, report
from zbkern.planning.command.answer import answer
from zbkern.planning.command.question import SIZES, LayoutQuestion, Question, WrongArgument, option
from zbkern.planning.planner import Plan
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.costs import ChunkCosts, Costs
from zbkern.planning.simulation.json_file import read_text
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.schedules.actions import ScheduleError

SUFFIXES = (".svg", ".html", ".json", ".torch.csv", ".csv", ".txt", ".py")
_DECIDED = (
    *("context_parallel", "costs", "memory", "chunks", "placement"),
    *("schedule", "slices", "offload", "recompute", "compare"),
)
"""Arguments that a search of layouts has answers for."""


def add_to(commands: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    plan_options.add_to(commands).set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Does what the parsed arguments say, and returns the exit status."""
    try:
        _check(arguments)
        question, found = _of_stages(arguments) if arguments.gpus is None else _of_gpus(arguments)
        for path in arguments.out:
            _write(path, question, found, arguments.config)
            print(f"wrote {path}")
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
    given = _given(arguments, LayoutQuestion._fields)
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
    """Before the search, so that an error comes at once."""
    for path in arguments.out:
        _refuse(not path.name.endswith(SUFFIXES), "--out", f"{path} must end in one of {', '.join(SUFFIXES)}")
        nowhere = f"cannot write {path}: there is no folder {path.parent}; create it first"
        _refuse(not path.parent.is_dir(), "--out", nowhere)
        program = path.suffix == ".py" and arguments.config is None
        _refuse(program, "--out", f"{path}: a program trains a model; give it with --config")
    _check_whether_given(arguments)
    if arguments.gpus is not None:
        return
    try:
        given = arguments.slices
        slices = 1 if given in (None, "auto") else given if isinstance(given, int) else len(given)
        schedules.check_counts("plan", arguments.stages, arguments.microbatches, arguments.chunks or 1, slices)
    except ScheduleError as error:
        raise WrongArgument("--stages", str(error)) from error


def _check_whether_given(arguments: Namespace) -> None:
    """Raises WrongArgument for the first argument that is missing, or does not go with another one."""
    layouts, with_model = arguments.gpus is not None, arguments.config is not None
    needed = "it is needed; or give --config, --gpus and --batch, and it is searched for"
    needed = "--gpus needs it: layouts are for a model and for so many sequences a step" if layouts else needed
    for name in ("config", "batch") if layouts else ("stages", "microbatches"):
        _refuse(getattr(arguments, name) is None, option(name), needed)
    of_models = ("gpu", "hardware", "attention", "calibrate", *SIZES)
    for applies, names, why in (
        (not layouts, ("batch",), "it goes with --gpus; without, --microbatches says how much a step has"),
        (layouts, _DECIDED, "--gpus decides about it; leave one of the two out"),
        (with_model, ("costs", "schedule"), "--config has the costs of its own model; leave one of the two out"),
        (not with_model, of_models, "it describes a model's training; give the model with --config, or leave it out"),
    ):
        for name in names if applies else ():
            _refuse(getattr(arguments, name) is not None, option(name), why)


def _write(path: Path, question: Question, found: Plan, config: Path) -> None:
    schedule = found.schedule
    try:
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
    except OSError as error:
        raise WrongArgument("--out", f"cannot write {path}: {error.strerror}; choose another path") from error
    except ValueError as error:  # of a program
        raise WrongArgument("--out", f"{path}: {error}") from error
