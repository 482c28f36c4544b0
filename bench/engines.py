"""Our engine and torch's with one schedule each, on copies of a model's layers, for benchmarks of pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from zbkern.pipeline import Pipeline, Schedule

LAYERS = " with zbkern's layers"
LAYERS_ALONE = LAYERS + " in torch's stage"


class Contestant(NamedTuple):
    """One engine with one schedule. layers: this rank's copies, by their index in the model; actions: how many F, B, W
    and BW this rank runs in a step."""

    name: str
    step: Callable[[], Any]
    layers: dict[int, nn.Module]
    actions: int
    close: Callable[[], None] = lambda: None


def ours(name: str, schedule: Schedule, model: Sequence[nn.Module], x: Tensor, y: Tensor, **options: Any) -> Contestant:
    """options: of the Pipeline."""
    rank = dist.get_rank()
    chunks, layers = own_chunks(schedule.placement, model)
    pipe = Pipeline([*map(zbkern.convert, chunks.values())], schedule, nn.functional.mse_loss, **options)
    inputs = x if schedule.placement[0] == rank else None
    targets = y if schedule.placement[-1] == rank else None
    actions = len(schedule.actions[rank])
    return Contestant(f"zbkern {name}", lambda: pipe.step(inputs, targets), layers, actions, pipe.close)


def torchs(
    name: str, model: Sequence[nn.Module], x: Tensor, y: Tensor, microbatches: int, variant: str = ""
) -> Contestant:
    """A schedule of torch's engine. variant: with nothing of zbkern's, its layers in its stage, or its layers alone."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules as stock

    from zbkern.pipeline import torch_pipelining

    rank, line = dist.get_rank(), (*range(dist.get_world_size()),)
    single = name in ("GPipe", "1F1B")  # a stage on each rank
    placement = line if single else (*line, *reversed(line)) if name == "ZBVZeroBubble" else (*line, *line)
    chunks, layers = own_chunks(placement, model)
    make = (torch_pipelining if variant == LAYERS else pipelining).PipelineStage
    stages = [
        make(zbkern.convert(part) if variant else part, chunk, len(placement), x.device)
        for chunk, part in chunks.items()
    ]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:  # the mean over microbatches: no scaling pass after it
        return nn.functional.mse_loss(output, target) / microbatches

    kind, options = getattr(stock, f"Schedule{name}"), {"loss_fn": loss_fn, "scale_grads": False}
    schedule = kind(stages[0] if single else stages, microbatches, **options)
    arguments = (x,) if placement[0] == rank else ()
    keywords = {"target": y, "losses": []} if placement[-1] == rank else {}
    passes = 3 if "ZeroBubble" in name else 2
    step = lambda: schedule.step(*arguments, **keywords)  # noqa: E731
    return Contestant(f"torch {name}{variant}", step, layers, passes * microbatches * len(stages))


def own_chunks(
    placement: Sequence[int], model: Sequence[nn.Module]
) -> tuple[dict[int, nn.Module], dict[int, nn.Module]]:
    """Copies of this rank's chunks, by their number, and of their layers, by their index in the model. A chunk of one
    layer is that layer: what a container costs the host is not measured."""
    size = len(model) // len(placement)
    chunks, layers = {}, {}
    for chunk in (chunk for chunk, home in enumerate(placement) if home == dist.get_rank()):
        part = [copy.deepcopy(layer) for layer in model[chunk * size : (chunk + 1) * size]]
        layers.update(enumerate(part, chunk * size))
        chunks[chunk] = part[0] if size == 1 else nn.Sequential(*part)
    return chunks, layers


def plain_step(layers: Iterable[nn.Module], x: Tensor, y: Tensor, microbatches: int) -> None:
    """The same in one process without an engine."""
    for inputs, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        for layer in layers:
            inputs = layer(inputs)
        (nn.functional.mse_loss(inputs, targets) / microbatches).backward()


def check(contestant: Contestant, model: Sequence[nn.Module]) -> None:
    """One step's gradients against those of the model; raises when they differ by more than fp32 rounding."""
    contestant.step()
    for index, layer in contestant.layers.items():
        for (name, ours), plain in zip(layer.named_parameters(), model[index].parameters(), strict=True):
            where = f"{contestant.name} {index}.{name}"
            torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-7, msg=where)
