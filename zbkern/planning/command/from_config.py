"""`zbkern plan --config`: a plan for a model that nobody has run, from its configuration and a table of hardware."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zbkern.pipeline import schedules
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.schedules.units import amount, number
from zbkern.planning.command import report
from zbkern.planning.command.remedies import may_fit_with_saving, remedies
from zbkern.planning.cost_model import calibration
from zbkern.planning.cost_model.architecture import Architecture, load_architecture
from zbkern.planning.cost_model.hardware import Hardware, load_hardware
from zbkern.planning.cost_model.model_costs import Job, flops, model_costs, outside, parameters, predictors
from zbkern.planning.planner import Plan
from zbkern.planning.planner.annealing import measured
from zbkern.planning.planner.arguments import chunks_per_rank, problem_of
from zbkern.planning.planner.partition import balanced_partitions, even_partitions
from zbkern.planning.planner.problem import ordering_of
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.json_file import parse_object, read_text
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.planning.simulation.memory import static_of_ranks
from zbkern.planning.simulation.needs import least_need
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline

USABLE = 0.9
"""Of a GPU's memory: the rest is for what the model of costs leaves out, and for fragmentation."""

_LEAST_LIMIT = 1e6
"""Bytes: a limit below is taken for one in GB."""

SIZES = {
    "tensor_parallel": 1,
    "expert_parallel": 1,
    "context_parallel": 1,
    "data_parallel": 0,
    "sequence": 4096,
    "microbatch_size": 1,
}
"""Arguments that say how a model is trained, and their defaults."""

FLAGS = ("fp8", "fully_shard")
"""Those that are so or not."""

_STEP = '{"seconds": 12.3, "schedule": "one_f_one_b", "stages": 8, "microbatches": 32, "tensor_parallel": 8}'

_LONGEST = 1e6  # seconds of a step

_DECIDED = (
    *("context_parallel", "costs", "memory", "chunks", "placement"),
    *("schedule", "slices", "offload", "recompute", "compare", "time_limit"),
)
"""Arguments that a search of layouts has answers for."""

CHOSEN = ("stages", "microbatches", *(name for name in SIZES if name != "sequence"), "fully_shard")


def option(name: str) -> str:
    """The option with the argument of that name."""
    return "--" + name.replace("_", "-")


def spelt(arguments: Mapping[str, int]) -> list[str]:
    """The options that give these, without those that are not so."""
    return [
        option(name) if value is True else f"{option(name)} {value}"
        for name, value in arguments.items()
        if value is not False
    ]


class WrongArgument(ValueError):
    """Names the argument, and what to do about it."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")


@contextlib.contextmanager
def reading(argument: str, path: str | Path | None, of_content: str = "") -> Iterator[None]:
    """Raises WrongArgument for a file that cannot be read, and, of `of_content`, for one with something else in it."""
    try:
        yield
    except OSError as error:
        raise WrongArgument(argument, f"cannot read {error.filename}: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        where = "" if path is None or str(path) in str(error) else f"{path}: "
        raise WrongArgument(of_content or argument, f"{where}{error}") from error


class Setting(NamedTuple):
    """What is planned for: a model, a GPU, and how the model is trained."""

    architecture: Architecture
    hardware: Hardware
    job: Job

    @property
    def costs(self) -> ModelCosts:
        return model_costs(*self)

    def tokens(self, microbatches: int) -> int:
        """Of a step, of all pipelines."""
        return microbatches * self.job.tokens * self.job.data_parallel

    def beside(self, stages: int) -> float:
        """Seconds of a step that no pass has."""
        return outside(*self, stages)

    def of_peak(self, rate: float) -> float:
        """The share of a GPU's peak flops, in bf16, that so many tokens per second take on it."""
        return rate * flops(self.architecture, self.job.sequence) / self.hardware.matmul_flops

    @property
    def limit(self) -> float:
        """Bytes that a rank may hold."""
        return USABLE * self.hardware.memory


