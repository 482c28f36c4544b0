"""`zbkern plan`: what is asked on a command line becomes a Question, and its Answer is printed and written to files.

An error is one line that names the argument and what to do about it, and exit status 2.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from zbkern.planning import draw
from zbkern.planning.command import from_config, launch, layouts, report
from zbkern.planning.command.answer import answer
from zbkern.planning.command.options import NEEDS, OPTIONS, WITHOUT
from zbkern.planning.command.question import BYTES, LayoutQuestion, Measured, Question, WrongArgument, option
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.costs.chunks import ChunkCosts, Costs
from zbkern.planning.costs.json_file import read_text
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.planner import Plan, native
from zbkern.planning.simulation import comparison

_ABOUT = (
    "Finds the order of forwards (F), input gradients (B) and weight gradients (W) with the least idle time within a "
    "memory limit, and prints it with a lower bound; --compare shows published schedules beside it. Costs are measured "
    "(--costs), or computed from a model's configuration (--config)."
)


SUFFIXES = (".svg", ".html", ".json", ".torch.csv", ".csv", ".txt", ".py")


def add_to(commands: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    what = "find a schedule for given costs and memory, compare schedules, draw them"
    parser = commands.add_parser("plan", help=what, description=_ABOUT)
    for each in OPTIONS:
        each.add_to(parser)
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
        question = Question(**given, setting=Measured(_costs(arguments.costs)))
    else:
        setting = from_config.setting(vars(arguments))
        question = Question(**given | {"setting": setting, "name": arguments.config.name, "compare": True})
    _check_question(question, arguments.costs)
    found = answer(question, _show_progress)
    print(report.text(found, _width()))
    return question, found.plan


def _of_gpus(arguments: Namespace) -> tuple[Question, Plan]:
    """Searches layouts, prints the best, and returns the first and its plan."""
    model, gpu = from_config.read(vars(arguments))
    given = _given(arguments, LayoutQuestion._fields[2:])
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
    try:
        _ = question.request
    except ValueError as error:
        given = {"placement": None, "chunks": None, "slices": 1, "speeds": None}
        named = [option(name) for name, default in given.items() if getattr(question, name) != default]
        raise WrongArgument(", ".join([*named, "--stages"]), str(error)) from error
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
        unknown = not isinstance(question.setting, Setting) or costs.offload_bandwidth is None
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
    layouts = arguments.gpus is not None
    needed = "it is needed; or give --config, --gpus and --batch, and it is searched for"
    needed = "--gpus needs it: layouts are for a model and for so many sequences a step" if layouts else needed
    for name in ("config", "batch") if layouts else ("stages", "microbatches"):
        _refuse(getattr(arguments, name) is None, option(name), needed)
    for each in OPTIONS:
        if getattr(arguments, each.argument) not in (None, []):
            for other in each.without:
                _refuse(getattr(arguments, other) is not None, option(each.argument), WITHOUT[other])
            without = each.needs != "" and getattr(arguments, each.needs) is None
            _refuse(without, option(each.argument), NEEDS.get(each.needs, ""))


def _write(path: Path, question: Question, found: Plan, config: Path) -> None:
    schedule = found.schedule
    with _writing("--out", path):
        if path.suffix == ".py" and isinstance(question.setting, Setting):
            launch.write(path, found, question.setting, config)
        elif path.suffix == ".txt":
            path.write_text(schedule.to_text() + "\n", encoding="utf-8")
        elif path.suffix == ".csv":
            header = not path.name.endswith(".torch.csv")
            above = "".join(f"# {name}: {value}\n" for name, value in _made_for(question, found)) if header else ""
            path.write_text(above + schedule.to_csv(header=header), encoding="utf-8")
        else:
            draw.save([found.timeline], path, costs=[found.costs], limit=question.limit)


def _made_for(question: Question, found: Plan) -> Iterator[tuple[str, object]]:
    """What a schedule is of, beside its actions, for `zbkern rehearse`: by the names of options."""
    if found.partition:
        yield "partition", " ".join(map(str, found.partition))
    if question.costs.speeds is not None:
        yield "speeds", " ".join(map(str, question.costs.speeds))
    if isinstance(question.setting, Setting):
        given = ((each, getattr(question.setting.job, each.name)) for each in fields(question.setting.job))
        in_plan = ("halves", "overlap", *BYTES)
        yield from ((each.name, value) for each, value in given if value != each.default and each.name not in in_plan)


@contextlib.contextmanager
def _writing(argument: str, path: Path) -> Iterator[None]:
    """Raises WrongArgument for a file that cannot be written, and for a program that there cannot be."""
    try:
        yield
    except OSError as error:
        raise WrongArgument(argument, f"cannot write {path}: {error.strerror}; choose another path") from error
    except ValueError as error:
        raise WrongArgument(argument, f"{path}: {error}") from error
