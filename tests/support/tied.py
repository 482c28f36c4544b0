"""Models with everything that makes gradients get lost: tied weights, a block used twice, parameters of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Embedding, blocks, a head that is the embedding's weight, and one block used twice with another between."""

    def __init__(self, vocabulary: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = Block(width)
        self.second = Block(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.first(self.embedding(indices))
        x = self.second(x * self.scale)
        return self.head(self.first(x))


def pair(make: Callable[[], nn.Module] = Tied) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make().double()
    return model, zbkern.convert(copy.deepcopy(model))


class Energy(nn.Module):
    """Every layer that has a derivative of its derivative, one of them used twice, and a product of its own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = Block(width)
        self.norm, self.rms, self.mlp = nn.LayerNorm(width), nn.RMSNorm(width), zbkern.nn.MLP(width, 8)
        self.mixing = nn.Conv1d(1, 1, 3, padding=1)
        self.product = Product(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.product(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return self.last(self.mlp(self.rms(torch.tanh(self.norm(self.mixing(x.unsqueeze(1)).squeeze(1))))))


class Product(nn.Module):
    """With a parameter of its own, which interception finds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def microbatch(kind: type[nn.Module], key: int) -> Tensor:
    """Tokens of a Tied, numbers of an Energy."""
    generator = torch.Generator().manual_seed(key)
    if kind is Tied:
        return torch.randint(11, (2, 5), generator=generator)
    return torch.randn(5, 6, dtype=torch.float64, generator=generator)
