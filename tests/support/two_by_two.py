"""Two stages of two replicas for tests, and the same model in one process with the data of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zbkern
from tests.support.meshes import named_mesh
from zbkern.pipeline import Pipeline, schedules

WIDTH, MICROBATCHES = 6, 6
KINDS = ("ddp", "fsdp")


class Block(nn.Module):
    """Converted layers, and parameters that zbkern does not know, one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.tanh(self.linear(self.norm(x)))) * self.gain


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
