"""What all pictures share: colours, legends, and the checks of what is to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zbkern.schedules.actions import Event
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, duration

_KINDS = {
    "F": ("#3f83c9", "forward"),
    "B": ("#2e9e86", "input gradient"),
    "W": ("#dfa23a", "weight gradient"),
    "BW": ("#8d74c4", "both gradients"),
    "R": ("#c2668f", "recompute"),
    "O": ("#7a8793", "offload"),
    "L": ("#a58a6b", "load"),
}
COLOURS = {kind: colour for kind, (colour, _) in _KINDS.items()}
LANES = {"O": "out", "L": "back"}  # the copies of a rank: below its passes, a lane for each direction
IDLE, OUTSIDE, HELD, STATIC, LIMIT = "#f7c5c1", "#eef0f3", "#a9b3bf", "#6e7781", "#cf222e"


class Drawable(Protocol):
    """A Timeline, as far as pictures need it: drawing takes data, and imports no class of the simulation."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def events(self) -> Sequence[Sequence[Event]]: ...
    @property
    def copies(self) -> Sequence[Sequence[Event]]: ...
    @property
    def peak_memory(self) -> Sequence[float]: ...
    @property
    def samples(self) -> Sequence[Sequence[tuple[float, ...]]]: ...
    @property
    def unit(self) -> str: ...
    @property
    def memory_unit(self) -> str: ...
    @property
    def makespan(self) -> float: ...
    @property
    def bubble_rate(self) -> float: ...
    def memory_held(self, costs: Any) -> list[list[tuple[float, float]]]: ...


def checked(
    function: str, timelines: Sequence[Drawable], titles: Sequence[str] | None, costs: Sequence[Any] | None = None
) -> Sequence[str]:
    """The title of every timeline: as given, or the name of its schedule. Raises TypeError or ValueError."""
    for what, given, attribute, wanted in (
        ("timelines", timelines, "events", "a list of Timelines, such as [simulate(schedule)]"),
        ("costs", () if costs is None else costs, "per_chunk", "a list with the Costs of every timeline, or None"),
    ):
        if not isinstance(given, Sequence) or not all(hasattr(each, attribute) for each in given):
            raise TypeError(f"{function}: {what} must be {wanted}; got {type(given).__name__} {given!r}")
    if not timelines:
        raise ValueError(f"{function}: timelines is empty; give at least one")
    for what, some in (("titles", titles), ("costs", costs)):
        if some is not None and len(some) != len(timelines):
            raise ValueError(f"{function}: {what} must be one for each of {len(timelines)} timelines; got {len(some)}")
    return titles or [timeline.schedule.name for timeline in timelines]


def note(timeline: Drawable, limit: float | None = None) -> str:
    """The figures beside a title; limit: of the memory of a rank."""
    text = f"{timeline.bubble_rate:.1%} bubble, makespan {duration(timeline.makespan, timeline.unit)}"
    if timeline.peak_memory:
        text += f", peak memory {amount(max(timeline.peak_memory), timeline.memory_unit)}"
        text += "" if limit is None else f" of {amount(limit, timeline.memory_unit)}"
    return text


def lanes(timeline: Drawable, rank: int) -> dict[str, list[Event]]:
    """The copies of a rank by their lane, for every rank of a timeline that has any; else no lanes."""
    if not any(timeline.copies):
        return {}
    return {lane: [e for e in timeline.copies[rank] if e.action.kind == kind] for kind, lane in LANES.items()}


def legend(timelines: Sequence[Drawable]) -> list[tuple[str, str]]:
    """The entries of the legend: text and colour."""
    rows = [row for timeline in timelines for row in (*timeline.events, *timeline.copies)]
    present = {event.action.kind for row in rows for event in row}
    entries = [(f"{kind} {meaning}", colour) for kind, (colour, meaning) in _KINDS.items() if kind in present]
    if any(timeline.schedule.chunks > 1 for timeline in timelines):
        entries.append(("later chunk of a rank", shade("F", 1, 2)))
    return [*entries, ("idle", IDLE), ("not yet started, or done", OUTSIDE)]


def shade(kind: str, index: int, count: int) -> str:
    """The colour of a kind for chunk `index` of a rank's `count`: later ones are lighter."""
    channels = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * 0.75 * index / count):02x}" for c in channels)


def label(schedule: Schedule, microbatch: int) -> str:
    """Of a microbatch: its number; of a slice 2.0, 2.1, ..., the sequence and the slice."""
    unit = schedule.units[microbatch]
    return f"{unit.microbatch}.{unit.slice}" if unit.slices > 1 else str(unit.microbatch)


def is_light(colour: str) -> bool:
    """Whether a number on it must be dark to be read: by the luminance that sRGB's weights give."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 150
