"""Partitions: where a model's layers are cut into chunks, so that ranks have equal work and hold what fits them.

The start is the cut whose largest chunk is the smallest possible, and most even of those (dynamic programming). Then
single layers move from the rank with the most work, or too much memory, to another chunk, every chunk between passing
one on, as long as that helps; so what counts is a rank's work in all its chunks together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from zbkern.planning.simulation.layers import LayerCosts, ModelCosts

Partition = tuple[int, ...]  # the first layer of every chunk

_IN_FLIGHT = (2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.35, 0.2, 0.0)
"""Of what 1F1B holds: partitions that have memory for so many microbatches."""


def work_of(layer: LayerCosts) -> float:
    return layer.forward + layer.backward + layer.weight


def even_partitions(layers: int, chunks: int) -> list[Partition]:
    """Equal numbers of layers per chunk, as far as they go: with the larger chunks first, last, or in between.

    Also with the first layer and the last one or two (embedding, norm and head) beside an even division of the others,
    in the same chunks or the last ones in a chunk of their own.
    """
    beside, alone = ((0, 0), (1, 1), (1, 2), (1, 0), (0, 1), (0, 2)), ((0, 1), (1, 1), (0, 2), (1, 2))
    found: list[Partition] = []
    for own, ends in ((0, beside), (1, alone)):  # chunks of the last layers
        for before, after in ends:
            divided = _even(before, layers - before - after, chunks - own)
            found += [(0, *starts[1:], *[layers - after] * own) for starts in divided]
    return list(dict.fromkeys(found))


def _even(begin: int, layers: int, chunks: int) -> Iterator[list[int]]:
    """The first layer of every chunk, where so many layers from `begin` on are divided evenly."""
    if not 0 < chunks <= layers:
        return
    size, larger = divmod(layers, chunks)
    for shift in (
        [min(index, larger) for index in range(chunks)],
        [max(0, index - (chunks - larger)) for index in range(chunks)],
        [index * larger // chunks for index in range(chunks)],
    ):
        yield [begin + index * size + extra for index, extra in enumerate(shift)]


def balanced_partitions(
    model: ModelCosts, placement: Sequence[int], microbatches: int, limits: Sequence[float] | None
) -> list[Partition]:
    """Partitions of about equal work per rank, the most equal first, then some that hold less where work is.

    placement: the rank of every chunk. limits: the memory of every rank, None for no limit.
    """
    start = balanced_chunks(tuple(map(work_of, model.layers)), len(placement))
    tried = [(None, 0.0), *((limits, in_flight) for in_flight in (_IN_FLIGHT if limits is not None else ()))]
    found = (tuple(_improved(_Ranks(model, placement, microbatches, *each), start)) for each in tried)
    return list(dict.fromkeys(found))


@lru_cache(maxsize=64)  # asked for again for every placement
def balanced_chunks(work: tuple[float, ...], chunks: int) -> Partition:
    """The first layer of every chunk: the most work in a chunk is as little as possible, then that of squares."""
    count, unit = len(work), max(sum(work), 1e-300) / 2**50  # whole numbers: equal layers have equal sums
    prefix = [*accumulate((round(each / unit) for each in work), initial=0)]
    nothing: tuple[float, int, Partition] = (math.inf, 0, ())
    best = [(0.0, 0, ()), *[nothing] * count]  # [end]: the most in a chunk so far, the squares, and the chunks
    for chunk in range(chunks):
        further = [nothing] * (count + 1)
        for end in range(chunk + 1, count - (chunks - chunk - 1) + 1):
            for begin in range(end - 1, chunk - 1, -1):
                inside = prefix[end] - prefix[begin]
                if (about := inside >> 8) > further[end][0]:  # rounding does not choose among the most
                    break
                most, squares, starts = best[begin]
                cost = max(most, about), squares + inside * inside
                if cost < further[end][:2]:
                    further[end] = *cost, (*starts, begin)
        best = further
    return best[count][2]


_Cost = tuple[float, float, float]
_Saved = tuple[list[list[float]], list[dict[str, int]]]


class _Ranks:
    """What every rank would do and hold, updated as layers move from chunk to chunk."""

    def __init__(
        self,
        model: ModelCosts,
        placement: Sequence[int],
        microbatches: int,
        limits: Sequence[float] | None,
        in_flight: float,
    ) -> None:
        count, ranks = len(placement), max(placement) + 1
        self.placement, self.layers = placement, model.layers
        # a chunk holds a microbatch from its F to its B: 1F1B holds as many as there are ranks in the first chunk
        self._in_flight = [in_flight * min(microbatches, ranks * (count - chunk) / count) for chunk in range(count)]
        self._works = [work_of(layer) for layer in model.layers]
        self._held = [max(layer.activation, layer.held) for layer in model.layers]
        self._limits = None if limits is None else [limit * (1 + 1e-9) for limit in limits]
        self.work = [0.0] * ranks
        self._once, self._flying, self._static = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self._missing = [0.0] * ranks
        self._tied: list[dict[str, int]] = [{} for _ in range(ranks)]

    def saved(self) -> _Saved:
        sums = [self.work[:], self._once[:], self._flying[:], self._static[:], self._missing[:]]
        return sums, [dict(each) for each in self._tied]

    def restore(self, saved: _Saved) -> None:
        sums, tied = saved
        self.work, self._once, self._flying, self._static, self._missing = (each[:] for each in sums)
        self._tied = [dict(each) for each in tied]

    def fill(self, starts: Sequence[int]) -> None:
        """Starts anew with the layers of this partition."""
        for values in (self.work, self._once, self._flying, self._static, self._missing):
            values[:] = [0.0] * len(values)
        self._tied = [{} for _ in self.work]
        for chunk, (begin, end) in enumerate(pairwise([*starts, len(self.layers)])):
            for layer in range(begin, end):
                self.change(layer, chunk, 1)

    def change(self, layer: int, chunk: int, sign: int) -> None:
        """Adds a layer to a chunk (sign 1), or takes it away (-1)."""
        rank, held = self.placement[chunk], self._held[layer]
        self.work[rank] += sign * self._works[layer]
        if self._limits is None:
            return
        self._once[rank] += sign * held
        self._flying[rank] += sign * held * self._in_flight[chunk]
        tied, others = self.layers[layer].tied, 0  # layers of the rank that have the same weights
        if tied is not None:
            present = self._tied[rank].get(tied, 0)
            self._tied[rank][tied], others = present + sign, present + min(sign, 0)
        if not others:
            self._static[rank] += sign * self.layers[layer].static
        once, flying = self._once[rank], self._flying[rank]
        missing = self._static[rank] + (once if once > flying else flying) - self._limits[rank]
        self._missing[rank] = missing if missing > 0 else 0.0

    def cost(self) -> _Cost:
        """The memory that is missing, the most work of a rank, and how uneven the work is; less is better."""
        return sum(self._missing), max(self.work), sum([each * each for each in self.work])

    def worst(self) -> int:
        """The rank that a layer should leave: with the least memory, if that is too little, else with the most work."""
        most = max(self._missing)
        return self._missing.index(most) if most > 0 else self.work.index(max(self.work))


def _improved(ranks: _Ranks, starts: Sequence[int]) -> list[int]:
    """`starts` after all moves of a layer that help, the best first."""
    starts = list(starts)
    ranks.fill(starts)
    best = ranks.cost()
    while True:
        here = ranks.saved()
        found: list[int] | None = None
        worst = ranks.worst()
        for chunk, owner in enumerate(ranks.placement):
            if owner != worst:
                continue
            for step in (1, -1):
                for moved in _moves(ranks, starts, chunk, step):
                    cost = ranks.cost()
                    if cost < best and any(new < old * (1 - 1e-9) for new, old in zip(cost, best, strict=True)):
                        best, found = cost, moved[:-1]
                ranks.restore(here)  # filling anew takes as long as all moves
        if found is None:
            return starts
        starts = found
        ranks.fill(starts)


def _moves(ranks: _Ranks, starts: Sequence[int], source: int, step: int) -> Iterator[list[int]]:
    """Starts and the number of layers, after a layer of chunk `source` has moved to each chunk after it (step 1) or
    before it (-1), the nearest first; `ranks` follows. It is one list, which the next move changes.
    """
    moved = [*starts, len(ranks.layers)]
    if moved[source + 1] - moved[source] < 2:
        return
    chunk = source
    while 0 <= chunk + step < len(starts):
        first = max(chunk, chunk + step)  # the chunk whose first layer changes
        layer = moved[first] - (step > 0)
        moved[first] -= step
        ranks.change(layer, chunk, -1)
        ranks.change(layer, chunk + step, 1)
        chunk += step
        yield moved
