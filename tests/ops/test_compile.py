"""torch.compile traces converted models without graph breaks and their W still waits; torch.export and fake tensors."""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zbkern
from tests.support import op_cases
from zbkern import testing
from zbkern.ops import compiled_operators


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.RMSNorm(8)
        self.mlp = zbkern.nn.MLP(8, 12)
        self.attention = zbkern.nn.Attention(8, 2, causal=True)
        self.head = nn.Linear(8, 11)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embedding(indices)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(self.scale(x)))


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net()
    return model, zbkern.convert(copy.deepcopy(model))


def indices(seed: int) -> Tensor:
    return torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(seed))


COMPILER = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="Inductor needs a C++ compiler on the CPU")


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("deferred", [True, False])
def test_compiled_gradients_are_equal_without_a_graph_break(deferred: bool) -> None:
    model, twin = pair()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    queue = zbkern.WGradQueue()
    for key in range(3):
        model(indices(key)).square().mean().backward()
        loss = compiled(indices(key)).square().mean()
        with queue.defer(key) if deferred else contextlib.nullcontext():
            loss.backward()
    weights = {id(p) for task in queue.tasks() for p in task.parameters if p is not None}
    names = {name for name, p in twin.named_parameters() if id(p) in weights}
    norms = {name for name, _ in twin.named_parameters() if name.startswith(("norm", "scale"))}
    assert names == ({name for name, _ in twin.named_parameters()} - norms if deferred else set())
    for key in reversed(queue.keys()):
        queue.run(key)
    testing.assert_same_gradients(twin, model)


@needs_compiler
@pytest.mark.slow
def test_what_waits_is_not_written_to_by_the_compiled_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor reuses memory after the last use that it knows of; it must know of W's."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())])
    twin = zbkern.convert(copy.deepcopy(model))
    compiled = torch.compile(twin, fullgraph=True)
    queue = zbkern.WGradQueue()
    copies = []
    original = zbkern.WGradQueue.add

    def add(self: zbkern.WGradQueue, task: zbkern.WGradTask, key: object = None) -> None:
        copies.append((task.tensors, [tensor.clone() for tensor in task.tensors]))
        original(self, task, key)

    monkeypatch.setattr(zbkern.WGradQueue, "add", add)
    x = torch.randn(16, 32)
    with queue.defer():
        compiled(x).square().sum().backward()
    assert len(copies) == 6
    for held, before in copies:
        for a, b in zip(held, before, strict=True):
            assert torch.equal(a, b)
    addresses = {tensor.untyped_storage().data_ptr() for held, _ in copies for tensor in held}
    queue.run()
    model(x).square().sum().backward()
    testing.assert_same_gradients(twin, model)
    assert len(addresses) == 12
    # held where they are, not copied; without effects Inductor calls the operator its own way
    lowered = hasattr(compiled_operators.weight_gradient, "register_effect")
    assert (x.untyped_storage().data_ptr() in addresses) == lowered


WAIT = ("linear", "gated_mlp", "embedding", "grouped_linear", "grouped_mlp")  # of the others W is in B


@pytest.mark.parametrize(
    ("backend", "seed"), [("aot_eager", 2), pytest.param("inductor", 16, marks=[pytest.mark.slow, needs_compiler])]
)
@pytest.mark.parametrize("op", op_cases.OPS)
def test_compiled_calls(op: str, backend: str, seed: int) -> None:
    """Any options, float32 or float64, two microbatches and one graph; by Inductor one call, which has rows, weights
    and biases with this seed."""
    rng = random.Random(seed)
    for _ in range(2 if op in WAIT and backend == "aot_eager" else 1):
        call, dtype = op_cases.draw(op, rng), rng.choice([torch.float64, torch.float32])
        if not call.compiles:
            continue
        torch._dynamo.reset()
        counters.clear()
        graph = torch.compile(call.ours, backend=backend, fullgraph=True, dynamic=rng.choice([None, False]))
        parameters = [op_cases.random_tensor(rng, *s).to(dtype).requires_grad_() for s in call.parameters]
        others, queue = [p.detach().clone().requires_grad_() for p in parameters], zbkern.WGradQueue()
        for key in range(2):
            inputs = [op_cases.random_tensor(rng, *s).to(dtype).requires_grad_() for s in call.inputs]
            twins = [t.detach().clone().requires_grad_() for t in inputs]
            sums = []
            for function, tensors in ((call.ours, (*twins, *others)), (graph, (*inputs, *parameters))):
                y = function(*tensors)
                sums.append(sum(t.float().square().sum() for t in (y if isinstance(y, tuple) else (y,))))
            sums[0].backward()
            with queue.defer(key):
                sums[1].backward()
            slack = 1e-5  # sums are of float32
            testing.assert_close(sums[1], sums[0], call.said, slack)
            for ours, theirs in zip(inputs, twins, strict=True):
                testing.assert_close(ours.grad, theirs.grad, call.said, slack, scale=1.0)
        assert counters["stats"]["unique_graphs"] == 1, call.said
        assert op not in WAIT or all(p.grad is None for p in parameters), call.said
        queue.run()
        for ours, theirs in zip(parameters, others, strict=True):
            testing.assert_close(ours.grad, theirs.grad, call.said, slack, scale=1.0)


