"""Heads and losses of a vocabulary that is cut over ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.meshes import cpu_mesh
from tests.support.sharded_model import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    batches,
    differences,
    make,
    parallelize,
    whole,
)


def loss_parallel_rank(order: str, ranks: int) -> tuple[list[str], dict[str, float], float]:
    """A head whose vocabulary is cut, with torch's loss_parallel: what did not wait, and the differences."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh = cpu_mesh()
    model, twin = make(), make()
    for step in ("convert", "parallelize") if order == "converted first" else ("parallelize", "convert"):
        if step == "convert":
            twin = zbkern.convert(twin)
        else:
            twin = parallelize(twin, "all but the head", mesh)
            style = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
            twin.head = parallelize_module(twin.head, mesh, style)
    queue, largest = zbkern.WGradQueue(), 0.0
    for key, indices in enumerate(batches()):
        targets = indices.roll(1, 1)
        expected = nn.functional.cross_entropy(model(indices).flatten(0, 1), targets.flatten())
        expected.backward()
        with queue.defer(key), loss_parallel():
            loss = nn.functional.cross_entropy(twin(indices).flatten(0, 1), targets.flatten())
            loss.backward()
        largest = max(largest, abs(float(whole(loss.detach()) - expected.detach())))
    at_once = [name for name, p in twin.named_parameters() if p.grad is not None]
    queue.run()
    return at_once, differences(twin, model), largest


@pytest.mark.dist
@pytest.mark.parametrize("order", ["converted first", "parallelized first"])
def test_a_vocabulary_that_is_cut(two_ranks: Any, order: str) -> None:
    for at_once, found, loss in two_ranks.run(loss_parallel_rank, order, 2):
        assert all("norm" in name for name in at_once)
        assert max(found.values()) < 1e-10, found
        assert loss < 1e-12


@pytest.mark.dist
@pytest.mark.slow
def test_a_vocabulary_that_is_cut_in_four(four_ranks: Any) -> None:
    for at_once, found, loss in four_ranks.run(loss_parallel_rank, "converted first", 4):
        assert all("norm" in name for name in at_once)
        assert max(found.values()) < 1e-10, found
        assert loss < 1e-12


def fused_head_rank(bias: bool, compiled: bool) -> tuple[int, list[float]]:
    """linear_cross_entropy whose vocabulary is cut: W that waited, and differences of loss and gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = cpu_mesh()
    torch.manual_seed(0)
    plain = zbkern.nn.LinearCrossEntropy(WIDTH, VOCABULARY, bias, dtype=torch.float64)
    own = copy.deepcopy(plain)
    for name, parameter in list(own.named_parameters()):
        setattr(own, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[1, 2, -100, 4], [0, 7, 3, 3]])
    expected, queue = plain(x, target), zbkern.WGradQueue()
    expected.backward()
    rows = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
    torch._dynamo.reset()
    head = torch.compile(own, backend="aot_eager", fullgraph=True) if compiled else own
    with queue.defer(), loss_parallel():
        loss = head(rows, target)
        loss.backward()
    assert all(p.grad is None for p in own.parameters())
    waiting = queue.pending()
    queue.run()
    pairs = [(loss.detach(), expected.detach()), (rows.grad, x.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(own.parameters(), plain.parameters(), strict=True)]
    return waiting, [float((whole(a) - b).abs().max()) for a, b in pairs]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("bias", "compiled"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_a_head_with_its_loss(two_ranks: Any, bias: bool, compiled: bool) -> None:
    for waiting, found in two_ranks.run(fused_head_rank, bias, compiled):
        assert waiting == 1
        assert max(found) < 1e-12


def log_probs_rank() -> list[float]:
    """linear_log_probs of a head whose vocabulary is cut: differences from one that is whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = cpu_mesh()
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5).double().requires_grad_(), torch.randn(8, 5).double().requires_grad_()
    rows = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
    own, target = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_(), torch.tensor([1, -100, 7])
    found, expected = (zbkern.functional.linear_log_probs(*pair, target) for pair in ((rows, own), (x, weight)))
    for log_probs, entropy in (found, expected):
        (log_probs.sum() + 2 * entropy.sum()).backward()
    pairs = [*zip(found, expected, strict=True), (rows.grad, x.grad), (own.grad, weight.grad)]
    return [float((whole(a) - b).abs().max()) for a, b in pairs]


@pytest.mark.dist
def test_log_probs_of_a_vocabulary_that_is_cut(two_ranks: Any) -> None:
    for found in two_ranks.run(log_probs_rank):
        assert max(found) < 1e-12
