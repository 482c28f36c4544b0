"""What real models mix tokens by, drawn at random: as a model has it, and in ways that slices or packs get wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.token_mixers import WIDTH, Mixer


def state_of(carry: Any, key: object, is_handed_on: bool) -> Any:
    return carry.state(key) if carry is not None and is_handed_on else None


class Scan(Mixer):
    """Gated linear recurrences, as of Mamba and RWKV: h = a h + b. Handed on, without its gradient, or begun anew; from
    chunks of a few tokens, at tokens that say so, or with a state that is rounded."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.gate, self.resets = nn.Linear(WIDTH, WIDTH), rng.random() < 0.2

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        gates, is_handed_on = self.gate(x).sigmoid(), self.chance < 0.7
        if self.resets:  # as at separators of documents
            gates = gates * (x[..., :1] > -0.5)
        state = state_of(carry, (id(self), "state"), is_handed_on)
        state, found = torch.zeros_like(x[:, 0]) if state is None else state, []
        for token in range(x.shape[1]):
            if 0.5 < self.chance < 0.6 and token % 8 == 0:
                state = 0.5 * state  # of the slice's places
            state = gates[:, token] * state + (1 - gates[:, token]) * x[:, token]
            found.append(state)
        if carry is not None and is_handed_on:
            kept = state.detach() if self.chance < 0.1 else state.float().to(x) if self.chance < 0.15 else state
            carry.keep((id(self), "state"), kept)
        return torch.stack(found, 1)


class Stabilised(Mixer):
    """Weighted means in exponential space, as of RWKV and xLSTM: numerator, denominator, and the largest exponent so
    far, of which one may be forgotten."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        keys = 3 * x.roll(1, -1) - 0.1 * (torch.arange(x.shape[1])[:, None] if self.chance < 0.1 else 0)
        states = [state_of(carry, (id(self), part), self.chance < 0.7) for part in range(3)]
        zeros = torch.zeros_like(x[:, 0])
        over, under, most = (
            zeros - (30 if part == 2 else 0) if state is None else state for part, state in enumerate(states)
        )
        if 0.6 < self.chance < 0.7 and carry is not None:
            most = zeros + 0 * most
        found = []
        for token in range(x.shape[1]):
            larger = torch.maximum(most, keys[:, token])
            before, now = (most - larger).exp(), (keys[:, token] - larger).exp()
            over, under, most = over * before + x[:, token] * now, under * before + now, larger
            found.append(over / under)
        if carry is not None and self.chance < 0.7:
            for part, state in enumerate((over, under, most)):
                carry.keep((id(self), part), state)
        return torch.stack(found, 1)


class Linear(Mixer):
    """Linear attention: sums of keys times values, and of keys, that are handed on, or one of them; the delta rule."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        keys, which = F.softplus(x), self.chance * 5
        handed = [which < 3, which < 2]
        if which > 4:
            return self._by_delta_rule(x, carry)
        sums = [(keys[..., None] * x[..., None, :]).cumsum(1), keys.cumsum(1)]
        for part, total in enumerate(sums):
            if carry is not None and handed[part]:
                before = carry.state((id(self), part))
                sums[part] = total if before is None else total + before
                carry.keep((id(self), part), sums[part][:, -1:])
        return torch.einsum("btk,btkv->btv", x.sigmoid(), sums[0]) / (1 + sums[1].sum(-1, keepdim=True))

    def _by_delta_rule(self, x: Tensor, carry: Any) -> Tensor:
        keys, is_handed_on, found = F.normalize(x, dim=-1), self.chance < 0.9, []
        state = state_of(carry, (id(self), "state"), is_handed_on)
        state = x.new_zeros(len(x), WIDTH, WIDTH) if state is None else state
        for token in range(x.shape[1]):
            key = keys[:, token, :, None]
            state = state + key @ (x[:, token, None] - key.mT @ state)
            found.append((x[:, token, None] @ state)[:, 0])
        if carry is not None and is_handed_on:
            carry.keep((id(self), "state"), state)
        return torch.stack(found, 1)


