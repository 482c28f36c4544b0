"""`zbkern plan`: a schedule for given costs and memory, or a named one; printed, compared and written to files.

An error is one line that names the argument and what to do about it, and exit status 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zbkern.pipeline import schedules
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.schedules.units import TIME_UNITS, amount, duration, enough
from zbkern.planning import draw
from zbkern.planning.command import from_config, launch, layouts, plan_options, report
from zbkern.planning.command.from_config import WrongArgument
from zbkern.planning.command.remedies import may_fit_with_saving
from zbkern.planning.planner import Plan, PlanOptions, plan
from zbkern.planning.planner.arguments import chunks_per_rank
from zbkern.planning.planner.plan import EFFORT, judged
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.costs import Costs
from zbkern.planning.simulation.json_file import read_text
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.planning.simulation.simulator import simulate

SUFFIXES = (".svg", ".html", ".json", ".torch.csv", ".csv", ".txt", ".py")
_WORTH_TRYING = 0.01  # of the objective
_QUICK = 2  # rounds of the searches that only tell what an option would give
_RECHUNKED = (
    "other numbers of chunks: the same model cut evenly; what its first or last chunk has beyond others stays whole"
)


def add_to(commands: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    plan_options.add_to(commands).set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Does what the parsed arguments say, and returns the exit status."""
    try:
        _check(arguments)
        if arguments.effort is None:
            arguments.effort = EFFORT if arguments.gpus is None else layouts.EFFORT
        if arguments.slices is None:
            arguments.slices = 1
        found, limit, setting = _of_stages(arguments) if arguments.gpus is None else _of_gpus(arguments)
        for path in arguments.out:
            _write(path, found, limit, setting, arguments.config)
            print(f"wrote {path}")
    except WrongArgument as error:
        print(f"zbkern plan: argument {error}", file=sys.stderr)
        return 2
    return 0


def _of_gpus(arguments: Namespace) -> tuple[Plan, float, from_config.Setting]:
    """Searches layouts, prints the best, and returns the plan of the first."""
    model, gpu = from_config.model_and_gpu(arguments)
    sequence = arguments.sequence or from_config.SIZES["sequence"]
    wanted = layouts.Wanted(model, gpu, arguments.gpus, arguments.batch, sequence, bool(arguments.fp8))
    own = {name: getattr(arguments, name) for name in from_config.CHOSEN if getattr(arguments, name) is not None}
    answers = layouts.search(wanted, arguments.effort, arguments.objective, _progress(), own)
    if not answers:
        sizes = f"{wanted.gpus} GPUs fits {wanted.batch} sequences of {sequence} tokens per step"
        raise WrongArgument("--gpus", f"no layout of {sizes}: more GPUs, or another --batch, may do")
    print(layouts.describe(answers, _width()))
    if own and not any(each.layout.has(own) for each in answers):
        print(report.figure("yours", layouts.why_not(wanted, own), _width()))
    return answers[0].plan, answers[0].layout.setting.limit, answers[0].layout.setting


class _Task(NamedTuple):
    """What is planned: arguments, and what follows from them."""

    arguments: Namespace
    costs: Costs | ModelCosts
    setting: from_config.Setting | None  # what the costs were computed from
    limit: float | None
    whole: float  # what one microbatch holds in the whole model; 0 for none, where memory has model states in it


def _of_stages(arguments: Namespace) -> tuple[Plan, float | None, from_config.Setting | None]:
    """Plans for so many stages and microbatches, prints and compares."""
    task, width = _task(arguments), _width()
    setting, layers = task.setting, task.costs if isinstance(task.costs, ModelCosts) else None
    found = _named(task) if arguments.schedule else _plan(task)
    if setting is not None:
        print(f"{from_config.title(arguments, setting)}\n")
    searched = layers is not None and arguments.chunks is None and arguments.placement is None
    saving = from_config.saves_memory(arguments)
    print(report.describe(found, arguments.objective, task.limit, task.whole, width, layers, searched, saving))
    _print_gains(task, found)
    if setting is not None:
        print(from_config.step(found, setting, arguments.objective, width))
    elif layers is not None:
        print(report.cut(found, len(layers.layers), width))
    if arguments.compare or setting is not None:
        print("\n" + _comparison(task, found))
    if setting is not None:
        print("\n" + from_config.assumptions(setting.hardware, width))
    return found, task.limit, setting


