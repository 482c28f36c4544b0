"""Gradient norms over stages, replicas and shards: every gradient counts once, in a precision that holds it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zbkern.pipeline import norms
from zbkern.pipeline.local_transport import LocalTransport
from zbkern.pipeline.optimizer import Optimizer


def test_main_grad_counts_and_is_clipped() -> None:
    weight, bias = (nn.Parameter(torch.ones(2).bfloat16()) for _ in range(2))
    weight.main_grad, bias.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]).bfloat16()
    transport = LocalTransport.ring(1)[0]
    for nothing in (0.0, -1.0, math.nan):  # a negative one would turn the gradients around
        with pytest.raises(ValueError, match="clip_grad_norm_: max_norm must be above 0"):
            norms.clip_grad_norm_([weight, bias], nothing, transport)
    assert norms.clip_grad_norm_([weight, bias], 1.0, transport) == pytest.approx(5.0)
    assert weight.main_grad.tolist() == pytest.approx([0.6, 0.0])
    assert norms.grad_norm([weight, bias], transport) == pytest.approx(1.0, rel=1e-2)


def test_norms_of_small_gradients_are_taken_in_fp32() -> None:
    """In fp16 the first would be beyond its range, and in bf16 the second rounded; those of fp64 stay in it."""
    large, fine = nn.Parameter(torch.zeros(4).half()), nn.Parameter(torch.zeros(1001).bfloat16())
    large.grad, fine.grad = torch.full_like(large, 60000.0), torch.ones_like(fine)
    transport = LocalTransport.ring(1)[0]
    assert norms.grad_norm(large, transport) == 120000.0
    assert norms.grad_norm(fine, transport) == pytest.approx(math.sqrt(1001), rel=1e-6)
    double = nn.Parameter(torch.zeros(1).double())
    double.grad = torch.full_like(double, 1 + 2**-40)
    assert norms.grad_norm(double, transport) == 1 + 2**-40
    assert norms.grad_norm([large, fine], transport) == pytest.approx(math.hypot(120000.0, math.sqrt(1001)), rel=1e-6)


def test_a_pipeline_is_no_parameters() -> None:
    with pytest.raises(TypeError, match=r"clip_grad_norm_: parameters must be .* got LocalTransport \(a Pipeline goes"):
        norms.clip_grad_norm_(LocalTransport.ring(1)[0], 1.0)


def sharded_loop() -> tuple[float, float | None, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    x = torch.randn(5, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(x).square().sum().backward()  # which torch 2.8 sums over gloo, where later ones take the mean
    expected = float(torch.nn.utils.get_total_norm([p.grad.full_tensor() for p in model.parameters()]))
    stage = LocalTransport.ring(1)[0]  # a pipeline of one stage, which two ranks share
    optimizer = Optimizer(torch.optim.AdamW(model.parameters()), stage, max_norm=1.0)
    optimizer.step()
    return expected, optimizer.last_norm, norms.grad_norm(model.parameters(), stage)


def placed_norms() -> list[float]:
    """One gradient in three placements, each alone, and all together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, gradient = init_device_mesh("cpu", (2,)), torch.tensor([[3.0], [4.0]])
    parameters = [nn.Parameter(distribute_tensor(torch.zeros(2, 1), mesh, [at])) for at in (Shard(0), Replicate())]
    parameters.append(nn.Parameter(parameters[1].detach()))
    for parameter in parameters[:2]:
        parameter.grad = distribute_tensor(gradient, mesh, parameter.placements)
    share = 0.25 if mesh.get_local_rank() == 0 else 0.75
    parameters[2].grad = DTensor.from_local(gradient * share, mesh, [Partial()])
    stage = LocalTransport.ring(1)[0]
    return [norms.grad_norm(part, stage) for part in (*parameters, parameters)]


@pytest.mark.dist
def test_a_gradient_counts_once_wherever_it_is(two_ranks: Any) -> None:
    for found in two_ranks.run(placed_norms):
        assert found == pytest.approx([5.0, 5.0, 5.0, 5.0 * math.sqrt(3)])


@pytest.mark.dist
def test_shards_count_as_the_whole(two_ranks: Any) -> None:
    for expected, found, clipped in two_ranks.run(sharded_loop):
        assert found == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-5)
