"""Inside torch.compile, too, W of modules that own parameters is deferred: without a graph break, and compiled once."""

from __future__ import annotations

import contextlib
import copy
import functools
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zbkern
from tests.conversion.test_interception import CASES, pair
from tests.ops.test_compile import needs_compiler
from tests.support.deferred import backward, check, compiled, deferred
from zbkern import testing

SEPARABLE = [
    *("experts, all at once", "experts times tokens", "linear, half of a matrix", "linear by name"),
    *("@ from the left", "@ of the transposed", "mm", "einsum with heads", "einsum, weight first", "split", "unbind"),
    *("conv1d, same, uneven", "conv1d, weight reshaped", "conv2d", "conv_transpose1d", "embedding"),
]
IN_B = [
    "experts, batched",
    "1 + weight",
    "positions",
    "decays",
    "masked weight",
    "matmul with a vector",
    "through an autograd function",
]
MIXED = ["in place on a product", "several uses", "sum of weights", "addmm", "linear, bias of two dimensions"]
OLD = torch.__version__.startswith("2.8.")  # does not tell what a tensor is a view of, so that W of views is in B
OF_VIEWS = ["linear, half of a matrix", "mm", "split", "unbind", "conv1d, weight reshaped"]
OVERLAPPING = {
    "expand": ({"w": (8, 8)}, lambda p, x: torch.bmm(x.view(2, 3, 8), p["w"].expand(2, 8, 8))),
    "unfold": ({"w": (12,)}, lambda p, x: x @ p["w"].unfold(0, 8, 1).t()),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Experts(nn.Module):
    """Every expert for every token, of which each keeps one."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(3, 8, dtype=dtype))
        self.up = nn.Parameter(torch.randn(3, 16, 8, dtype=dtype))
        self.down = nn.Parameter(torch.randn(3, 8, 16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        scores, experts = F.linear(x, self.router).softmax(-1).max(-1)
        kept = F.one_hot(experts, 3) * scores.unsqueeze(-1)
        h = F.silu(torch.einsum("tk,ehk->teh", x, self.up))
        return x + torch.einsum("teh,ekh->tek", h, self.down).mul(kept.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.experts = Experts()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.experts(self.norm(x)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [*SEPARABLE, *IN_B, *MIXED])
def test_compiled_gradients_are_torchs(name: str) -> None:
    module, twin = pair(*CASES[name], torch.float64)
    graph = compiled(twin, dynamic=False)
    queue = deferred(module, graph, torch.randn(2, 6, 8, dtype=torch.float64), 1e-10)
    assert counters["stats"]["unique_graphs"] == 1
    if name in SEPARABLE and not (OLD and name in OF_VIEWS):
        assert all(p.grad is None for p in twin.parameters() if p.dim() > 1)
    assert (queue.run() > 0) == (name not in IN_B and not (OLD and name in OF_VIEWS))
    testing.assert_same_gradients(twin, module, tolerance=1e-10)


@pytest.mark.skipif(OLD, reason="torch 2.8 does not tell what a tensor is a view of while it compiles")
def test_grouped_products_of_a_dtype_that_torch_does_not_compile() -> None:
    """The transformers library has an operator of its own for these, whose B would compute the weight's gradient."""
    moe = pytest.importorskip("transformers.integrations.moe")

    def compute(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # one group and one row have none of the other
        h = moe._grouped_mm(x, p["w"].transpose(-2, -1), ends)
        return moe._grouped_mm(h, p["v"], ends)

    module, twin = pair({"w": (3, 16, 8), "v": (3, 16, 8)}, compute, torch.float32)
    graph = compiled(twin)
    module.compile(backend="aot_eager", fullgraph=True)
    assert check(module, twin, [torch.randn(6, 8)], 1e-5, graph) == 2


@pytest.mark.skipif(OLD, reason="torch 2.8 has no product of groups on the CPU")
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("of", [torch, F], ids=["torch._grouped_mm", "F.grouped_mm"])
def test_grouped_products_in_bfloat16(of: ModuleType, cast: bool) -> None:
    """As torchtitan's experts and, on GPUs, the transformers library's; cast: of parameters in float32."""
    grouped_mm = F.grouped_mm if of is F else torch._grouped_mm

    def compute(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 6], dtype=torch.int32)
        w1, w2, w3 = (p[name].to(torch.bfloat16) if cast else p[name] for name in ("w1", "w2", "w3"))
        x = x.to(torch.bfloat16)
        h = F.silu(grouped_mm(x, w1.transpose(-2, -1), offs=ends)) * grouped_mm(x, w3.mT, offs=ends)
        return grouped_mm(h, w2.transpose(-2, -1), offs=ends)

    shapes = {"w1": (3, 16, 8), "w2": (3, 8, 16), "w3": (3, 16, 8)}
    module, twin = pair(shapes, compute, torch.float32 if cast else torch.bfloat16)
    graph = compiled(twin)
    x = torch.randn(6, 8, dtype=torch.float32 if cast else torch.bfloat16)
    assert check(module, twin, [x], 3e-2, graph) == 3


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


def test_a_loop_over_experts_waits_as_it_does_uncompiled() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), LoopOverExperts())
    twin = zbkern.convert(copy.deepcopy(module))
    graph = compiled(twin, fullgraph=False)
    check(module, twin, torch.randn(2, 6, 8, dtype=torch.float64), 1e-10, forward=graph)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor(dtype: torch.dtype) -> None:
    """The default backend, which may write into memory that it believes to be free; bfloat16: by autocast."""
    module = Experts(torch.float32)
    twin = zbkern.convert(copy.deepcopy(module))
    graph = compiled(twin, backend="inductor")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert check(module, twin, torch.randn(2, 6, 8), TOLERANCES[dtype], graph) == 2 * 3


