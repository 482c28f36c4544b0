"""What would make a model fit: for the errors of `zbkern plan --config`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zbkern.planning.command.question import Question, spelt
from zbkern.planning.planner.arguments import chunks_per_rank
from zbkern.planning.simulation.layers import ModelCosts
from zbkern.planning.simulation.needs import fits, least_need
from zbkern.schedules.units import amount, number

_TIMES = [2**power for power in range(1, 10)]  # as many, or as few
_WIDEST, _SHORTEST = 64, 256  # tensor parallelism, and tokens, that are worth naming
SAVING_CHUNKS = 8  # per rank, at most, in a search
_LEAST_LIMIT = 1e6  # bytes: a limit below is taken for one in GB


def why_not(question: Question) -> str | None:
    """What does not fit, and what would; None where only a placement or chunks that were given may be in the way."""
    setting, stages, limit = question.setting, question.stages, question.limit
    if setting is None or limit is None:
        return None
    need = least_need(setting.costs, stages)
    if need.total <= limit or (question.saves_memory and may_fit_with_saving(setting.costs, stages, limit)):
        return None
    options = remedies(question)
    what = f"it fits with {' or '.join(options)}" if options else "no one of the options for sizes makes it fit"
    if 0 < limit < _LEAST_LIMIT and not (question.memory and question.memory[1]):
        what = f"a limit is in bytes: --memory {number(limit)}e9 for as many GB"
    return f"nothing fits in {amount(limit, 'bytes')}: {need.describe(stages, 'bytes')}; {what}"


def may_fit_with_saving(costs: ModelCosts, stages: int, limit: float) -> bool:
    """Whether offloading or recomputing could make it fit: a rank then holds a microbatch in one of its chunks only."""
    chunks = max(1, min(SAVING_CHUNKS, len(costs.layers) // stages))
    thinner = [replace(layer, activation=layer.activation / chunks) for layer in costs.layers]
    return fits(replace(costs, layers=tuple(thinner)), stages, limit)


def remedies(question: Question) -> list[str]:
    """Options with the least change of their numbers, each of which makes the model fit, in the order of the tries.

    What follows from the sizes that were given follows from those that are tried.
    """
    assert question.setting is not None
    model, _, job = question.setting
    stages, placement = question.stages, question.placement
    chunks = question.chunks or (2 if placement == "v" else chunks_per_rank(placement, stages))
    most = (len(model.blocks) + 2 * (1 + model.predictors)) // chunks
    fixed = job.fully_shard or isinstance(placement, tuple)  # the rank of every chunk of so many stages
    tries: dict[str, Sequence[int]] = {
        "stages": () if fixed else range(stages + 1, most + 1),
        "tensor_parallel": [value for by in _TIMES if (value := job.tensor_parallel * by) <= _WIDEST],
        "expert_parallel": [job.expert_parallel * by for by in _TIMES],
        "data_parallel": [job.pipelines * by for by in _TIMES],
        "fully_shard": () if job.fully_shard or stages > 1 else (True,),
        "microbatch_size": [value for by in _TIMES if (value := job.microbatch_size // by) >= 1],
        "sequence": [value for by in _TIMES if (value := job.sequence // by) >= _SHORTEST],
    }
    found: list[str] = []
    for name, values in tries.items():
        value = next((each for each in values if _fits(question, **{name: each})), None)
        found += [] if value is None else spelt({name: value})
    return found


def _fits(question: Question, stages: int = 0, **sizes: Any) -> bool:
    assert question.setting is not None
    try:
        setting = question.setting._replace(job=replace(question.setting.job, **sizes))
        costs, limit = setting.costs, replace(question, setting=setting).limit
    except ValueError:  # heads or experts that cannot be divided so
        return False
    assert limit is not None
    return fits(costs, stages or question.stages, limit)
