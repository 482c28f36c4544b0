"""Gradient norms over stages, replicas and shards: every gradient counts once, in a precision that holds it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.chunks import results_on_threads
from tests.support.ranks import cpu_mesh, named_mesh
from zbkern.pipeline.optimizer import Optimizer, clipping
from zbkern.pipeline.transport.local import LocalTransport


def norm_of(*gradients: torch.Tensor) -> float:
    return math.sqrt(clipping.exact_sum(clipping.squared_norms([gradients])[0].tolist()))


def test_norms_of_small_gradients_are_taken_in_fp32() -> None:
    """In fp16 the first would be beyond its range, and in bf16 the second rounded; those of fp64 stay in it."""
    large, fine = torch.full((4,), 60000.0).half(), torch.ones(1001).bfloat16()
    assert norm_of(large) == 120000.0
    assert norm_of(fine) == pytest.approx(math.sqrt(1001), rel=1e-6)
    assert norm_of(torch.full((1,), 1 + 2**-40, dtype=torch.float64)) == 1 + 2**-40
    assert norm_of(large, fine) == pytest.approx(math.hypot(120000.0, math.sqrt(1001)), rel=1e-6)


def test_sparse_gradients_count_and_are_clipped() -> None:
    table, transport = nn.Embedding(5, 2, sparse=True), LocalTransport.ring(1)[0]
    optimizer = Optimizer(torch.optim.SparseAdam(table.parameters(), lr=0.5), transport, max_norm=1.0)
    table(torch.tensor([1, 1, 3])).sum().backward()  # two rows, the first one from two summands
    before = table.weight.detach().clone()
    optimizer.step()
    assert optimizer.last_norm == pytest.approx(math.sqrt(2 * 4 + 2 * 1))
    assert optimizer.clipped == 1
    assert (table.weight != before).any(1).tolist() == [False, True, False, True, False]
    assert norm_of(table.weight.grad) == pytest.approx(1.0)


def gradient_of_stage(stage: int, index: int) -> torch.Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * stage + index))


def mixed_gradients(inf: bool) -> dict[str, Any]:
    """Two stages of two tensor-parallel ranks: plain gradients and DTensors in every placement, on two meshes.

    Returns norms, and how far gradients and weights are from what one process makes of the whole.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    world = named_mesh(stage=2, replica=1, tensor=2)
    stage, _, place = world.get_coordinate()
    tensor, both = world["tensor"], world["replica", "tensor"]

    def placed(whole: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
        if mesh is None:
            return whole.clone()
        if Partial() not in placements:
            return distribute_tensor(whole.clone(), mesh, placements)
        return DTensor.from_local(whole * (0.25 if place == 0 else 0.75), mesh, placements)

    cases = [
        (None, None),
        (tensor, [Shard(0)]),
        (tensor, [Partial()]),
        (both, [Replicate(), Shard(1)]),
        (tensor, [Replicate()]),
        (both, [Shard(0), Partial()]),
        (None, None),
    ]
    wholes = [[gradient_of_stage(s, index) for index in range(len(cases))] for s in (0, 1)]
    if inf:
        wholes[1][3][0, 0] = math.inf
    expected = [gradient for row in wholes for gradient in row]
    norm = float(torch.nn.utils.get_total_norm(expected))
    group, found = world.get_group("stage"), {"expected": norm}

    def make() -> list[nn.Parameter]:
        parameters = []
        for whole, (mesh, placements) in zip(wholes[stage], cases, strict=True):
            at = placements and [Replicate() if p.is_partial() else p for p in placements]
            parameters.append(nn.Parameter(placed(torch.zeros(4, 2), mesh, at)))
            parameters[-1].grad = placed(whole, mesh, placements)
        return parameters

    def apart(tensors: list[torch.Tensor], factor: float) -> float:
        full = [getattr(t, "full_tensor", lambda t=t: t)() for t in tensors]
        return max((a - b * factor).abs().max().item() for a, b in zip(full, wholes[stage], strict=True))

    parameters = make()
    optimizer = Optimizer(torch.optim.SGD(parameters, lr=1.0), group, max_norm=1.0)
    optimizer.step()
    optimizer.validate()
    optimizer.close()
    found["norm"] = optimizer.last_norm
    with torch.no_grad():
        weights = [parameter.detach() for parameter in parameters]
    if inf:
        assert all(not getattr(w, "full_tensor", lambda w=w: w)().any() for w in weights), "a step that was skipped"
    else:
        found["apart"] = apart(weights, -1 / (norm + 1e-6))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("inf", [False, True])
def test_stages_of_tensor_parallel_ranks(four_ranks: Any, inf: bool) -> None:
    for found in four_ranks.run(mixed_gradients, inf):
        assert found["norm"] == pytest.approx(found["expected"], rel=1e-6)
        assert inf or found["apart"] < 1e-6


def tied_beside_shards() -> tuple[float | None, bool]:
    """The norm, and whether the Optimizer stepped, where one tensor-parallel rank has a NaN that the others lack
    in a weight that both stages hold; the last stage has shards."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = named_mesh(stage=2, tensor=2)
    stage, place = mesh.get_coordinate()
    whole = nn.Parameter(torch.zeros(2))
    whole.grad = torch.full((2,), math.nan if place == 1 else 1.0)
    parameters, names, group = [whole], {"w": whole}, mesh.get_group("stage")
    if stage == 1:
        parameters.append(nn.Parameter(distribute_tensor(torch.zeros(4), mesh["tensor"], [Shard(0)])))
        parameters[1].grad = distribute_tensor(torch.ones(4), mesh["tensor"], [Shard(0)])
    optimizer = Optimizer(torch.optim.SGD(parameters, lr=1.0), group, max_norm=9.0, tied=names)
    optimizer.step()
    optimizer.validate()
    optimizer.close()
    return optimizer.last_norm, bool(whole.any())


@pytest.mark.dist
def test_what_one_rank_cannot_add_up_of_a_tied_weight_is_heard_by_all(four_ranks: Any) -> None:
    for norm, stepped in four_ranks.run(tied_beside_shards):
        assert not math.isfinite(norm)
        assert not stepped


def stages_around_shards(bad: int | None, max_norm: float) -> list[tuple[Any, ...]]:
    """Norms and weights of four stages, threads of this tensor-parallel rank, of which the second alone has shards.

    bad: a stage where one tensor-parallel rank alone has an infinite gradient.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = cpu_mesh()

    def stage(transport: LocalTransport) -> tuple[Any, ...]:
        whole = nn.Parameter(torch.zeros(2))
        whole.grad = torch.full((2,), 1.0 + transport.rank)
        if transport.rank == bad and mesh.get_local_rank() == 1:
            whole.grad[0] = math.inf
        parameters = [whole]
        if transport.rank == 1:
            parameters.append(nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])))
            parameters[1].grad = distribute_tensor(torch.full((4,), 3.0), mesh, [Shard(0)])
        optimizer = Optimizer(torch.optim.SGD(parameters, lr=1.0), transport, max_norm=max_norm, timeout=60)
        optimizer.step()
        optimizer.validate()
        return optimizer.last_norm, whole[1].item()

    return results_on_threads(4, stage)


@pytest.mark.dist
@pytest.mark.parametrize("bad", [None, 0, 2, 3])
def test_the_sum_ends_where_the_shards_are(two_ranks: Any, bad: int | None) -> None:
    expected = math.sqrt(2 * (1 + 4 + 9 + 16) + 4 * 9)
    for stages in two_ranks.run(stages_around_shards, bad, 6.0):
        for index, (norm, weight) in enumerate(stages):
            if bad is None:
                assert norm == pytest.approx(expected)
                assert weight == pytest.approx(-(1.0 + index) * 6.0 / expected)
            else:
                assert not math.isfinite(norm)
                assert weight == 0
