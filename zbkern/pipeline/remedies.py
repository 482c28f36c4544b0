"""What would make a model fit: for the errors of `zbkern plan --config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from zbkern.pipeline.simulation.architecture import Architecture
from zbkern.pipeline.simulation.hardware import Hardware
from zbkern.pipeline.simulation.layers import ModelCosts
from zbkern.pipeline.simulation.model_costs import Job, model_costs
from zbkern.pipeline.simulation.needs import fits

_MOST = {"tensor_parallel": 64, "data_parallel": 512}  # that are worth naming
_SHORTEST = 256  # tokens
SAVING_CHUNKS = 8  # per rank, at most, in a search


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
    most = _layers(architecture) // chunks
    for name in (
        *("stages", "tensor_parallel", "expert_parallel", "data_parallel"),
        *("fully_shard", "microbatch_size", "sequence"),
    ):
        for value in _values(name, given, architecture):
            tried = {**given, name: value}
            if tried["stages"] <= most and _fits(architecture, hardware, limit, relative, **tried):
                found.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
                break
    return found


def _values(name: str, given: Mapping[str, Any], architecture: Architecture) -> Iterator[int]:
    """Of this option, in the order in which they are tried."""
    value = given.get(name, False)
    if name == "stages":
        yield from () if given.get("fully_shard") else range(value + 1, _layers(architecture) + 1)
    elif name == "fully_shard":
        yield from () if value or given["stages"] > 1 else (True,)
    elif name in ("microbatch_size", "sequence"):
        least = max(_SHORTEST, architecture.sequence) if name == "sequence" else 1
        while (value := value // 2) >= least:
            yield value
    else:
        if name == "data_parallel":
            value = Job(**{size: each for size, each in given.items() if size != "stages"}).data_parallel
        experts = architecture.experts.count if architecture.experts else 0
        while (value := 2 * value) <= _MOST.get(name, experts):
            yield value


def _fits(
    architecture: Architecture, hardware: Hardware, limit: float, relative: bool, stages: int, **sizes: Any
) -> bool:
    try:
        costs = model_costs(architecture, hardware, Job(**sizes))
    except ValueError:  # heads or experts that cannot be divided so
        return False
    whole = sum(layer.activation for layer in costs.layers)
    return fits(costs, stages, limit * whole if relative else limit)


def _layers(architecture: Architecture) -> int:
    return len(architecture.blocks) + 2 * (1 + architecture.predictors)
