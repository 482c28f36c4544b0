"""Replicas with other numbers of microbatches, or other calls: right, or refused before anybody waits."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zbkern
from tests.support.ranks import named_mesh
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, schedules

pytestmark = pytest.mark.dist

WIDTH = 6
COUNTS = [(3, 5), *(tuple(random.Random(step).choices(range(1, 7), k=2)) for step in range(4))]  # of replicas, by step
KINDS = ("ddp", "fsdp, gathered once", "fsdp", "tensor parallel")


def mesh() -> Any:
    return named_mesh(stage=2, replica=2)


class Block(nn.Module):
    """Its buffer is another one on every replica, until somebody makes them equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(self.linear(x)) + 0.01 * self.seen


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block().double() for _ in range(2)]


def batch(step: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + count)
    return torch.randn(2, 2 * count, WIDTH, generator=generator, dtype=torch.double).unbind()


def wrapped(kind: str, block: nn.Module) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(zbkern.convert(block), process_group=mesh().get_group("replica"))
    if kind == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
        from torch.distributed.tensor.placement_types import Replicate

        plan = {"linear": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(zbkern.convert(block), mesh()["replica"], plan)
    return fully_shard(zbkern.convert(block), mesh=mesh()["replica"], reshard_after_forward=kind == "fsdp")


def result(kind: str, steps: Callable[[Pipeline], Any], schedule: Any, loss_fn: Any = nn.functional.mse_loss) -> Any:
    """What the steps return, or what they raise, which must be soon."""
    chunk, start = wrapped(kind, blocks()[dist.get_rank() // 2]), time.monotonic()
    pipe = Pipeline(chunk, schedule, loss_fn, mesh().get_group("stage"), timeout=600)
    try:
        found = steps(pipe)
        pipe.close()
        return found
    except PipelineError as error:
        assert time.monotonic() - start < 60
        return str(error)


def unequal_numbers(kind: str) -> str | tuple[float, float]:
    """What is raised, or how far weights, and the loss of an evaluation, are from those of one process."""
    stage, replica = divmod(dist.get_rank(), 2)
    plain = blocks()

    def train(pipe: Pipeline) -> tuple[list[Tensor], Tensor | None]:
        inner = torch.optim.SGD(nn.ModuleList(pipe.modules.values()).parameters(), lr=0.5, momentum=0.9)
        optimizer = Optimizer(inner, pipe, max_norm=0.05, adaptive=False)
        for step, counts in enumerate(COUNTS):
            optimizer.zero_grad()
            inputs, targets = batch(step, counts[replica])
            parts = len(inputs) // 2
            pipe.step([*inputs.chunk(parts)], [*targets.chunk(parts)])
            optimizer.step()
        final = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in optimizer.weights()]
        return final, pipe.evaluate([*batch(9, 2)[0].chunk(2)], [*batch(9, 2)[1].chunk(2)])

    found = result(kind, train, lambda n: schedules.zb_h1(2, n))
    if isinstance(found, str):
        return found
    final, evaluated = found
    reference = torch.optim.SGD(nn.ModuleList(plain).parameters(), lr=0.5, momentum=0.9)
    kept = [[block.seen.clone() for block in plain]] * 2  # of each replica; DDP's begin a step with the first one's
    for step, counts in enumerate(COUNTS):
        reference.zero_grad()
        for which in (1, 0):
            set_buffers(plain, kept[0 if kind == "ddp" else which])
            inputs, targets = batch(step, counts[which])
            parts = len(inputs) // 2
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                (nn.functional.mse_loss(plain[1](plain[0](x)), y) / parts / 2).backward()
            kept[which] = [block.seen.clone() for block in plain]
        nn.utils.clip_grad_norm_(nn.ModuleList(plain).parameters(), 0.05)
        reference.step()
    off = max((a - b).abs().max().item() for a, b in zip(final, plain[stage].parameters(), strict=True))
    set_buffers(plain, kept[0 if kind == "ddp" else replica])
    inputs, targets = batch(9, 2)
    loss = nn.functional.mse_loss(plain[1].eval()(plain[0].eval()(inputs)), targets)
    return off, 0.0 if evaluated is None else abs(evaluated.item() - loss.item())


def set_buffers(blocks: list[nn.Module], values: list[Tensor]) -> None:
    for block, value in zip(blocks, values, strict=True):
        block.seen.copy_(value)


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_numbers_of_microbatches_are_right_or_refused(four_ranks: Any, kind: str) -> None:
    for found in four_ranks.run(unequal_numbers, kind, timeout=120):
        if kind in ("fsdp", "tensor parallel"):
            assert "replicas must run the same units in the same order" in found
            assert "got 3 units on rank" in found
            assert "and 5 on rank" in found
        else:
            assert max(found) < 1e-6


def packs_of_one_replica(kind: str) -> str:
    """What is raised where one replica has sequences packed into its rows, which its first forwards compare."""
    side = [{"cu_seqlens": torch.tensor([0, 1, 2])}, {}] if dist.get_rank() % 2 == 0 else None
    inputs, targets = (each.chunk(2) for each in batch(0, 2))
    step = lambda pipe: pipe.step([*inputs], [*targets], side)  # noqa: E731
    return result(kind, step, schedules.zb_h1(2, 2), nn.MSELoss(reduction="sum"))


def test_packs_of_one_replica_are_refused_where_every_pass_gathers_weights(four_ranks: Any) -> None:
    for found in four_ranks.run(packs_of_one_replica, "fsdp", timeout=120):
        assert "replicas must run the same units in the same order" in found


def evaluations_of_one_replica(kind: str) -> str | None:
    """What is raised where the first replica alone evaluates before every step."""

    def steps(pipe: Pipeline) -> None:
        for step in range(3):
            if dist.get_rank() % 2 == 0:
                pipe.evaluate(*batch(step, 4))
            pipe.step(*batch(step, 4))

    return result(kind, steps, schedules.zb_h1(2, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_one_replica_evaluates_alone_or_is_refused(four_ranks: Any, kind: str) -> None:
    for said in four_ranks.run(evaluations_of_one_replica, kind, timeout=120):
        # one that has begun its next step is told of its passes
        told = said and re.search("must (make the same calls|run the same microbatches) in the same order", said)
        assert said is None if kind == "ddp" else told
