"""One optimizer step of the GPT: by `Trainer` in a pipeline, by `TorchTrainer` in torch's own engine, and by
`PlainTrainer` in one process."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence

import gpt
import torch
import torch.distributed as dist
from text import Text
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import zbkern
from zbkern.pipeline import Optimizer, Pipeline, Schedule


class Trainer:
    """This rank's chunks of the model in a pipeline, one of --replicas identical pipelines, with their optimizer."""

    def __init__(self, arguments: argparse.Namespace, text: Text, schedule: Schedule, fill: str = "planned") -> None:
        self.arguments, self.text, self.schedule = arguments, text, schedule
        self.device = device_of_this_rank()
        self.replica = mesh(arguments)["replica"].get_local_rank()
        count = len(schedule.placement)
        self.config = model_config(arguments)
        mine = chunks_of_this_rank(arguments, schedule.placement)
        tied = gpt.tie(self.config, mine, count)
        self.modules = list(mine.values())
        self.first, self.last = 0 in mine, count - 1 in mine
        group = mesh(arguments).get_group("stage")
        if arguments.replicas > 1:
            replicas = mesh(arguments).get_group("replica")
            wrap = nn.parallel.DistributedDataParallel
            self.modules = [wrap(module, process_group=replicas) for module in self.modules]
        self.pipe = Pipeline(self.modules, schedule, gpt.loss_fn, group, self.device, fill=fill, tied=tied)
        inner = make_optimizer(arguments, nn.ModuleList(self.modules))
        self.optimizer = Optimizer(inner, self.pipe, max_norm=arguments.clip)
        self.learning_rate = warm_up(self.optimizer)

    def step(self, step: int) -> Tensor | None:
        """One optimizer step; the mean loss of this replica on the rank of the last chunk, None elsewhere."""
        data = batch(self.arguments, self.text, step, self.device)
        inputs, targets = (part.chunk(self.arguments.replicas)[self.replica] for part in data)
        self.optimizer.zero_grad()
        with half(self.arguments, self.device):
            loss = self.pipe.step(inputs if self.first else None, targets if self.last else None)
        self.optimizer.step()
        self.learning_rate.step()
        return loss


class TorchTrainer:
    """The same chunks in 1F1B of torch.distributed.pipelining, on the ranks of one pipeline."""

    def __init__(self, arguments: argparse.Namespace, text: Text) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.arguments, self.text, self.device = arguments, text, device_of_this_rank()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.module = chunks_of_this_rank(arguments, range(ranks))[rank]
        self.first, self.last = rank == 0, rank == ranks - 1
        stage = PipelineStage(self.module, rank, ranks, self.device)
        self.schedule = Schedule1F1B(stage, arguments.microbatches, gpt.loss_fn)
        self.optimizer = make_optimizer(arguments, self.module)
        self.learning_rate = warm_up(self.optimizer)

    def step(self, step: int) -> Tensor | None:
        inputs, targets = batch(self.arguments, self.text, step, self.device)
        self.optimizer.zero_grad()
        losses: list[Tensor] | None = [] if self.last else None
        with half(self.arguments, self.device):
            self.schedule.step(*[inputs] * self.first, target=targets if self.last else None, losses=losses)
        self._clip()
        self.optimizer.step()
        self.learning_rate.step()
        return torch.stack(losses).mean() if losses else None

    def _clip(self) -> None:
        """By the norm over all ranks, which each of them waits for."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        square = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), self.arguments.clip, square.sqrt())


class PlainTrainer:
    """The same model in one process with plain backward(), and torch.nn's layers unless `convert`: the reference."""

    def __init__(self, arguments: argparse.Namespace, text: Text, convert: bool = False) -> None:
        self.arguments, self.text, self.device = arguments, text, device_of_this_rank()
        self.model = gpt.chunk(model_config(arguments), 0, 1).to(self.device)
        if convert:
            zbkern.convert(self.model)
        gpt.tie(model_config(arguments), {0: self.model}, 1)
        self.optimizer = make_optimizer(arguments, self.model)
        self.learning_rate = warm_up(self.optimizer)

    def step(self, step: int) -> Tensor:
        inputs, targets = batch(self.arguments, self.text, step, self.device)
        self.optimizer.zero_grad()
        count = self.arguments.microbatches * self.arguments.replicas
        total = torch.zeros((), device=self.device)
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            with half(self.arguments, self.device):
                loss = gpt.loss_fn(self.model(x), y) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.arguments.clip)
        self.optimizer.step()
        self.learning_rate.step()
        return total


def model_config(a: argparse.Namespace) -> gpt.Config:
    return gpt.Config(a.layers, a.width, a.heads, a.context, tied=a.tied, seed=a.seed)


def device_of_this_rank() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def make_optimizer(arguments: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; tensor-parallel parameters are a group of their own, because torch's kernels do not mix the two."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
    named = [{"params": group} for group in groups if group]
    return torch.optim.AdamW(named, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)


def half(arguments: argparse.Namespace, device: torch.device) -> torch.autocast:
    """bf16 on a GPU, unless --check compares losses to 1e-5."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and not arguments.check)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def mesh(arguments: argparse.Namespace) -> DeviceMesh:
    """All ranks, as --replicas pipelines, each stage of which is --tensor-parallel ranks."""
    return _mesh(arguments.replicas, arguments.tensor_parallel)


@functools.cache
def _mesh(replicas: int, tensor: int) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas // tensor, tensor)
    return init_device_mesh(device_of_this_rank().type, shape, mesh_dim_names=("replica", "stage", "tensor"))


def chunks_of_this_rank(arguments: argparse.Namespace, placement: Sequence[int]) -> dict[int, gpt.Chunk]:
    """This rank's chunks of the model by number, converted; under --tensor-parallel its part of them."""
    stage, device = mesh(arguments)["stage"].get_local_rank(), device_of_this_rank()
    found = {}
    for index in (index for index, home in enumerate(placement) if home == stage):
        module = gpt.chunk(model_config(arguments), index, len(placement)).to(device)
        found[index] = zbkern.convert(module)
        if arguments.tensor_parallel > 1:
            gpt.parallelize(module, mesh(arguments)["tensor"])
    return found


def batch(arguments: argparse.Namespace, text: Text, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The batch of a step, for all replicas together."""
    rows = arguments.rows * arguments.microbatches * arguments.replicas
    inputs, targets = text.batch(step, rows, arguments.context)
    return inputs.to(device), targets.to(device)


def everywhere(loss: Tensor | None, arguments: argparse.Namespace, device: torch.device) -> float:
    """The mean loss over replicas, each of which has its loss on the ranks of one stage; returned on all ranks."""
    value = torch.zeros((), device=device) if loss is None else loss.float()
    dist.all_reduce(value)
    return value.item() / (arguments.replicas * arguments.tensor_parallel)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
