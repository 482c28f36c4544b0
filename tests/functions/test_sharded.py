"""Tensor- and sequence-parallel layers on torch's own API: their W waits, and gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern

WIDTH, VOCABULARY, TOKENS = 16, 8, 4
MICROBATCHES = 2


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList([Block(nn.RMSNorm), Block(nn.LayerNorm)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embedding(indices)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def parallelize(model: nn.Module, kind: str, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    tokens = Shard(1)
    block: dict[str, Any] = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=tokens),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    embedding = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)}
    if kind == "all but the head":
        plan: dict[str, Any] = embedding
    elif kind == "sequence":
        plan = embedding | {"head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())}
    else:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate())
            if kind == "rows"
            else ColwiseParallel(output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        block = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    plan |= {f"blocks.{i}.{name}": style for i in range(2) for name, style in block.items()}
    return parallelize_module(model, mesh, plan)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (2, TOKENS), generator=generator) for _ in range(MICROBATCHES)]


def loss_of(model: nn.Module, indices: Tensor) -> Tensor:
    return (model(indices) * torch.linspace(-1, 2, VOCABULARY, dtype=torch.float64)).square().sum()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differences(twin: nn.Module, model: nn.Module, of: Callable[[Any], Any] = lambda p: p.grad) -> dict[str, float]:
    """The largest difference of every gradient, relative to the largest value of it in one process."""
    found = {}
    for (name, ours), theirs in zip(twin.named_parameters(), model.parameters(), strict=True):
        expected = whole(theirs.grad)
        found[name] = float((whole(of(ours)) - expected).abs().max() / expected.abs().max())
    return found


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
        assert not at_once
        assert waiting == 10 * MICROBATCHES
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


def norm_targets_rank(case: str) -> tuple[str, float]:
    """A norm under sequence parallelism whose gradient exists already: its placement afterwards, and the difference."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = nn.LayerNorm(WIDTH, dtype=torch.float64)
    own = zbkern.convert(copy.deepcopy(plain))
    for name, parameter in list(own.named_parameters()):
        setattr(own, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    buffer = "main_grad" if case == "main_grad" else "grad"
    if case != "none":
        for parameter in own.parameters():
            setattr(parameter, buffer, torch.zeros_like(parameter))
    called: list[str] = []
    if case == "hook":
        own.weight.register_post_accumulate_grad_hook(lambda p: called.append(str(p.grad.placements)))
    queue = zbkern.WGradQueue()
    for _ in range(2):
        plain(x).square().sum().backward()
        with queue.defer():
            y = own(distribute_tensor(x, mesh, [Shard(1)]))
            y.redistribute(mesh, [Replicate()]).to_local().square().sum().backward()
    assert queue.pending() == 2
    assert not called
    queue.run()
    assert len(called) == (case == "hook")
    found = [getattr(parameter, buffer) for parameter in own.parameters()]
    pairs = zip(map(whole, found), (parameter.grad for parameter in plain.parameters()), strict=True)
    largest = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
    return str(found[0].placements[0]), largest


@pytest.mark.dist
@pytest.mark.parametrize("case", ["none", "zeros", "main_grad", "hook"])
def test_norms_add_to_a_gradient_as_it_is_laid_out(two_ranks: Any, case: str) -> None:
    for placement, found in two_ranks.run(norm_targets_rank, case):
        assert found < 1e-12
        assert placement.startswith("P" if case == "none" else "R"), placement


def sequence_linear(mesh: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A norm and two linears of its output under sequence parallelism; and this rank's part of a [batch, tokens, K]."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = zbkern.convert(nn.ModuleDict({"norm": nn.RMSNorm(WIDTH), "mlp": GatedBlock()}).double())
    tokens = Shard(1)
    styles: dict[str, Any] = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=tokens),
    }
    return parallelize_module(model, mesh, styles), lambda x: x.chunk(mesh.size(), 1)[mesh.get_local_rank()]


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def order_rank(batch: int, wgrads_per_collective: int) -> tuple[list[str], int, list[Tensor]]:
    """What happened in B of the second microbatch, how many W waited after it, and the gradients in the end."""
    import torch.distributed._functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh

    model, part = sequence_linear(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 2, batch, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    events: list[str] = []
    queue = zbkern.WGradQueue(merge=False, wgrads_per_collective=wgrads_per_collective)
    queue.listeners.append(lambda tasks: events.append("W"))

    def recorded(name: str, event: str) -> Callable[..., Any]:
        original = getattr(collectives, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return original(*args, **kwargs)

        return call

    names = {"all_gather_single": "gather", "reduce_scatter_single": "reduce", "wait_tensor": "wait"}
    for key in range(2):
        with queue.defer(key):
            y = model["mlp"](model["norm"](part(x[key]).requires_grad_()))
            with pytest.MonkeyPatch.context() as patch:
                for name, event in names.items():
                    patch.setattr(collectives, name, recorded(name, event))
                events.clear()
                y.backward(part(dy[key]))
    in_b, waiting = list(events), queue.pending()
    queue.run()
    return in_b, waiting, [whole(p.grad) for p in model.parameters()]


@pytest.mark.dist
def test_w_runs_between_the_start_of_a_collective_and_the_wait(two_ranks: Any) -> None:
    for rank in range(2):
        events, waiting, covered = two_ranks.run(order_rank, 1, 1)[rank]
        assert events == ["gather", "W", "wait", "reduce", "W", "wait"]
        assert waiting == 8 - 1 - 2  # one in the first microbatch: before its first collective nothing was pending
        uncovered_events, uncovered_waiting, expected = two_ranks.run(order_rank, 1, 0)[rank]
        assert "W" not in uncovered_events
        assert uncovered_waiting == 8
        assert all(torch.equal(a, b) for a, b in zip(covered, expected, strict=True))


def gather_rank(regather_inputs: bool, tokens: int) -> tuple[int, int, list[str], list[Tensor]]:
    """Bytes that autograd keeps of x between F and B, bytes that W hold, collectives of W, and the gradients."""
    import torch.distributed._functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh

    model, part = sequence_linear(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    x, dy = torch.randn(2, 2, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    queue, events = zbkern.WGradQueue(regather_inputs=regather_inputs), []
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = part(x).detach().clone().requires_grad_()
    for key in range(2):
        with queue.defer(key):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = model["mlp"](model["norm"](own))
            y.backward(part(dy))
        if key == 0:
            from_f_to_b, held = sum(kept.values()), queue.bytes
    with pytest.MonkeyPatch.context() as patch:
        original = collectives.all_gather_single
        patch.setattr(collectives, "all_gather_single", lambda *a, **k: (events.append("gather"), original(*a, **k))[1])
        queue.run()
    return from_f_to_b, held, events, [own.grad, *(whole(p.grad) for p in model.parameters())]


@pytest.mark.dist
@pytest.mark.parametrize("tokens", [4, 6])
def test_w_gathers_its_input_again(two_ranks: Any, tokens: int) -> None:
    kept, again = (two_ranks.run(gather_rank, choice, tokens) for choice in (False, True))
    saved = 2 * tokens * WIDTH * 8 // 2  # of float64: the other rank's half, shared by gate and up
    for (f_kept, w_kept, none, expected), (f_again, w_again, gathers, found) in zip(kept, again, strict=True):
        assert f_kept - f_again == saved
        assert w_kept - w_again == saved
        assert not none
        assert gathers == ["gather"] * 4  # gate and up of two microbatches
        for a, b in zip(found, expected, strict=True):
            assert float((a - b).abs().max()) <= 1e-12 * float(b.abs().max())


def second_derivative_rank() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    model, part = sequence_linear(init_device_mesh("cpu", (2,)))
    x = part(torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)).requires_grad_()
    with zbkern.WGradQueue(regather_inputs=True).defer():
        y = model["mlp"](model["norm"](x))
        try:
            torch.autograd.grad(y.sum(), x, create_graph=True)
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.dist
def test_what_was_not_kept_has_no_second_derivative(two_ranks: Any) -> None:
    for message in two_ranks.run(second_derivative_rank):
        assert "regather_inputs=False" in message


def loss_parallel_rank(order: str, ranks: int) -> tuple[list[str], dict[str, float], float]:
    """A head whose vocabulary is cut, with torch's loss_parallel: what did not wait, and the differences."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,))
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
        assert not at_once
        assert max(found.values()) < 1e-10, found
        assert loss < 1e-12


@pytest.mark.dist
@pytest.mark.slow
def test_a_vocabulary_that_is_cut_in_four(four_ranks: Any) -> None:
    for at_once, found, loss in four_ranks.run(loss_parallel_rank, "converted first", 4):
        assert not at_once
        assert max(found.values()) < 1e-10, found
        assert loss < 1e-12


def fused_head_rank(bias: bool) -> tuple[int, list[float]]:
    """linear_cross_entropy whose vocabulary is cut: W that waited, and differences of loss and gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
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
    with queue.defer(), loss_parallel():
        loss = own(rows, target)
        loss.backward()
    assert all(p.grad is None for p in own.parameters())
    waiting = queue.pending()
    queue.run()
    pairs = [(loss.detach(), expected.detach()), (rows.grad, x.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(own.parameters(), plain.parameters(), strict=True)]
    return waiting, [float((whole(a) - b).abs().max()) for a, b in pairs]


@pytest.mark.dist
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_with_its_loss(two_ranks: Any, bias: bool) -> None:
    for waiting, found in two_ranks.run(fused_head_rank, bias):
        assert waiting == 1
        assert max(found) < 1e-12


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
