"""A small decoder under tensor or sequence parallelism for tests, and how far its gradients are from one process's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zbkern
from tests.support.ranks import cpu_mesh

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
    """kind: "rows" or "columns" of the embedding, "sequence" parallelism, or with it the "vocabulary" of the head."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    tokens = Shard(1)
    block: dict[str, Any] = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=tokens),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    embedding = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)}
    if kind == "vocabulary":
        head = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)
        plan: dict[str, Any] = embedding | {"head": head}
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


def linear_rank(case: str, backend: str | None) -> tuple[int, list[str], list[float]]:
    """A linear of DTensors, compiled where a backend is named: tasks that wait, the placements of gradients, and how
    far these and dx are from those of one process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = cpu_mesh()
    weight_place, bias_place, x_place = {
        "by outputs, uneven": (Shard(0), Shard(0), Replicate()),
        "by inputs": (Shard(1), Replicate(), Shard(2)),
        "by tokens": (Replicate(), Replicate(), Shard(1)),
        "by tokens, a whole gradient exists": (Replicate(), Replicate(), Shard(1)),
        "by tokens, a whole gradient exists, weight frozen before W": (Replicate(), Replicate(), Shard(1)),
        "by tokens and outputs": (Shard(0), Shard(0), Shard(1)),
        "not at all": (Replicate(), Replicate(), Replicate()),
    }[case]
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 7, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    layer = zbkern.convert(copy.deepcopy(plain))
    layer.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, [weight_place]))
    layer.bias = nn.Parameter(distribute_tensor(plain.bias.detach(), mesh, [bias_place]))
    if "exists" in case:
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
    own = distribute_tensor(x.detach(), mesh, [x_place]).requires_grad_()
    queue = zbkern.WGradQueue()
    torch._dynamo.reset()
    graph = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    plain(x).square().sum().backward()
    with queue.defer():
        graph(own).redistribute(mesh, [Replicate()]).to_local().square().sum().backward()
    waiting = queue.pending()
    if case.endswith("frozen before W"):  # its gradient stays as it was
        layer.weight.requires_grad_(False)
        plain.weight.grad.zero_()
    queue.run()
    pairs = zip((*layer.parameters(), own), (*plain.parameters(), x), strict=True)
    distances = [float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs]
    return waiting, [str(p.grad.placements[0]) for p in layer.parameters()], distances
