"""Every published schedule for the same model on the same machine, to compare them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from zbkern import schedules
from zbkern.planning.costs.chunks import OF_EDGES, PARTS, Costs, number_fields
from zbkern.planning.simulation.simulator import simulate
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.schedule import Schedule

INTERLEAVED = ("interleaved", "interleaved_zero_bubble")
"""The generators that take any number of chunks per rank."""


def build(
    name: str, stages: int, microbatches: int, chunks: int | None = None, slices: int | Sequence[int] = 1
) -> Schedule:
    """The schedule of a name in `schedules.NAMES`; chunks per rank matter to the interleaved ones alone (default 2).

    microbatches: of whole sequences, each in these slices.
    """
    more = {"chunks": chunks} if chunks is not None and name in INTERLEAVED else {}
    return getattr(schedules, name)(stages, microbatches, **more, slices=slices)


def with_microbatches(schedule: Schedule, microbatches: int) -> Schedule | None:
    """The same published schedule for another number of microbatches; None for one that is not published."""
    if schedule.name not in schedules.NAMES or schedule.own_slices:
        return None
    kind = schedule.name, schedule.ranks
    as_published = build(*kind, schedule.microbatches, schedule.chunks, schedule.slices)
    return build(*kind, microbatches, schedule.chunks, schedule.slices) if as_published == schedule else None


def rechunk(costs: Costs, chunks: int, wanted: int) -> Costs:
    """The costs of the same model in `wanted` chunks, for costs of `chunks`: cut evenly along the model.

    What the first or the last chunk has beyond the others (beyond the median of those between, where there are any) is
    the embedding or the head, which cannot be cut: it stays whole, in the first or the last new chunk. That holds for
    each cost by itself. A message takes as long and is as large as before, however small the chunk, or as the longest
    and the largest of several.
    """
    if chunks == wanted:
        return costs
    given = {name: getattr(costs, name) for name in number_fields() if name not in OF_EDGES}
    cut = {name: _rechunk(value, chunks, wanted) for name, value in given.items() if value is not None}
    for name, wholes in PARTS.items():  # which may be cut in another way
        most = [sum(each) for each in zip(*(cut[whole] for whole in wholes), strict=True)]
        cut[name] = list(map(min, cut[name], most))
    edges = {name: getattr(costs, name) for name in OF_EDGES}
    largest = {name: value if isinstance(value, float) else max(value, default=0.0) for name, value in edges.items()}
    return replace(costs, **largest, **cut)  # type: ignore[arg-type]


def timelines(
    costs: Costs,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    slices: int | Sequence[int] = 1,
    names: Sequence[str] = schedules.NAMES,
) -> list[Timeline]:
    """Each published schedule's timeline, or those of these names.

    costs: of `chunks` chunks per rank; other schedules get the same model in their number of chunks (see `rechunk`).
    The interleaved ones have `chunks` chunks per rank, two at least.
    """
    made = [build(name, stages, microbatches, max(2, chunks), slices) for name in names]
    return [simulate(each, rechunk(costs, stages * chunks, len(each.placement))) for each in made]


def _rechunk(value: float | tuple[float, ...], chunks: int, wanted: int) -> list[float]:
    if isinstance(value, float):
        return [value * chunks / wanted] * wanted
    first, last = _excess(value) if chunks > 1 else (0.0, 0.0)
    even = [*value]
    even[0] -= first
    even[-1] -= last
    found = [
        sum(
            each * max(0.0, min((old + 1) / chunks, (new + 1) / wanted) - max(old / chunks, new / wanted)) * chunks
            for old, each in enumerate(even)
        )
        for new in range(wanted)
    ]
    found[0] += first
    found[-1] += last
    return found


def _excess(values: tuple[float, ...]) -> tuple[float, float]:
    """What the first and the last are above the median of those between, or of two above the other."""
    common = statistics.median(values[1:-1] or [min(values)])
    return max(0.0, values[0] - common), max(0.0, values[-1] - common)
