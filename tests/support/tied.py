"""A model with everything that makes gradients get lost: tied weights, a block used twice, a parameter of its own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from zbkern import testing


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


def microbatches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (2, 5), generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def both(model: nn.Module, twin: nn.Module, queue: zbkern.WGradQueue, count: int = 3) -> None:
    """Microbatches through both; the twin's W wait. Every other graph has edges to the weights."""
    for key, x in enumerate(microbatches(count)):
        loss_of(model, x).backward()
        with contextlib.nullcontext() if key % 2 else queue.defer(key):
            loss = loss_of(twin, x)
        with queue.defer(key):
            loss.backward()


def assert_deferred_is_the_same(model: nn.Module, twin: nn.Module, queue: zbkern.WGradQueue | None = None) -> None:
    """Some microbatches through both, then the twin's W: the gradients are equal."""
    queue = zbkern.WGradQueue() if queue is None else queue
    both(model, twin, queue)
    queue.run()
    testing.assert_same_gradients(twin, model)
