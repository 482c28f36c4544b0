"""A model and a GPU for `zbkern plan --config`: from a configuration, a table of hardware, and what was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbkern import schedules
from zbkern.planning.command.published import on_best_cut
from zbkern.planning.command.question import SIZES, LayoutQuestion, Question, WrongArgument, option
from zbkern.planning.cost_model import calibration
from zbkern.planning.cost_model.architecture import Architecture, load_architecture
from zbkern.planning.cost_model.hardware import Hardware, load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.software import under
from zbkern.planning.costs.json_file import parse_object, read_text
from zbkern.planning.costs.layers import ModelCosts
from zbkern.schedules.layout import HALVES
from zbkern.schedules.units import number

_STEP = '{"seconds": 12.3, "schedule": "one_f_one_b", "stages": 8, "microbatches": 32, "tensor_parallel": 8}'

_LONGEST = 1e6  # seconds of a step

CHOSEN = tuple(name for name in ("stages", "microbatches", *SIZES) if name not in LayoutQuestion._fields)


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


def read(given: Mapping[str, Any]) -> tuple[Architecture, Hardware]:
    """Those of --config, --gpu, --hardware, --attention and --software, corrected by --calibrate. Raises WrongArgument.

    given: all of these, the sizes, stages and microbatches by name, None for what was not given.
    """
    names = ("config", "gpu", "hardware", "attention", "software", "calibrate")
    config, gpu, table, kernel, software, measured = (given[name] for name in names)
    with reading("--config", config):
        architecture = load_architecture(config)
    if architecture.predictors and any(path.suffix == ".py" for path in given.get("out", ())):
        left_out = (*architecture.left_out, "num_nextn_predict_layers")  # of what the program trains
        architecture = replace(architecture, predictors=0, left_out=left_out)
    named = [option(name) for name in ("gpu", "hardware", "attention") if given[name] is not None]
    with reading("--hardware", table, ", ".join(named)):
        hardware = load_hardware("h100" if gpu is None else gpu, table, kernel)
    hardware = hardware if software is None else under(hardware, software)
    if given["fp8"] and hardware.fp8_flops is None:
        raise WrongArgument(
            "--fp8", f"{hardware.title} has no FP8, or its table no fp8_flops; leave it out, or add them"
        )
    if measured is not None:
        with reading("--calibrate", measured):
            hardware = replace(hardware, calibration=_calibration(measured, architecture, hardware, given))
    return architecture, hardware


def setting(given: Mapping[str, Any]) -> Setting:
    """What costs are computed from. Raises WrongArgument; given: as for `read`."""
    model, gpu = read(given)
    try:
        made = Setting(model, gpu, _job(given))
        made.beside(given["stages"])
    except ValueError as error:
        named = [option(name) for name in SIZES if name in str(error)]
        raise WrongArgument(", ".join(named), str(error)) from error
    return made


def _job(given: Mapping[str, Any]) -> Job:
    return Job(**{name: given[name] for name in SIZES if given[name] is not None})


def _calibration(
    path: Path, architecture: Architecture, hardware: Hardware, given: Mapping[str, Any]
) -> calibration.Calibration:
    """Of costs that profile_layers has measured with the sizes given, or of a step of a training run."""
    text, source = read_text(path), path.name
    if '"layers"' in text:
        measured = ModelCosts.from_json(text)
        halves = any(each.name.endswith(HALVES) for each in measured.layers)
        job = replace(_job(given), halves=halves)
        computed = Setting(architecture, hardware, job).costs
        return calibration.of_blocks(computed, measured, job.tensor_parallel, source)
    step = parse_object("a training step", text, _STEP)
    if unknown := sorted({*step} - {"seconds", "schedule", *CHOSEN, "sequence", "chunks"}):
        raise ValueError(f"unknown fields {unknown}; expected the seconds of a step, and how it ran: {_STEP}")
    run = {**given, "schedule": "one_f_one_b", "chunks": None, **step}
    name, stages, microbatches, chunks = (run[each] for each in ("schedule", "stages", "microbatches", "chunks"))
    seconds: Any = step.get("seconds")
    if type(seconds) not in (int, float) or not 0 < seconds < _LONGEST:
        raise ValueError(f"it must have the seconds of a step, above 0 and below {_LONGEST:.0e}, as in {_STEP}")
    if None in (stages, microbatches) or name not in schedules.NAMES:
        raise ValueError(f"it must have stages, microbatches and a schedule of {', '.join(schedules.NAMES)}: {_STEP}")
    setting = Setting(architecture, hardware, _job(run))
    question = Question(stages, microbatches, setting, chunks=chunks, schedule=name)
    if chunks not in (None, question.named.chunks):
        raise ValueError(f"chunks: {name} has {question.named.chunks} per rank; leave chunks out")
    _, used = question.speed(seconds)
    if used > ((hardware.fp8_flops or 0.0) / hardware.matmul_flops if run["fp8"] else 1.0):
        much = f"a step of {number(seconds)} s would use {used:.0%} of the peak flops"
        raise ValueError(f"{much}: give all sizes of the run, as in {_STEP}")
    passes = on_best_cut(question.named, setting.costs, None).makespan
    return calibration.of_step(passes / 1e3 + question.beside, seconds, source)