def _task(arguments: Namespace) -> _Task:
    setting = None if arguments.config is None else from_config.setting(arguments)
    costs = _costs(arguments.costs) if setting is None else setting.costs
    if isinstance(costs, Costs):
        chunks = _chunks(arguments)
        try:
            flat = costs.per_chunk(arguments.stages * chunks)
        except ValueError as error:
            raise WrongArgument("--costs", f"{arguments.costs}: {error}; --stages and --chunks say how many") from error
        whole, static, has_checkpoint = sum(flat.activation), any(flat.static), flat.checkpoint is not None
    elif arguments.schedule is not None:
        why = "--costs has layers, which are cut differently for every schedule; --compare shows them all"
        raise WrongArgument("--schedule", why)
    else:
        whole, static = sum(each.activation for each in costs.layers), any(each.static for each in costs.layers)
        has_checkpoint = True
    limit = None if setting is None else setting.limit
    if arguments.memory is not None:
        value, relative = arguments.memory
        limit = value * whole if relative else value
    return _Task(arguments, _with_copies(arguments, costs, has_checkpoint), setting, limit, 0.0 if static else whole)


def _comparison(task: _Task, found: Plan) -> str:
    """A table of the published schedules, in whole sequences and in the plan's slices, and of the plan."""
    arguments, costs, setting, limit, whole = task
    stages, microbatches, published = arguments.stages, arguments.microbatches, []
    for slices in dict.fromkeys([(1,), found.schedule.slices]):
        if isinstance(costs, ModelCosts):
            published += from_config.published_timelines(costs, stages, microbatches, limit, slices)
        else:
            published += comparison.timelines(costs, stages, microbatches, found.schedule.chunks, slices)
    shown = published if arguments.schedule else [*published, found.timeline]
    if isinstance(costs, Costs):
        return f"{report.table(shown, arguments.objective, limit, whole)}\n\n{_RECHUNKED}"
    tokens, beside = (0, 0.0) if setting is None else (setting.tokens(microbatches), setting.beside(stages))
    return report.table(shown, arguments.objective, limit, whole, tokens, beside, cuts=True)


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _chunks(arguments: Namespace) -> int:
    """Chunks per rank, for costs of chunks."""
    name = arguments.schedule
    if name is None:
        return arguments.chunks or chunks_per_rank(arguments.placement, arguments.stages)
    if arguments.placement is not None:
        raise WrongArgument("--placement", f"{name} has its own; leave out --placement, or --schedule")
    chunks = comparison.build(name, arguments.stages, 1, arguments.chunks).chunks
    if arguments.chunks not in (None, chunks):
        others = " or ".join(comparison.INTERLEAVED)
        raise WrongArgument("--chunks", f"{name} has {chunks} per rank; leave --chunks out, or use {others}")
    return chunks


def _costs(path: str | None) -> Costs | ModelCosts:
    costs: Costs | ModelCosts = Costs()
    if path is not None:
        with from_config.reading("--costs", path):
            text = read_text(path)
            costs = (ModelCosts if '"layers"' in text else Costs).from_json(text)
    return costs


def _with_copies(arguments: Namespace, costs: Costs | ModelCosts, has_checkpoint: bool) -> Costs | ModelCosts:
    """The costs with the bandwidth of --offload, in their own units; without a number that of the table of hardware."""
    saving = "--offload" if arguments.offload is not None else "--recompute"
    if not from_config.saves_memory(arguments):
        return costs
    if arguments.schedule is not None:
        raise WrongArgument(saving, f"{arguments.schedule} is as published; leave --schedule or {saving} out")
    if arguments.memory is None and arguments.config is None:
        raise WrongArgument(saving, "without a limit nothing needs less memory; give one with --memory")
    if arguments.recompute and not has_checkpoint:
        raise WrongArgument(
            "--recompute", "--costs must have checkpoint, what an F keeps; zbkern's profile measures it"
        )
    rate = arguments.offload
    if rate is None or (arguments.config is not None and not rate and costs.offload_bandwidth is not None):
        return costs
    if not rate:
        where = "only --config has a table of hardware, and host_bandwidth must be in it"
        raise WrongArgument("--offload", f"expected GB/s, such as --offload 50; {where}")
    if costs.memory_unit == "bytes" and costs.time_unit is not None:
        rate *= 1e9 / TIME_UNITS[costs.time_unit]
    return dataclasses.replace(costs, offload_bandwidth=rate, reload_bandwidth=rate)


def _plan(task: _Task) -> Plan:
    """Raises WrongArgument, with what would fit where nothing does."""
    arguments = task.arguments
    try:
        return _search(task, _progress())
    except ScheduleError as error:
        why_not = None if task.setting is None else from_config.why_not(arguments, task.setting, task.limit or 0.0)
        reason = why_not or str(error)
        for option, other in _savings(task).items():
            reason += f"; it fits with {option}, {arguments.objective} "
            reason += duration(getattr(other.timeline, arguments.objective), other.timeline.unit)
        raise WrongArgument("--memory", reason) from error
    except ValueError as error:  # everything else has been checked
        given = {"placement": None, "chunks": None, "slices": 1}
        named = [f"--{name}" for name, default in given.items() if getattr(arguments, name) != default]
        raise WrongArgument(", ".join([*named, "--stages"]), str(error)) from error


