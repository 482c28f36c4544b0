"""Chunks of whatever training can meet: buffers, hooks, checkpoints, losses of their own, frozen and tied weights."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zbkern
from zbkern.pipeline import add_loss

WIDTH, TOKENS = 4, 6


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) / 2


class Products(nn.Module):
    """Products with parameters of its own, whole ones, parts and sums of them, and one of them by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.experts = nn.Parameter(randn(WIDTH, WIDTH)), nn.Parameter(randn(3, WIDTH, WIDTH))
        self.scale = nn.Parameter(randn(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight) + x @ self.experts[1].T + torch.einsum("btd,edf->btf", x, self.experts)
        y = y + F.linear(x, self.scale * self.weight) + x @ self.weight[:, [2, 0, 1, 3]] * self.scale.sum()
        return torch.tanh(y) * (1 + self.weight[0])


class InFlight(nn.Module):
    """As if a collective was in flight in the midst of F and of B: passes beside this one go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(_InFlight.apply(x)))


class _InFlight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        zbkern.in_flight()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        zbkern.in_flight()
        return gradient


class Twice(nn.Module):
    """One linear that runs twice, once within a checkpoint of torch's."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()  # or a reentrant one would have no gradient
        y: Any = checkpoint(self.linear, x, use_reentrant=self.reentrant)
        return torch.tanh(self.linear(torch.sin(y)))


class Checkpointed(nn.Module):
    """Products within a checkpoint of torch's, which compares what a forward saves when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Products()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Penalised(nn.Module):
    """Adds a loss of its own, also within a checkpoint of torch's. added: in one process, the list for what it adds."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant
        self.added: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.added is not None or self.reentrant is None:
            return self.inner(x)
        x = x if x.requires_grad else x.clone().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        penalty = y.square().mean()
        if self.added is None:
            return add_loss(y, penalty, "penalty")
        self.added.append(penalty)
        return y


class Counts(nn.Module):
    """A buffer that every forward changes and reads, as running statistics are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + x.detach().mean((0, 1))
        return self.linear(x) - self.seen


class Normed(nn.Module):
    """Statistics, and vectors of a power iteration, which every forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.mT).mT)


class Noise(nn.Module):
    """Random numbers of torch and of Python."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3) * random.choice([0.5, 1.0]) if self.training else x


class Hooked(nn.Module):
    """Hooks on the module and on its parameters that change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_full_backward_pre_hook(lambda _, dy: (dy[0] * 1.5,))

    def add_hooks(self) -> None:
        """Those of parameters, which a copy would not have."""
        takes = self.linear.weight.requires_grad
        self.linear.requires_grad_()  # or there can be none
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        self.linear.bias.register_hook(lambda gradient: 2 * gradient)
        self.linear.requires_grad_(takes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.convolution = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0] + self.convolution(x.mT).mT


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.positions = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1]))
        return self.attention(x, x, x, need_weights=False)[0]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Routed(nn.Module):
    """Experts of zbkern, whose tokens the forward sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), zbkern.nn.Experts(WIDTH, 5, 3, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).max(-1)
        order = chosen.argsort(stable=True)
        y = self.experts(tokens[order], chosen.bincount(minlength=3)) * scores[order, None]
        return torch.zeros_like(tokens).index_add(0, order, y).view_as(x)


class Attending(nn.Module):
    """Attention of zbkern, which takes the carry by itself."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        options = zbkern.functional.AttentionOptions(window=window)
        self.attention = zbkern.nn.Attention(WIDTH, 2, 1, causal=True, options=options)

    def forward(self, x: Tensor, carry: Any = None, **_: Any) -> Tensor:
        return self.attention(x, carry=carry)