class LongConvolution(Mixer):
    """As long as the sequence, by a Fourier transform, as of Hyena: of all tokens before, of the slice's, around."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.filter = nn.Parameter(torch.randn(64, WIDTH) * torch.linspace(0, -4, 64).exp()[:, None])

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        seen = x if carry is None or self.chance > 0.6 else carry.append((id(self), "tokens"), x, 1)
        count = seen.shape[1]
        size = count if self.chance > 0.9 else 2 * count
        spectrum = torch.fft.rfft(seen, size, 1) * torch.fft.rfft(self.filter[:count], size, 0)
        return torch.fft.irfft(spectrum, size, 1)[:, count - x.shape[1] : count]


class Rotary(Mixer):
    """Rotated queries and keys: at places that go on or begin anew, those of the mask, at frequencies of the length."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.limit = rng.choice([7, 14, 28, 40, 60])

    def mix(self, x: Tensor, carry: Any = None, mask: Any = None, **_: Any) -> Tensor:
        start = carry.start if carry is not None else 0
        places = torch.arange(start, start + x.shape[1])[None]
        if self.chance < 0.1:
            places = places - start
        elif self.chance < 0.2 and mask is not None:
            places = mask.cumsum(1) - 1
        end, base = start + x.shape[1], 100.0
        if self.chance > 0.9:  # dynamic: of the tokens so far
            base = base * max(1, end / self.limit)
        elif self.chance > 0.8:  # of long sequences
            base = 1000.0 if end > self.limit else base
        elif self.chance > 0.7 and carry is not None and carry.length is not None:
            base = 1000.0 if carry.length > self.limit else base
        elif self.chance > 0.7:
            base = 1000.0 if end > self.limit else base
        keys = x if 0.2 < self.chance < 0.3 else self._rotated(x, places, base)
        values = x
        if carry is not None:
            keys, values = (
                carry.append((id(self), name), each, 1) for name, each in (("keys", keys), ("values", values))
            )
        if 0.2 < self.chance < 0.3:  # rotated as they are read
            keys = self._rotated(keys, torch.arange(keys.shape[1])[None], base)
        queries = self._rotated(x, places, base)
        seen = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - x.shape[1])
        return F.scaled_dot_product_attention(queries, keys, values, seen)

    @staticmethod
    def _rotated(x: Tensor, places: Tensor, base: float) -> Tensor:
        frequencies = base ** -(torch.arange(WIDTH // 2, dtype=x.dtype) / (WIDTH // 2))
        angles = places[..., None] * frequencies
        one, two = x.chunk(2, -1)
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)


class Biased(Mixer):
    """Attention that is biased by distance, has sinks, or a temperature by place: of the sequence or the slice."""

    def mix(self, x: Tensor, carry: Any = None, cu_seqlens: Any = None, **_: Any) -> Tensor:
        keys = x if carry is None or self.chance > 0.9 else carry.append((id(self), "keys"), x, 1)
        count, total = x.shape[1], keys.shape[1]
        places, others = torch.arange(total - count, total)[:, None], torch.arange(total)
        seen = places >= others
        if cu_seqlens is not None and self.chance > 0.1:
            one, other = (torch.searchsorted(cu_seqlens, each, right=True) for each in (places, others))
            seen = seen & (one == other)
        distance = (places - others if self.chance > 0.2 else places - (total - count) - others).to(x)
        scores = x @ keys.mT / WIDTH**0.5
        if self.chance < 0.4:
            scores = scores - 0.3 * distance
        elif self.chance < 0.6:  # the first tokens, beside a window
            first = others < 2 if self.chance < 0.5 else (others >= total - count) & (others < total - count + 2)
            seen = seen & (first | (places - others < self.width))
        elif self.chance < 0.8:  # sharper for later tokens
            own = places if self.chance < 0.7 else places - (total - count)
            scores = scores * (1 + own.to(x)).log1p()
        scores = scores.masked_fill(~seen, -math.inf)
        if self.chance > 0.8:
            sink = scores.new_zeros(len(x), count, 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ keys
        return scores.softmax(-1) @ keys


class Shared(Mixer):
    """Two layers of attention of which the second reads the keys of the first: all of them, or those of the slice."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        own, keys = x, x
        if carry is not None:
            keys = carry.append((id(self), "keys"), x, 1)
        y = self._attended(x, keys)
        others = keys if self.chance < 0.6 else own
        return self._attended(y, others.detach() if self.chance < 0.1 else others)

    @staticmethod
    def _attended(x: Tensor, keys: Tensor) -> Tensor:
        seen = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - x.shape[1])
        return F.scaled_dot_product_attention(x, keys, keys, seen)


class Chunked(Mixer):
    """Attention within chunks of the sequence, or to means of chunks before, or to the best few of these."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        size = 2 * self.width
        keys = x if carry is None else carry.append((id(self), "keys"), x, 1)
        count, total = x.shape[1], keys.shape[1]
        places, others = torch.arange(total - count, total)[:, None], torch.arange(total)
        if self.chance < 0.5:
            first = 0 if self.chance < 0.3 else total - count  # of the chunks
            seen = ((places - first) // size == (others - first) // size) & (places >= others)
            return F.scaled_dot_product_attention(x, keys, keys, seen)
        whole = total // size
        if not whole:
            return x + 0 * keys[:, :1]  # what was appended has a gradient
        means = keys[:, : whole * size].unflatten(1, (whole, size)).mean(2)
        seen = torch.arange(whole) < places // size
        scores = (x @ means.mT).masked_fill(~seen, -1e9)
        if self.chance > 0.7:
            best = scores.topk(min(2, whole), -1).indices
            scores = torch.full_like(scores, -1e9).scatter(-1, best, scores.gather(-1, best))
        weights = scores.softmax(-1) * seen.any(-1, keepdim=True)
        if self.chance > 0.9:
            weights = weights * (means.norm(dim=-1) > 0.3 * means.norm(dim=-1).amax(1, keepdim=True))[:, None]
        return x + weights @ means


class Hard(Mixer):
    """Copies from the key of the highest score."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        keys = x if carry is None or self.chance > 0.6 else carry.append((id(self), "keys"), x, 1)
        seen = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - x.shape[1])
        scores = (x @ keys.mT).masked_fill(~seen, -math.inf)
        best = scores.argmax(-1) if self.chance < 0.8 else scores.topk(1, -1).indices[..., 0]
        copied = keys.gather(1, best[..., None].expand(-1, -1, WIDTH))
        return copied * scores.gather(-1, best[..., None]).sigmoid()


class Balanced(Mixer):
    """Experts with a bias that balances their loads: written in every forward, at the end of it, or only counted."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.router = nn.Linear(WIDTH, 4)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("loads", torch.zeros(4, dtype=torch.long if self.chance < 0.2 else torch.float64))

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        scores = self.router(x).sigmoid()
        if self.chance > 0.8 and self.training:
            self._balance((scores > 0.5).sum((0, 1)))
        best = (scores + self.bias).topk(2, -1).indices
        loads = F.one_hot(best, 4).sum((0, 1, 2))
        if self.chance < 0.4:
            self.loads += loads
        elif self.chance < 0.6 and self.training:
            self._balance(loads)
        weights = scores.gather(-1, best)
        if 0.6 < self.chance < 0.8:  # of what all experts have: a fraction of the row's tokens
            weights = weights * (loads / loads.sum())[best]
        return x * (weights * (1 + best)).sum(-1, keepdim=True)

    def _balance(self, loads: Tensor) -> None:
        self.bias += 0.1 * (loads.double().mean() - loads).sign()


class Quantized(Mixer):
    """Rounded to a few steps, by the largest number of each token, of the row, or of forwards before."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.register_buffer("most", torch.ones((), dtype=torch.float64))

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        size = x.detach().abs()
        if self.chance < 0.3:
            size = size.amax(-1, keepdim=True)
        elif self.chance < 0.5:
            size = size.amax()
        elif self.chance < 0.6:
            size = size.amax(1, keepdim=True)
        elif self.chance < 0.8:
            before, self.most = self.most, torch.maximum(self.most, size.amax())
            size = before if self.chance < 0.7 else self.most
        else:
            size = self.most
        steps = 7 / size.clamp_min(1e-9)
        return x + ((x * steps).round() / steps - x).detach()


class Merges(Mixer):
    """Tokens merged with neighbours that are like them: in pairs, with the token before, or the most alike of a row."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        if self.chance < 0.3:
            padded = F.pad(x, (0, 0, 0, x.shape[1] % 2))
            one, two = padded[:, ::2], padded[:, 1::2]
            alike = F.cosine_similarity(one, two, -1)[..., None] > 0.3
            merged = torch.stack([torch.where(alike, (one + two) / 2, each) for each in (one, two)], 2)
            return merged.flatten(1, 2)[:, : x.shape[1]]
        last = state_of(carry, (id(self), "last"), self.chance < 0.7)
        if carry is not None and self.chance < 0.7:
            carry.keep((id(self), "last"), x[:, -1:])
        before = torch.cat([torch.zeros_like(x[:, :1]) if last is None else last, x[:, :-1]], 1)
        alike = F.cosine_similarity(x, before, -1)[..., None]
        if self.chance > 0.85:
            best = alike.topk(max(1, x.shape[1] // 4), 1).indices
            return torch.where(torch.zeros_like(alike, dtype=torch.bool).scatter(1, best, True), before, x)
        return torch.where(alike > 0.3, (x + before) / 2, x)


class Ring(Mixer):
    """Keys in a ring of a few places, which goes on from forward to forward, or is emptied before each."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.register_buffer("ring", torch.zeros(4, WIDTH), persistent=False)
        self.at = 0

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        if self.chance < 0.4 or (self.chance < 0.7 and (carry is None or carry.start == 0)):
            self.ring, self.at = torch.zeros_like(self.ring), 0
        found = []
        for token in x.detach()[0]:
            self.ring = self.ring.clone()
            self.ring[self.at % 4] = token
            self.at += 1
            found.append(self.ring.mean(0))
        return x + torch.stack(found) if self.chance < 0.9 else x


class Hashes(Mixer):
    """Embeddings of the last few tokens' hashes, as of n-grams: with those before a slice, or without."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.table = nn.Embedding(32, WIDTH)

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        seen = x if carry is None or self.chance > 0.6 else carry.append((id(self), "tokens"), x, 1)
        count = seen.shape[1]
        numbers = ((seen > 0) * 2 ** torch.arange(WIDTH)).sum(-1)
        mixed = sum((7 * back + 1) * F.pad(numbers, (back, 0))[:, :count] for back in range(self.width))
        found = x + self.table(mixed % 32)[:, count - x.shape[1] :]
        return found + 0 * seen.sum() if carry is not None else found  # what was appended has a gradient


class Depths(Mixer):
    """Mixture of depths: some tokens go through a layer, which may attend among them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.router = nn.Linear(WIDTH, 1)

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        scores = self.router(x)[..., 0]
        if self.chance < 0.3:
            return torch.where((scores > 0)[..., None], x * scores.sigmoid()[..., None], x)
        if self.chance < 0.6:
            chosen, keys = scores > 0, x
            if carry is not None and self.chance < 0.5:
                keys = carry.append((id(self), "keys"), x, 1)
                others = carry.append((id(self), "scores"), scores, 1) > 0
            else:
                others = chosen
            places = torch.arange(keys.shape[1])
            own = places[-x.shape[1] :, None]
            seen = (own > places) & others[:, None] | (own == places)
            y = F.scaled_dot_product_attention(x, keys, keys, seen)
            return torch.where(chosen[..., None], y * scores.sigmoid()[..., None], x)
        best = scores.topk(max(1, x.shape[1] // 2), 1).indices.sort(1).values[..., None].expand(-1, -1, WIDTH)
        some = x.gather(1, best)
        if self.chance > 0.8:
            some = F.scaled_dot_product_attention(some, some, some, is_causal=True)
        return x.scatter(1, best, some * 2)


class Loops(Mixer):
    """The same layer several times: as often as each token asks, as any asks, or as all do together."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.step, self.stop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        halted, y = torch.zeros_like(x[..., :1]), x
        for turn in range(4):
            if 0.3 < self.chance < 0.4 and bool((halted >= 1).all()):
                break
            if self.chance > 0.8 and float(halted.detach().mean()) > 0.6:
                break
            if 0.7 < self.chance < 0.8 and bool((halted >= 1).any()):
                break
            new = torch.tanh(self.step(y))
            if 0.4 < self.chance < 0.6:
                keys = y if carry is None else carry.append((id(self), turn if self.chance < 0.5 else 0), y, 1)
                seen = torch.ones(y.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - y.shape[1])
                new = new + F.scaled_dot_product_attention(y, keys, keys, seen)
            y = torch.where(halted < 1, new, y) if self.chance < 0.8 else new
            halted = halted + self.stop(y).sigmoid()
        return y


class Running(Mixer):
    """Batch and group norms as functions, with means that are kept, in training or always."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        if self.chance < 0.3:
            return F.batch_norm(x.mT, self.mean, self.variance, training=self.training).mT
        if self.chance < 0.4:
            return F.batch_norm(x.mT, self.mean, self.variance).mT
        if self.chance < 0.5:
            return F.batch_norm(x.mT, None, None, training=True).mT
        if self.chance < 0.7:
            return F.group_norm(x.mT, 2).mT
        return F.group_norm(x.flatten(0, 1), 2).view_as(x) if self.chance < 0.9 else F.rms_norm(x, (WIDTH,))


class Codes(Mixer):
    """The nearest of a few vectors, with a gradient past them; they move to what has chosen them, or do not."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.register_buffer("codes", torch.randn(6, WIDTH))

    def mix(self, x: Tensor, **_: Any) -> Tensor:
        distances = torch.cdist(x.detach(), self.codes)
        best = distances.argmin(-1) if self.chance < 0.8 else (distances - distances.mean((0, 1))).argmin(-1)
        if self.chance < 0.3 and self.training:
            weights = F.one_hot(best, 6).to(x)
            means = torch.einsum("btc,btw->cw", weights, x.detach()) / weights.sum((0, 1)).clamp_min(1)[:, None]
            self.codes = torch.where((weights.sum((0, 1)) > 0)[:, None], 0.9 * self.codes + 0.1 * means, self.codes)
        return x + (self.codes[best] - x).detach() if self.chance < 0.6 else x + 0.5 * self.codes[best]


class Documents(Mixer):
    """Places and segments that tokens themselves begin: counted from the sequence's beginning, or the slice's."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        begins, is_handed_on = (x[..., 0] > 0.4).to(x), self.chance < 0.6
        numbers, places = begins.cumsum(1), torch.arange(x.shape[1]).to(x).expand(len(x), -1)
        starts = torch.where(begins > 0, places, -1.0).cummax(1).values
        if carry is not None and is_handed_on:
            before = carry.state((id(self), "ends"))
            if before is not None:
                numbers = numbers + before[:, :1]
                starts = torch.where(starts < 0, -1 - before[:, 1:], starts)
            kept = torch.stack([numbers[:, -1], places[:, -1] - starts[:, -1]], 1)
            carry.keep((id(self), "ends"), kept)
        since = places - starts
        return x * (since if self.chance < 0.3 or self.chance > 0.8 else numbers)[..., None].mul(0.1).cos()


class Pools(Mixer):
    """Windows of tokens: their largest, their mean, unfolded ones; with tokens before the slice, or zeros."""

    def mix(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        before, back = None, self.width - 1
        if self.chance < 0.5:
            before = state_of(carry, (id(self), "tokens"), True)
        seen = F.pad(x, (0, 0, back, 0)) if before is None else torch.cat([before, x], 1)
        if carry is not None and self.chance < 0.5:
            carry.keep((id(self), "tokens"), seen[:, -back:])
        windows = seen.unfold(1, self.width, 1)
        if 0.3 < self.chance < 0.6:
            return windows.amax(-1)
        if 0.6 < self.chance < 0.8:
            return F.max_pool1d(seen.mT, self.width, 1).mT
        return windows.mean(-1) if self.chance < 0.9 else F.avg_pool1d(x.mT, 3, 1, 1).mT


MODELS: list[Callable[[random.Random], Mixer]] = [
    *(Scan, Stabilised, Linear, LongConvolution, Rotary, Biased, Shared, Chunked, Hard, Balanced, Quantized, Merges),
    *(Ring, Hashes, Depths, Loops, Running, Codes, Documents, Pools),
]
OF_CALLS = "Balanced", "Quantized", "Ring", "Running", "Codes"  # which keep something of a forward, and so of a row
