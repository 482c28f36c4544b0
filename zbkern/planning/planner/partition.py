"""Partitions: where a model's layers are cut into chunks, so that ranks have equal work and hold what fits them.

The start is the cut whose largest chunk is the smallest possible, and most even of those (dynamic programming): with
one chunk per rank nothing is better. With several a rank's work in all of them counts: annealing moves single layers
from chunk to chunk, and reaches the best cut of small models (see the tests).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

from zbkern.planning.costs.layers import LayerCosts, ModelCosts
from zbkern.planning.planner import native
from zbkern.planning.planner.native import Effort

Partition = tuple[int, ...]  # the first layer of every chunk

_IN_FLIGHT = (2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.35, 0.2, 0.0)
"""Of what 1F1B holds: partitions that have memory for so many microbatches."""
_STEPS = 500  # of annealing, for every chunk but one
_TEMPERATURES = 50
_COLD = 0.001  # the last temperature
_VARIANTS = ((5.0, 10.0), (5.0, 0.4), (0.2, 40.0), (0.2, 10.0))
"""The first temperature, and what even chunks count beside the work of a rank: cold ones stay near the start."""
_MEAN, _ONE_IN_FLIGHT, _STRAIN = 2**30, 2**8, 2**20  # units of the compiled core (csrc/planner.h)


def work_of(layer: LayerCosts) -> float:
    return layer.forward + layer.backward + layer.weight


def busiest(
    work: Sequence[float], starts: Partition, placement: Sequence[int], slowness: Sequence[float] | None = None
) -> float:
    """The most time of a rank, from the work of every layer and the time that each rank takes for one of it."""
    found = [0.0] * (max(placement) + 1)
    for rank, (begin, end) in zip(placement, pairwise([*starts, len(work)]), strict=True):
        found[rank] += sum(work[begin:end])
    return max(found if slowness is None else (time * slow for time, slow in zip(found, slowness, strict=True)))


def slowness_of(model: ModelCosts, ranks: int) -> list[float]:
    """The time that each rank takes for one of work."""
    return [1 / speed for speed in model._at_speeds(ranks).speeds or [1.0] * ranks]


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

    placement: the rank of every chunk. limits: the memory of every rank, None for no limit. Work is equal where ranks
    take equally long for it, by the model's speeds.
    """
    return list(_balanced(model, tuple(placement), microbatches, None if limits is None else tuple(limits)))


@lru_cache(maxsize=64)  # asked for again for every published schedule
def _balanced(
    model: ModelCosts, placement: tuple[int, ...], microbatches: int, limits: tuple[float, ...] | None
) -> tuple[Partition, ...]:
    slowness = slowness_of(model, max(placement) + 1)
    equal = balanced_chunks(tuple(map(work_of, model.layers)), tuple(slowness[rank] for rank in placement))
    found = [equal]
    if len(placement) > 1:
        problem, (hot, even) = _problem(model, placement, microbatches, limits), _VARIANTS[0]
        if len(set(placement)) < len(placement):
            balanced = (_annealed(problem._replace(limit=[], even=evenly), equal, first) for first, evenly in _VARIANTS)
            found = sorted(balanced, key=lambda each: busiest(problem.work, each, placement, slowness))
        shares = ([int(share * most) for most in problem.in_flight] for share in _IN_FLIGHT)
        smaller = (_annealed(problem._replace(in_flight=each, even=even), found[0], hot) for each in shares)
        found += takewhile(bool, smaller)  # what fits does so for fewer microbatches, too
    numbers = model._partition_of(range(len(model.layers)))
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
    return ModelCosts(tuple(layers), speeds=model.speeds)


@lru_cache(maxsize=64)  # asked for again for every placement
def balanced_chunks(work: tuple[float, ...], slowness: tuple[float, ...]) -> Partition:
    """The first layer of every chunk: the most time of a chunk is as little as possible, then that of squares.

    slowness: the time that each chunk takes for one of work.
    """
    chunks = len(slowness)
    count, unit = len(work), max(sum(work), 1e-300) / 2**50  # whole numbers: equal layers have equal sums
    done = [*accumulate((round(each / unit) for each in work), initial=0)]
    nothing: tuple[float, int, Partition] = (math.inf, 0, ())
    best = [(0.0, 0, ()), *[nothing] * count]  # [end]: the most in a chunk so far, the squares, and the chunks
    for chunk in range(chunks):
        further = [nothing] * (count + 1)
        prefix = [round(each * slowness[chunk]) for each in done]
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


class _Problem(NamedTuple):
    """`PartitionProblem` of the compiled core (csrc/planner.h)."""

    placement: tuple[int, ...]
    work: list[int]
    held: list[int]
    fixed: list[int]
    tied: list[int]
    in_flight: list[int]
    limit: list[int]
    even: float
    slowness: list[float]


def _problem(
    model: ModelCosts, placement: tuple[int, ...], microbatches: int, limits: Sequence[float] | None
) -> _Problem:
    """With memory for as many microbatches as 1F1B holds. Where a limit is more than that, it is that."""
    layers, ranks, chunks = model.layers, max(placement) + 1, len(placement)
    work, slowness = list(map(work_of, layers)), slowness_of(model, ranks)
    shared = {layer.tied: layer.static for layer in sorted(layers, key=lambda layer: layer.static)}  # the largest
    static = [layer.static if layer.tied is None else shared[layer.tied] for layer in layers]
    held = [max(layer.activation, layer.held) for layer in layers]
    memory = _MEAN * ranks / (sum(held) + sum(static) or 1.0)
    tied = {name: number for number, name in enumerate({layer.tied for layer in layers if layer.tied is not None})}
    enough = sum(static) / ranks + sum(layer.activation for layer in layers)
    return _Problem(
        placement,
        _scaled(work, _MEAN * sum(1 / each for each in slowness) / (sum(work) or 1.0)),
        _scaled(held, memory),
        _scaled(static, memory),
        [-1 if layer.tied is None else tied[layer.tied] for layer in layers],
        # a chunk holds a microbatch from its F to its B: 1F1B holds as many as there are ranks in the first chunk
        _scaled([min(microbatches, ranks * (chunks - chunk) / chunks) for chunk in range(chunks)], _ONE_IN_FLIGHT),
        _scaled([min(limit * (1 + 1e-9), enough) for limit in limits or [math.inf] * ranks], memory),
        even=0.0,
        slowness=slowness,
    )


def _annealed(problem: _Problem, start: Partition, hot: float) -> Partition:
    """Single layers go from a chunk to the one before it or behind it, at lower and lower temperatures.

    What becomes small grows fast with the work of a rank, slowly with that of a chunk, and with memory that is missing.
    Of all that are passed the best has the least missing memory, then the least work of the busiest rank. Where there
    are limits it is empty if the start keeps them. It runs in C++ (csrc/planner_partition.cpp).
    """
    cooled = [hot * (_COLD / hot) ** (step / _TEMPERATURES) for step in range(_TEMPERATURES)]
    effort = Effort(temperatures=_scaled(cooled, _STRAIN), work=_STEPS * (len(start) - 1) // _TEMPERATURES)
    return tuple(native.core.anneal_partition(problem, start, effort))


def _scaled(amounts: Sequence[float], scale: float) -> list[int]:
    return [round(each * scale) for each in amounts]