def _search(task: _Task, progress: Callable[[str], None] = lambda line: None) -> Plan:
    arguments = task.arguments
    return plan(
        task.costs,
        arguments.stages,
        arguments.microbatches,
        arguments.chunks,
        arguments.placement,
        task.limit,
        effort=arguments.effort,
        offload=arguments.offload is not None,
        recompute=arguments.recompute,
        slices=arguments.slices,
        options=PlanOptions(arguments.objective, time_limit=arguments.time_limit, progress=progress),
    )


def _savings(task: _Task) -> dict[str, Plan]:
    """Plans with --recompute or --offload that fit, where neither was asked for and the costs say what they cost."""
    costs = task.costs
    if task.limit is None or from_config.saves_memory(task.arguments):
        return {}
    if isinstance(costs, ModelCosts) and not may_fit_with_saving(costs, task.arguments.stages, task.limit):
        return {}
    known = {
        "recompute": isinstance(costs, ModelCosts) or costs.checkpoint is not None,
        "offload": costs.offload_bandwidth is not None and costs.reload_bandwidth is not None,
    }
    found = {}
    for name in filter(known.get, known):
        with contextlib.suppress(ScheduleError):
            changes = {name: True, "effort": min(task.arguments.effort, _QUICK)}
            found[f"--{name}"] = _search(task._replace(arguments=Namespace(**{**vars(task.arguments), **changes})))
    return found


def _print_gains(task: _Task, found: Plan) -> None:
    """What saving memory would give, where passes wait for it, or for others that may have waited for it."""
    objective = task.arguments.objective
    if task.arguments.schedule is None and found.idle.memory + found.idle.dependencies >= _WORTH_TRYING:
        for line, (option, other) in enumerate(_savings(task).items()):
            time = getattr(other.timeline, objective)
            less = 1 - time / getattr(found.timeline, objective)
            said = f"{objective} {duration(time, other.timeline.unit)}, {less:.2%} less"
            said = f"{option}: {said if less >= report.SHOWN else 'no gain'} (a quick search)"
            print(report.figure("" if line else "try", said, _width()))


def _named(task: _Task) -> Plan:
    """The schedule of --schedule, with the lower bound for any order of its chunks in the limit, if there is one."""
    arguments, costs, limit = task.arguments, task.costs, task.limit
    assert isinstance(costs, Costs)
    if arguments.slices == "auto":
        raise WrongArgument("--slices", f"{arguments.schedule} is as it is told: give a number, or lengths")
    sizes = arguments.stages, arguments.microbatches, arguments.chunks, arguments.slices
    schedule = comparison.build(arguments.schedule, *sizes)
    peak = max(simulate(schedule, costs).peak_memory)
    if limit is not None and report.exceeds(peak, limit):
        raise WrongArgument(
            "--memory",
            f"{schedule.name} holds {enough(peak, costs.memory_unit)} on one rank, more than "
            f"{amount(limit, costs.memory_unit)}; raise the limit, or leave --schedule out for a plan within it",
        )
    return judged(schedule, costs, limit, arguments.objective)


def _progress() -> Callable[[str], None]:
    return show_progress if sys.stderr.isatty() else lambda line: None


def show_progress(line: str) -> None:
    """Shows how far a search is, in one line of the terminal that the next call writes over; "" ends it."""
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _check(arguments: Namespace) -> None:
    """Before the search, so that an error comes at once."""
    for path in arguments.out:
        if not path.name.endswith(SUFFIXES):
            raise WrongArgument("--out", f"{path} must end in one of {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise WrongArgument("--out", f"cannot write {path}: there is no folder {path.parent}; create it first")
        if path.suffix == ".py" and arguments.config is None:
            raise WrongArgument("--out", f"{path}: a program trains a model; give it with --config")
    from_config.check_whether_given(arguments)
    if arguments.gpus is not None:
        return
    try:
        given = arguments.slices
        slices = 1 if given in (None, "auto") else given if isinstance(given, int) else len(given)
        schedules.check_counts("plan", arguments.stages, arguments.microbatches, arguments.chunks or 1, slices)
    except ScheduleError as error:
        raise WrongArgument("--stages", str(error)) from error


def _write(path: Path, found: Plan, limit: float | None, setting: from_config.Setting | None, config: Path) -> None:
    schedule = found.schedule
    try:
        if path.suffix == ".py" and setting is not None:
            launch.write(path, found, setting, config)
        elif path.suffix == ".txt":
            path.write_text(schedule.to_text() + "\n", encoding="utf-8")
        elif path.suffix == ".csv":
            header = not path.name.endswith(".torch.csv")
            cut = f"# partition: {' '.join(map(str, found.partition))}\n" if header and found.partition else ""
            path.write_text(cut + schedule.to_csv(header=header), encoding="utf-8")
        else:
            draw.save([found.timeline], path, costs=[found.costs], limit=limit)
    except OSError as error:
        raise WrongArgument("--out", f"cannot write {path}: {error.strerror}; choose another path") from error
    except ValueError as error:  # of a program
        raise WrongArgument("--out", f"{path}: {error}") from error
