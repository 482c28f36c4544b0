"""Modules that mix tokens in every way that comes to mind, right or wrong in slices and packs, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbkern
from zbkern.pipeline import add_loss

WIDTH = 8


class Mixer(nn.Module):
    """What all have: a linear before and after, and what a call knows of its sequence."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.chance = rng.choice([1.0, 0.1, 3.0]), rng.random()
        self.width = rng.choice([2, 3, 5])

    def forward(self, x: Tensor, **known: Any) -> Tensor:
        return self.outer(self.mix(torch.tanh(self.inner(x)), **known)) * self.scale

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        return x


class Mean(Mixer):
    def mix(self, x: Tensor, **_: Any) -> Tensor:
        return x - x.mean(1, keepdim=True)


class MeanBefore(Mixer):
    def mix(self, x: Tensor, **_: Any) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class SumBefore(Mixer):
    """Right in slices where it hands its state on, and the gradient with it."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        sums = x.cumsum(1)
        if carry is not None and self.chance < 0.8:
            before = carry.state((id(self), "sum"))
            sums = sums if before is None else sums + before
            kept = sums[:, -1:]
            carry.keep((id(self), "sum"), kept.detach() if self.chance < 0.3 else kept)
        return sums / 8


class Largest(Mixer):
    def mix(self, x: Tensor, **_: Any) -> Tensor:
        return x.cummax(1).values if self.chance < 0.5 else x.logcumsumexp(1)


class Shift(Mixer):
    """The token before, from the carry or not."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        last = None
        if carry is not None and self.chance < 0.6:
            last = carry.state((id(self), "last"))
            carry.keep((id(self), "last"), x[:, -1:])
        before = torch.zeros_like(x[:, :1]) if last is None else last
        return x + torch.cat([before, x[:, :-1]], 1)


class Norm(Mixer):
    def mix(self, x: Tensor, **_: Any) -> Tensor:
        if self.chance < 0.3:
            return F.normalize(x, dim=1)
        if self.chance < 0.6:
            return F.layer_norm(x.mT, x.shape[1:2]).mT
        return F.instance_norm(x.mT).mT if self.chance < 0.8 else F.layer_norm(x, (WIDTH,))


class Convolution(Mixer):
    """Of a few tokens before."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.weights = nn.Parameter(torch.randn(WIDTH, 1, self.width))

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        tokens, before = x.mT, None
        if carry is not None and self.chance < 0.6:
            before = carry.state((id(self), "tokens"))
        seen = F.pad(tokens, (self.width - 1, 0)) if before is None else torch.cat([before, tokens], 2)
        if carry is not None and self.chance < 0.6:
            carry.keep((id(self), "tokens"), seen[..., -(self.width - 1) :])
        return F.conv1d(seen, self.weights, groups=WIDTH).mT


class Attention(Mixer):
    """Causal, or not; in a window, or not; with the carry, or without; of a pack's sequences, or of all."""

    def mix(self, x: Tensor, carry: Any = None, cu_seqlens: Any = None, mask: Any = None, **_: Any) -> Tensor:
        keys, count = x, x.shape[1]
        if carry is not None and self.chance < 0.7:
            keys = carry.append((id(self), "keys"), x.detach() if self.chance < 0.1 else x, 1)
        start = keys.shape[1] - count
        places = torch.arange(start, start + count)[:, None], torch.arange(start + count)
        seen = places[0] >= places[1] if self.chance > 0.05 else torch.ones(count, start + count, dtype=torch.bool)
        if self.width == 3:
            seen = seen & (places[0] - places[1] < self.width)
        if cu_seqlens is not None and self.chance > 0.2:
            numbers = [torch.searchsorted(cu_seqlens, place, right=True) for place in places]
            seen = seen & (numbers[0] == numbers[1])
        seen = seen.expand(len(x), -1, -1)
        if mask is not None and self.chance > 0.3:
            if carry is not None and self.chance < 0.7:
                mask = carry.append((id(self), "mask"), mask, 1)
            own = places[0] == places[1]
            seen = seen & mask[:, None].bool() | own if mask.shape[1] == seen.shape[2] else seen
        return F.scaled_dot_product_attention(x, keys, keys, seen)


