"""Models of bench.split: layers, a gated MLP, attention and a Llama block, ours and as others write them."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern


class OwnLinear(nn.Linear):
    """A layer that `convert` does not know: its forward is intercepted."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def chain(width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])


class OwnNorm(nn.RMSNorm):
    """A norm that adds to its weight before it multiplies, as Gemma's does: intercepted, not recognised."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * (1.0 + (self.weight - 1.0))


class TorchMLP(zbkern.nn.MLP):
    """A gated MLP in torch's operations."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def attention_block(width: int, heads: int) -> nn.Module:
    """torch's linears around the same attention core: `convert` makes ours of it."""
    return zbkern.restore(zbkern.nn.Attention(width, heads, causal=True))


class LlamaBlock(nn.Module):
    """One layer of a Llama: pre-norm attention with grouped queries and rotary positions, pre-norm SwiGLU."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int, mlp: type[zbkern.nn.MLP]) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = zbkern.nn.RMSNorm(width), zbkern.nn.RMSNorm(width)
        self.attention = zbkern.nn.Attention(width, heads, key_heads, causal=True)
        self.mlp = mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotary=rotary_angles(x.shape[1], self.attention.head_dim, x.dtype))
        return x + self.mlp(self.mlp_norm(x))


@functools.cache
def rotary_angles(tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(size // 2) / (size / 2))
    return angles.cos().to(dtype), angles.sin().to(dtype)


LLAMA = {"width": 512, "heads": 8, "key_heads": 2, "hidden": 1792}
"""Of Llama-3 8B, an eighth in every direction: 8 heads of 64, 2 of them for keys and values."""


def not_of_attention(name: str, module: nn.Module) -> bool:
    """For convert(defer=...): W of attention's projections runs in B. Of all W they hold most bytes for their flops."""
    return not isinstance(module, zbkern.nn.Attention)
