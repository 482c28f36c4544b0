"""What a probe of slices is made of: modules that are right in slices around another one, and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbkern
from zbkern.pipeline.runtime.slices.carry import Carry

WIDTH, TOKENS, ROWS = 8, 48, 2


class Unprobed:
    """In the place of `Probes`, which lets everything through."""

    def begin(self) -> None:
        pass

    def check(self, run: Any, inputs: Any, side: Any) -> None:
        pass

    def explain(self, error: Exception, run: Any, inputs: Any, side: Any) -> None:
        pass


class Causal(nn.Module):
    """Attention by torch, which gets its earlier keys and values from the carry."""

    def __init__(self, hands_on: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.out, self.hands_on, self.dropout = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            hands_on,
            dropout,
        )

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        q, k, v = self.inner(x).unflatten(2, (2, -1)).transpose(1, 2).chunk(3, -1)
        if carry is not None and self.hands_on:
            k, v = carry.append((id(self), "k"), k, 2), carry.append((id(self), "v"), v, 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, seen, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class Alone(nn.Module):
    """What makes something of the tokens that it is given, by itself."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Chunk(nn.Module):
    """A right layer before and after another one; keywords: it takes the carry by these alone."""

    def __init__(self, part: nn.Module, takes: bool = False) -> None:
        super().__init__()
        self.before, self.part, self.after, self.takes = Causal(), part, nn.Linear(WIDTH, WIDTH), takes

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        x = x + self.before(x, carry=keywords["carry"])
        return self.after(x + self.part(x, **(keywords if self.takes else {})))


def chunk_with(part: nn.Module, dtype: torch.dtype) -> nn.Module:
    return zbkern.convert(Chunk(part, isinstance(part, Causal)).to(dtype))


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(2, ROWS, TOKENS, WIDTH).to(dtype).unbind()
