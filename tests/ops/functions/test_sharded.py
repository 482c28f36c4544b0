"""Layers and heads that torch's own API cuts over ranks: their W waits, and gradients are those of one process."""

from __future__ import annotations

import contextlib
import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.ranks import cpu_mesh
from tests.support.sharded_model import (
    MICROBATCHES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    batches,
    differences,
    linear_rank,
    loss_of,
    make,
    parallelize,
    whole,
)

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU"
)


def whole_loss(model: nn.Module, indices: Tensor) -> Tensor:
    """The cross-entropy of a vocabulary that may be cut, inside of torch's loss_parallel."""
    return nn.functional.cross_entropy(model(indices).flatten(0, 1), indices.roll(1, 1).flatten())


def layers_rank(kind: str, order: str, compiled: bool = False, main_grad: bool = False) -> dict[str, Any]:
    """A model that is cut beside that of one process. kind: see `parallelize`; "vocabulary" also cuts the head, with
    its loss.

    at_once: parameters whose W did not wait; waiting: how many tasks did; kernels: how many ran; far: the differences
    of gradients, and of the loss; collectives: in torch's compiled graphs and in ours; hooks: which ran.
    """
    from torch.distributed.tensor.parallel import loss_parallel

    mesh, hooks = cpu_mesh(), []
    model, twin, theirs = make(), make(), parallelize(make(), kind, mesh)
    for step in ("convert", "parallelize") if order == "converted first" else ("parallelize", "convert"):
        twin = zbkern.convert(twin) if step == "convert" else parallelize(twin, kind, mesh)
    if main_grad:
        for name, parameter in twin.named_parameters():
            if "norm" not in name:
                parameter.main_grad = torch.zeros_like(parameter)
        twin.head.weight.register_post_accumulate_grad_hook(lambda p: hooks.append("head"))
    cut_loss, loss_fn = (loss_parallel, whole_loss) if kind == "vocabulary" else (contextlib.nullcontext, loss_of)
    graphs = [collectives_of(each) for each in (theirs, twin)] if compiled else []
    queue, kernels, far = zbkern.WGradQueue(), [], {"loss": 0.0}
    queue.listeners.append(lambda tasks: kernels.append(len(tasks)))
    for key, indices in enumerate(batches()):
        expected = loss_fn(model, indices)
        expected.backward()
        with queue.defer(key), cut_loss():
            loss = loss_fn(twin, indices)
            loss.backward()
        far["loss"] = max(far["loss"], abs(float(whole(loss.detach()) - expected.detach())))
    at_once = [name for name, p in twin.named_parameters() if p.grad is not None]
    assert not hooks
    waiting = queue.pending()
    queue.run()
    with cut_loss():
        loss_fn(theirs, batches()[0]).backward()
    for (name, ours), other in zip(twin.blocks.named_parameters(), theirs.blocks.parameters(), strict=True):
        places = [getattr(p.grad, "placements", None) for p in (ours, other)]
        assert main_grad or places[0] == places[1], name
    far |= differences(twin, model, lambda p: getattr(p, "main_grad", p.grad))
    found = {"at_once": at_once, "waiting": waiting, "kernels": len(kernels), "far": far, "hooks": hooks}
    return found | {"collectives": [*map(len, graphs)]}