class Context(nn.Module):
    """Attention to the tokens before that are no padding, of the same sequence among those packed into a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, attention_mask: Any = None, position_ids: Any = None, carry: Any = None) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        known = {"k": k, "v": v, "attention_mask": attention_mask, "position_ids": position_ids}
        if carry is not None:
            known = {name: None if t is None else carry.append((id(self), name), t, 1) for name, t in known.items()}
        start = known["k"].shape[1] - x.shape[1]
        seen = torch.ones(len(x), x.shape[1], start + x.shape[1], dtype=torch.bool).tril(start)
        if attention_mask is not None:
            seen &= known["attention_mask"].bool()[:, None]
        if position_ids is not None:
            number = (known["position_ids"] == 0).cumsum(1)
            seen &= number[:, start:, None] == number[:, None]
        own = torch.eye(seen.shape[2], dtype=torch.bool)[start:]  # or padding would see nothing
        return F.scaled_dot_product_attention(q, known["k"], known["v"], seen | own)


class Sums(nn.Module):
    """A state that goes on from token to token, to which padding adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Any = None, position_ids: Any = None, carry: Any = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        sums = (y if attention_mask is None else y * attention_mask[..., None]).cumsum(1)
        if carry is not None and (state := carry.state(id(self))) is not None:
            sums = sums + state
        if carry is not None:
            carry.keep(id(self), sums[:, -1:])
        return sums / TOKENS


OF_W: list[Callable[[], nn.Module]] = [  # whose gradients all are of zbkern's W
    lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH, bias=False)),
    lambda: nn.RMSNorm(WIDTH),
    lambda: Twice(False),
    lambda: Twice(True),
    *(functools.partial(Penalised, reentrant) for reentrant in (None, False, True)),
    Frozen,
    Routed,
    nn.Identity,
    InFlight,
]
BY_TOKEN: list[Callable[[], nn.Module]] = [  # which slices of sequences may cut
    *OF_W,
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    Products,
    Checkpointed,
]
IN_SLICES: list[Callable[[], nn.Module]] = [*BY_TOKEN, Context, Sums, lambda: Attending(None), lambda: Attending(2)]
OTHERS: list[Callable[[], nn.Module]] = [Hooked, Counts, Normed, Recurrent, SelfAttention]
ALONE: list[Callable[[], nn.Module]] = [Noise]  # in one rank, whose forwards have one order


class Chunk(nn.Module):
    """Some of these, each added to what it is given; tied: a weight that the first and the last chunk have."""

    def __init__(self, pieces: list[nn.Module], passes: str, tied: bool) -> None:
        super().__init__()
        self.pieces, self.passes = nn.ModuleList(pieces), passes
        self.tied = nn.Parameter(randn(WIDTH, WIDTH)) if tied else None

    @property
    def tied_parameters(self) -> dict[str, Tensor]:
        return {} if self.tied is None else {"tied": self.tied}

    def forward(self, x: Tensor, first: Tensor | None = None, scale: Tensor | None = None, **context: Any) -> Any:
        y = x if first is None else x + torch.cos(first)
        for piece in self.pieces:
            y = y + (piece(y, **context) if isinstance(piece, Attending | Context | Sums) else piece(y))
        if self.tied is not None:
            y = y + F.linear(y, self.tied)
        if scale is not None:
            y = y * scale
        if self.passes == "tensor":
            return y
        if self.passes == "tuple":
            return y, x
        return {"first": (x > 0).double(), "x": y}


# ---- how weights are read by functions that know nothing of an Optimizer


def saved(chunk: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save([*chunk.parameters()], file)
    file.seek(0)
    return torch.load(file)


READS: dict[str, Callable[[nn.Module], list[Tensor]]] = {  # all parameters
    "state_dict": lambda chunk: list(map(copy.deepcopy(chunk.state_dict()).get, dict(chunk.named_parameters()))),
    "torch.save": saved,
    "deepcopy": lambda chunk: [*copy.deepcopy(chunk).parameters()],
    "clone": lambda chunk: [p.clone() for p in chunk.parameters()],
    ".data": lambda chunk: [p.data.clone() for p in chunk.parameters()],
    "NumPy": lambda chunk: [torch.tensor(p.numpy(force=True)) for p in chunk.parameters()],
    "a list of them": lambda chunk: [*torch._foreach_mul([*chunk.parameters()], 1.0)],
    "one vector": lambda chunk: [nn.utils.parameters_to_vector(chunk.parameters())],
}
