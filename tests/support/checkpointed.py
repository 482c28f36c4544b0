"""What the tests of checkpoints train: layers with buffers and dropout, in chunks of a pipeline or in one piece."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from tests.support.schedules import saved_in_turn, with_actions
from zbkern.pipeline import Optimizer, Pipeline, schedules

WIDTH, LAYERS, MICROBATCHES = 6, 4, 4


def layers(first: int, last: int) -> nn.Sequential:
    """Layers of the model by their numbers in it; each draws its weights from its own number."""
    found: OrderedDict[str, nn.Module] = OrderedDict()
    for index in range(first, last):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1))
        found[f"layer{index}"] = layer
    return nn.Sequential(found)


def chunks(placement: tuple[int, ...], rank: int) -> dict[int, nn.Sequential]:
    share = LAYERS // len(placement)
    return {c: layers(c * share, (c + 1) * share) for c, home in enumerate(placement) if home == rank}


def make_optimizer(modules: Any) -> torch.optim.Optimizer:
    """Two groups, as weight decay is usually for matrices only."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 0.003},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator).unbind()


def build(name: str, *how: str | None) -> tuple[dict[int, nn.Sequential], Pipeline, Optimizer]:
    """This rank's chunks of the model on two ranks, under the schedule of that name; how: see `saved_in_turn`."""
    schedule = getattr(schedules, name)(2, MICROBATCHES)
    if how:
        schedule = with_actions(schedule, saved_in_turn(*how))
    mine = {chunk: zbkern.convert(module) for chunk, module in chunks(schedule.placement, dist.get_rank()).items()}
    pipe = Pipeline(list(mine.values()), schedule, nn.functional.mse_loss, timeout=60)
    return mine, pipe, Optimizer(make_optimizer(mine.values()), pipe, max_norm=0.15)


def train(pipe: Pipeline, optimizer: Any, steps: range, dtype: torch.dtype = torch.float32) -> list[float | None]:
    """The loss of every step, where this rank has the last chunk; dtype: of the inputs."""
    losses = []
    first, last = (pipe.schedule.placement[end] == pipe.rank for end in (0, -1))
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = pipe.step(inputs.to(dtype) if first else None, targets if last else None)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
    return losses


def state_by_name(modules: list[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, buffers, and for every parameter its state, hyperparameters and the master that an Optimizer has."""
    found: dict[str, Any] = {}
    for module in modules:
        found.update({key: value.clone() for key, value in module.state_dict().items()})
        names = {id(parameter): key for key, parameter in module.named_parameters()}
        for parameter, master in getattr(optimizer, "masters", ()):
            if id(parameter) in names:
                names[id(master)] = names[id(parameter)]
                found[f"{names[id(master)]}/master"] = master
        for group in optimizer.param_groups:
            for parameter in (p for p in group["params"] if id(p) in names):
                name = names[id(parameter)]
                found.update({f"{name}/{entry}": value for entry, value in optimizer.state[parameter].items()})
                found[f"{name}/settings"] = (group["lr"], group["weight_decay"], group["betas"])
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key], key


def plain_run(module: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs.to(module[0][0].weight.dtype)).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
