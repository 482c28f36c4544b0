"""Norms under sequence parallelism: x a DTensor whose rows are spread over ranks, weights that every rank has whole.

The same functions as elsewhere (norm.py) compute this rank's rows. Its weight gradients are terms of a sum over ranks:
W adds them to a `.grad` with the placement Partial, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbkern.ops.autograd import OpCall, Params, apply, weight_gradients
from zbkern.ops.functions._shapes import Layout
from zbkern.ops.functions.collectives import arrived, cover_backward_of, local_of
from zbkern.ops.functions.sharded import Sums, as_computed, empty_terms, is_sharded, local, may_be_terms

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedCall(OpCall):
    """A norm whose weights are DTensors. sums: for every dimension of the mesh, whether its ranks have other rows."""

    __slots__ = ("sums",)

    def __init__(self, params: Params, backend: ModuleType, name: str, sums: Sums) -> None:
        super().__init__(params, backend, name)
        self.sums = sums

    @property
    def values(self) -> Params:
        """The weights that kernels read: this rank's part, which is all of it."""
        return tuple([None if p is None else p._local_tensor for p in self.params])

    def on_rows(self, norm: Callable[..., Any]) -> Callable[..., Any]:
        """norm(*params, *inputs) in torch's operations, on this rank's rows."""
        from torch.distributed.tensor import Partial, Replicate

        places = [Partial() if term else Replicate() for term in self.sums]

        def part(value: Any) -> Any:
            return value.to_local(grad_placements=places) if value is not None and is_sharded(value) else value

        return lambda *arguments: norm(*map(part, arguments))

    def weight_gradients(self, partials: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        """What `autograd.weight_gradients` returns for partial sums of this rank's rows."""
        kernel = local(self.backend.norm_wgrad, self.sums)
        if may_be_terms(self.params, self.sums):
            return weight_gradients(self, kernel, (partials,), needs, partials.numel())
        found = [None if p is None else empty_terms(self.sums, p) for p in self.params]
        kernel.run([(partials,)], found, False)
        return as_computed(self, found, needs)


def has_local_rows(x: Any, *weights: Any) -> bool:
    """True for DTensors where every rank has whole rows of x and whole weights."""
    return all(p.is_replicate() for weight in weights if weight is not None for p in weight.placements) and all(
        p.is_replicate() or (p.is_shard() and not p.is_shard(x.dim() - 1)) for p in x.placements
    )


def on_local_rows(
    norm: type[torch.autograd.Function], params: Params, backend: ModuleType, name: str, x: Any, eps: float
) -> DTensor:
    """norm of a DTensor x that `has_local_rows`; the result is cut as x is."""
    call = ShardedCall(params, backend, name, tuple([not placement.is_replicate() for placement in x.placements]))
    cover_backward_of(x)
    layout = Layout.of(x)
    return _FromRows.apply(apply(norm, call, _ToRows.apply(x, layout), eps, None), layout)


class _ToRows(torch.autograd.Function):
    """This rank's part of a DTensor."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        rows = arrived(x._local_tensor)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[DTensor, None]:
        return ctx.layout.tensor(dx), None


class _FromRows(torch.autograd.Function):
    """The DTensor of this rank's part. In B, W runs while the gradient is on its way."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layout: Layout) -> DTensor:
        ctx.layout = layout
        return layout.tensor(y.view_as(y))

    @staticmethod
    def backward(ctx: Any, dy: DTensor) -> tuple[Tensor, None]:
        return local_of(dy, ctx.layout.placements), None