def collectives_of(model: nn.Module) -> list[str]:
    """Compiles the model; the collectives in its graphs, once these have been traced."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: list[str] = []

    def list_collectives(graph: torch.fx.GraphModule, _: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found.extend(name for name in names if name.startswith("_c10d_functional") and "wait" not in name)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=list_collectives, bw_compiler=list_collectives)
    model.compile(backend=backend, fullgraph=True)
    return found


KINDS = ["rows", "columns", "sequence", "vocabulary"]


@pytest.mark.dist
@pytest.mark.parametrize("order", ["converted first", "parallelized first"])
@pytest.mark.parametrize("kind", KINDS)
def test_w_waits_and_gradients_are_those_of_one_process(two_ranks: Any, kind: str, order: str) -> None:
    for found in two_ranks.run(layers_rank, kind, order):
        assert all("norm" in name for name in found["at_once"])
        assert not found["at_once"] or kind in ("sequence", "vocabulary")
        # there, norms are torch's
        assert found["waiting"] == (8 if kind in ("sequence", "vocabulary") else 10) * MICROBATCHES
        assert found["kernels"] < found["waiting"]  # microbatches of one weight are one kernel
        assert max(found["far"].values()) < 1e-10, found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["columns", "vocabulary"])  # the cuts of the others are in these
def test_on_four_ranks(four_ranks: Any, kind: str) -> None:
    for found in four_ranks.run(layers_rank, kind, "converted first"):
        assert max(found["far"].values()) < 1e-10, found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["columns", "sequence"])  # "rows" is these blocks and that embedding
def test_compiled(two_ranks: Any, kind: str) -> None:
    for found in two_ranks.run(layers_rank, kind, "converted first", True):
        assert all("norm" in name or "embedding" in name for name in found["at_once"])
        assert found["waiting"] == (3 * 2 + 1) * MICROBATCHES  # of the blocks, and the head
        theirs, ours = found["collectives"]
        assert ours == theirs > 0
        assert max(found["far"].values()) < 1e-10, found


@pytest.mark.dist
def test_main_grad_and_hooks(two_ranks: Any) -> None:
    for found in two_ranks.run(layers_rank, "rows", "converted first", False, True):
        assert max(found["far"].values()) < 1e-10, found
        assert found["hooks"] == ["head"] * MICROBATCHES


cut_tokens = pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="torch 2.8's own linear refuses DTensors whose tokens are cut"
)


BY_INDUCTOR = [pytest.mark.slow, needs_compiler, cut_tokens]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "backend", "waits", "placements"),
    [
        ("by outputs, uneven", None, 1, ["S(0)", "S(0)"]),
        ("by outputs, uneven", "aot_eager", 1, ["S(0)", "S(0)"]),
        ("by inputs", "aot_eager", 1, ["S(1)", "R"]),
        pytest.param("by inputs", "inductor", 1, ["S(1)", "R"], marks=BY_INDUCTOR),
        pytest.param("by tokens", None, 1, ["P(sum)", "P(sum)"], marks=cut_tokens),  # as torch's layer has them
        pytest.param("by tokens", "aot_eager", 1, ["P(sum)", "P(sum)"], marks=cut_tokens),
        pytest.param("by tokens", "inductor", 1, ["P(sum)", "P(sum)"], marks=BY_INDUCTOR),
        pytest.param("by tokens, a whole gradient exists", None, 1, ["R", "R"], marks=cut_tokens),
        pytest.param("by tokens, a whole gradient exists", "aot_eager", 1, ["R", "R"], marks=cut_tokens),
        pytest.param(
            "by tokens, a whole gradient exists, weight frozen before W", None, 1, ["R", "R"], marks=cut_tokens
        ),
        pytest.param("by tokens and outputs", None, 1, ["S(0)", "S(0)"], marks=cut_tokens),
        pytest.param("by tokens and outputs", "aot_eager", 0, ["S(0)", "S(0)"], marks=cut_tokens),
        ("not at all", None, 1, ["R", "R"]),  # a router
    ],
)
def test_a_linear_of_dtensors(
    two_ranks: Any, case: str, backend: str | None, waits: int, placements: list[str]
) -> None:
    for waiting, found, distances in two_ranks.run(linear_rank, case, backend):
        assert (waiting, found) == (waits, placements)
        assert max(distances) < 1e-12


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


def fused_head_rank(bias: bool, compiled: bool) -> tuple[int, list[float]]:
    """linear_cross_entropy whose vocabulary is cut: W that waited, and differences of loss and gradients; then those of
    linear_log_probs."""
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
    pairs = [(loss.detach(), expected.detach())]

    def add_gradients() -> None:
        pairs.extend([(rows.grad, x.grad), *((p.grad, q.grad) for p, q in zip(*both, strict=True))])
        rows.grad = x.grad = None
        own.zero_grad(), plain.zero_grad()

    both = [*own.parameters()], [*plain.parameters()]
    add_gradients()
    for given, module in ((rows, own), (x, plain)):
        log_probs, entropy = zbkern.functional.linear_log_probs(given, module.weight, target, module.bias)
        (log_probs.sum() + 2 * entropy.sum()).backward()
    add_gradients()
    return waiting, [float((whole(a) - b).abs().max()) for a, b in pairs]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("bias", "compiled"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_a_head_with_its_loss(two_ranks: Any, bias: bool, compiled: bool) -> None:
    for waiting, found in two_ranks.run(fused_head_rank, bias, compiled):
        assert waiting == 1
        assert max(found) < 1e-12
