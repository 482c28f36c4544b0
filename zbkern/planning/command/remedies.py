"""Options that would make a model fit, or its step faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zbkern.planning.command.question import Question, spelt
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.needs import fits, least_need
from zbkern.schedules.units import amount, number

_TIMES = [2**power for power in range(1, 10)]  # as many, or as few
_WIDEST, _SHORTEST = 64, 256  # tensor parallelism, and tokens, that are worth naming
_LEAST_LIMIT = 1e6  # bytes: a limit below is taken for one in GB


def why_not(question: Question) -> str | None:
    """What does not fit, and what would; None where only a placement or chunks that were given may be in the way."""
    costs, stages, limit = question.costs, question.stages, question.limit
    if not isinstance(question.setting, Setting) or limit is None:
        return None
    assert isinstance(costs, ModelCosts)
    need = least_need(costs, stages)
    if need.total <= limit or (question.saves_memory and fits(costs, stages, limit, saves=True)):
        return None
    options = remedies(question)
    what = f"it fits with {' or '.join(options)}" if options else "no one of the options for sizes makes it fit"
    if 0 < limit < _LEAST_LIMIT and not (question.memory and question.memory[1]):
        what = f"a limit is in bytes: --memory {number(limit)}e9 for as many GB"
    return f"nothing fits in {amount(limit, 'bytes')}: {need.describe(stages, 'bytes')}; {what}"


def remedies(question: Question) -> list[str]:
    """Options for sizes, each of which alone makes the model fit, with the least change of its number.

    What follows from the sizes that were given follows from those that are tried.
    """
    assert isinstance(question.setting, Setting)
    model, _, job = question.setting
    stages, placement = question.stages, question.placement
    most = (len(model.blocks) + 2 * (1 + model.predictors)) // question.request.chunks_per_rank
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
    smallest = {
        name: next((value for value in values if _fits(question, name, value)), 0) for name, values in tries.items()
    }
    return spelt({name: value for name, value in smallest.items() if value})


def _fits(question: Question, name: str, value: int) -> bool:
    """Whether the model would fit with this number instead."""
    assert isinstance(question.setting, Setting)
    changed: dict[str, Any] = {name: value}
    try:
        other = replace(question, **changed if name == "stages" else {"setting": _sized(question.setting, **changed)})
        costs, limit = other.costs, other.limit
    except ValueError:  # heads or experts that cannot be divided so
        return False
    assert isinstance(costs, ModelCosts)
    assert limit is not None
    return fits(costs, other.stages, limit)


def savings(question: Question) -> dict[str, Question]:
    """With --recompute or --offload, where neither was asked for and the costs say what they cost."""
    costs, limit, ways = question.costs, question.limit, {}
    if limit is None or question.saves_memory:
        return {}
    if isinstance(costs, ModelCosts) and not fits(costs, question.stages, limit, saves=True):
        return {}
    if isinstance(costs, ModelCosts) or costs.checkpoint is not None:
        ways["--recompute"] = replace(question, recompute=True)
    if costs.offload_bandwidth is not None and costs.reload_bandwidth is not None:
        ways["--offload"] = replace(question, offload=0.0)
    return ways


def halves(question: Question) -> dict[str, Question]:
    """With --halves, where the model has some and the question does not."""
    whole = question.setting
    if not isinstance(whole, Setting):
        return {}
    finer = _sized(whole, halves=True)
    same = len(finer.costs.layers) == len(whole.costs.layers)
    return {} if same else {"--halves": replace(question, setting=finer)}


def in_slices(question: Question) -> dict[str, Question]:
    """With --slices auto, where a model's sequences go through several stages, and go whole."""
    alone = question.stages == 1 or question.slices != 1 or question.schedule is not None
    if alone or not isinstance(question.setting, Setting):
        return {}
    return {"--slices auto": replace(question, slices="auto")}


def _sized(setting: Setting, **sizes: Any) -> Setting:
    """With other sizes of its job. Raises ValueError as `Job`."""
    return setting._replace(job=replace(setting.job, **sizes))
