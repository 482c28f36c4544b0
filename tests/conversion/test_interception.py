"""Modules that zbkern does not know: whatever they do with their parameters, W waits and gradients are torch's."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.deferred import backward, check, deferred
from zbkern import testing
from zbkern.kernels import reference
from zbkern.ops.functions import grouped as grouped_functions

Compute = Callable[[dict[str, nn.Parameter], Tensor], Tensor]


class Module(nn.Module):
    """Some parameters, and what is done with them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], compute: Compute, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self._parameters, x)


def experts(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
    """The loop of the transformers library: chosen by a tensor of one number, gate and up in one matrix."""
    y = torch.zeros_like(x)
    for expert in torch.arange(3):
        rows = torch.arange(int(expert), len(x), 3)
        gate, up = F.linear(x[rows], p["gate_up"][expert]).chunk(2, -1)
        y.index_add_(0, rows, F.linear(F.silu(gate) * up, p["down"][expert]).to(y.dtype))
    return y


def batched_experts(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
    chosen = torch.arange(len(x)) % 2  # the third gets no token
    gate, up = torch.bmm(p["gate_up"][chosen], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    return torch.bmm((gate * up).unsqueeze(1), p["down"][chosen].mT).squeeze(1)


def cast_and_written(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
    weight = p["w"].float()
    part = weight[1:]  # made before anything is written
    weight[0], weight[2] = 0, 3 * weight[2]
    return (F.linear(x.float(), weight) + F.linear(x.float()[:, 1:], part.mT)).to(x.dtype)


def chosen_and_scaled(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
    weight = p["w"][torch.tensor([1, 3])]
    weight *= 2
    return F.linear(x, weight)


def zeroed_where_autograd_does_not_look(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
    weight = p["w"].mT.contiguous()
    with torch.no_grad():
        weight[0] = 0
    return F.linear(x, weight)


EXPERTS = {"gate_up": (3, 16, 8), "down": (3, 8, 8)}
SQUARE, VECTOR = {"w": (8, 8)}, {"w": (8,)}

CASES: dict[str, tuple[dict[str, tuple[int, ...]], Compute]] = {
    "experts in a loop": (EXPERTS, experts),
    "experts, batched": (EXPERTS, batched_experts),
    "experts, all at once": ({"w": (3, 8, 8)}, lambda p, x: torch.matmul(x, p["w"]).sum(0)),
    "experts times tokens": ({"w": (3, 8, 8)}, lambda p, x: torch.matmul(p["w"], x.mT).sum(0).mT),
    "linear": ({"w": (8, 8), "b": (8,)}, lambda p, x: F.linear(x, p["w"], p["b"])),
    "linear by name": ({"w": (8, 8), "b": (8,)}, lambda p, x: F.linear(input=x, weight=p["w"], bias=p["b"])),
    "linear, half of a matrix": ({"w": (16, 8)}, lambda p, x: F.linear(x, p["w"][8:])),
    "linear, bias of two dimensions": ({"w": (8, 8), "b": (3, 8)}, lambda p, x: F.linear(x, p["w"], p["b"][1])),
    "@": (SQUARE, lambda p, x: x @ p["w"]),
    "matmul by names": (SQUARE, lambda p, x: torch.matmul(input=x, other=p["w"])),
    "@ from the left": (SQUARE, lambda p, x: (p["w"] @ x.mT).mT),
    "@ of the transposed": (SQUARE, lambda p, x: x @ p["w"].T),
    "mm": (SQUARE, lambda p, x: torch.mm(x, p["w"].t())),
    "matmul with a vector": (VECTOR, lambda p, x: (x @ p["w"]).unsqueeze(-1)),
    "addmm": ({"w": (8, 8), "b": (8,)}, lambda p, x: torch.addmm(p["b"], x, p["w"])),
    "addmm, scaled": ({"w": (8, 8), "b": (8,)}, lambda p, x: torch.addmm(p["b"], x, p["w"], alpha=0.5)),
    "einsum": (SQUARE, lambda p, x: torch.einsum("tk,nk->tn", x, p["w"])),
    "einsum, weight first": (SQUARE, lambda p, x: torch.einsum("nk,tk->tn", p["w"], x)),
    "einsum with heads": ({"w": (2, 4, 3)}, lambda p, x: torch.einsum("thd,hdr->thr", x.view(-1, 2, 4), p["w"])),
    "einsum with an ellipsis": (
        SQUARE,
        lambda p, x: torch.einsum("...k,kn->...n", x.view(2, 3, 8), p["w"]).flatten(0, 1),
    ),
    "einsum with a sum": (SQUARE, lambda p, x: torch.einsum("tk,nj->tk", x, p["w"])),
    "einsum of a diagonal": (SQUARE, lambda p, x: torch.einsum("tk,kk->tk", x, p["w"])),
    "einsum that repeats the weight": (
        {"w": (1, 4, 3), "v": (1, 3)},
        lambda p, x: (
            torch.einsum("thd,hdr->thr", x.view(-1, 2, 4), p["w"])
            * torch.einsum("thd,dr->thr", x.view(-1, 2, 4), p["v"])
        ),
    ),
    "einsum that repeats the input": ({"w": (6, 8)}, lambda p, x: torch.einsum("tk,tn->tkn", x[:1], p["w"]).flatten(1)),
    "sparse @ weight": (
        {"w": (8, 3)},
        lambda p, x: torch.mm(torch.eye(8, dtype=x.dtype).to_sparse(), p["w"]) + x[:1].sum(),
    ),
    "conv1d": ({"w": (8, 1, 3), "b": (8,)}, lambda p, x: F.conv1d(x.mT[None], p["w"], p["b"], 1, 1, groups=8)[0].mT),
    "conv1d, same": ({"w": (4, 8, 3)}, lambda p, x: F.conv1d(x.mT[None], p["w"], padding="same")[0].mT),
    "conv1d, same, uneven": (
        {"w": (4, 8, 4)},
        lambda p, x: F.conv1d(x.mT[None], p["w"], padding="same", dilation=3)[0].mT,
    ),
    "conv2d, same": ({"w": (4, 1, 2, 3)}, lambda p, x: F.conv2d(x[None, None], p["w"], padding="same")[0, 0]),
    "conv2d, valid": ({"w": (4, 1, 2, 2)}, lambda p, x: F.conv2d(x[None, None], p["w"], padding="valid").flatten(1)),
    "conv1d, weight reshaped": ({"w": (8, 3)}, lambda p, x: F.conv1d(x.mT[None], p["w"][:, None], groups=8)[0].mT),
    "conv1d by names": (
        {"w": (8, 1, 3)},
        lambda p, x: F.conv1d(input=x.mT[None], weight=p["w"], stride=2, padding=1, groups=8)[0].mT,
    ),
    "conv2d": ({"w": (4, 1, 2, 2)}, lambda p, x: F.conv2d(x[None, None], p["w"], stride=2).flatten(1)),
    "conv_transpose1d": ({"w": (8, 4, 2)}, lambda p, x: F.conv_transpose1d(x.mT[None], p["w"], stride=2)[0].mT),
    "embedding": ({"w": (5, 8)}, lambda p, x: x + F.embedding(torch.arange(len(x)) % 3, p["w"])),
    "embedding, indexed": ({"w": (5, 8)}, lambda p, x: x + p["w"][torch.arange(len(x)) % 3]),
    "rows counted from the end": ({"w": (5, 8)}, lambda p, x: x + p["w"][torch.arange(len(x)) % 3 - 3]),
    "rows of a mask": ({"w": (9, 8)}, lambda p, x: x + p["w"][torch.arange(9) < len(x)]),
    "positions": ({"w": (9, 8)}, lambda p, x: x + p["w"][: len(x)]),
    "1 + weight": (VECTOR, lambda p, x: F.rms_norm(x, (8,)) * (1.0 + p["w"])),
    "layer norm": ({"w": (8,), "b": (8,)}, lambda p, x: F.layer_norm(x, (8,), p["w"], p["b"])),
    "decays": (SQUARE, lambda p, x: x @ -torch.exp(p["w"].float()).to(x.dtype)),
    "sinks": (VECTOR, lambda p, x: torch.cat([x, p["w"].reshape(1, -1).expand(len(x), -1)], -1).softmax(-1)),
    "added in place": (VECTOR, lambda p, x: x.clone().add_(p["w"])),
    "in place on a product": ({"w": (8, 8), "b": (8,)}, lambda p, x: F.linear(x[None], p["w"], p["b"]).add_(1)[0]),
    "written into": (VECTOR, lambda p, x: torch.stack([x[0], p["w"] * x[1]])),
    "a parameter as the output": (SQUARE, lambda p, x: p["w"]),
    "part of a parameter as the output": (SQUARE, lambda p, x: p["w"][2:4]),
    "several uses": (SQUARE, lambda p, x: x @ p["w"] + F.linear(x, p["w"]) + F.linear(x, p["w"][:, :8].T) * p["w"][0]),
    "split": ({"w": (16, 8)}, lambda p, x: sum(F.linear(x, part) for part in p["w"].split([8, 8]))),
    "unbind": ({"w": (2, 8, 8)}, lambda p, x: sum(x @ part for part in p["w"].unbind())),
    "low rank": ({"a": (2, 8), "b": (8, 2)}, lambda p, x: F.linear(x, p["b"] @ p["a"])),
    "scaled weight": ({"s": (8, 1), "w": (8, 8)}, lambda p, x: F.linear(x, p["s"] * p["w"])),
    "normalised weight": (
        {"g": (8, 1), "v": (8, 8)},
        lambda p, x: F.linear(x, torch._weight_norm(p["v"], p["g"], 0)) + F.linear(x, F.normalize(p["v"], dim=1)),
    ),
    "scaled weight, modified in place": (SQUARE, lambda p, x: F.linear(x, (2 * p["w"]).mul_(3)[:, :8])),
    "cast and written into": (SQUARE, cast_and_written),
    "chosen rows, scaled in place": (SQUARE, chosen_and_scaled),
    "zeroed where autograd does not look": (SQUARE, zeroed_where_autograd_does_not_look),
    "masked weight": (SQUARE, lambda p, x: x @ (p["w"] * torch.ones(8, 8, dtype=x.dtype).tril())),
    "sum of weights": (
        {"w": (8, 8), "a": (2, 8), "b": (8, 2)},
        lambda p, x: F.linear(x, p["w"] + 0.5 * p["b"] @ p["a"]),
    ),
    "cast of a scaled weight that changes nothing": (
        {"s": (8, 1), "w": (8, 8)},
        lambda p, x: F.linear(x, (p["s"] * p["w"]).to(x.dtype)),
    ),
    "under vmap": (SQUARE, lambda p, x: torch.vmap(lambda row: row @ p["w"])(x) + x @ p["w"]),
    "through an autograd function": (SQUARE, lambda p, x: x @ Doubled.apply(p["w"])),
}


# What interception does not see, or sees too late: autograd has it
AT_ONCE = {
    "through an autograd function",
    "under vmap",
    "cast and written into",
    "chosen rows, scaled in place",
    "zeroed where autograd does not look",
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return dy * 2


def pair(shapes: dict[str, tuple[int, ...]], compute: Compute, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    module = Module(shapes, compute, dtype)
    return module, zbkern.convert(copy.deepcopy(module))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", CASES)
def test_gradients_wait_and_are_torchs(name: str) -> None:
    """Of two backwards, of one through a checkpoint, and of a gradient penalty."""
    module, twin = pair(*CASES[name], torch.float64)
    check(module, twin, torch.randn(2, 6, 8, dtype=torch.float64), waits=name not in AT_ONCE)
    module.zero_grad(), twin.zero_grad()
    check(module, twin, forward=functools.partial(checkpoint, twin, use_reentrant=False), waits=False)
    if name in ("a parameter as the output", "part of a parameter as the output"):
        return
    x, queue = torch.randn(6, 8, dtype=torch.float64, requires_grad=True), zbkern.WGradQueue()
    for each, scope in ((module, contextlib.nullcontext()), (twin, queue.defer())):
        each.zero_grad()
        (slope,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        with scope:
            slope.square().sum().backward()
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-10)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Which W have run, of how many microbatches."""
    found: list[tuple[str, int]] = []
    for name in ("linear_wgrad", "grouped_linear_wgrad"):
        own = getattr(reference, name)
        record = lambda *a, name=name, own=own: (found.append((name, len(a[0]))), own(*a))  # noqa: E731
        monkeypatch.setattr(reference, name, record)
    grouped_functions.grouped_wgrad.cache_clear()
    yield found
    grouped_functions.grouped_wgrad.cache_clear()


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no torch.nn.functional.grouped_mm")
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_of_whole_parameters_are_one_kernel(
    transposed: bool, cast: bool, launched: list[tuple[str, int]]
) -> None:
    """As torchtitan's experts call them, weights cast or not; gradients have the parameters' dtype."""

    def compute(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, len(x)], dtype=torch.int32)
        weight = p["w"].bfloat16() if cast else p["w"]
        return F.grouped_mm(x.to(weight.dtype), weight if transposed else weight.transpose(-2, -1), offs=ends).float()

    module, twin = pair({"w": (3, 8, 16) if transposed else (3, 16, 8)}, compute, torch.float32)
    check(module, twin, torch.randn(3, 6, 8), 1e-2 if cast else 1e-5)
    assert ("grouped_linear_wgrad", 3) in launched


def test_microbatches_of_one_expert_are_one_kernel(launched: list[tuple[str, int]]) -> None:
    module, twin = pair(EXPERTS, experts, torch.float32)
    check(module, twin, torch.randn(4, 6, 8), 1e-5)
    assert launched == [("linear_wgrad", 4)] * 6  # two matrices of three experts


@pytest.mark.parametrize("made", ["part", "sum", "part of a sum"])
def test_hooks_on_what_is_made_of_a_parameter_run(made: str) -> None:
    """The gradient that a hook returns is the one that reaches the parameter."""

    def compute(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
        weight = p["w"][:4] if made == "part" else p["w"] + p["w"].mT
        weight.register_hook(lambda gradient: 3 * gradient)
        return F.linear(x, weight[:2] if made == "part of a sum" else weight)

    module, twin = pair(SQUARE, compute, torch.float64)
    check(module, twin, waits=False)


def with_biases(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
    found = F.linear(x, p["w"], p["w"][0]), torch.addmm(x, x, p["w"]), torch.baddbmm(x, x[None], p["w"][None])[0]
    assert {y.dtype for y in found} == {torch.bfloat16}
    return sum(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shapes", "compute"), [(EXPERTS, experts), (SQUARE, with_biases)])
def test_autocast(shapes: dict[str, tuple[int, ...]], compute: Compute, dtype: torch.dtype) -> None:
    """Around the forward alone, so that nothing casts what B and W multiply."""
    module, twin = pair(shapes, compute, torch.float32)
    around = torch.autocast("cpu", torch.bfloat16)
    deferred(around(module), around(twin), [torch.randn(8, 8, dtype=dtype)], 3e-2).run()
    testing.assert_same_gradients(twin, module, tolerance=3e-2)
    assert all(p.grad.dtype == torch.float32 for p in twin.parameters())


class Checkpointed(nn.Module):
    """Checkpoints within a forward that is intercepted itself: of a module of its own, and of its own parameter."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.scale, self.w = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8, 8))
        self.inner = Module(SQUARE, lambda p, x: (x @ p["w"]).tanh(), torch.float32)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x * self.scale, use_reentrant=self.use_reentrant)
        return checkpoint(lambda x: (x @ self.w).tanh(), x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_inside_of_a_forward(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    module = Checkpointed(use_reentrant).double()
    twin = zbkern.convert(copy.deepcopy(module))
    queue = deferred(module, twin, [torch.randn(6, 8, dtype=torch.float64)], 1e-12)
    assert twin.inner.w.grad is None
    assert twin.scale.grad is None
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-12)


def test_casts_by_type() -> None:
    def compute(p: dict[str, nn.Parameter], x: Tensor) -> Tensor:
        assert p["w"].type() == "torch.FloatTensor"
        return F.linear(x.double(), p["w"].type(torch.float64)).float()

    module, twin = pair(SQUARE, compute, torch.float32)
    check(module, twin, [torch.randn(6, 8)], 1e-6)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no product of groups")
@pytest.mark.parametrize("use", ["rows", "groups", "a value"])
def test_an_index_that_changes_between_b_and_w_is_an_error(use: str) -> None:
    index = torch.tensor([2, 2, 6], dtype=torch.int32) if use == "groups" else torch.tensor([0, 2, 1, 1, 0, 2])
    computes: dict[str, Compute] = {
        "rows": lambda p, x: torch.bmm(p["w"][index], x.unsqueeze(-1)).squeeze(-1),
        "groups": lambda p, x: torch._grouped_mm(x, p["w"][:, :, :8], offs=index),
        "a value": lambda p, x: x + p["w"][index][:, 0],
    }
    twin, queue = zbkern.convert(Module({"w": (3, 8, 8)}, computes[use], torch.float32)), zbkern.WGradQueue()
    with queue.defer():
        backward(twin, torch.randn(6, 8))
    index.zero_()
    with pytest.raises(RuntimeError, match="needs was modified in place between B and W"):
        queue.run()
    queue.discard()


def test_recurrent_layers() -> None:
    module = nn.LSTM(8, 8, num_layers=2, dtype=torch.float64)
    twin = zbkern.convert(copy.deepcopy(module))
    check(module, twin)


def test_attention_of_torch_has_a_w() -> None:
    """Its projections are within one function of torch: B must not compute their W."""
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    twin = zbkern.convert(copy.deepcopy(module))

    def attention(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: module(x, x, x, need_weights=False)[0]

    queue = deferred(attention(module), attention(twin), [torch.randn(2, 3, 8, dtype=torch.float64)], 1e-12)
    held = {id(p): task.tensors for task in queue.tasks() for p in task.parameters if p is not None}
    for weight in (twin.in_proj_weight, twin.out_proj.weight):
        assert [tensor.shape[-1] for tensor in held[id(weight)]] == [8, len(weight)]  # x and dy, not a gradient
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-12)


SHARES: dict[str, float] = {  # what waits: B computes the products of a computed weight
    "low rank": 0, "einsum with an ellipsis": 1, "scaled weight": 0, "masked weight": 0, "decays": 0,
    "scaled weight, modified in place": 0, "normalised weight": 0, "cast of a scaled weight that changes nothing": 0,
    "sum of weights": 16 / 96,  # whose product with b is one with a W
    "dropped out": 0, "embedded": 0, "positions that others add": 1, "lstm": 0,
}  # fmt: skip
OTHERS: dict[str, Compute] = {
    "dropped out": lambda p, x: F.linear(x, F.dropout(2 * p["w"], 0.5)),
    "embedded": lambda p, x: F.embedding(torch.arange(3), 2 * p["w"]),
    "positions that others add": lambda p, x: 2 * p["w"],
}


@pytest.mark.parametrize("name", SHARES)
def test_coverage_counts_products_that_b_computes(name: str) -> None:
    module = nn.LSTM(8, 8) if name == "lstm" else Module(*CASES.get(name, (SQUARE, OTHERS.get(name))), torch.float32)
    twin, x = zbkern.convert(module), torch.randn(6, 8)
    positions = torch.randn(8, 8) if name == "positions that others add" else 0
    found = zbkern.coverage(twin, lambda: (positions + pytree.tree_leaves(twin(x))[0]).square().sum())
    assert found.share == pytest.approx(SHARES[name])
    assert (found.not_deferred == {}) == (SHARES[name] == 1)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("before", [True, False])
def test_parametrized_layers(kind: str, before: bool) -> None:
    """What torch.nn.utils.parametrizations makes of them, before and after convert: W of the weight is in B."""
    torch.manual_seed(0)
    parametrize = getattr(nn.utils.parametrizations, kind)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Conv1d(6, 6, 1)).double()
    twin = zbkern.convert(plain) if not before else plain
    parametrize(twin[0]), parametrize(twin[2])
    module = zbkern.restore(copy.deepcopy(twin))
    zbkern.convert(twin)
    check(module, twin, torch.randn(2, 6, 8, dtype=torch.float64), waits=False)
    found = zbkern.coverage(twin, lambda: twin(torch.randn(6, 8, dtype=torch.float64)).sum())
    assert found.share == 0