def check_whether_given(arguments: argparse.Namespace) -> None:
    """Raises WrongArgument for the first argument that is missing, or does not go with another one."""
    layouts, with_model = arguments.gpus is not None, arguments.config is not None
    needed = "it is needed; or give --config, --gpus and --batch, and it is searched for"
    needed = "--gpus needs it: layouts are for a model and for so many sequences a step" if layouts else needed
    for name in ("config", "batch") if layouts else ("stages", "microbatches"):
        if getattr(arguments, name) is None:
            raise WrongArgument(option(name), needed)
    of_models = ("gpu", "hardware", "calibrate", *FLAGS, *SIZES)
    for applies, names, why in (
        (not layouts, ("batch",), "it goes with --gpus; without, --microbatches says how much a step has"),
        (layouts, _DECIDED, "--gpus decides about it; leave one of the two out"),
        (with_model, ("costs", "schedule"), "--config has the costs of its own model; leave one of the two out"),
        (not with_model, of_models, "it describes a model's training; give the model with --config, or leave it out"),
    ):
        for name in names if applies else ():
            value = getattr(arguments, name)
            if value is not None and value is not False:
                raise WrongArgument(option(name), why)


def saves_memory(arguments: argparse.Namespace) -> bool:
    """Whether the plan may offload or recompute."""
    return arguments.recompute or arguments.offload is not None


def why_not(arguments: argparse.Namespace, setting: Setting, limit: float) -> str | None:
    """What does not fit, and what would; None where it does fit, but for a placement or chunks that were given."""
    costs, stages = setting.costs, arguments.stages
    need = least_need(costs, stages)
    if need.total <= limit or (saves_memory(arguments) and may_fit_with_saving(costs, stages, limit)):
        return None
    given, relative = arguments.memory or (limit, False)
    placement = arguments.placement
    chunks = arguments.chunks or (2 if placement == "v" else chunks_per_rank(placement, stages))
    options = remedies(*setting[:2], stages, _sizes(arguments), given, relative=relative, chunks=chunks)
    if isinstance(placement, tuple):  # the rank of every chunk of so many stages
        options = [each for each in options if not each.startswith("--stages")]
    what = f"it fits with {' or '.join(options)}" if options else "no one of the options for sizes makes it fit"
    if 0 < limit < _LEAST_LIMIT and not relative:
        what = f"a limit is in bytes: --memory {number(limit)}e9 for as many GB"
    return f"nothing fits in {amount(limit, 'bytes')}: {need.describe(stages, 'bytes')}; {what}"


def assumptions(gpu: Hardware, width: int) -> str:
    """What programs get of a GPU, which no datasheet says; where the rest is told; and where the peaks are from."""
    corrected = f", then corrected by {gpu.calibration.source}" if gpu.calibration.source else ""
    text = (
        f"Computed from flops and bytes with shares fitted to published runs{corrected}, and not measured: programs "
        f"get {gpu.matmul_share:.0%} of the GPU's peak in W's large products, "
        f"{gpu.matmul_share * gpu.forward_backward_share:.0%} in those of F and B, {gpu.memory_share:.0%} of its "
        f"memory's bandwidth and {gpu.network_share:.0%} of the links'. docs/models.md says what else is assumed."
    )
    source = f"Peaks: {gpu.source or 'of a table that names no source'}."
    return "\n".join(textwrap.fill(each, width) for each in (text, source))


def published_timelines(
    costs: ModelCosts, stages: int, microbatches: int, limit: float | None, slices: int | Sequence[int] = 1
) -> list[Timeline]:
    """Of every published schedule, on that of the even and balanced partitions on which it is fastest and fits.

    Where it fits on none, on that of some on which it holds least. Schedules with more chunks than the model has layers
    are left out.
    """
    made = [comparison.build(name, stages, microbatches, slices=slices) for name in schedules.NAMES]
    return [_on_its_best_cut(each, costs, limit) for each in made if len(each.placement) <= len(costs.layers)]