class Positions(Mixer):
    """Places of tokens, which go on from slice to slice or begin anew."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.places = nn.Embedding(64, WIDTH)

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        start = carry.start if carry is not None and self.chance < 0.5 else 0
        return x + self.places(torch.arange(start, start + x.shape[1]))


class Drops(Mixer):
    """Dropout by token, or one mask for all tokens; layers that are left out."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        if not self.training:
            return x
        if self.chance < 0.3:
            return x * F.dropout(torch.ones_like(x[:, :1]), 0.5)
        if self.chance < 0.5:
            return x * 0 if random.random() < 0.5 else x
        if self.chance < 0.9:
            return x * (torch.rand(()) < 0.5) if self.chance < 0.7 else x + torch.randn_like(x[:, :1])
        return F.dropout(x, 0.3)


class Counted(Mixer):
    """A buffer, or an attribute, that every forward changes, and that the next one reads or not."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls, self.last = 0, torch.zeros(WIDTH)

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        if self.chance < 0.3:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
            return x - self.mean if self.chance < 0.15 else x
        self.calls += 1
        if self.chance < 0.5:
            return x * (1 + 0.1 * self.calls)
        before, self.last = self.last, x.detach().mean((0, 1))
        return x + before if self.chance < 0.8 else x


class Gradients(Mixer):
    """The same values, with a gradient that is of all tokens: of an activation, or of a weight."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        if self.chance < 0.4:
            self.inner.weight.register_hook(lambda gradient: gradient / gradient.norm().clamp_min(1e-9))
        elif self.chance < 0.6:
            self.inner.weight.register_hook(lambda gradient: gradient * 0.5)

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        if self.chance > 0.6 and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-9))
        return x


class Adds(Mixer):
    """A loss of its own: a mean over tokens, or something else."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        value = x.square().mean() if self.chance < 0.5 else x.mean((0, 1)).square().sum()
        return add_loss(x, 0.1 * value)


class Hooked(Mixer):
    """What a forward hook does to what is returned."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        whole = self.chance < 0.5
        self.inner.register_forward_hook(lambda part, inputs, y: y - y.mean(1, keepdim=True) if whole else y * 2)


class Recurrent(Mixer):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        known = carry is not None and self.chance < 0.6
        y, state = self.cell(x, carry.state((id(self), "state")) if known else None)
        if known:
            carry.keep((id(self), "state"), state)
        return y


class Blocks(Mixer):
    """Means over tokens in blocks, from the sequence's or the slice's beginning."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
        means = padded.unflatten(1, (-1, 4)).mean(2, keepdim=True).expand(-1, -1, 4, -1).flatten(1, 2)
        return x + means[:, : x.shape[1]]


class Reads(Mixer):
    """Where there is padding, or not."""

    def mix(self, x: Tensor, mask: Any = None, carry: Any = None, **_: Any) -> Tensor:
        if mask is None:
            return x
        places = mask.cumsum(1)
        if carry is not None and self.chance < 0.5:
            before = carry.state((id(self), "tokens"))
            places = places if before is None else places + before
            carry.keep((id(self), "tokens"), places[:, -1:])
        return x * (1 + 0.1 * places[..., None]) if self.chance < 0.8 else x


class Late(Mixer):
    """Right for short sequences: what begins beyond some tokens."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        return x if x.shape[1] < 10 else x - 0.5 * x[:, :1]


KINDS: list[Callable[[random.Random], Mixer]] = [
    *(Mixer, Mean, MeanBefore, SumBefore, Largest, Shift, Norm, Convolution, Attention, Attention, Positions, Drops),
    *(Counted, Gradients, Adds, Hooked, Blocks, Reads, Late, Recurrent),
]


class Mixers(nn.Module):
    """One to three of these in a chunk, of token numbers, or of what another chunk has returned."""

    def __init__(self, rng: random.Random, embeds: bool) -> None:
        super().__init__()
        options = rng.choice([{}, {}, {}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
        self.embedding = nn.Embedding(13, WIDTH, **options) if embeds else None
        self.parts = nn.ModuleList(rng.choice(KINDS)(rng) for _ in range(rng.choice([1, 1, 2, 3])))

    def forward(self, x: Tensor, attention_mask: Any = None, cu_seqlens: Any = None, carry: Any = None) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for part in self.parts:
            x = x + part(x, mask=attention_mask, cu_seqlens=cu_seqlens, carry=carry)
        return x

    @property
    def draws(self) -> str:
        """Whether random numbers are drawn: none, by token, or once for all tokens."""
        chances = [part.chance for part in self.parts if isinstance(part, Drops)]
        return "none" if not chances else "by token" if min(chances) >= 0.9 else "once"


def converted(module: nn.Module, rng: random.Random) -> nn.Module:
    return zbkern.convert(module) if rng.random() < 0.5 else module
