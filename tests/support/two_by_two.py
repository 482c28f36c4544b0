"""Two stages of two replicas for tests, and the same model in one process with the data of both."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zbkern
from tests.support.meshes import named_mesh
from tests.support.optimizer_cases import clip_in_float64
from zbkern.pipeline import Pipeline, schedules

WIDTH, MICROBATCHES, MAX_NORM = 6, 6, 20.0
KINDS = ("ddp", "fsdp")


class Forced(torch.autograd.Function):
    """x * gain, with any gradient of the gain that a test wants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, value: float | None) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.value = value
        return x * gain

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain = ctx.saved_tensors
        found = (dy * x).sum().reshape(1) if ctx.value is None else torch.full_like(gain, ctx.value)
        return dy * gain, found, None


class Block(nn.Module):
    """Converted layers, and parameters that zbkern does not know, one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.force: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        return Forced.apply(x + torch.tanh(self.linear(self.norm(x))), self.gain, self.force)


def make_model(chunks: int, dtype: torch.dtype = torch.float64) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Block()).to(dtype) for _ in range(chunks)]


def batch(step: int, replica: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(2, MICROBATCHES, 3, WIDTH, generator=generator).to(dtype).unbind()


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    wide = torch.promote_types(outputs.dtype, torch.float32)
    return nn.functional.mse_loss(outputs.to(wide), targets.to(wide))


def backward_of_both(model: list[nn.Sequential], step: int) -> None:
    """Adds the gradients of the mean over both replicas' batches, in one process."""
    for replica in range(2):
        inputs, targets = batch(step, replica)
        (mean_square(nn.Sequential(*model)(inputs), targets) / 2).backward()


def mesh() -> DeviceMesh:
    return named_mesh(replica=2, stage=2)


def wrap(kind: str, module: nn.Sequential, **options: Any) -> nn.Module:
    zbkern.convert(module)
    if kind == "ddp":
        options.setdefault("bucket_cap_mb", 0.0003)
        return nn.parallel.DistributedDataParallel(module, process_group=mesh().get_group("replica"), **options)
    from torch.distributed.fsdp import fully_shard

    options.setdefault("reshard_after_forward", False)
    for block in module:
        fully_shard(block, mesh=mesh()["replica"], **options)
    return fully_shard(module, mesh=mesh()["replica"], **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Setup:
    """This rank's part of the pipeline that its replica is."""

    def __init__(self, kind: str, name: str, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.schedule = getattr(schedules, name)(2, MICROBATCHES)
        self.replica, self.stage = divmod(dist.get_rank(), 2)
        self.chunks = self.schedule.chunks_of(self.stage)
        model = make_model(len(self.schedule.placement), dtype)
        self.plain = [model[chunk] for chunk in self.chunks]
        self.modules = [wrap(kind, module, **options) for module in self.plain]
        self.dtype = dtype

    def pipe(self, **options: Any) -> Pipeline:
        options = {"timeout": 30, **options}
        return Pipeline(self.modules, self.schedule, mean_square, mesh().get_group("stage"), **options)

    def data(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        inputs, targets = batch(step, self.replica, self.dtype)
        last = len(self.schedule.placement) - 1
        return (inputs if 0 in self.chunks else None, targets if last in self.chunks else None)

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.plain for p in module.parameters()]

    def named(self, read: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {
            f"{chunk}.{name}": whole(read(p)).detach().clone()
            for chunk, module in zip(self.chunks, self.plain, strict=True)
            for name, p in module.named_parameters()
        }


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


Pairs = list[tuple[torch.optim.Optimizer, float]]  # with the norm that its gradients are clipped to


def one_pair(parameters: list[nn.Parameter]) -> Pairs:
    return [(make_optimizer(parameters), MAX_NORM)]


Forces = tuple[tuple[tuple[int, int], float], ...]  # ((chunk, step), the gradient of its gain)


@functools.cache
def plain_steps(
    chunks: int, steps: int, forces: Forces = (), make_pairs: Callable[[list[nn.Parameter]], Pairs] = one_pair
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], list[float]]:
    """One process and both replicas' data: gradients and weights after every step, losses of replica 0."""
    model = make_model(chunks)
    named = {f"{c}.{name}": p for c, module in enumerate(model) for name, p in module.named_parameters()}
    pairs = make_pairs(list(named.values()))
    gradients, weights, losses = [], [], []
    for step in range(steps):
        for parameter in named.values():
            parameter.grad = None
        for replica in range(2):
            for index, (x, y) in enumerate(zip(*(part.split(1) for part in batch(step, replica)), strict=True)):
                for chunk, module in enumerate(model):
                    value = dict(forces).get((chunk, step))  # the mean over replicas halves it
                    module[1].force = value / 2 if value is not None and (replica, index) == (1, 2) else None
                loss = mean_square(nn.Sequential(*model)(x), y) / MICROBATCHES
                (loss / 2).backward()
                if replica == 0:
                    losses = [*losses, 0.0] if index == 0 else losses
                    losses[-1] += loss.item()
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        norms = [clip_in_float64(each.param_groups[0]["params"], limit) for each, limit in pairs if forces]
        for optimizer, _ in pairs if all(map(math.isfinite, norms)) else ():
            optimizer.step()
        weights.append({name: p.detach().clone() for name, p in named.items()})
    return gradients, weights, losses


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], at: Any, **tolerance: float) -> None:
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **tolerance, msg=lambda m, n=name: f"{at}, {n}: {m}")