def _on_its_best_cut(schedule: Schedule, costs: ModelCosts, limit: float | None) -> Timeline:
    microbatches, limits = schedule.sequences, None if limit is None else [limit] * schedule.stages
    balanced = balanced_partitions(costs, schedule.placement, microbatches, limits)
    even = even_partitions(len(costs.layers), len(schedule.placement))
    cuts = [costs.chunk_costs(each, schedule.placement) for each in dict.fromkeys([*balanced, *even])]
    orders, tried = ordering_of(schedule), []
    for cut in cuts:
        problem = problem_of(cut, schedule.placement, microbatches, None, "cost", schedule.slices)
        found = measured(problem, orders)
        assert found is not None  # published schedules pass microbatches in order
        static = static_of_ranks(cut.per_chunk(problem.chunks), schedule.placement)
        held = max(peak / problem.memory_scale + always for peak, always in zip(found[1], static, strict=True))
        fits = limit is None or not report.exceeds(held, limit)
        tried.append((not fits, found[0].cost / problem.time_scale if fits else held, cut))
    return simulate(schedule, min(tried, key=lambda one: one[:2])[2])


def setting(arguments: argparse.Namespace) -> Setting:
    """What the arguments describe. Raises WrongArgument."""
    model, gpu = model_and_gpu(arguments)
    try:
        found = Setting(model, gpu, Job(**_sizes(arguments)))
        found.beside(arguments.stages)
    except ValueError as error:
        named = [name for name in (*SIZES, *FLAGS) if name in str(error)]
        raise WrongArgument(", ".join(map(option, named)), str(error)) from error
    return found


def model_and_gpu(arguments: argparse.Namespace) -> tuple[Architecture, Hardware]:
    """Those of --config, --gpu and --hardware. Raises WrongArgument."""
    with reading("--config", arguments.config):
        architecture = load_architecture(arguments.config)
    with reading("--hardware", arguments.hardware, "--gpu" if arguments.hardware is None else "--gpu, --hardware"):
        hardware = load_hardware("h100" if arguments.gpu is None else arguments.gpu, arguments.hardware)
    if arguments.fp8 and hardware.fp8_flops is None:
        raise WrongArgument(
            "--fp8", f"{hardware.title} has no FP8, or its table no fp8_flops; leave it out, or add them"
        )
    if arguments.calibrate is not None:
        with reading("--calibrate", arguments.calibrate):
            hardware = replace(hardware, calibration=_calibration(arguments, architecture, hardware))
    return architecture, hardware


