"""Models of bench.split: layers, experts, a gated MLP, attention and a Llama block, ours and as others write them."""

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


def chain(width: int, kind: type[nn.Linear] = nn.Linear, layers: int = 6) -> nn.Module:
    return nn.Sequential(*[kind(width, width) for _ in range(layers)])


class OwnNorm(nn.RMSNorm):
    """A norm that adds to its weight before it multiplies, as Gemma's does: intercepted, not recognised."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * (1.0 + (self.weight - 1.0))


class Experts(nn.Module):
    """Experts in two parameters, called in a loop, as the transformers library does."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 2 * hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for index, rows in enumerate(x.chunk(len(self.down))):
            gate, up = F.linear(rows, self.gate_up[index]).chunk(2, -1)
            parts.append(F.linear(F.silu(gate) * up, self.down[index]))
        return torch.cat(parts)


class Shared(zbkern.nn.Experts):
    """Experts with fixed, uneven shares of the rows; the third has none."""

    SHARES = (0.25, 0.05, 0, 0.1, 0.3, 0.05, 0.05, 0.2)

    def counts(self, x: Tensor) -> Tensor:
        ends = (torch.tensor(self.SHARES).cumsum(0) * len(x)).round().long()
        return ends.diff(prepend=ends.new_zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.counts(x))


class Looped(Shared):
    """The same parameters in a loop over the experts."""

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for rows, first, second in zip(
            x.split(self.counts(x).tolist()), self.gate_up_proj, self.down_proj, strict=True
        ):
            gate, up = F.linear(rows, first).chunk(2, -1)
            parts.append(F.linear(F.silu(gate) * up, second))
        return torch.cat(parts)


class Library(Shared):
    """The same parameters by torch._grouped_mm."""

    def forward(self, x: Tensor) -> Tensor:
        ends = self.counts(x).cumsum(0).int()
        gate, up = torch._grouped_mm(x, self.gate_up_proj.mT, ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.down_proj.mT, ends)


class TorchMLP(zbkern.nn.MLP):
    """The same parameters in torch's operations."""

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
