"""Partitions: where a model's layers are cut into chunks, so that ranks have equal work and hold what fits them.

The start is the cut whose largest chunk is the smallest possible, and most even of those (dynamic programming): with
one chunk per rank nothing is better. With several a rank's work in all of them counts: annealing moves single layers
from chunk to chunk, and reaches the best cut of small models (see the tests).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from random import Random

from zbkern.planning.simulation.layers import LayerCosts, ModelCosts

Partition = tuple[int, ...]  # the first layer of every chunk

_IN_FLIGHT = (2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.35, 0.2, 0.0)
"""Of what 1F1B holds: partitions that have memory for so many microbatches."""
_STEPS = 500  # of annealing, for every chunk but one
_COLD = 0.001  # the last temperature
_STEEP = 4  # power of a rank's work
_VARIANTS = ((5.0, 10.0), (5.0, 0.4), (0.2, 40.0), (0.2, 10.0))
"""The first temperature, and what even chunks count beside that power, squared: cold ones stay near the start."""
_MISSING = 100  # what it counts if as much memory is missing as a rank holds for one microbatch


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
    """Partitions of about equal work per rank, the most equal first, then some that hold less where work is; of a
    model in half blocks then those of its whole blocks, even ones among them.

    placement: the rank of every chunk. limits: the memory of every rank, None for no limit.
    """
    return list(_balanced(model, tuple(placement), microbatches, None if limits is None else tuple(limits)))


@lru_cache(maxsize=64)  # asked for again for every published schedule
def _balanced(
    model: ModelCosts, placement: tuple[int, ...], microbatches: int, limits: tuple[float, ...] | None
) -> tuple[Partition, ...]:
    equal = balanced_chunks(tuple(map(work_of, model.layers)), len(placement))
    found = [equal]
    if len(set(placement)) < len(placement):
        found = [_annealed(_Ranks(model, placement, microbatches, None, 0.0, equal, each)) for each in _VARIANTS]
        found.sort(key=lambda each: _Ranks(model, placement, microbatches, None, 0.0, each).busiest)
    most_equal = found[0]
    for in_flight in _IN_FLIGHT if limits is not None else ():
        ranks = _Ranks(model, placement, microbatches, limits, in_flight, most_equal)
        if not any(ranks.missing):
            break  # nor would it be for fewer microbatches
        found.append(_annealed(ranks))
    numbers = model.partition_of(range(len(model.layers)))
    blocks = [layer for layer, number in enumerate(numbers) if number % 1 == 0]
    if len(placement) <= len(blocks) < len(numbers):
        whole = _balanced(_joined(model, blocks), placement, microbatches, limits)
        of_blocks = [*whole, *even_partitions(len(blocks), len(placement))]
        found += [tuple(blocks[first] for first in each) for each in of_blocks]
    return tuple(dict.fromkeys(found))


def _joined(model: ModelCosts, blocks: Sequence[int]) -> ModelCosts:
    """With one layer for both halves of a block, of which the first ones are given."""
    names = ("forward", "backward", "weight", "activation", "held", "static")
    layers: list[LayerCosts] = []
    for begin, end in pairwise([*blocks, len(model.layers)]):
        both = model.layers[begin:end]
        sums = {name: sum(getattr(layer, name) for layer in both) for name in names}
        layers.append(LayerCosts(f"layer {len(layers)}", tied=both[0].tied, **sums))
    return ModelCosts(tuple(layers))


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


class _Ranks:
    """What every rank would do and hold, updated as layers go from chunk to chunk.

    strain: what annealing makes small: it grows fast with the work of a rank, slowly with that of a chunk, and with
    memory that is missing.
    """

    def __init__(
        self,
        model: ModelCosts,
        placement: Sequence[int],
        microbatches: int,
        limits: Sequence[float] | None,
        in_flight: float,
        starts: Partition,
        variant: tuple[float, float] = _VARIANTS[0],
    ) -> None:
        count, ranks = len(placement), max(placement) + 1
        self.placement, self.layers, self.starts = placement, model.layers, starts
        self.hot, self._of_chunks = variant
        # a chunk holds a microbatch from its F to its B: 1F1B holds as many as there are ranks in the first chunk
        self._in_flight = [in_flight * min(microbatches, ranks * (count - chunk) / count) for chunk in range(count)]
        works = [work_of(layer) for layer in model.layers]
        self._shares = [ranks * work / (sum(works) or 1.0) for work in works]  # of the work of a rank, in the mean
        self._held = [max(layer.activation, layer.held) for layer in model.layers]
        self._memory = (sum(self._held) + sum(layer.static for layer in model.layers)) / ranks or 1.0
        self._limits = None if limits is None else [limit * (1 + 1e-9) for limit in limits]
        self.strain, self._strains = 0.0, [0.0] * ranks
        self._work, self._in_chunk, self.missing = [0.0] * ranks, [0.0] * count, [0.0] * ranks
        self._once, self._flying, self._static = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self._tied: list[dict[str, int]] = [{} for _ in range(ranks)]
        for chunk, (begin, end) in enumerate(pairwise([*starts, len(self.layers)])):
            for layer in range(begin, end):
                self.change(layer, chunk, 1)

    def change(self, layer: int, chunk: int, sign: int) -> None:
        """Adds a layer to a chunk (sign 1), or takes it away (-1)."""
        rank, work = self.placement[chunk], sign * self._shares[layer]
        if self._limits is not None:
            self._change_memory(layer, chunk, sign, rank, self._limits[rank])
        self.strain += self._of_chunks * work * (2 * self._in_chunk[chunk] + work) - self._strains[rank]
        self._in_chunk[chunk] += work
        self._work[rank] += work
        self._strains[rank] = self._work[rank] ** _STEEP + _MISSING * self.missing[rank] / self._memory
        self.strain += self._strains[rank]

    def _change_memory(self, layer: int, chunk: int, sign: int, rank: int, limit: float) -> None:
        held = sign * self._held[layer]
        self._once[rank] += held
        self._flying[rank] += held * self._in_flight[chunk]
        tied, others = self.layers[layer].tied, 0  # layers of the rank that have the same weights
        if tied is not None:
            present = self._tied[rank].get(tied, 0)
            self._tied[rank][tied], others = present + sign, present + min(sign, 0)
        if not others:
            self._static[rank] += sign * self.layers[layer].static
        self.missing[rank] = max(0.0, self._static[rank] + max(self._once[rank], self._flying[rank]) - limit)

    @property
    def busiest(self) -> float:
        """The most work of a rank, in the mean 1."""
        return round(max(self._work), 9)

    def cost(self) -> tuple[float, float, float]:
        """The memory that is missing, the most work of a rank, and the strain; less is better."""
        return sum(self.missing), self.busiest, self.strain


def _annealed(ranks: _Ranks) -> Partition:
    """The best of all that is passed as single layers go from a chunk to the one before it or behind it."""
    found, random = ranks.starts, Random(0).random
    bounds, movable, best = [*found, len(ranks.layers)], len(found) - 1, ranks.cost()
    steps = _STEPS * movable
    for step in range(steps):
        chunk = 1 + int(random() * movable)  # the one behind the bound that moves
        back = random() < 0.5
        layer, source, target = (bounds[chunk] - 1, chunk - 1, chunk) if back else (bounds[chunk], chunk, chunk - 1)
        if bounds[source + 1] - bounds[source] < 2:
            continue
        before = ranks.strain
        ranks.change(layer, source, -1)
        ranks.change(layer, target, 1)
        worse = ranks.strain - before
        if worse > 0 and random() >= math.exp(-worse / (ranks.hot * (_COLD / ranks.hot) ** (step / steps))):
            ranks.change(layer, target, -1)
            ranks.change(layer, source, 1)
            continue
        bounds[chunk] += -1 if back else 1
        cost = ranks.cost() if worse < 0 else best
        if cost < best and any(new < old * (1 - 1e-9) for new, old in zip(cost, best, strict=True)):
            best, found = cost, tuple(bounds[:-1])
    return found
