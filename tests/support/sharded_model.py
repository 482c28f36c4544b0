"""A small decoder under tensor or sequence parallelism for tests, and how far its gradients are from one process's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
