"""Modules that mix tokens in every way that comes to mind, right or wrong in slices and packs, drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
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
    """Right for short sequences: what begins beyond some tokens, in a window or from the beginning."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.limit = rng.choice([7, 10, 14, 22, 28, 40, 60])

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        if self.chance < 0.4:
            return x if x.shape[1] < self.limit else x - 0.5 * x[:, :1]
        keys = x if carry is None else carry.append((id(self), "keys"), x, 1)
        count, start = x.shape[1], keys.shape[1] - x.shape[1]
        places = torch.arange(start, start + count)[:, None], torch.arange(start + count)
        own = places[0] if self.chance < 0.7 else places[0] - start  # in the slice: other keys beyond the window
        seen = (places[0] >= places[1]) & (own - places[1] < self.limit)
        return F.scaled_dot_product_attention(x, keys, keys, seen)


class Rows(Mixer):
    """Mixes rows of a batch, and no tokens, or both."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        if self.chance < 0.5:
            return x + x.roll(1, 0)
        return x - x.mean(0, keepdim=True) if self.chance < 0.8 else x.flatten(0, 1).roll(1, 0).view_as(x)


class Remembers(Mixer):
    """States between calls: in a buffer, a list or the instance, read by the next call or not."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.register_buffer("memory", torch.zeros(1, 4, WIDTH))
        self.past: list[Tensor] = []

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        if self.chance < 0.5:
            keys = torch.cat([self.memory.expand(len(x), -1, -1), x], 1) if self.chance < 0.25 else x
            seen = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - x.shape[1])
            y = F.scaled_dot_product_attention(x, keys, keys, seen)
            self.memory = torch.cat([self.memory, x.detach()[:1]], 1)[:, -4:]
            return y
        y = x + sum(self.past[-2:]) if self.chance < 0.8 else x
        self.past.append(x.detach().mean((0, 1)))
        return y


