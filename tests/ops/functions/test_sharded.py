"""Tensor- and sequence-parallel layers on torch's own API: their W waits, and gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.sharded_model import (
    MICROBATCHES,
    TOKENS,
    WIDTH,
    batches,
    differences,
    loss_of,
    make,
    parallelize,
    whole,
)


def layers_rank(kind: str, order: str) -> tuple[list[str], int, int, dict[str, float]]:
    """What did not wait, how many tasks did, how many kernels ran, and the differences."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model, twin = make(), make()
    for step in ("convert", "parallelize") if order == "converted first" else ("parallelize", "convert"):
        twin = zbkern.convert(twin) if step == "convert" else parallelize(twin, kind, mesh)
    queue, kernels = zbkern.WGradQueue(), []
    queue.listeners.append(lambda tasks: kernels.append(len(tasks)))
    for key, indices in enumerate(batches()):
        loss_of(model, indices).backward()
        with queue.defer(key):
            loss_of(twin, indices).backward()
    at_once = [name for name, p in twin.named_parameters() if p.grad is not None]
    waiting = queue.pending()
    queue.run()
    theirs = parallelize(make(), kind, mesh)
    loss_of(theirs, batches()[0]).backward()
    for (name, ours), other in zip(twin.blocks.named_parameters(), theirs.blocks.parameters(), strict=True):
        assert getattr(ours.grad, "placements", None) == getattr(other.grad, "placements", None), name
    return at_once, waiting, len(kernels), differences(twin, model)


@pytest.mark.dist
@pytest.mark.parametrize("order", ["converted first", "parallelized first"])
@pytest.mark.parametrize("kind", ["rows", "columns", "sequence"])
def test_w_waits_and_gradients_are_those_of_one_process(two_ranks: Any, kind: str, order: str) -> None:
    for at_once, waiting, kernels, found in two_ranks.run(layers_rank, kind, order):
        assert all("norm" in name for name in at_once)
        assert not at_once or kind == "sequence"
        assert waiting == (8 if kind == "sequence" else 10) * MICROBATCHES  # there, norms are torch's
        assert kernels < waiting  # microbatches of one weight are one kernel
        assert max(found.values()) < 1e-10, found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "columns", "sequence"])
def test_on_four_ranks(four_ranks: Any, kind: str) -> None:
    for *_, found in four_ranks.run(layers_rank, kind, "converted first"):
        assert max(found.values()) < 1e-10, found


def unusual_rank(case: str) -> tuple[int, float, float]:
    """A linear of unusual placements: tasks that wait, and the differences of weight and bias."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight_place, x_place = {
        "tokens are cut": (Replicate(), Shard(0)),
        "tokens are cut, and the weight": (Shard(0), Shard(0)),
        "a router": (Replicate(), Replicate()),
    }[case]
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((4, 6), (4,), (8, 6)))
    plain = nn.Linear(6, 4, dtype=torch.float64)
    plain.weight, plain.bias = nn.Parameter(weight), nn.Parameter(bias)
    plain(x).square().sum().backward()
    own = zbkern.convert(copy.deepcopy(plain).requires_grad_())
    own.zero_grad()
    own.weight = nn.Parameter(distribute_tensor(weight, mesh, [weight_place]))
    own.bias = nn.Parameter(distribute_tensor(bias, mesh, [weight_place]))
    queue = zbkern.WGradQueue()
    with queue.defer():
        y = own(distribute_tensor(x, mesh, [x_place]))
        y.redistribute(mesh, [Replicate()]).to_local().square().sum().backward()
    assert own.weight.grad is None
    waiting = queue.pending()
    queue.run()
    if case == "tokens are cut":
        assert own.weight.grad.placements == own.bias.grad.placements == (Partial(),)  # as torch's layer has them
    else:
        assert own.weight.grad.placements == own.weight.placements
    pairs = zip((own.weight, own.bias), (plain.weight, plain.bias), strict=True)
    return waiting, *(float((whole(a.grad) - b.grad).abs().max()) for a, b in pairs)


@pytest.mark.dist
@pytest.mark.parametrize("case", ["tokens are cut", "tokens are cut, and the weight", "a router"])
def test_unusual_placements(two_ranks: Any, case: str) -> None:
    for waiting, *found in two_ranks.run(unusual_rank, case):
        assert waiting == 1
        assert max(found) < 1e-12


def extras_rank() -> tuple[dict[str, float], list[str]]:
    """Differences of gradients in main_grad, and the hooks that ran."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    model, twin = make(), parallelize(zbkern.convert(make()), "rows", mesh)
    called: list[str] = []
    for name, parameter in twin.named_parameters():
        if "norm" not in name:
            parameter.main_grad = torch.zeros_like(parameter)
    twin.head.weight.register_post_accumulate_grad_hook(lambda p: called.append("head"))
    queue, indices = zbkern.WGradQueue(), batches()[0]
    loss_of(model, indices).backward()
    with queue.defer():
        loss_of(twin, indices).backward()
    assert not called
    queue.run()
    return differences(twin, model, lambda p: getattr(p, "main_grad", p.grad)), called