def _sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a `Job`: as given, or their defaults."""
    flags = {name: bool(getattr(arguments, name)) for name in FLAGS}
    return {name: getattr(arguments, name) or least for name, least in SIZES.items()} | flags


def _calibration(
    arguments: argparse.Namespace, architecture: Architecture, hardware: Hardware
) -> calibration.Calibration:
    """Of costs that profile_layers has measured with the sizes of the arguments, or of a step of a training run."""
    text, source = read_text(arguments.calibrate), arguments.calibrate.name
    if '"layers"' in text:
        job = Job(**_sizes(arguments))
        computed = model_costs(architecture, hardware, job)
        return calibration.of_blocks(computed, ModelCosts.from_json(text), job.tensor_parallel, source)
    given = parse_object("a training step", text, _STEP)
    if unknown := sorted({*given} - {"seconds", "schedule", *CHOSEN, "sequence", "chunks"}):
        raise ValueError(f"unknown fields {unknown}; expected the seconds of a step, and how it ran: {_STEP}")
    run = argparse.Namespace(**{**vars(arguments), "schedule": "one_f_one_b", "chunks": None, **given})
    seconds = given.get("seconds")
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < _LONGEST:
        raise ValueError(f"it must have the seconds of a step, above 0 and below {_LONGEST:.0e}, as in {_STEP}")
    if None in (run.stages, run.microbatches) or run.schedule not in schedules.NAMES:
        raise ValueError(f"it must have stages, microbatches and a schedule of {', '.join(schedules.NAMES)}: {_STEP}")
    schedule = comparison.build(run.schedule, run.stages, run.microbatches, run.chunks)
    if run.chunks not in (None, schedule.chunks):
        raise ValueError(f"chunks: {run.schedule} has {schedule.chunks} per rank; leave chunks out")
    setting = Setting(architecture, hardware, Job(**_sizes(run)))
    used = setting.of_peak(setting.tokens(run.microbatches) / seconds / setting.job.gpus(run.stages))
    if used > ((hardware.fp8_flops or 0.0) / hardware.matmul_flops if run.fp8 else 1.0):
        raise ValueError(
            f"a step of {number(seconds)} s would use {used:.0%} of the peak flops: give all sizes of the run, as in "
            + _STEP
        )
    passes = _on_its_best_cut(schedule, setting.costs, None).makespan / 1e3
    return calibration.of_step(passes + setting.beside(run.stages), seconds, source)


def title(arguments: argparse.Namespace, setting: Setting) -> str:
    """The model, and on what it is trained."""
    architecture, hardware, job = setting
    total, active = parameters(architecture)
    size = f"{number(total / 1e9)} billion parameters"
    if active < total:
        size += f", {number(active / 1e9)} of them for a token"
    parallel = {kind: getattr(job, f"{kind}_parallel") for kind in ("tensor", "expert", "context", "data")}
    beside = "".join(f", {kind} parallel {count}" for kind, count in parallel.items() if count > 1)
    model = f"{arguments.config.name} ({architecture.kind}): {size}, {len(architecture.blocks)} layers"
    if architecture.left_out:
        model += f"; left out: what {', '.join(architecture.left_out)} describes"
    return (
        f"{model}\n{arguments.stages} stages{beside} on {job.gpus(arguments.stages)} x {hardware.title}; "
        f"{arguments.microbatches} microbatches of {job.microbatch_size} x {job.sequence} tokens"
    )


def step(found: Plan, setting: Setting, objective: str, width: int) -> str:
    """The costs of a layer, the cut, and how long a step takes."""
    chunks = report.cut(found, len(setting.costs.layers), width, f": {_counted(setting.architecture)}")
    beside = setting.beside(found.schedule.stages)
    seconds = getattr(found.timeline, objective) / 1e3 + beside
    rate = setting.tokens(found.schedule.sequences) / seconds
    each = rate / setting.job.gpus(found.schedule.stages)
    placement = found.schedule.placement
    static = amount(max(static_of_ranks(found.costs.per_chunk(len(placement)), placement)), "bytes")
    lines = [
        report.figure("layer", _block_costs(setting), width),
        chunks,
        report.figure("static", f"{static} at most by rank: weights, gradients, optimizer states", width),
        report.figure(
            "step",
            f"{number(seconds)} s, {rate:,.0f} tokens/s, {each:,.0f} per GPU, {setting.of_peak(each):.1%} of the peak "
            "flops; "
            f"{number(beside)} s of it are the optimizer's step and what is not hidden of traffic between pipelines; "
            f"{how_exact(setting.architecture, setting.hardware)}",
            width,
        ),
    ]
    return "\n".join(lines)


def how_exact(architecture: Architecture, hardware: Hardware) -> str:
    """The error of speeds of this kind of model, from runs that were left out of the fit; or what corrected them."""
    if hardware.calibration.source:
        return hardware.calibration.describe()
    experts = architecture.experts is not None
    kind, error, runs = ("runs with experts", 0.11, 5) if experts else ("dense runs", 0.08, 7)
    return f"within {error:.0%} (rms) of {runs} published {kind}, each left out of the fit"


def _counted(architecture: Architecture) -> str:
    """Which layers a partition counts, by the names that `cut` has for them."""
    embedding, blocks, norm = architecture.names
    found = f"{embedding}, {blocks}.0 to {len(architecture.blocks) - 1}, {norm} with the head"
    further = predictors(architecture)
    if not further:
        return found
    return (
        f"{found}, then {', '.join(further)}, each with a head, which models of the transformers library do not have: "
        "to cut one, plan with num_nextn_predict_layers 0 in its config.json"
    )


def _block_costs(setting: Setting) -> str:
    """The costs of one block, by which the ratios can be judged."""
    blocks = setting.costs.layers[1 : 1 + len(setting.architecture.blocks)]
    block = blocks[len(blocks) // 2]
    times = ", ".join(
        f"{name} {number(each)}" for name, each in (("F", block.forward), ("B", block.backward), ("W", block.weight))
    )
    held = f", {block.held / block.activation:.2f} times that from B to W" if block.activation else ""
    return f"{block.name}: {times} ms; {amount(block.activation, 'bytes')} from F to B{held}"
