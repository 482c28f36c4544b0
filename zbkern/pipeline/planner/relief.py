"""Reliefs: other ways to run a chunk that hold less memory and take more time, chosen where memory is the limit.

Recomputing keeps a chunk's input alone and runs its forward again before its backward; offloading sends activations to
the host after F and fetches them before B. Both need room on the rank for what comes back, once per rank and not once
per microbatch, which is taken off its limit. Which chunks are relieved: the first ones, since what they hold waits
longest; how many of them, and whether at all, is what is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbkern.pipeline.actions import ScheduleError
from zbkern.pipeline.costs import ChunkCosts, Costs
from zbkern.pipeline.planner.plan import PLACEMENTS, Plan, placement_of, plan


@dataclass(frozen=True)
class Relief:
    """What a relieved chunk costs beside `Costs`.

    kept: the part of `activation` that it still holds between F and B. recompute: whether B runs the forward again.
    forward, backward: time added to F and to B, of transfers that nothing hides. room: of how many microbatches the
    activations are on the rank when they come back: one for recomputing, two for offloading while the next is fetched.
    """

    name: str
    kept: float
    recompute: bool = False
    forward: float = 0.0
    backward: float = 0.0
    room: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.kept <= 1 or self.forward < 0 or self.backward < 0 or self.room < 0:
            raise ValueError(f"Relief: kept must be in 0..1, and times and room at least 0; got {self}")


@dataclass(frozen=True)
class RelievedPlan:
    """A plan, the costs that it was made for, and the relief of every chunk in model order, None for none.

    Plans of different reliefs do different work: compare their `timeline.cost`, not their bubble rates.
    """

    plan: Plan
    costs: Costs
    reliefs: tuple[Relief | None, ...]


def plan_relieved(
    costs: Costs,
    reliefs: Sequence[Relief],
    stages: int,
    microbatches: int,
    chunks: int = 1,
    placement: str | Sequence[int] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    time_limit: float = 10.0,
    *,
    effort: int | None = None,
    **options: Any,
) -> RelievedPlan:
    """The plan with the least cost with one of the reliefs, or none, in some of the chunks; arguments as of `plan`.

    A first answer of each choice decides which one the search goes on with. Raises ScheduleError when none fits.
    """
    _, homes = placement_of(placement, stages, chunks)
    given: Sequence[Any] = memory_limit if isinstance(memory_limit, Sequence) else [memory_limit] * stages
    if len(given) != stages:
        raise ValueError(f"plan_relieved: memory_limit must be one number or one per rank ({stages}); got {len(given)}")
    best: tuple[float, Costs, list[float] | None, tuple[Relief | None, ...]] | None = None
    refused: ScheduleError | None = None
    for chosen in _choices(reliefs, len(homes)):
        changed, room = _relieved(costs.per_chunk(len(homes)), chosen, homes, stages)
        limits = None if memory_limit is None else [limit - less for limit, less in zip(given, room, strict=True)]
        if limits is not None and min(limits) < 0:
            continue
        try:
            first = plan(changed, stages, microbatches, chunks, homes, limits, effort=0, time_limit=0.0, **options)
        except ScheduleError as error:
            refused = refused or error
            continue
        if best is None or first.timeline.cost < best[0]:
            best = (first.timeline.cost, changed, limits, chosen)
    if best is None:
        raise refused or ScheduleError(f"plan_relieved: no relief fits memory_limit={memory_limit}")
    _, changed, limits, chosen = best
    where = placement if isinstance(placement, str) and placement in PLACEMENTS else homes
    found = plan(changed, stages, microbatches, chunks, where, limits, time_limit, effort=effort, **options)
    return RelievedPlan(found, changed, chosen)


def _choices(reliefs: Sequence[Relief], chunks: int) -> list[tuple[Relief | None, ...]]:
    """None, and each relief in the first eighth of the chunks, in two eighths, and so on."""
    counts = sorted({-(-chunks * eighth // 8) for eighth in range(1, 9)})
    some = [(relief,) * count + (None,) * (chunks - count) for relief in reliefs for count in counts]
    return [(None,) * chunks, *some]


def _relieved(
    flat: ChunkCosts, chosen: Sequence[Relief | None], homes: Sequence[int], stages: int
) -> tuple[Costs, list[float]]:
    """The costs of the chunks with their reliefs, and the room that each rank needs for what comes back."""
    forward, backward, activation = list(flat.forward), list(flat.backward), list(flat.activation)
    room = [0.0] * stages
    for chunk, relief in enumerate(chosen):
        if relief is None:
            continue
        away = (1 - relief.kept) * activation[chunk]
        room[homes[chunk]] = max(room[homes[chunk]], relief.room * away)
        backward[chunk] += relief.backward + relief.recompute * forward[chunk]
        forward[chunk] += relief.forward
        activation[chunk] -= away
    fields = flat._asdict()
    overhead = [b + w - both for b, w, both in zip(flat.backward, flat.weight, fields.pop("fused"), strict=True)]
    changed = {"forward": forward, "backward": backward, "activation": activation, "split_overhead": overhead}
    return replace(Costs(), **{**fields, **changed}), room