def test_one_product_used_twice_is_two_w() -> None:
    """Equal calls are joined into one by the compiler, unless it knows that each does something."""
    layer = zbkern.nn.Linear(4, 4)
    queue = zbkern.WGradQueue()
    x = torch.randn(3, 4, requires_grad=True)
    loss = torch.compile(lambda x: (layer(x) + layer(x)).sum(), backend="aot_eager", fullgraph=True)(x)
    with queue.defer():
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert queue.pending() == 0  # nothing was asked of weights
        loss.backward()
    testing.assert_close(dx, 2 * torch.ones(3, 4) @ layer.weight)
    assert queue.pending() == 2
    queue.run()
    testing.assert_close(layer.weight.grad, 2 * torch.ones(3, 4).t() @ x)


def test_a_queue_that_comes_later_makes_the_compiler_look_again() -> None:
    layer = zbkern.nn.Linear(4, 4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    (expected,) = torch.autograd.grad(compiled(x).sum(), layer.weight)
    queue = zbkern.WGradQueue()
    with queue.defer():
        compiled(x).sum().backward()
    assert layer.weight.grad is None
    queue.run()
    testing.assert_close(layer.weight.grad, expected)
    del queue
    testing.assert_close(torch.autograd.grad(compiled(x).sum(), layer.weight)[0], expected)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_compiled_parameters_are_an_error_not_a_call_without_a_gradient(kind: str) -> None:
    layer = zbkern.nn.Linear(4, 4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    seen: list[object] = []
    handle = getattr(layer.weight, kind)(seen.append)
    queue = zbkern.WGradQueue()
    loss = compiled(torch.randn(3, 4)).sum()
    with queue.defer(), pytest.raises(RuntimeError, match=r"weight \[4, 4\] has hooks"):
        loss.backward()
    assert not seen
    handle.remove()
    with queue.defer():
        compiled(torch.randn(3, 4)).sum().backward()
    assert queue.run() == 1


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_through_a_compiled_layer_is_an_error() -> None:
    """Its gradients would have no graph, and those of layers behind it one: a penalty of all would be wrong."""
    model = nn.Sequential(zbkern.nn.Linear(4, 4), nn.Tanh(), zbkern.nn.Linear(4, 4))
    model[0].compile(backend="aot_eager", fullgraph=True)
    queue, x = zbkern.WGradQueue(), torch.randn(3, 4, requires_grad=True)
    loss = model(x).square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    assert dx.requires_grad
    with queue.defer(), pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)
    queue.discard()


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_that_share_memory_get_their_own_gradients(transposed: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin = zbkern.convert(copy.deepcopy(model))
    for net in (model, twin):
        values = net[0].weight.data
        net[2].weight = nn.Parameter(values.t() if transposed else values)
    queue, x = zbkern.WGradQueue(), torch.randn(3, 4)
    model(x).square().sum().backward()
    with queue.defer():
        torch.compile(twin, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    assert queue.run() == 2
    testing.assert_same_gradients(twin, model)


def test_forwards_of_several_threads_in_one_backward() -> None:
    """Autograd counts nodes by thread, so that several of one backward have the same number."""
    queue, x = zbkern.WGradQueue(), torch.randn(3, 4)
    layers = [zbkern.nn.Linear(4, 4) for _ in range(2)]
    compiled = [torch.compile(layer, backend="aot_eager", fullgraph=True) for layer in layers]
    outputs = []
    for layer in compiled:
        thread = threading.Thread(target=lambda layer=layer: outputs.append(layer(x)))
        thread.start()
        thread.join()
    with queue.defer():
        (outputs[0] + outputs[1]).sum().backward()
    assert queue.run() == 2
    for layer in layers:
        testing.assert_close(layer.weight.grad, torch.ones(3, 4).t() @ x)


TRANSFORMED = {
    "vmap": lambda layer, x: torch.vmap(lambda x: layer(x))(x.view(3, 2, 4)),
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).square().sum())(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x.sin(),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("intercepted", [False, True])
def test_function_transforms_within_what_is_compiled(name: str, intercepted: bool) -> None:
    """They see through torch's operations alone: taps would hide the weights from them."""

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias).tanh()

    torch.manual_seed(0)
    model = (Own if intercepted else nn.Linear)(4, 4)
    twin = zbkern.convert(copy.deepcopy(model))
    queue, x = zbkern.WGradQueue(), torch.randn(6, 4)
    TRANSFORMED[name](model, x).square().sum().backward()
    graph = torch.compile(lambda x: TRANSFORMED[name](twin, x), backend="aot_eager", fullgraph=True)
    with queue.defer():
        graph(x).square().sum().backward()
    queue.run()
    for p, expected in zip(twin.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None)
        if p.grad is not None:
            testing.assert_close(p.grad, expected.grad)


def test_compiled_autograd() -> None:
    """It traces a backward, where nothing tells whose gradients are wanted: with it around the forward, too, W is in B;
    around the backward alone it is an error, not a gradient that is lost."""
    from torch._dynamo import compiled_autograd

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin = zbkern.convert(copy.deepcopy(model))
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    queue, x = zbkern.WGradQueue(), torch.randn(3, 4)
    loss = compiled(x).square().sum()
    wanted = pytest.raises(RuntimeError, match="enable compiled autograd around the forward")
    with queue.defer(), wanted, compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    for enabled in (True, False):
        model(x).square().sum().backward()
        around = compiled_autograd._enable(torch.compile(backend="eager")) if enabled else contextlib.nullcontext()
        with around, queue.defer():
            compiled(x).square().sum().backward()
        assert queue.run() == (0 if enabled else 2)
    testing.assert_same_gradients(twin, model)


OPERANDS: dict[str, list[Tensor]] = {  # what W reads
    "linear": [torch.randn(3, 4), torch.randn(3, 5)],
    "transposed": [torch.randn(3, 5), torch.randn(3, 4)],
    "embedding": [torch.randint(5, (3,)), torch.randn(3, 4)],
    "grouped_linear": [torch.randn(6, 4), torch.tensor([2, 2, 6]).int(), torch.randn(6, 5)],
}


@pytest.mark.parametrize("kind", OPERANDS)
def test_the_operators_pass_torchs_check(kind: str) -> None:
    tensors = OPERANDS[kind]
    weight = torch.randn(3, 5, 4) if kind == "grouped_linear" else torch.randn(5, 4)
    bias = torch.randn(tensors[-1].shape[1]) if kind in ("linear", "transposed") else None
    torch.library.opcheck(torch.ops.zbkern.weight_gradient.default, (kind, tensors, weight, bias, [], True))
    if kind == "grouped_linear":
        x, ends, _ = tensors
        for vectors in (None, torch.randn(3, 5)):
            torch.library.opcheck(torch.ops.zbkern.grouped_linear.default, (x, weight, vectors, ends))


@pytest.mark.parametrize("strict", [False, True])
def test_export_traces_torchs_operations_while_a_queue_exists(strict: bool) -> None:
    model, twin = pair()
    queue = zbkern.WGradQueue()
    exported = torch.export.export(twin, (indices(0),), strict=strict)
    testing.assert_close(exported.module()(indices(1)), model(indices(1)))
    assert not [n for n in exported.graph.nodes if n.op == "call_function" and "zbkern" in str(n.target)]
    assert queue.pending() == 0


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, twin = pair()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = twin(mode.from_tensor(indices(0)))
    assert y.shape == (2, 6, 11)


def test_a_subclass_of_tensors_stays_one() -> None:
    """A tensor subclass goes through torch's operations: DTensor and others bring their own."""

    class Tagged(Tensor):
        pass

    x = torch.randn(3, 4).as_subclass(Tagged)
    layer = zbkern.nn.Linear(4, 2)
    y = layer(x)
    assert type(y) is Tagged
    testing.assert_close(y.as_subclass(Tensor), F.linear(x.as_subclass(Tensor), layer.weight, layer.bias))
