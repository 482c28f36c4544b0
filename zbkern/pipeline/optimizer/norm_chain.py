"""The chain of ranks along which squares of gradients are added up to the norm over all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.own_settings import Settings
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.mailbox import Note


class NormChain:
    """This rank's place in the chain: whose sums it receives, who gets its own. Its end sends the total to all.

    Where some ranks have shards (DTensor) and the last has none, the sum ends at the last rank that has: all pipelines
    of its mesh then skip the same steps. The ranks after it send it their own sums, and wait for the total.

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
        transport.connect([*pairwise(ranks[: end + 1]), *((ranks[end], rank) for rank in ranks[end + 1 :])])
        self.transport, self._timeout, self._end = transport, timeout, ranks[end]
        self._next = None if place == end else ranks[place + 1] if place < end else self._end
        self._sources = [*ranks[max(0, place - 1) : place]] if place <= end else []
        self._sources += ranks[end + 1 :] if place == end else []
        self.is_after_end = place > end
        self.counted = {name for rank in ranks[:place] for name in names[rank]}
        """The names of shared parameters that a rank before this one counts."""

    @property
    def ends_here(self) -> bool:
        """Whether this rank knows the total first."""
        return self._next is None

    def receive_sums(self, step: int) -> list[tuple[Tensor, Settings]]:
        """What the ranks that send their sums to this one have sent, of the optimizer's n-th step."""
        return [self.transport.receive(rank, _tag(rank, step), self._timeout) for rank in self._sources]

    def send_sum(self, step: int, total: Tensor, settings: Settings) -> None:
        """Sends the sum of this rank and those before it to the next; no-op where the chain ends. settings: what their
        optimizers have set in the step before."""
        if self._next is not None:
            self.transport.send(self._next, _tag(self.transport.rank, step), (total, settings))

    def total_is_here(self, step: int) -> bool:
        """Whether `receive_total` would return at once."""
        return self.transport.ready(total_tag(step))

    def receive_total(self, step: int) -> Tensor:
        """The sum of all ranks, on all but the one where the chain ends. fp64 [norms, 1]."""
        return torch.tensor(self.transport.receive(self._end, total_tag(step), self._timeout), dtype=torch.float64)

    def send_total(self, step: int, total: Tensor) -> None:
        """Where the chain ends: sends the sum of all ranks to the others."""
        for peer in self.transport.peers:
            self.transport.send(peer, total_tag(step), total.tolist())


def total_tag(step: int) -> Note:
    """The tag of the sums of squares of all ranks in the n-th optimizer step."""
    return Note(step, f"the squared gradient norm of all stages, optimizer step {step}")


def _tag(rank: int, step: int) -> Note:
    """The tag of the sum of squares of a rank and those before it."""
    return Note(step, f"the squared gradient norm of stages up to rank {rank}, optimizer step {step}")
