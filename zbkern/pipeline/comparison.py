"""Every published schedule for one model and one machine, so that they can be compared: same work, same memory unit."""

from __future__ import annotations

from dataclasses import asdict

from zbkern.pipeline import schedules
from zbkern.pipeline.actions import Schedule
from zbkern.pipeline.costs import Costs
from zbkern.pipeline.simulate import simulate
from zbkern.pipeline.timeline import Timeline

INTERLEAVED = ("interleaved", "interleaved_zero_bubble")
"""The generators that take any number of chunks per rank."""


def build(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of a name in `schedules.NAMES`; chunks per rank matter to the interleaved ones alone (default 2)."""
    more = {"chunks": chunks} if chunks is not None and name in INTERLEAVED else {}
    return getattr(schedules, name)(stages, microbatches, **more)


def recut(costs: Costs, chunks: int, wanted: int) -> Costs:
    """The costs of the same model in `wanted` chunks, for costs of `chunks`: all of it cut evenly along the model.

    A hop takes as long as before, however small the chunk. Raises ValueError when every edge has a latency of its own,
    since other chunks have other edges.
    """
    if chunks == wanted:
        return costs
    if isinstance(costs.communication, tuple):
        raise ValueError(
            f"recut: costs.communication has one number per edge of {chunks} chunks, and {wanted} chunks have other "
            "edges; give one number"
        )
    fields = asdict(costs)
    communication = fields.pop("communication")
    return Costs(communication=communication, **{name: _recut(value, chunks, wanted) for name, value in fields.items()})


def timelines(costs: Costs, stages: int, microbatches: int, chunks: int = 1) -> tuple[list[Timeline], list[str]]:
    """Each published schedule's timeline, and the names of those that the costs say nothing about.

    costs: of `chunks` chunks per rank; other schedules get the same model in their number of chunks (see `recut`). The
    interleaved ones have `chunks` chunks per rank, two at least.
    """
    found, unknown = [], []
    for name in schedules.NAMES:
        schedule = build(name, stages, microbatches, max(2, chunks))
        try:
            found.append(simulate(schedule, recut(costs, stages * chunks, len(schedule.placement))))
        except ValueError:
            unknown.append(name)
    return found, unknown


def _recut(value: float | tuple[float, ...], chunks: int, wanted: int) -> float | list[float]:
    if isinstance(value, float):
        return value * chunks / wanted
    return [
        sum(
            each * max(0.0, min((old + 1) / chunks, (new + 1) / wanted) - max(old / chunks, new / wanted)) * chunks
            for old, each in enumerate(value)
        )
        for new in range(wanted)
    ]
