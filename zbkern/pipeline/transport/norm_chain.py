"""The chain of ranks along which squares of gradients are added up to the norm over all stages, and its way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.transport.base import Transport, total_tag
from zbkern.pipeline.transport.framing import NormTotal
from zbkern.pipeline.transport.mailbox import Note


class NormChain:
    """This rank's place in the chain: whose sums it receives, who gets its own. The total comes back the same way.

    Where some ranks have shards (DTensor) and the last has none, the sum ends at the last rank that has: all pipelines
    of its mesh then skip the same steps. The ranks after it send their sums back to it, and wait for the total.

    ranks: in the order in which the model uses them. has_shards: whether this rank has any. shared: {name: number of
    its torch optimizer, or None} of its parameters that other ranks have copies of. max_norm: what
    ranks must have alike to clip the same steps. timeout: seconds to wait for a message. Collective. Raises ValueError
    where they have not, or where copies are in different optimizers.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        has_shards: bool,
        shared: Mapping[str, int | None],
        max_norm: Any,
        timeout: float,
    ) -> None:
        names, with_shards, norms = zip(
            *transport.gather((dict(sorted(shared.items())), has_shards, max_norm)), strict=True
        )
        if any(norm != norms[0] for norm in norms):
            raise ValueError(f"Optimizer: max_norm must be the same on all ranks; got {[*norms]} (by rank)")
        for name in sorted({name for held in names for name in held}):
            places = {rank: held[name] for rank, held in enumerate(names) if held.get(name) is not None}
            if len({*places.values()}) > 1:
                raise ValueError(
                    f"Optimizer: tied {name!r} must be in the same torch optimizer on all ranks, or its copies would "
                    f"differ; got its place in the list by rank, {places}"
                )
        place = ranks.index(transport.rank)
        end = max((at for at, rank in enumerate(ranks) if with_shards[rank]), default=len(ranks) - 1)
        before, after = ranks[:place][-1:], ranks[place + 1 :][:1]
        self._timeout = timeout
        self._next = None if place == end else after[0] if place < end else before[0]
        self._sources = [(rank, "previous") for rank in before if place <= end]
        self._sources += [(rank, "later") for rank in after if place >= end]
        self.use(transport)
        self.is_after_end = place > end
        self.counted = {name for rank in ranks[:place] for name in names[rank]}
        """The names of shared parameters that a rank before this one counts."""

    def use(self, transport: Transport) -> None:
        """From now on this one, of the same ranks."""
        self.transport = transport
        transport.passes_totals_to = [rank for rank, _ in self._sources]

    @property
    def ends_here(self) -> bool:
        """Whether this rank knows the total first."""
        return self._next is None

    def receive_sums(self, step: int) -> list[Tensor]:
        """The sums of the ranks that send theirs to this one, of the optimizer's n-th step."""
        return [self.transport.receive(rank, _tag(what, step), self._timeout) for rank, what in self._sources]

    def send_sum(self, step: int, total: Tensor) -> None:
        """Sends the sum of this rank and those before it to the next; no-op where the chain ends."""
        if self._next is not None:
            self.transport.send(self._next, _tag("later" if self.is_after_end else "previous", step), total)

    def total_is_here(self, step: int) -> bool:
        """Whether `receive_total` would return at once."""
        return self.transport.ready(total_tag(step))

    def receive_total(self, step: int) -> Tensor:
        """The sum of all ranks, from the next one; not where the chain ends. fp64 [norms]."""
        assert self._next is not None
        return torch.tensor(self.transport.receive(self._next, total_tag(step), self._timeout), dtype=torch.float64)

    def pass_back(self, step: int, total: Tensor) -> None:
        """Where the chain ends: sends the sum of all ranks, which every rank passes on as soon as it arrives."""
        self.transport.send_total(NormTotal(step, total.tolist()))


def _tag(what: str, step: int) -> Note:
    """Of a message with the sum of squares of the previous or later ranks."""
    return Note(step, f"the squared gradient norm of {what} stages, optimizer step {step}")
