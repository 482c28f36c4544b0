"""add_loss: a loss that a module adds where it is, such as a z-loss, or one that balances experts.

An activation goes through a function that returns it, and whose backward begins that of the loss. So the loss needs no
way out of the module, and is there again in whatever runs again: a checkpointed region, say.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.compiler.disable(reason="what a loss counts for is another number in every microbatch")
def add_loss(activation: Tensor, value: Tensor, name: str = "auxiliary") -> Tensor:
    """Adds a loss to that of the step, inside of a module: `hidden = add_loss(hidden, value)`. Returns the activation.

    activation: any tensor that the module goes on with, and that the loss of the model depends on. value: a tensor of
    one number, with its graph. name: under which `Pipeline.auxiliary_losses` reports it, with others of that name.

    Like what loss_fn returns, it is a mean over microbatches: each counts for 1 / microbatches, or, where each has
    slices of its own (`plan_batch`), for its share of the tokens; so does a slice within its sequence. Outside of a
    Pipeline it counts once, as if it was added to what `backward` is called on. `evaluate` reports it, too. Raises
    TypeError or ValueError for what is no loss or no activation.
    """
    if not isinstance(activation, Tensor) or not activation.is_floating_point():
        raise TypeError(f"add_loss: activation must be a tensor of floating-point numbers; got {_kind(activation)}")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"add_loss: value must be a floating-point tensor with its graph; got {_kind(value)}")
    if value.numel() != 1:
        raise ValueError(f"add_loss: value must be one number, such as .mean() gives; got shape {list(value.shape)}")
    if isinstance(value, DTensor):
        value = value.full_tensor()
    running = _thread.running
    return _AddLossFunction.apply(activation, value, None if running is None else running.note(name, value))


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


class Share(NamedTuple):
    """What a slice of a microbatch counts for in a step, by its tokens.

    whole: what all of the microbatch counts for. starts: of its slices that have begun, and the end of the last: a list
    that grows in forwards. number: of the slice.
    """

    whole: float
    starts: Sequence[int] = (0, 1)
    number: int = 0

    @property
    def weight(self) -> float:
        """For when the last slice has begun."""
        return self.whole * (self.starts[self.number + 1] - self.starts[self.number]) / self.starts[-1]


class AuxiliaryLosses:
    """The losses that modules of a chunk add in a step. A context of every pass: `with losses.during(key):`."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, Share] = {}
        self._values: list[tuple[str, Tensor, Share]] = []
        self._reports = True

    def begin(self, reports: bool) -> None:
        """Before a step or evaluation, whose values `totals` will be; or a forward without a report, which leaves it
        the last one's."""
        self._reports = reports
        if reports:
            self.clear()

    def clear(self) -> None:
        self._shares.clear()
        self._values.clear()

    def during(self, key: Hashable, share: Share | None = None) -> _Pass:
        """Inside, on this thread, losses are added: those of a forward, which has this share, under a key; or, without
        a share, those of what runs again in the backward of the forward that had the key."""
        if share is not None:
            self._shares[key] = share
        return _Pass(self._shares, key, self._values if share is not None and self._reports else None)

    def totals(self) -> dict[str, float]:
        """By name; waits for the device."""
        found: dict[str, float] = {}
        for name, value, share in self._values:
            found[name] = found.get(name, 0.0) + float(value) * share.weight
        return found


class _Pass:
    """A pass of a chunk, beside which others may run in other threads. values: where those of a forward are kept."""

    def __init__(
        self, shares: Mapping[Hashable, Share], key: Hashable, values: list[tuple[str, Tensor, Share]] | None
    ) -> None:
        self._shares, self._key, self._values = shares, key, values

    def __enter__(self) -> None:
        self._outer, _thread.running = _thread.running, self

    def __exit__(self, *_: object) -> None:
        _thread.running = self._outer

    def note(self, name: str, value: Tensor) -> Share:
        """Keeps a value for `totals`, once. Returns what it counts for."""
        share = self._shares[self._key]
        if self._values is not None:
            self._values.append((name, value.detach().clone(), share))
        return share


class _Thread(threading.local):
    running: _Pass | None = None


_thread = _Thread()


class _AddLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, value: Tensor, share: Share | None) -> Tensor:
        ctx.share, ctx.like = share, {"size": value.shape, "dtype": value.dtype, "device": value.device}
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = 1.0 if ctx.share is None else ctx.share.weight
        return gradient, torch.full(**ctx.like, fill_value=weight), None
