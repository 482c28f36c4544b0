"""Calls of every public op with options that are drawn, and the same in torch's own words: what tests of ops compare.

`draw(op, rng)` gives one. A new option of an op belongs into its function here: then it is tried with every dtype,
layout, order of W and whatever else the tests of ops draw.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zbkern import functional as Z

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""What torch calls them."""


@dataclass
class Call:
    """ours and torchs take (*inputs, *parameters) of these shapes, and return a tensor or several. torchs is given
    float64. said: what was drawn. smooth: no corners, across which rounding could carry a value. twice, forward_mode:
    has second derivatives, and those of forward mode. compiles: in one graph.
    """

    said: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    inputs: Sequence[tuple[int, ...]]
    parameters: Sequence[tuple[int, ...]]
    smooth: bool = True
    twice: bool = True
    forward_mode: bool = True
    compiles: bool = True


def some(rng: random.Random) -> bool:
    return rng.random() < 0.5


def rows(rng: random.Random) -> tuple[int, ...]:
    """Dimensions before the features."""
    return rng.choice([(), (3,), (2, 3), (1, 2, 2), (0,), (5,)])


def random_tensor(rng: random.Random, *shape: int) -> Tensor:
    """Of float64, and no argument of the call."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rng.getrandbits(32)))


def linear(rng: random.Random) -> Call:
    k, n, transposed = rng.randint(1, 6), rng.randint(1, 5), some(rng)
    name = rng.choice([None, *ACTIVATIONS])

    def torchs(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        z = F.linear(x, w.mT if transposed else w, b)
        return z if name is None else ACTIVATIONS[name](z)

    return Call(
        f"activation={name}, transposed={transposed}",
        lambda x, w, b=None: Z.linear(x, w, b, name, transposed=transposed),
        torchs,
        [(*rows(rng), k)],
        [(k, n) if transposed else (n, k), *[(n,)] * some(rng)],
        smooth=name != "relu",
    )


def gated_mlp(rng: random.Random) -> Call:
    k, h, n, name = rng.randint(1, 5), rng.randint(1, 6), rng.randint(1, 4), rng.choice([*ACTIVATIONS])
    biased = rng.choice([(True,) * 3, (False,) * 3, tuple(some(rng) for _ in range(3))])

    def with_biases(given: tuple[Tensor, ...]) -> list[Tensor | None]:
        left = iter(given)
        return [next(left) if there else None for there in biased]

    def torchs(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        a, b, c = with_biases(biases)
        return F.linear(ACTIVATIONS[name](F.linear(x, gate, a)) * F.linear(x, up, b), down, c)

    shapes = [shape for shape, there in zip([(h,), (h,), (n,)], biased, strict=True) if there]
    return Call(
        f"{name}, biases={biased}",
        lambda x, gate, up, down, *b: Z.gated_mlp(x, gate, up, down, *with_biases(b), activation=name),
        torchs,
        [(*rows(rng), k)],
        [(h, k), (h, k), (n, h), *shapes],
        smooth=name != "relu",
    )


def norm(rng: random.Random, centered: bool) -> Call:
    """With a residual there are two outputs. Without an eps the dtype has one, and float64 another than others."""
    k, weighted, added = rng.randint(3, 6), some(rng), some(rng)
    eps = rng.choice([1e-3, 1e-5] if centered else [1e-3, None])

    def torchs(*given: Tensor) -> Any:
        x, parameters = given[0] + given[1] if added else given[0], given[1 + added :]
        y = F.layer_norm(x, (k,), *parameters, eps=eps) if centered else F.rms_norm(x, (k,), *parameters, eps=eps)
        return (y, x) if added else y

    def ours(*given: Tensor) -> Any:
        function, residual = Z.layer_norm if centered else Z.rms_norm, given[1] if added else None
        return function(given[0], *given[1 + added :], eps=eps, residual=residual)

    parameters = [(k,)] * (weighted + (weighted and centered and some(rng)))
    shapes = [(*rows(rng), k)] * (1 + added)
    return Call(f"eps={eps}, residual={added}", ours, torchs, shapes, parameters, smooth=eps is not None)


def embedding(rng: random.Random) -> Call:
    size, features, kind = rng.randint(1, 7), rng.randint(1, 4), rng.choice([torch.int64, torch.int32])
    row = rng.choice([None, rng.randrange(size), -1])
    shape = rng.choice([(), (4,), (2, 3), (0,)])
    indices = (random_tensor(rng, *shape).abs() * 3).long().clamp(max=size - 1).to(kind)
    return Call(
        f"{indices.tolist()}, padding_idx={row}",
        lambda w: Z.embedding(indices, w, row),
        lambda w: F.embedding(indices, w, row),
        [],
        [(size, features)],
    )


def routing(rng: random.Random) -> tuple[list[int], int, dict[str, Any]]:
    """Rows of every group, rows in all, and the argument that says so."""
    counts = [rng.choice([0, 1, 2, 4]) for _ in range(3)]
    form = rng.choice(["a list", "a tensor", "offsets"])
    if form == "offsets":
        ends = list(itertools.accumulate(counts))
        return counts, ends[-1] + rng.choice([0, 2]), {"offsets": torch.tensor(ends, dtype=torch.int32)}
    return counts, sum(counts), {"counts": counts if form == "a list" else torch.tensor(counts)}


def by_group(x: Tensor, counts: list[int], function: Callable[[int, Tensor], Tensor], features: int) -> Tensor:
    """Zeros for rows of no group."""
    found = [function(group, part) for group, part in enumerate(x[: sum(counts)].split(counts))]
    return torch.cat([*found, x.new_zeros(len(x) - sum(counts), features)])


def grouped_linear(rng: random.Random) -> Call:
    (counts, m, said), k, n = routing(rng), rng.randint(1, 5), rng.randint(1, 4)
    transposed = some(rng)

    def torchs(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        w = w.mT if transposed else w
        return by_group(x, counts, lambda e, part: F.linear(part, w[e], None if b is None else b[e]), n)

    return Call(
        f"{said}, transposed={transposed}",
        lambda x, w, b=None: Z.grouped_linear(x, w, bias=b, transposed=transposed, **said),
        torchs,
        [(m, k)],
        [(3, k, n) if transposed else (3, n, k), *[(3, n)] * some(rng)],
    )


GPT_OSS = Z.GateOptions(interleaved=True, limit=0.5, alpha=1.702, offset=1.0)
"""Of gpt-oss, with limits so low that some values reach them."""


def grouped_mlp(rng: random.Random) -> Call:
    """By slicing, as the transformers library does."""
    (counts, m, said), k, h, n = routing(rng), rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 3)
    gate = rng.choice([Z.GateOptions(), Z.GateOptions("gelu", interleaved=True), GPT_OSS])
    transposed, biased = some(rng), some(rng)

    def torchs(x: Tensor, first: Tensor, second: Tensor, *biases: Tensor) -> Tensor:
        first, second = (w.mT if transposed else w for w in (first, second))

        def expert(e: int, part: Tensor) -> Tensor:
            z = F.linear(part, first[e], biases[0][e] if biases else None)
            a, up = (z[..., ::2], z[..., 1::2]) if gate.interleaved else z.chunk(2, -1)
            if gate is GPT_OSS:
                a, up = a.clamp(max=0.5), up.clamp(-0.5, 0.5)
                y = (up + 1) * a * torch.sigmoid(a * 1.702)
            else:
                y = ACTIVATIONS[gate.activation](a) * up
            return F.linear(y, second[e], biases[1][e] if biases else None)

        return by_group(x, counts, expert, n)

    shapes = [(3, 2 * h, k), (3, n, h)]
    return Call(
        f"{said}, {gate}, transposed={transposed}",
        lambda x, a, b, *biases: Z.grouped_mlp(x, a, b, biases=biases or (None,) * 2, gate=gate,
                                               transposed=transposed, **said),
        torchs,
        [(m, k)],
        [*((s[0], s[2], s[1]) if transposed else s for s in shapes), *[(3, 2 * h), (3, n)] * biased],
        smooth=gate is not GPT_OSS,
    )  # fmt: skip


def linear_cross_entropy(rng: random.Random) -> Call:
    shape, k, v = rng.choice([(7,), (2, 3), (1,)]), rng.randint(1, 5), rng.randint(2, 9)
    reduction, smoothing, z_loss = rng.choice(["mean", "sum", "none"]), rng.choice([0.0, 0.2]), rng.choice([0.0, 0.3])
    options = Z.CrossEntropyOptions(-100, smoothing, z_loss, rng.choice([1024, 3]), rng.choice([None, 1.5]))
    target = labels_of(rng, shape, v)

    def torchs(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        z, labels = F.linear(x, w, b).flatten(0, -2), target.flatten()
        z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
        loss = F.cross_entropy(z, labels, label_smoothing=smoothing, reduction=reduction)
        squares = z_loss * z.logsumexp(1).square() * (labels != -100)
        if reduction == "none":
            return (loss + squares).view(shape)
        return loss + squares.sum() / ((labels != -100).sum() if reduction == "mean" else 1)

    return Call(
        f"{reduction}, {options}",
        lambda x, w, b=None: Z.linear_cross_entropy(x, w, target, b, reduction, options),
        torchs,
        [(*shape, k)],
        [(v, k), *[(v,)] * some(rng)],
    )


def linear_log_probs(rng: random.Random) -> Call:
    """And the entropy: two outputs."""
    shape, k, v = rng.choice([(7,), (2, 3), (1,)]), rng.randint(1, 5), rng.randint(2, 9)
    options = Z.CrossEntropyOptions(chunk=rng.choice([1024, 3]), softcap=rng.choice([None, 1.5]))
    target = labels_of(rng, shape, v)

    def torchs(x: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, cap = F.linear(x, w, b), options.softcap
        log_p = (z if cap is None else cap * torch.tanh(z / cap)).log_softmax(-1)
        chosen = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return chosen * (target != -100), -(log_p.exp() * log_p).sum(-1) * (target != -100)

    return Call(
        f"{options}",
        lambda x, w, b=None: Z.linear_log_probs(x, w, target, b, options),
        torchs,
        [(*shape, k)],
        [(v, k), *[(v,)] * some(rng)],
    )


def labels_of(rng: random.Random, shape: tuple[int, ...], words: int) -> Tensor:
    """Some are ignored."""
    target = (random_tensor(rng, *shape).abs() * words / 2).long().clamp(max=words - 1)
    target.view(-1)[1::3] = -100
    return target


def by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    options: Z.AttentionOptions,
    sinks: Tensor | None,
    ends: list[int],
    key_ends: list[int],
) -> Tensor:
    """Attention of packed sequences, every head of each by itself."""
    y = q.new_zeros(*q.shape[:2], v.shape[2])
    for ((a, b), (c, d)), head in itertools.product(
        zip(pairwise(ends), pairwise(key_ends), strict=True), range(q.shape[1])
    ):
        one = head * k.shape[1] // q.shape[1]
        scores = q[a:b, head] @ k[c:d, one].T * (q.shape[2] ** -0.5 if options.scale is None else options.scale)
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        if causal:
            scores = scores.masked_fill((distance < 0) | (distance >= (options.window or 99)), float("-inf"))
        total = scores.exp().sum(1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        weights = scores.exp() / total.clamp(min=1e-300)  # 0 where a query sees no key
        y = y.index_put((torch.arange(a, b), torch.tensor(head)), weights @ v[c:d, one])
    return y


def attention(rng: random.Random) -> Call:
    """Sequences of one length as a batch, or packed, with their ends in a list or on the device. Some have more keys
    than queries, or fewer, of which a causal one leaves queries that see none."""
    form, heads, causal = rng.choice(["batch", "packed", "on the device"]), rng.choice([4, 2, 1]), some(rng)
    size, values = rng.choice([(6, 6), (6, 3), (4, 7)])
    options = Z.AttentionOptions(
        rng.choice([None, 3]) if causal else None, rng.choice([None, 0.0, -0.3, 0.7]), rng.choice([None, 0.7])
    )
    lengths = [5, 5] if form == "batch" else [rng.choice([0, 1, 4, 6]) for _ in range(3)]
    longer = [rng.choice([0, 2, -3])] * 2 if form == "batch" else [rng.choice([0, 3, -2]) for _ in range(3)]
    ends, key_ends = (
        list(itertools.accumulate(each, initial=0))
        for each in (lengths, [max(a + b, 0) for a, b in zip(lengths, longer, strict=True)])
    )
    beyond, sinks = 2 * (form == "on the device"), some(rng)  # beyond the last end there is nothing

    def ours(q: Tensor, k: Tensor, v: Tensor, level: Tensor | None = None) -> Tensor:
        if form == "batch":
            return Z.attention(*(t.unflatten(0, (2, -1)) for t in (q, k, v)), causal, options, sinks=level).flatten(
                0, 1
            )
        given = [torch.tensor(each, dtype=torch.int32) if beyond else each for each in (ends, key_ends)]
        return Z.attention(q, k, v, causal, options, *given, sinks=level)

    return Call(
        f"{form} {ends} {key_ends}, causal={causal}, {options}",
        ours,
        lambda q, k, v, level=None: by_formula(q, k, v, causal, options, level, ends, key_ends),
        [(ends[-1] + beyond, 4, size), *((key_ends[-1] + beyond, heads, n) for n in (size, values))],
        [(4,)] * sinks,
        twice=size != values,  # else torch's own core, which has none
        forward_mode=False,
        compiles=form != "on the device",  # a CPU is one whose values are read
    )


def rotated_by_hand(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """As the transformers library writes it, in modeling_llama and in modeling_gptj, on the first columns."""
    size = 2 * angles.shape[1]
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        wide = angles.repeat_interleave(2, -1)[:, None]
        other = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        wide = torch.cat((angles, angles), -1)[:, None]
        other = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), -1)
    return torch.cat((turning * wide.cos() + other * wide.sin(), rest), -1)


def rotary(rng: random.Random) -> Call:
    shape, interleaved = rng.choice([(3, 2, 8), (2, 3, 2, 8), (2, 1, 3, 2, 11)]), some(rng)
    angles = random_tensor(rng, 3, rng.choice([0, 1, 3, 4]))
    return Call(
        f"{2 * angles.shape[1]} columns, interleaved={interleaved}",
        lambda x: Z.rotary(x, angles.cos(), angles.sin(), interleaved),
        lambda x: rotated_by_hand(x, angles, interleaved),
        [shape],
        [],
    )


OPS: dict[str, Callable[[random.Random], Call]] = {
    "linear": linear,
    "gated_mlp": gated_mlp,
    "rms_norm": lambda rng: norm(rng, False),
    "layer_norm": lambda rng: norm(rng, True),
    "embedding": embedding,
    "grouped_linear": grouped_linear,
    "grouped_mlp": grouped_mlp,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_log_probs": linear_log_probs,
    "attention": attention,
    "rotary": rotary,
}


def draw(op: str, rng: random.Random) -> Call:
    call = OPS[op](rng)
    call.said = f"{op} of {[*call.inputs]} and {[*call.parameters]}: {call.said}"
    return call