class Strided(Mixer):
    """A convolution with a stride, and its values for the tokens that it has seen."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.strided = nn.Conv1d(WIDTH, WIDTH, self.width, stride=self.width)

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        seen = self.strided(F.pad(x.mT, (self.width - 1, 0)))
        return seen.repeat_interleave(self.width, 2)[..., : x.shape[1]].mT


class Chooses(Mixer):
    """Experts with a capacity, which take the best tokens or the first; sorted tokens, medians and quantiles."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        scores, count = x.sum(2).sigmoid(), x.shape[1]
        if self.chance < 0.3:
            best = scores.topk(-(-count // self.width), 1).indices
            return x * torch.zeros_like(scores).scatter(1, best, 1.0)[..., None]
        if self.chance < 0.5:
            chosen = scores > 0.5
            return x * (chosen & (chosen.cumsum(1) <= -(-count // self.width)))[..., None]
        if self.chance < 0.6:
            return x.sort(1).values
        if self.chance < 0.7:
            return x - x.median(1, keepdim=True).values
        return x * (scores > 0.5)[..., None] if self.chance < 0.9 else x * scores.softmax(1)[..., None]


class Limits(Mixer):
    """What chooses tokens by their scores, one by one or up to a limit: experts with a capacity, budgets, thresholds
    and orders of the row. Some compute each token by itself."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.router = nn.Linear(WIDTH, rng.choice([2, 4, 8]))
        self.threshold, self.share = rng.uniform(0.05, 0.95), rng.choice([0.1, 0.2, 0.25, 0.34, 0.5, 0.7, 0.9])
        self.way = rng.randrange(len(WAYS))

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        return x * WAYS[self.way](self, x, (3 * self.router(x)).softmax(-1))

    def limit(self, count: int) -> int:
        return math.ceil(count * self.share)

    def passes(self, scores: Tensor) -> Tensor:
        """[rows, tokens]: those of a high first score."""
        return scores[..., 0] > self.threshold


def _capacity(self: Limits, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """Of experts: the first tokens of a row, of all rows, or of all in the order of tokens, that choose each."""
    if self.chance < 0.4:
        return chosen * (chosen.cumsum(1) <= self.limit(x.shape[1]))
    flat = (chosen.mT if self.chance < 0.7 else chosen).flatten(0, 1) if self.chance > 0.5 else chosen.flatten(0, 1)
    if flat.shape[1] != scores.shape[2]:
        flat = chosen.transpose(0, 1).flatten(0, 1)
        kept = flat * (flat.cumsum(0) <= self.limit(len(flat)))
        return kept.unflatten(0, (x.shape[1], len(x))).transpose(0, 1)
    return (flat * (flat.cumsum(0) <= self.limit(len(flat)))).view_as(chosen)


def _by_score(self: Limits, x: Tensor, scores: Tensor) -> Tensor:
    """An expert's best tokens first."""
    chosen = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(x)
    order = scores.amax(-1).argsort(1, descending=True)
    sorted_ = chosen.gather(1, order[..., None].expand_as(chosen))
    kept = sorted_ * (sorted_.cumsum(1) <= self.limit(x.shape[1]))
    return (torch.zeros_like(kept).scatter(1, order[..., None].expand_as(kept), kept) * scores).sum(-1, keepdim=True)


def _first_that_pass(self: Limits, x: Tensor, scores: Tensor) -> Tensor:
    kept = torch.zeros_like(scores[..., 0])
    for row, passes in enumerate(self.passes(scores)):
        kept[row, passes.nonzero()[:, 0][: self.limit(x.shape[1])]] = 1
    return kept[..., None]


def _first_of_experts(self: Limits, x: Tensor, scores: Tensor) -> Tensor:
    flat = scores.flatten(0, 1)
    kept, best = torch.zeros_like(flat[:, :1]), flat.argmax(1)
    for expert in range(flat.shape[1]):
        rows = torch.where(best == expert)[0][: self.limit(len(flat))]
        kept = kept.index_add(0, rows, flat[rows, expert, None])
    return kept.view(*scores.shape[:2], 1)


def _top_two(self: Limits, scores: Tensor) -> Tensor:
    """[rows, tokens, experts]: the weights of the two that each token takes."""
    best = scores.topk(2, -1)
    return torch.zeros_like(scores).scatter(-1, best.indices, best.values)


def _crowded(self: Limits, x: Tensor, scores: Tensor, many: Tensor) -> Tensor:
    return scores[..., :1] * (0.5 if bool(many) else 1.0)


WAYS: list[Callable[[Limits, Tensor, Tensor], Tensor]] = [
    # each token by itself
    lambda self, x, s: self.passes(s)[..., None] * s[..., :1],
    lambda self, x, s: s.gather(-1, s.argmax(-1, keepdim=True)),
    lambda self, x, s: _top_two(self, s).amax(-1, keepdim=True),
    lambda self, x, s: s.masked_fill(s < s.amax(-1, keepdim=True) * self.share, 0).sum(-1, keepdim=True),
    # limits that the data may reach
    lambda self, x, s: (self.passes(s) & (self.passes(s).cumsum(1) <= self.limit(x.shape[1])))[..., None],
    lambda self, x, s: _capacity(self, x, s, F.one_hot(s.argmax(-1), s.shape[-1]).to(x)).amax(-1, keepdim=True),
    lambda self, x, s: (_capacity(self, x, s, (s > self.threshold).to(x)) * s).amax(-1, keepdim=True),
    lambda self, x, s: (_capacity(self, x, s, (_top_two(self, s) > 0).to(x)) * s).sum(-1, keepdim=True),
    _by_score,
    _first_that_pass,
    _first_of_experts,
    lambda self, x, s: _crowded(self, x, s, self.passes(s).sum(1).max() > self.limit(x.shape[1])),
    lambda self, x, s: _crowded(self, x, s, (self.passes(s).cumsum(1) > self.limit(x.shape[1])).any()),
    lambda self, x, s: _crowded(self, x, s, self.passes(s).any()),
    lambda self, x, s: _crowded(self, x, s, ~self.passes(s).all()),
    lambda self, x, s: ((s[..., 0] * self.passes(s)).cumsum(1) < self.limit(x.shape[1]))[..., None] * s[..., :1],
    lambda self, x, s: (
        (s[..., 0] * self.passes(s)).topk(self.limit(x.shape[1]), 1).values.amin(1)[:, None, None] + s[..., :1]
    ),
    lambda self, x, s: (self.limit(x.shape[1]) - s[..., 0].cumsum(1)).clamp(0, 1)[..., None],
    lambda self, x, s: (self.limit(x.shape[1]) - self.passes(s).to(x).cumsum(1)).clamp(0, 1)[..., None],
    # orders and sums of the row
    lambda self, x, s: (s >= s.quantile(self.share, 1, keepdim=True)).to(x).amax(-1, keepdim=True),
    lambda self, x, s: (s[..., 0] >= s[..., 0].kthvalue(self.limit(x.shape[1]), 1, keepdim=True).values)[..., None],
    lambda self, x, s: (
        torch.zeros_like(s).scatter(1, s.topk(self.limit(x.shape[1]), 1).indices, 1.0).sum(-1, keepdim=True)
    ),
    lambda self, x, s: s[..., :1] > s[..., :1].mean(1, keepdim=True),
    lambda self, x, s: s.gather(1, s.argmax(1, keepdim=True)).amax(-1, keepdim=True) + s[..., :1],
    lambda self, x, s: s[..., :1] * (1 + self.passes(s).to(x).mean(1)[:, None, None]),
    lambda self, x, s: s[..., :1] / self.passes(s).sum(1).clamp_min(1)[:, None, None],
    lambda self, x, s: (s[..., :1].argsort(1).argsort(1) < self.limit(x.shape[1])) * s[..., :1],
    lambda self, x, s: (s[..., 0].cummax(1).indices == torch.arange(x.shape[1]))[..., None] * s[..., :1],
]


class Statistics(Mixer):
    """Means and variances of the tokens up to each one, handed on or not."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        numbers = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None].expand(len(x), -1, 1)
        sums = torch.cat([x, x.square(), torch.ones_like(numbers)], 2).cumsum(1)
        if carry is not None and self.chance < 0.8:
            before = carry.state((id(self), "sums"))
            sums = sums if before is None else sums + (before[..., :-1] if self.chance < 0.2 else before)
            carry.keep((id(self), "sums"), sums[:, -1:])
        one, two, count = sums.split([WIDTH, WIDTH, 1], 2)
        mean = one / count
        return (x - mean) * (two / count - mean.square()).clamp_min(0).add(1.0).rsqrt()


class Lengths(Mixer):
    """What depends on how many tokens a row has, by its mask or its shape."""

    def mix(self, x: Tensor, mask: Any = None, carry: Any = None, **_: Any) -> Tensor:
        if self.chance < 0.2:
            return x * math.log(1 + x.shape[1])
        if self.chance < 0.4:
            return x / (1 + (x.shape[1] if carry is None else carry.end))
        if mask is None:
            return x
        count = mask.sum(1)[:, None]
        if self.chance < 0.7:
            return torch.where((torch.arange(x.shape[1]) < count - 1)[..., None], x, 2 * x)
        return torch.where(mask[..., None].bool(), x, 0 * x) if self.chance < 0.9 else x / count[..., None].clamp_min(1)


class Nested(Mixer):
    """Hooks within hooks: before a forward, after it, on gradients; of a part, of what is around it."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.around = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Identity())
        wrong = self.chance < 0.4
        self.around[0].register_forward_hook(lambda _, given, y: y + given[0] * 0.5)
        self.around[0][0].register_forward_pre_hook(lambda _, given: (given[0] * 2,))
        if self.chance < 0.2:
            self.around.register_forward_pre_hook(lambda _, given: (given[0] - given[0].mean(1, keepdim=True),))
        elif wrong:
            self.around[0][1].register_full_backward_hook(lambda _, given, taken: (given[0] / (1 + given[0].norm()),))
        elif self.chance < 0.7:
            self.around[0][1].register_full_backward_hook(lambda _, given, taken: (given[0] * 0.5,))

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        return self.around(x)


class Whole(Mixer):
    """What takes the sequence at once: norms over it, transforms, products, differences, its first or last token."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        ways: list[Callable[[Tensor], Tensor]] = [
            lambda x: F.layer_norm(x, x.shape[1:]),
            lambda x: torch.fft.fft(x, dim=1).real / 8,
            lambda x: x.cumprod(1),
            lambda x: x.softmax(1),
            lambda x: torch.cat([x[:, :1], x.diff(dim=1)], 1),
            lambda x: x + x[:, :1],
            lambda x: x + x[:, -1:].detach(),
            lambda x: x * x.detach().norm(),
            lambda x: x + x.argmax(1, keepdim=True) * 0.01,
        ]
        return ways[int(self.chance * len(ways))](x)


class _Scaled(torch.autograd.Function):
    """Values as they are; a gradient by its largest number, or by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: bool) -> Tensor:
        ctx.largest = largest
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient / (1 + gradient.abs().max()) if ctx.largest else gradient * 0.5), None


class Scales(Mixer):
    """A gradient of its own, of an activation or of a weight."""

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        largest = self.chance < 0.4
        if self.width == 2:
            return _Scaled.apply(x, largest)
        return F.linear(x, _Scaled.apply(self.outer.weight, largest))


class Parametrized(Mixer):
    """Weights that are computed in every forward: by a norm, or by a power iteration that goes on from the last."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        made = nn.utils.parametrizations.spectral_norm if self.chance < 0.5 else nn.utils.parametrizations.weight_norm
        made(self.outer)


KINDS: list[Callable[[random.Random], Mixer]] = [
    *(Mixer, Mean, MeanBefore, SumBefore, Largest, Shift, Norm, Convolution, Attention, Attention, Positions, Drops),
    *(Counted, Gradients, Adds, Hooked, Blocks, Reads, Late, Late, Recurrent, Rows, Remembers, Strided, Chooses),
    *(Statistics, Lengths, Nested, Whole, Scales, Parametrized),
]


class Mixers(nn.Module):
    """One to three of these in a chunk, of token numbers, or of what another chunk has returned."""

    def __init__(self, rng: random.Random, embeds: bool, kinds: Sequence[Callable[..., Mixer]] = KINDS) -> None:
        super().__init__()
        options = rng.choice([{}, {}, {}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
        self.embedding = nn.Embedding(13, WIDTH, **options) if embeds else None
        self.parts = nn.ModuleList(rng.choice(kinds)(rng) for _ in range(rng.choice([1, 1, 2, 3])))

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