@pytest.mark.parametrize("deferred", [True, False])
def test_a_view_of_a_parameter_whose_gradient_lies_in_another_order(deferred: bool) -> None:
    module, twin = pair(*CASES["linear, half of a matrix"], torch.float64)
    for parameter in (*module.parameters(), *twin.parameters()):
        parameter.grad = torch.ones_like(parameter).t().contiguous().t()
    queue, x = zbkern.WGradQueue(), torch.randn(6, 8, dtype=torch.float64)
    backward(module, x)
    graph = compiled(twin)
    with queue.defer() if deferred else contextlib.nullcontext():
        backward(graph, x)
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-10)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_views_whose_elements_share_memory_have_their_gradient_in_b(name: str) -> None:
    module, twin = pair(*OVERLAPPING[name], torch.float64)
    graph = compiled(twin)
    assert check(module, twin, None, 1e-10, graph, waits=False) == 0


def save_products(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("within", "selective"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_within_or_around_what_is_compiled(within: bool, selective: bool) -> None:
    """Within: as where a library wraps its blocks in checkpoints, then compiles them."""
    module = Block()
    twin = zbkern.convert(copy.deepcopy(module))
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    options = {"context_fn": contexts} if selective else {}
    checkpointed = functools.partial(checkpoint, twin if within else compiled(twin), use_reentrant=False, **options)
    graph = compiled(checkpointed) if within else checkpointed
    queue = deferred(module, graph, [torch.randn(6, 8, dtype=torch.float64)], 1e-10)
    assert all(p.grad is None for p in twin.parameters() if p.dim() > 1)
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-10)


def test_two_ranks_whose_stages_are_compiled_in_place() -> None:
    """No microbatch and no step after the first compiles again; W runs from the queue."""
    from tests.support.chunks import results_on_threads
    from zbkern.pipeline import Pipeline, schedules
    from zbkern.pipeline.transport.local import LocalTransport

    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block())
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
    assert [sum(tasks) for tasks in waited] == [2 * 4 * 4] * 2  # steps, microbatches, products of a block
    assert graphs[0][0] == graphs[0][1] == graphs[1][1] == counters["stats"]["unique_graphs"] <= 2
    for stage, block in zip(stages, module, strict=True):
        testing.assert_same_gradients(stage, block, tolerance=1e-10)
