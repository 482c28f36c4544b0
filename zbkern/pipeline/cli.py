"""`zbkern plan`: a schedule for given costs and memory, or a named one; printed, compared and written to files.

An error is one line that names the argument and what to do about it, and exit status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zbkern.pipeline import draw, from_config, launch, layouts, report, schedules
from zbkern.pipeline.from_config import WrongArgument
from zbkern.pipeline.planner import Plan, PlanOptions, plan
from zbkern.pipeline.planner.arguments import PLACEMENTS, Slices, chunks_per_rank
from zbkern.pipeline.planner.plan import EFFORT, judged
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.pipeline.schedules.units import TIME_UNITS, amount, duration
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


_count = _number(int, "a whole number, at least 1", 1)
_HELP = {
    "--stages": "pipeline ranks, p",
    "--microbatches": "microbatches per step, m",
    "--gpus": "with --config and --batch, instead of --stages and --microbatches: searches the layouts of so many GPUs "
    "(tensor, pipeline, data and expert parallelism, size of a microbatch, recomputation), and prints the best five; "
    "with --stages, --tensor-parallel and so on also the best layout of these sizes, and why it loses",
    "--batch": "with --gpus: sequences per step, of all pipelines",
    "--costs": "JSON file that Costs.save wrote, of one chunk or of every chunk, or ModelCosts.save, of every layer, "
    "for a plan that cuts them into chunks; without it every pass takes 1",
    "--memory": "the most a rank may hold: 1.5x is 1.5 times what one microbatch holds in the whole model (1F1B needs "
    "1x, and the costs' static memory besides), a plain number is in the unit of the costs' activation, bytes with "
    "--config; without it there is no limit, with --config 0.9 of the GPU's memory",
    "--chunks": "chunks per rank (default 1, or those of --schedule; what is best for costs of layers)",
    "--placement": f"where the chunks are: {', '.join(PLACEMENTS)}, or the rank of every chunk, such as 0,1,1,0",
    "--objective": "what to minimise: cost, the longest span of a rank (default), or makespan, the span of all of them",
    "--effort": f"rounds of search, each twice as long as the one before (default {EFFORT}, about ten seconds in all; "
    f"with --gpus {layouts.EFFORT}; 0: the quick answer alone); the plan depends on it and not on how fast or busy the "
    "machine is",
    "--time-limit": "ends the search after this many seconds, if that is sooner; the plan then depends on the machine",
    "--offload": "activations may go to the host and come back, at so many GB/s in each direction (memory per time for "
    "costs without units); with --config the number can be left out, and is that of the table of hardware",
    "--recompute": "activations may be recomputed; --costs of chunks must have the checkpoint, what an F keeps then",
    "--slices": "sequences go through the pipeline in slices: as many as are best (auto), a number, whose lengths are "
    "chosen, or the length of each, in any unit; for causal models, see docs/long_context.md",
    "--schedule": f"this schedule instead of a search: {', '.join(schedules.NAMES)}",
    "--compare": "also a table of all published schedules and the plan",
    "--out": "files to write, by suffix: .svg .html (pictures), .json (a trace for Perfetto), .csv, .torch.csv "
    "(without comments, for torch.distributed.pipelining), .txt (the whole grid), .py (with --config: a program that "
    "trains the model so, for torchrun)",
    "--config": "plan for a model that was never run: its folder or config.json, as transformers writes it; "
    "--costs and --schedule do not go with it, and the table of published schedules is always printed",
    "--gpu": "with --config: a GPU in the table of hardware (default h100)",
    "--hardware": "with --config: a table of your own, in the form of zbkern/pipeline/simulation/hardware.json",
    "--calibrate": "with --config: corrects what is computed by what was measured: blocks of the model, as "
    "profile_layers and ModelCosts.save wrote them, of the sizes given here (with --gpus: one sequence on one GPU); or "
    'a step of a training run, {"seconds": 12.3}, 1F1B with the sizes given here, or with those beside the seconds',
    "--tensor-parallel": "with --config: GPUs that share every layer (default 1)",
    "--expert-parallel": "with --config: GPUs that share the experts (default 1)",
    "--context-parallel": "with --config: GPUs that share the tokens of every sequence (default 1)",
    "--fully-shard": "with --config and --stages 1: data-parallel GPUs share weights and gradients, too, gathered "
    "layer by layer (FSDP, ZeRO-3); with --gpus it is tried anyway, and can be named to compare with",
    "--fp8": 'with --config: F and B of linears in FP8, as recipe="fp8_blockwise" of zbkern.convert',
    "--data-parallel": "with --config: pipelines that share the optimizer's state (default: as few as experts need)",
    "--sequence": "with --config: tokens of a sequence (default 4096)",
    "--microbatch-size": "with --config: sequences of a microbatch (default 1)",
}


def add_to(commands: Any) -> None:
    """Adds `plan` to the subparsers of the command line."""
    what = "find a schedule for given costs and memory, compare schedules, draw them"
    parser = commands.add_parser("plan", help=what, description=_ABOUT)

    def add(name: str, **keywords: Any) -> None:
        parser.add_argument(name, help=_HELP[name], **keywords)

    add("--stages", type=_count, metavar="P")
    add("--microbatches", type=_count, metavar="M")
    add("--gpus", type=_count, metavar="N")
    add("--batch", type=_count, metavar="N")
    add("--costs", metavar="FILE")
    add("--memory", type=_memory, metavar="LIMIT")
    add("--chunks", type=_count, metavar="V")
    add("--placement", type=_placement, metavar="NAME")
    add("--objective", choices=("cost", "makespan"), default="cost")
    add("--effort", type=_number(int, "a number of rounds from 0 to 99", most=99), metavar="ROUNDS")
    add("--time-limit", type=_number(float, "a number of seconds such as 10"), metavar="SECONDS")
    rate = _number(float, "a bandwidth in GB/s above 0, such as 50", 1e-9)
    add("--offload", type=rate, nargs="?", const=0.0, metavar="GB/s")
    add("--recompute", action="store_true")
    add("--slices", type=_slices, metavar="N")
    add("--schedule", choices=schedules.NAMES, metavar="NAME")
    add("--compare", action="store_true")
    add("--out", type=Path, nargs="+", action="extend", default=[], metavar="FILE")
    add("--config", type=Path, metavar="FILE")
    add("--gpu", metavar="NAME")
    add("--hardware", type=Path, metavar="FILE")
    add("--calibrate", type=Path, metavar="FILE")
    for name in from_config.SIZES:
        add(from_config.option(name), type=_count, metavar="N")
    for name in from_config.FLAGS:
        add(from_config.option(name), action="store_const", const=True)
    parser.set_defaults(run=run)


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
    print(report.describe(found, objective, limit, whole, _width()))
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
    print(report.describe(found, objective, limit, whole, width, costs, searched))
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
        print("\n" + report.table([*published, found.timeline], objective, limit, whole, tokens, cuts=True))
    if setting is not None:
        saving = arguments.offload is not None, arguments.recompute
        print("\n" + from_config.assumptions(setting, costs, *saving, width))
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
    if arguments.offload is None and not arguments.recompute:
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
        named = [f"--{name}" for name in ("placement", "chunks") if getattr(arguments, name) is not None]
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
    if limit is None or arguments.recompute or arguments.offload is not None:
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
            f"{schedule.name} holds {amount(peak, costs.memory_unit)} on one rank, more than "
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
