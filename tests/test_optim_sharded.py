"""zbkern.optim.AdamW on DTensor: every placement of a gradient gives the step of the whole tensor, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.sharded_model import cpu_mesh
from zbkern.optim import AdamW
from zbkern.pipeline.optimizer.undo import Inverse

SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
STEPS = 3


def whole(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def stepped_where_placed() -> dict[str, tuple[float, float]]:
    """How far from torch's AdamW on the whole tensor, for each placement of parameter and gradient, after the steps
    and after the last of them is undone.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = cpu_mesh()
    rank = mesh.get_local_rank()

    def placed(gradient: Tensor, placement: Any) -> Tensor:
        if placement != Partial():
            return distribute_tensor(gradient, mesh, [placement])
        share = torch.linspace(0.1, 0.8, gradient.numel()).view_as(gradient)
        return DTensor.from_local(gradient * (share if rank == 0 else 1 - share), mesh, [placement])

    found = {}
    for parameter_at in (Replicate(), Shard(0), Shard(1)):
        for gradient_at in (Partial(), Replicate(), Shard(0), Shard(1)):
            ours, theirs = nn.Parameter(distribute_tensor(whole(0), mesh, [parameter_at])), nn.Parameter(whole(0))
            optimizer, expected = AdamW([ours], **SETTINGS), torch.optim.AdamW([theirs], **SETTINGS)
            history = []
            for step in range(STEPS):
                gradient = whole(step + 1)
                ours.grad, theirs.grad = placed(gradient, Replicate()).redistribute(mesh, [parameter_at]), gradient
                ours.main_grad = placed(gradient, gradient_at)
                version = ours._version
                undo = Inverse(optimizer)
                undo.save(optimizer)
                optimizer.step()
                assert ours._version > version  # a backward, or a W, that needed the old values raises
                expected.step()
                history.append(theirs.detach().clone())
            after = (ours.full_tensor() - history[-1]).abs().max().item()
            local = ours.to_local().detach()
            if parameter_at == Replicate():
                others = [torch.empty_like(local) for _ in range(2)]
                torch.distributed.all_gather(others, local)
                assert torch.equal(*others), f"replicas of a weight differ: {gradient_at}"
            undo.restore(optimizer)
            found[f"{parameter_at} {gradient_at}"] = after, (ours.full_tensor() - history[-2]).abs().max().item()
    return found


@pytest.mark.dist
def test_gradients_in_any_placement(two_ranks: Any) -> None:
    for found in two_ranks.run(stepped_where_placed):
        assert len(found) == 12
        for placements, (after, undone) in found.items():
            assert after < 1e-6, placements
            assert undone < 1e-6, placements


def refusals() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, other = cpu_mesh(), init_device_mesh("cpu", (2, 1))

    def refused(parameter: Tensor, gradient: Tensor, **options: Any) -> str:
        weight = nn.Parameter(parameter)
        weight.main_grad = gradient
        before = weight.detach().clone()
        try:
            AdamW([weight], **options).step()
        except ValueError as error:
            assert (weight == before).all(), "a refused step changes nothing"
            return str(error)
        return "nothing is refused"

    sharded, replicated = (distribute_tensor(whole(0), mesh, [at]) for at in (Shard(0), Replicate()))
    elsewhere = distribute_tensor(whole(0), other, [Replicate(), Replicate()])
    return [
        refused(whole(0), replicated),
        refused(sharded, whole(0)),
        refused(replicated, elsewhere),
        refused(sharded, sharded.detach().clone(), max_norm=1.0),
    ]


@pytest.mark.dist
def test_what_cannot_be_stepped_is_refused(two_ranks: Any) -> None:
    for plain, whole_gradient, elsewhere, clipped in two_ranks.run(refusals):
        for refused in (plain, whole_gradient, elsewhere):
            assert "a gradient must be on the device mesh of its parameter, or both on none" in refused
        assert "max_norm needs whole parameters" in clipped
