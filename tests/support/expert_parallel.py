"""Layers with experts in stages of expert-parallel ranks for tests, and the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zbkern
from tests.support import parallel_stages
from tests.support.parallel_stages import Trained, make_optimizer
from tests.support.ranks import named_mesh
from zbkern.pipeline import Optimizer, Pipeline, schedules

WIDTH, HIDDEN, EXPERTS, TOP_K, LAYERS, TOKENS = 8, 12, 4, 2, 4, 3
MICROBATCHES, MAX_NORM = 4, 1.0
STEEP = (2, 3, 6)  # steps whose gradients are clipped


def block(ranks: int, rank: int, group: Any = None, seed: int = 0) -> nn.Module:
    """The block of a model that is the same on all ranks, with this rank's share of the experts."""
    torch.manual_seed(seed)
    whole = zbkern.nn.Experts(WIDTH, HIDDEN, EXPERTS, bias=True, dtype=torch.float64)
    router = zbkern.nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
    share = EXPERTS // ranks
    own = zbkern.nn.Experts(WIDTH, HIDDEN, share, bias=True, dtype=torch.float64)
    own.load_state_dict({name: p[rank * share : (rank + 1) * share] for name, p in whole.state_dict().items()})
    return zbkern.nn.ExpertParallel(own, router, TOP_K, group)


class Layer(nn.Module):
    """A norm, a linear and experts, of which a rank of the mesh has its share."""

    def __init__(self, number: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        place = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            self.norm, self.linear = nn.RMSNorm(WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
            self.experts = block(*place, mesh, seed=number)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.linear(self.norm(x))))


def chunk(index: int, count: int, mesh: DeviceMesh | None) -> nn.Sequential:
    share = LAYERS // count
    numbers = range(index * share, (index + 1) * share)
    found = nn.Sequential()
    for number in numbers:
        found.add_module(str(number), Layer(number, mesh))
    return found


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of all expert-parallel ranks: microbatches first, each with 4 sequences."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, MICROBATCHES, 4, TOKENS, WIDTH)
    inputs, targets = torch.randn(shape, dtype=torch.double, generator=generator).unbind()
    return inputs, targets * (9 if step in STEEP else 0.3)


def replicate(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """All but the experts by FSDP2, which adds up what the ranks' own tokens give, as the experts' gradients are."""
    from torch.distributed.fsdp import fully_shard

    experts = {p for part in module.modules() if isinstance(part, zbkern.nn.Experts) for p in part.parameters()}
    for part in (*module, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=False, ignored_params=experts)
        part.set_gradient_divide_factor(1.0)
    return module


class Stages(Trained):
    """This rank's chunks under a Pipeline and its Optimizer: `stages` x `experts` ranks, each with its own tokens."""

    def __init__(self, stages: int, experts: int, schedule: str, fill: str = "planned", **how: Any) -> None:
        mesh = named_mesh(stage=stages, expert=experts)
        plan = getattr(schedules, schedule)(stages, MICROBATCHES)
        self.ranks, self.rank = experts, mesh["expert"].get_local_rank()
        chunks = plan.chunks_of(mesh["stage"].get_local_rank())
        count = len(plan.placement)
        self.modules = [
            replicate(zbkern.convert(chunk(index, count, mesh["expert"])), mesh["expert"]) for index in chunks
        ]
        self.pipe = Pipeline(self.modules, plan, self.loss, mesh.get_group("stage"), fill=fill, timeout=60)
        self.optimizer = Optimizer(make_optimizer(self.modules), self.pipe, max_norm=MAX_NORM, **how)
        self.first, self.last = 0 in chunks, count - 1 in chunks

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """This rank's share of the mean over the tokens of all ranks."""
        return nn.functional.mse_loss(output, target) / self.ranks

    def gradients(self, step: int) -> float | None:
        """Forward and backward of a step; this rank's share of its loss on ranks of the last stage."""
        inputs, targets = ([*part.chunk(self.ranks, 1)[self.rank].unbind()] for part in batch(step))
        self.optimizer.zero_grad()
        loss = self.pipe.step(inputs if self.first else None, targets if self.last else None)
        return None if loss is None else loss.item()

    def named(self) -> dict[str, Tensor]:
        return {name: p for module in self.modules for name, p in module.named_parameters()}


class OneProcess(parallel_stages.OneProcess):
    """The same model in one process."""

    max_norm = MAX_NORM

    def __init__(self) -> None:
        self.model = chunk(0, 1, None)
        self.pairs = [(make_optimizer([self.model]), MAX_NORM)]

    def gradients(self, step: int) -> float:
        self.model.zero_grad()
        inputs, targets = (part.flatten(0, 1) for part in batch(step))
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        return loss.item()
