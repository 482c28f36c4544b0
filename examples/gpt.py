"""A decoder: RMSNorm, causal attention with rotary positions, SwiGLU. `chunk` cuts it for a pipeline.

Only the attention knows that a sequence may come in slices: the carry has the keys and values of the slices before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from zbkern.functional import attention
from zbkern.pipeline import Carry


@dataclass(frozen=True)
class Config:
    """Sizes of the model. The weights of layer i depend on seed + i alone, not on the rank that holds the layer."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    context: int = 1024
    vocabulary: int = 256
    tied: bool = False
    seed: int = 0


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        half = config.width // config.heads // 2
        angles = torch.outer(torch.arange(config.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        together = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))  # of all heads, or of this rank's
        q, k, v = together.unbind(-2)  # [rows, tokens, heads, head_size]
        start = 0 if carry is None else carry.start
        q, k = self._rotate(q, start), self._rotate(k, start)
        if carry is not None:
            k, v = carry.append((self, "keys"), k, dim=1), carry.append((self, "values"), v, dim=1)
        return self.out(attention(q, k, v, causal=True).flatten(2))

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = (table[start : start + x.shape[1], None] for table in (self.cos, self.sin))
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = max(64, 8 * config.width // 3 // 64 * 64)
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, hidden, bias=False)
        self.up = nn.Linear(config.width, hidden, bias=False)
        self.down = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), carry)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width)
        self.vocabulary = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.vocabulary(self.norm(x))


class Chunk(nn.Sequential):
    """Some of the model's layers, one after the other."""

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        for part in self:
            x = part(x, carry) if isinstance(part, Block) else part(x)
        return x


def layer(config: Config, index: int) -> nn.Module:
    """Layer `index` of the model: the embedding, the blocks, the head (tied: with the embedding's values)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed + index)
        if index == 0:
            embedding = nn.Embedding(config.vocabulary, config.width)
            nn.init.normal_(embedding.weight, std=0.02)
            return embedding
        if index <= config.layers:
            return Block(config)
        head = Head(config)
        if config.tied:
            head.vocabulary.load_state_dict(layer(config, 0).state_dict())
        return head


def chunk(config: Config, index: int, chunks: int) -> Chunk:
    """Chunk `index` of `chunks`: an even share of the blocks; the first has the embedding, the last the head.

    Layers keep the numbers that they have in the model, so that checkpoints do not depend on the number of chunks.
    """
    if config.layers % chunks:
        raise ValueError(
            f"chunk: layers must be a multiple of the {chunks} chunks; got {config.layers}; change --layers"
        )
    share = config.layers // chunks
    layers = list(range(1 + index * share, 1 + (index + 1) * share))
    if index == 0:
        layers.insert(0, 0)
    if index == chunks - 1:
        layers.append(config.layers + 1)
    return Chunk(OrderedDict((str(i), layer(config, i)) for i in layers))


def tie(config: Config, chunks: dict[int, Chunk], count: int) -> dict[str, Tensor]:
    """Ties the head to the embedding: one parameter where `chunks` holds both, else equal values under one name.

    Returns what `Pipeline(tied=...)` needs: the parameters whose gradients are summed over ranks.
    """
    if not config.tied:
        return {}
    first, last = chunks.get(0), chunks.get(count - 1)
    if first is not None and last is not None:
        last[-1].vocabulary.weight = first[0].weight
    shared = first[0].weight if first is not None else last[-1].vocabulary.weight if last is not None else None
    return {} if shared is None else {"embedding": shared}


def parallelize(layers: Chunk, mesh: DeviceMesh) -> None:
    """Cuts the weights over the ranks of `mesh`, attention by heads, with torch's tensor parallelism; before `tie`."""
    block = {name: ColwiseParallel() for name in ("attention.qkv", "gate", "up")}
    block |= {name: RowwiseParallel() for name in ("attention.out", "down")}
    plans = {
        nn.Embedding: RowwiseParallel(input_layouts=Replicate()),
        Block: block,
        Head: {"vocabulary": ColwiseParallel(output_layouts=Replicate())},
    }
    for part in layers:
        kind = next(kind for kind in plans if isinstance(part, kind))
        parallelize_module(part, mesh, plans[kind])


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