@pytest.mark.dist
def test_main_grad_and_hooks(two_ranks: Any) -> None:
    for found, called in two_ranks.run(extras_rank):
        assert max(found.values()) < 1e-10, found
        assert called == ["head"]


def penalty_rank() -> dict[str, float]:
    """Differences of gradients of a gradient from those of torch's layers, parallelized alike: these are not those of
    one process, because torch's redistribution has no second derivative."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    model, twin = (parallelize(model, "rows", mesh) for model in (make(), zbkern.convert(make())))
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def penalty(model: nn.Module) -> Tensor:
        own = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model.blocks[0](own).square().sum(), own, create_graph=True)
        return slope.square().sum()

    queue = zbkern.WGradQueue()
    penalty(model).backward()
    with queue.defer():
        penalty(twin).backward()
    queue.run()
    return differences(twin.blocks[0], model.blocks[0])


@pytest.mark.dist
def test_gradients_of_gradients(two_ranks: Any) -> None:
    for found in two_ranks.run(penalty_rank):
        assert max(found.values()) < 1e-10, found


def partial_rank() -> str:
    """W into a gradient that is a sum still to be made."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    twin = parallelize(zbkern.convert(make()), "rows", mesh)
    weight = twin.head.weight
    weight.grad = DTensor.from_local(torch.zeros(weight.shape, dtype=torch.float64), mesh, [Partial()])
    queue = zbkern.WGradQueue()
    with queue.defer():
        loss_of(twin, batches()[0]).backward()
    try:
        queue.run()
    except RuntimeError as error:
        queue.discard()
        return str(error)
    return "no error"


@pytest.mark.dist
def test_a_gradient_that_is_a_sum_to_be_made_is_refused(two_ranks: Any) -> None:
    for message in two_ranks.run(partial_rank):
        assert "redistribute it to its parameter's placements" in message


class OwnLinear(nn.Linear):
    """A subclass with a forward of its own, which is intercepted."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * 2


def deferred_beside(model: nn.Module, twin: nn.Module, x: torch.Tensor) -> tuple[list[str], int, dict[str, float]]:
    """The cut twin's backward, deferred: what did not wait, how many tasks did, and the differences to the model."""
    queue = zbkern.WGradQueue()
    model(x).square().sum().backward()
    with queue.defer():
        twin(x).square().sum().backward()
    at_once, waiting = [name for name, p in twin.named_parameters() if p.grad is not None], queue.pending()
    queue.run()
    return at_once, waiting, differences(twin, model)


def own_forward_rank() -> tuple[list[str], int, dict[str, float]]:
    """Layers with a forward of their own under tensor parallelism: what did not wait, tasks, and the differences."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(OwnLinear(WIDTH, 2 * WIDTH), OwnLinear(2 * WIDTH, WIDTH)).double()
    mesh = init_device_mesh("cpu", (2,))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    twin = parallelize_module(zbkern.convert(copy.deepcopy(model)), mesh, plan)
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return deferred_beside(model, twin, x)


@pytest.mark.dist
def test_a_layer_with_a_forward_of_its_own(two_ranks: Any) -> None:
    for at_once, waiting, found in two_ranks.run(own_forward_rank):
        assert not at_once
        assert waiting == 2
        assert max(found.values()) < 1e-12, found


def gated_mlp_rank() -> tuple[list[str], int, dict[str, float]]:
    """zbkern.nn.MLP, its three linears cut: what did not wait, how many tasks did, and the differences."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = zbkern.nn.MLP(6, 8, bias=True, dtype=torch.float64)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    twin = parallelize_module(copy.deepcopy(model), mesh, plan)
    return deferred_beside(model, twin, torch.randn(5, 6, dtype=torch.float64))


@pytest.mark.dist
def test_a_gated_mlp_of_cut_linears(two_ranks: Any) -> None:
    for at_once, waiting, found in two_ranks.run(gated_mlp_rank):
        assert not at_once
        assert waiting == 3
        assert max(found.values()) < 1e-10, found
