"""`zbkern plan`: a schedule for given costs and memory, or a named one; printed, compared and written to files.

An error is one line that names the argument and what to do about it, and exit status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zbkern.pipeline import draw, from_config, launch, layouts, plan_options, report, schedules
from zbkern.pipeline.from_config import WrongArgument
from zbkern.pipeline.planner import Plan, PlanOptions, plan
from zbkern.pipeline.planner.arguments import chunks_per_rank
from zbkern.pipeline.planner.plan import EFFORT, judged
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.schedules.units import TIME_UNITS, amount, duration, enough
from zbkern.pipeline.simulation import comparison
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.json_file import read_text
from zbkern.pipeline.simulation.layers import ModelCosts
from zbkern.pipeline.simulation.simulator import simulate

SUFFIXES = (".svg", ".html", ".json", ".torch.csv", ".csv", ".txt", ".py")
_Given = TypeVar("_Given", Costs, ModelCosts)
_WORTH_TRYING = 0.01  # of the objective
_QUICK = 2  # rounds of the searches that only tell what an option would give
_RECHUNKED = (
    "other numbers of chunks: the same model cut evenly; what its first or last chunk has beyond others stays whole"
)


def add_to(commands: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    plan_options.add_to(commands).set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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


def _of_gpus(arguments: argparse.Namespace) -> tuple[Plan, float, from_config.Setting]:
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


def _of_stages(arguments: argparse.Namespace) -> tuple[Plan, float | None, from_config.Setting | None]:
    """Plans for so many stages and microbatches, prints and compares."""
    if arguments.config is not None:
        setting = from_config.setting(arguments)
        return *_of_layers(arguments, setting.costs, setting), setting
    costs = _costs(arguments.costs)
    return *(_of_layers(arguments, costs) if isinstance(costs, ModelCosts) else _of_chunks(arguments, costs)), None


def _of_chunks(arguments: argparse.Namespace, given: Costs) -> tuple[Plan, float | None]:
    """Plans, prints and compares, for costs of chunks."""
    stages, objective = arguments.stages, arguments.objective
    chunks = _chunks(arguments)
    try:
        flat = given.per_chunk(stages * chunks)
    except ValueError as error:
        raise WrongArgument("--costs", f"{arguments.costs}: {error}; --stages and --chunks say how many") from error
    costs = _with_copies(arguments, given, flat.checkpoint is not None)
    whole = sum(flat.activation)
    limit = _limit(arguments, whole)
    found = _named(arguments, chunks, costs, limit) if arguments.schedule else _plan(arguments, costs, limit)
    whole = 0.0 if any(flat.static) else whole
    print(report.describe(found, objective, limit, whole, _width(), saving=from_config.saves_memory(arguments)))
    _print_gains(arguments, costs, limit, found)
    if arguments.compare:
        published, unknown = comparison.timelines(costs, stages, arguments.microbatches, chunks)
        if len(slices := found.schedule.slices) > 1:
            published += comparison.timelines(costs, stages, arguments.microbatches, chunks, slices)[0]
        if not arguments.schedule:
            published.append(found.timeline)
        print("\n" + report.table(published, objective, limit, whole))
        print(f"\n{_RECHUNKED}")
        if unknown:
            print(f"not known: {', '.join(unknown)}, whose chunks have other edges than --costs has latencies for")
    return found, limit


def _of_layers(
    arguments: argparse.Namespace, given: ModelCosts, setting: from_config.Setting | None = None
) -> tuple[Plan, float | None]:
    """Plans, prints and compares, for costs of layers, which are cut, too; setting: what they were computed from."""
    if arguments.schedule is not None:
        why = "--costs has layers, which are cut differently for every schedule; --compare shows them all"
        raise WrongArgument("--schedule", why)
    objective, width = arguments.objective, _width()
    costs = _with_copies(arguments, given, True)
    whole = sum(layer.activation for layer in costs.layers)
    limit = _limit(arguments, whole)
    if setting is not None and limit is None:
        limit = setting.limit
    found = _plan(arguments, costs, limit, setting)
    if setting is not None:
        print(f"{from_config.title(arguments, setting)}\n")
    whole = 0.0 if any(layer.static for layer in costs.layers) else whole
    searched = arguments.chunks is None and arguments.placement is None
    print(report.describe(found, objective, limit, whole, width, costs, searched, from_config.saves_memory(arguments)))
    _print_gains(arguments, costs, limit, found)
    if setting is None:
        print(report.cut(found, len(costs.layers), width))
    else:
        print(from_config.step(found, setting, objective, width))
    if arguments.compare or setting is not None:
        published = from_config.published_timelines(costs, arguments.stages, arguments.microbatches, limit)
        if len(slices := found.schedule.slices) > 1:
            published += from_config.published_timelines(costs, arguments.stages, arguments.microbatches, limit, slices)
        tokens = 0 if setting is None else setting.tokens(arguments.microbatches)
        beside = 0.0 if setting is None else setting.beside(arguments.stages)
        print("\n" + report.table([*published, found.timeline], objective, limit, whole, tokens, beside, cuts=True))
    if setting is not None:
        print("\n" + from_config.assumptions(setting.hardware, width))
    return found, limit


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _limit(arguments: argparse.Namespace, whole: float) -> float | None:
    """What a rank may hold, where one microbatch holds `whole` in the model."""
    if arguments.memory is None:
        return None
    value, relative = arguments.memory
    return value * whole if relative else value


def _chunks(arguments: argparse.Namespace) -> int:
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


def _with_copies(arguments: argparse.Namespace, costs: _Given, has_checkpoint: bool) -> _Given:
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


def _plan(
    arguments: argparse.Namespace,
    costs: Costs | ModelCosts,
    limit: float | None,
    setting: from_config.Setting | None = None,
) -> Plan:
    """Raises WrongArgument, with what would fit where nothing does."""
    try:
        return _search(arguments, costs, limit, _progress())
    except ScheduleError as error:
        why_not = None if setting is None else from_config.why_not(arguments, setting, limit or 0.0)
        reason = why_not or str(error)
        for option, other in _savings(arguments, costs, limit).items():
            reason += f"; it fits with {option}, {arguments.objective} "
            reason += duration(getattr(other.timeline, arguments.objective), other.timeline.unit)
        raise WrongArgument("--memory", reason) from error
    except ValueError as error:  # everything else has been checked
        given = {"placement": None, "chunks": None, "slices": 1}
        named = [f"--{name}" for name, default in given.items() if getattr(arguments, name) != default]
        raise WrongArgument(", ".join([*named, "--stages"]), str(error)) from error


def _search(
    arguments: argparse.Namespace,
    costs: Costs | ModelCosts,
    limit: float | None,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    return plan(
        costs,
        arguments.stages,
        arguments.microbatches,
        arguments.chunks,
        arguments.placement,
        limit,
        effort=arguments.effort,
        offload=arguments.offload is not None,
        recompute=arguments.recompute,
        slices=arguments.slices,
        options=PlanOptions(arguments.objective, time_limit=arguments.time_limit, progress=progress),
    )


def _savings(arguments: argparse.Namespace, costs: Costs | ModelCosts, limit: float | None) -> dict[str, Plan]:
    """Plans with --recompute or --offload that fit, where neither was asked for and the costs say what they cost."""
    if limit is None or from_config.saves_memory(arguments):
        return {}
    known = {
        "--recompute": isinstance(costs, ModelCosts) or costs.checkpoint is not None,
        "--offload": costs.offload_bandwidth is not None and costs.reload_bandwidth is not None,
    }
    found = {}
    for option in filter(known.get, known):
        changes = {option.removeprefix("--"): True, "effort": min(arguments.effort, _QUICK)}
        with contextlib.suppress(ScheduleError):
            found[option] = _search(argparse.Namespace(**{**vars(arguments), **changes}), costs, limit)
    return found


def _print_gains(arguments: argparse.Namespace, costs: Costs | ModelCosts, limit: float | None, found: Plan) -> None:
    """What saving memory would give, where passes wait for it, or for others that may have waited for it."""
    if arguments.schedule is None and found.idle.memory + found.idle.dependencies >= _WORTH_TRYING:
        for line, (option, other) in enumerate(_savings(arguments, costs, limit).items()):
            time = getattr(other.timeline, arguments.objective)
            less = 1 - time / getattr(found.timeline, arguments.objective)
            said = f"{arguments.objective} {duration(time, other.timeline.unit)}, {less:.2%} less"
            said = f"{option}: {said if less >= report.SHOWN else 'no gain'} (a quick search)"
            print(report.figure("" if line else "try", said, _width()))


def _named(arguments: argparse.Namespace, chunks: int, costs: Costs, limit: float | None) -> Plan:
    """The schedule of --schedule, with the lower bound for any order of its chunks in the limit, if there is one."""
    if arguments.slices == "auto":
        raise WrongArgument("--slices", f"{arguments.schedule} is as it is told: give a number, or lengths")
    schedule = comparison.build(arguments.schedule, arguments.stages, arguments.microbatches, chunks, arguments.slices)
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


def _check(arguments: argparse.Namespace) -> None:
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
