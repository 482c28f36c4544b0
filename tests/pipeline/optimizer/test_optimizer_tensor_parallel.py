"""Two stages of two tensor-parallel ranks under a Pipeline and its Optimizer: equal to one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from zbkern.pipeline import Optimizer, Pipeline, schedules
from zbkern.pipeline.optimizer.post_validation import NormTag

WIDTH, MICROBATCHES, STEPS, MAX_NORM = 8, 4, 6, 1.9
LARGE = {1: 5.0, 3: 3.5, 5: 4.5}  # steps whose gradients are to be clipped, which the first stage alone does not show


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(), Block()]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, MICROBATCHES, 4, WIDTH, generator=generator).unbind()
    return inputs, targets * LARGE.get(step, 0.02) + inputs


def one_process() -> tuple[nn.Module, list[float]]:
    model, found = nn.Sequential(*make_model()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return model, found


def delay_norms(transport: Any) -> None:
    """One of the first stage's ranks hears later than the other whether it must clip, and has begun more forwards."""
    send = transport.send

    def send_late(rank: int, tag: Any, tensors: Any) -> None:
        if isinstance(tag, NormTag):
            time.sleep(0.1)
        send(rank, tag, tensors)

    transport.send = send_late


def tensor_parallel_rank(sequence_parallel: bool, make: str) -> tuple[list[float], dict[str, float], int]:
    """Norms of all steps, how far every weight is from that of one process, and how often a step was undone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    stage, place = mesh.get_coordinate()
    chunk = zbkern.convert(make_model()[stage])
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence_parallel:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(chunk, mesh["tensor"], plan)

    def part(whole: Tensor) -> Tensor:
        return whole.chunk(2, 1)[place].contiguous() if sequence_parallel else whole

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:  # a rank's part of the mean over all rows
        return nn.functional.mse_loss(output, target) / (2 if sequence_parallel else 1)

    found = []
    schedule = schedules.zb_h1(2, MICROBATCHES)
    inner = {"torch": torch.optim.AdamW, "zbkern": zbkern.optim.AdamW}[make](chunk.parameters(), lr=1e-2)
    with Pipeline(chunk, schedule, loss_fn, mesh.get_group("stage"), timeout=20) as pipe:
        optimizer = Optimizer(inner, pipe, max_norm=MAX_NORM, adaptive=False)
        if (stage, place) == (1, 1):
            delay_norms(pipe.transport)
        for step in range(STEPS):
            optimizer.zero_grad()
            pipe.step(*map(part, batch(step)))
            if step > 0:
                found.append(optimizer.last_norm)
            optimizer.step()
        optimizer.validate()
        found.append(optimizer.last_norm)
    expected, expected_norms = one_process()
    apart = {}
    for name, parameter in chunk.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        apart[name] = (whole - expected[stage].get_parameter(name)).abs().max().item()
    assert len(found) == len(expected_norms)
    return found, apart, optimizer.undone


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sequence_parallel", "make"),
    [
        (False, "torch"),
        (True, "zbkern"),
        pytest.param(False, "zbkern", marks=pytest.mark.slow),
        pytest.param(True, "torch", marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process(four_ranks: Any, sequence_parallel: bool, make: str) -> None:
    _, expected = one_process()
    results = four_ranks.run(tensor_parallel_rank, sequence_parallel, make)
    assert [undone for _, _, undone in results] == [3, 3, 0, 0]
    for found, apart, _ in results:
        assert found == pytest.approx(expected, rel=1e-4)
        assert max(apart.values()) < 1e-4, apart
