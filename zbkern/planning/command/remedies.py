"""What would make a model fit: for the errors of `zbkern plan --config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zbkern.pipeline.schedules.units import amount, number
from zbkern.planning.command.question import Question
from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.model_costs import Job, model_costs
from zbkern.planning.planner.arguments import chunks_per_rank
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.planning.simulation.needs import fits, least_need

_TIMES = [2**power for power in range(1, 10)]  # as many, or as few
_WIDEST, _SHORTEST = 64, 256  # tensor parallelism, and tokens, that are worth naming
SAVING_CHUNKS = 8  # per rank, at most, in a search
_LEAST_LIMIT = 1e6  # bytes: a limit below is taken for one in GB


def why_not(question: Question) -> str | None:
    """What does not fit, and what would; None where it does fit, but for a placement or chunks that were given."""
    setting, stages, limit = question.setting, question.stages, question.limit
    if setting is None or limit is None:
        return None
    costs = setting.costs
    need = least_need(costs, stages)
    if need.total <= limit or (question.saves_memory and may_fit_with_saving(costs, stages, limit)):
        return None
    given, relative = question.memory or (limit, False)
    placement = question.placement
    chunks = question.chunks or (2 if placement == "v" else chunks_per_rank(placement, stages))
    options = remedies(*setting[:2], stages, question.sizes, given, relative=relative, chunks=chunks)
    if isinstance(placement, tuple):  # the rank of every chunk of so many stages
        options = [each for each in options if not each.startswith("--stages")]
    what = f"it fits with {' or '.join(options)}" if options else "no one of the options for sizes makes it fit"
    if 0 < limit < _LEAST_LIMIT and not relative:
        what = f"a limit is in bytes: --memory {number(limit)}e9 for as many GB"
    return f"nothing fits in {amount(limit, 'bytes')}: {need.describe(stages, 'bytes')}; {what}"


def may_fit_with_saving(costs: ModelCosts, stages: int, limit: float) -> bool:
    """Whether offloading or recomputing could make it fit: a rank then holds a microbatch in one of its chunks only."""
    chunks = max(1, min(SAVING_CHUNKS, len(costs.layers) // stages))
    thinner = [replace(layer, activation=layer.activation / chunks) for layer in costs.layers]
    return fits(replace(costs, layers=tuple(thinner)), stages, limit)


def remedies(
    architecture: Architecture,
    hardware: Hardware,
    stages: int,
    sizes: Mapping[str, Any],
    limit: float,
    *,
    relative: bool = False,
    chunks: int = 1,
) -> list[str]:
    """Options with the least change of their numbers, each of which makes the model fit.

    sizes: arguments of the `Job`, as they were given: what follows from the others follows from those that are tried.
    relative: the limit counts what one microbatch holds in the whole model. chunks: per rank, at least.
    """
    found, given = [], {"stages": stages, **sizes}
    for name, values in _to_try(given, architecture, chunks).items():
        for value in values:
            if _fits(architecture, hardware, limit, relative, **{**given, name: value}):
                found.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
                break
    return found


def _to_try(given: Mapping[str, Any], architecture: Architecture, chunks: int) -> dict[str, Sequence[int]]:
    """Values of every option, in the order in which they are tried."""
    stages, sizes = given["stages"], {name: value for name, value in given.items() if name != "stages"}
    job, layers = Job(**sizes), len(architecture.blocks) + 2 * (1 + architecture.predictors)
    return {
        "stages": () if job.fully_shard else range(stages + 1, layers // chunks + 1),
        "tensor_parallel": [value for by in _TIMES if (value := job.tensor_parallel * by) <= _WIDEST],
        "expert_parallel": [job.expert_parallel * by for by in _TIMES],
        "data_parallel": [job.data_parallel * by for by in _TIMES],
        "fully_shard": () if job.fully_shard or stages > 1 else (True,),
        "microbatch_size": [value for by in _TIMES if (value := job.microbatch_size // by) >= 1],
        "sequence": [value for by in _TIMES if (value := job.sequence // by) >= _SHORTEST],
    }


def _fits(
    architecture: Architecture, hardware: Hardware, limit: float, relative: bool, stages: int, **sizes: Any
) -> bool:
    try:
        costs = model_costs(architecture, hardware, Job(**sizes))
    except ValueError:  # heads or experts that cannot be divided so
        return False
    whole = sum(layer.activation for layer in costs.layers)
    return fits(costs, stages, limit * whole if relative else limit)
