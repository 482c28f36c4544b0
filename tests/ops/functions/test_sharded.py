"""Tensor- and sequence-parallel layers on torch's own API: their W waits, and gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.meshes import cpu_mesh
from tests.support.sharded_model import (
    MICROBATCHES,
    TOKENS,
    WIDTH,
    batches,
    differences,
    linear_rank,
    loss_of,
    make,
    parallelize,
)


def layers_rank(kind: str, order: str) -> tuple[list[str], int, int, dict[str, float]]:
    """What did not wait, how many tasks did, how many kernels ran, and the differences."""
    mesh = cpu_mesh()
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


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "placements"),
    [
        ("by outputs, uneven", ["S(0)", "S(0)"]),
        ("by tokens", ["P(sum)", "P(sum)"]),  # as torch's layer has them
        ("by tokens, a whole gradient exists", ["R", "R"]),
        ("by tokens, a whole gradient exists, weight frozen before W", ["R", "R"]),
        ("by tokens and outputs", ["S(0)", "S(0)"]),
        ("not at all", ["R", "R"]),  # a router
    ],
)
def test_a_linear_of_dtensors(two_ranks: Any, case: str, placements: list[str]) -> None:
    for waiting, found, distances in two_ranks.run(linear_rank, case, None):
        assert (waiting, found) == (1, placements)
        assert max(distances) < 1e-12


def extras_rank() -> tuple[dict[str, float], list[str]]:
    """Differences of gradients in main_grad, and the hooks that ran."""
    mesh = cpu_mesh()
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
    mesh = cpu_mesh()
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
    from torch.distributed.tensor import DTensor, Partial

    mesh = cpu_mesh()
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


def cut_rank(kind: str) -> tuple[list[str], int, dict[str, float]]:
    """Layers with a forward of their own, or zbkern.nn.MLP, whose linears are cut: what `deferred_beside` says."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    if kind == "MLP":
        model: nn.Module = zbkern.nn.MLP(WIDTH, 2 * WIDTH, bias=True)
        plan: dict[str, Any] = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    else:
        model = nn.Sequential(OwnLinear(WIDTH, 2 * WIDTH), OwnLinear(2 * WIDTH, WIDTH))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    twin = parallelize_module(zbkern.convert(copy.deepcopy(model.double())), cpu_mesh(), plan)
    return deferred_beside(model, twin, torch.randn(5, WIDTH, dtype=torch.float64))


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "count"), [("own forwards", 2), ("MLP", 3)])
def test_layers_whose_linears_are_cut(two_ranks: Any, kind: str, count: int) -> None:
    for at_once, waiting, found in two_ranks.run(cut_rank, kind):
        assert not at_once
        assert waiting == count
        assert max(found.values()) < 1e-10, found


def deferred_beside(model: nn.Module, twin: nn.Module, x: torch.Tensor) -> tuple[list[str], int, dict[str, float]]:
    """The cut twin's backward, deferred: what did not wait, how many tasks did, and the differences to the model."""
    queue = zbkern.WGradQueue()
    model(x).square().sum().backward()
    with queue.defer():
        twin(x).square().sum().backward()
    at_once, waiting = [name for name, p in twin.named_parameters() if p.grad is not None], queue.pending()
    queue.run()
    return at_once, waiting, differences(twin, model)
