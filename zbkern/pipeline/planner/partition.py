"""Partitions: where a model's layers are cut into chunks, so that ranks have equal work and hold what fits them.

The start is the cut whose largest chunk is the smallest possible (by bisection), and most even of those (dynamic
programming). Then single layers move from the rank with the most work, or too much memory, to another chunk, every
chunk between passing one on, as long as that helps; so what counts is a rank's work in all its chunks together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from zbkern.pipeline.simulation.layers import LayerCosts, ModelCosts

Partition = tuple[int, ...]  # the first layer of every chunk

_IN_FLIGHT = (1.0, 0.75, 0.5, 0.35, 0.2, 0.0)  # of what 1F1B holds: partitions that leave room for so many microbatches
_ROUNDING = 1e-12


def work_of(layer: LayerCosts) -> float:
    return layer.forward + layer.backward + layer.weight


def even_partitions(layers: int, chunks: int) -> list[Partition]:
    """Equal numbers of layers per chunk, as far as they go: with the larger chunks first, last, or in between.

    Also with the first layer and the last one or two (embedding, norm and head) beside an even division of the others.
    """
    found: dict[Partition, None] = {}
    for before, after in ((0, 0), (1, 1), (1, 2), (1, 0), (0, 1), (0, 2)):
        inner = layers - before - after
        if inner < chunks:
            continue
        size, larger = divmod(inner, chunks)
        starts = [before + index * size for index in range(chunks)]
        shifts = (
            [min(index, larger) for index in range(chunks)],
            [max(0, index - (chunks - larger)) for index in range(chunks)],
            [index * larger // chunks for index in range(chunks)],
        )
        for shift in shifts:
            moved = [start + extra for start, extra in zip(starts, shift, strict=True)]
            partition = (0, *moved[1:])
            found[partition] = None
    return list(found)


def balanced_partitions(
    model: ModelCosts, placement: Sequence[int], microbatches: int, limits: Sequence[float] | None
) -> list[Partition]:
    """Partitions of about equal work per rank, the most equal first, then some that hold less where work is.

    placement: the rank of every chunk. limits: the memory of every rank, None for no limit.
    """
    start = balanced_chunks([work_of(layer) for layer in model.layers], len(placement))
    found: dict[Partition, None] = {}
    for in_flight in _IN_FLIGHT if limits is not None else (0.0,):
        ranks = _Ranks(model, placement, microbatches, limits, in_flight)
        found[tuple(_improved(ranks, start))] = None
    return list(found)


def balanced_chunks(work: Sequence[float], chunks: int) -> list[int]:
    """The first layer of every chunk: the most work in a chunk is as little as possible, then that of squares."""
    count, prefix = len(work), [0.0, *accumulate(work)]
    most = _least_maximum(work, prefix, chunks) * (1 + _ROUNDING)
    best = [0.0] + [float("inf")] * count  # [end]: sum of the squares of the chunks so far
    came_from: list[list[int]] = []
    for chunk in range(chunks):
        further, origin = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(chunk + 1, count - (chunks - chunk - 1) + 1):
            for begin in range(end - 1, chunk - 1, -1):
                inside = prefix[end] - prefix[begin]
                if inside > most and begin < end - 1:
                    break
                if best[begin] + inside * inside < further[end]:
                    further[end], origin[end] = best[begin] + inside * inside, begin
        came_from.append(origin)
        best = further
    starts, end = [], count
    for origin in reversed(came_from):
        end = origin[end]
        starts.append(end)
    return starts[::-1]


def _least_maximum(work: Sequence[float], prefix: Sequence[float], chunks: int) -> float:
    """The least that the largest of `chunks` chunks can be."""
    low, high = max(max(work), prefix[-1] / chunks), prefix[-1]
    for _ in range(60):
        middle = (low + high) / 2
        begin = used = 0
        while begin < len(work) and used <= chunks:
            begin = max(begin + 1, bisect_right(prefix, prefix[begin] + middle * (1 + _ROUNDING)) - 1)
            used += 1
        low, high = (low, middle) if used <= chunks else (middle, high)
        if high - low <= _ROUNDING * high:
            break
    return high


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
        self._room = [in_flight * min(microbatches, ranks * (count - chunk) / count) for chunk in range(count)]
        self._works = [work_of(layer) for layer in model.layers]
        self._held = [max(layer.activation, layer.held) for layer in model.layers]
        self._limits = limits
        self.work = [0.0] * ranks
        self._once, self._flying, self._static = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self._tied: list[dict[str, int]] = [{} for _ in range(ranks)]

    def fill(self, starts: Sequence[int]) -> None:
        for values in (self.work, self._once, self._flying, self._static):
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
        self._flying[rank] += sign * held * self._room[chunk]
        costs = self.layers[layer]
        if costs.tied is not None:
            present = self._tied[rank].get(costs.tied, 0)
            self._tied[rank][costs.tied] = present + sign
            if present + min(sign, 0):  # another layer there has these weights
                return
        self._static[rank] += sign * costs.static

    def cost(self) -> tuple[float, float, float]:
        """The memory that is missing, the most work of a rank, and how uneven the work is; less is better."""
        missing = 0.0
        if self._limits is not None:
            for once, flying, static, limit in zip(self._once, self._flying, self._static, self._limits, strict=True):
                missing += max(0.0, static + max(once, flying) - limit * (1 + 1e-9))
        return missing, max(self.work), sum(each * each for each in self.work)

    def worst(self) -> list[int]:
        """The ranks that a layer should leave: with too little memory, else with the most work."""
        if self._limits is not None:
            each = zip(self._once, self._flying, self._static, self._limits, strict=True)
            missing = [static + max(once, flying) - limit * (1 + 1e-9) for once, flying, static, limit in each]
            if max(missing) > 0:
                return [missing.index(max(missing))]
        most = max(self.work)
        return [self.work.index(most)]


def _improved(ranks: _Ranks, starts: Sequence[int]) -> list[int]:
    """`starts` after all moves of a layer that help, the best first."""
    starts = list(starts)
    ranks.fill(starts)
    best = ranks.cost()
    while True:
        found: list[int] | None = None
        for chunk, owner in enumerate(ranks.placement):
            if owner not in ranks.worst():
                continue
            for moved in _moves(ranks, starts, chunk):
                cost = ranks.cost()
                if any(new < old * (1 - 1e-9) for new, old in zip(cost, best, strict=True)) and cost < best:
                    best, found = cost, moved
            ranks.fill(starts)
        if found is None:
            return starts
        starts = found
        ranks.fill(starts)


def _moves(ranks: _Ranks, starts: Sequence[int], source: int) -> Iterator[list[int]]:
    """Starts after a layer of chunk `source` has moved to each other chunk in turn; `ranks` follows."""
    ends = [*starts[1:], len(ranks.layers)]
    if ends[source] - starts[source] < 2:
        return
    for step in (1, -1):
        moved = list(starts)
        chunk = source
        while 0 <= chunk + step < len(starts):
            if step > 0:
                moved[chunk + 1] -= 1
                layer = moved[chunk + 1]
            else:
                layer = moved[chunk]
                moved[chunk] += 1
            ranks.change(layer, chunk, -1)
            ranks.change(layer, chunk + step, 1)
            chunk += step
            yield list(moved)
        if step > 0:
            ranks.fill(starts)
