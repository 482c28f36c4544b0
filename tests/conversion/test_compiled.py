"""Inside torch.compile a module that zbkern does not know is like any other code: its W is in B, as `coverage` says.
Converted layers in it, or beside it, have their W in the queue. All gradients are torch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.deferred import compiled, deferred
from zbkern import testing
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.transport.local import LocalTransport


class Experts(nn.Module):
    """Every expert for every token, of which each keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(3, 8))
        self.up = nn.Parameter(torch.randn(3, 16, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        scores, experts = F.linear(x, self.router).softmax(-1).max(-1)
        kept = F.one_hot(experts, 3) * scores.unsqueeze(-1)
        h = F.silu(torch.einsum("tk,ehk->teh", x, self.up))
        return x + torch.einsum("teh,ekh->tek", h, self.down).mul(kept.unsqueeze(-1)).sum(1)


class LoopOverExperts(Experts):
    """As the transformers library's "eager" experts: which experts run, and for how many rows, depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        scores, experts = F.linear(x, self.router).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for expert in experts.unique():
            (rows,) = torch.where(experts == expert)
            h = F.silu(F.linear(x[rows], self.up[expert]))
            y.index_add_(0, rows, F.linear(h, self.down[expert]) * scores[rows, None])
        return y


class Block(nn.Module):
    def __init__(self, experts: Callable[[], nn.Module] = Experts) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = experts()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.experts(self.norm(x)))


EXPERTS = ["experts.router", "experts.up", "experts.down"]


def pair(experts: Callable[[], nn.Module] = Experts) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = Block(experts).double()
    return module, zbkern.convert(copy.deepcopy(module))


def check(module: nn.Module, twin: nn.Module, graph: Callable[..., Tensor]) -> None:
    """W of the linear alone waits, `coverage` says so, and the gradients are torch's."""
    found = zbkern.coverage(twin, lambda: graph(torch.randn(6, 8).double()).sum())
    assert found.not_deferred.keys() == {*EXPERTS}
    assert found.share == pytest.approx(64 / sum(p.numel() for p in module.parameters() if p.dim() > 1))
    queue = deferred(module, graph, torch.randn(2, 6, 8, dtype=torch.float64), 1e-10)
    names = {id(p): name for name, p in twin.named_parameters()}
    assert {names[id(p)] for task in queue.tasks() for p in task.parameters} == {"linear.weight", "linear.bias"}
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-10)


def test_without_a_graph_break() -> None:
    module, twin = pair()
    check(module, twin, compiled(twin, dynamic=False))
    assert counters["stats"]["unique_graphs"] <= 2  # once more where a queue has come


def test_a_loop_over_experts_that_breaks_the_graph() -> None:
    module, twin = pair(LoopOverExperts)
    check(module, twin, compiled(twin, fullgraph=False))


def test_experts_that_are_compiled_within_a_model_that_is_not() -> None:
    _, twin = pair()
    torch._dynamo.reset()
    twin.experts.compile(backend="aot_eager", fullgraph=True)
    found = zbkern.coverage(twin, lambda: twin(torch.randn(6, 8).double()).sum())
    assert found.not_deferred.keys() == {*EXPERTS}


def save_products(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("within", "selective"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_within_or_around_what_is_compiled(within: bool, selective: bool) -> None:
    """Within: as where a library wraps its blocks in checkpoints, then compiles them."""
    module, twin = pair()
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    options = {"context_fn": contexts} if selective else {}
    checkpointed = functools.partial(checkpoint, twin if within else compiled(twin), use_reentrant=False, **options)
    check(module, twin, compiled(checkpointed) if within else checkpointed)


def test_two_ranks_whose_stages_are_compiled_in_place() -> None:
    """No microbatch and no step after the first compiles again; W of converted layers runs from the queue."""
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block()).double()
    stages = [zbkern.convert(copy.deepcopy(block)) for block in module]
    torch._dynamo.reset()
    counters.clear()
    batches = torch.randn(2, 2, 12, 8, dtype=torch.float64)
    for inputs, targets in batches:
        F.mse_loss(module(inputs), targets).backward()
    graphs: list[list[int]] = [[], []]
    waited: list[list[int]] = [[], []]

    def run(transport: LocalTransport) -> None:
        rank = transport.rank
        stages[rank].compile(backend="aot_eager", fullgraph=True)
        with Pipeline([stages[rank]], schedules.zb_h1(2, 4), F.mse_loss, transport) as pipe:
            pipe.queue.listeners.append(lambda tasks: waited[rank].append(len(tasks)))
            for inputs, targets in batches:
                pipe.step(inputs if rank == 0 else None, targets if rank == 1 else None)
                graphs[rank].append(counters["stats"]["unique_graphs"])

    results_on_threads(2, run)
    assert [sum(tasks) for tasks in waited] == [2 * 4] * 2  # steps, microbatches: the linear of each block
    assert graphs[0][0] == graphs[0][1] == graphs[1][1] == counters["stats"]["unique_graphs"] <= 2
    for stage, block in zip(stages, module, strict=True):
        testing.assert_same_gradients(stage, block, tolerance=1e-10)
