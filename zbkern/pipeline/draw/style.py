"""What all pictures, tables and messages share: colours, legends, and numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.pipeline.simulation.costs import ChunkCosts, Costs
from zbkern.pipeline.simulation.memory import Memory
from zbkern.pipeline.simulation.timeline import Event, Timeline

COLOURS = {"F": "#3f83c9", "B": "#2e9e86", "W": "#dfa23a", "BW": "#8d74c4"}
MEANING = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "both gradients"}
IDLE, OUTSIDE, HELD = "#f7c5c1", "#eef0f3", "#a9b3bf"

Track = list[tuple[float, float]]  # of one rank: (time, memory held from then on)


def checked(
    timelines: Sequence[Timeline], titles: Sequence[str] | None, costs: Sequence[Costs] | None
) -> tuple[Sequence[str], list[list[Track]]]:
    """Titles, and the memory of every rank, empty without costs. Raises ValueError where the counts differ."""
    if not timelines:
        raise ValueError("draw: timelines is empty; give at least one")
    for what, given in (("titles", titles), ("costs", costs)):
        if given is not None and len(given) != len(timelines):
            raise ValueError(f"draw: {what} must be one for each of {len(timelines)} timelines; got {len(given)}")
    tracks = []
    for index, timeline in enumerate(timelines):
        flat = costs[index].per_chunk(len(timeline.schedule.placement)) if costs else None
        tracks.append([steps(row, flat) if flat else [] for row in timeline.events])
    return titles or [timeline.schedule.name for timeline in timelines], tracks


def steps(events: Sequence[Event], costs: ChunkCosts) -> list[tuple[float, float]]:
    """(time, memory from then on) of one rank's events: F takes at its start, the others give back at their end."""
    memory, found = Memory(costs), []
    for event in events:
        memory.account(event.action)
        found.append((event.start if event.action.kind == "F" else event.end, memory.now))
    return found


def note(timeline: Timeline) -> str:
    """The figures beside a title."""
    text = f"{timeline.bubble_rate:.1%} bubble, makespan {duration(timeline.makespan, timeline.unit)}"
    return text + (f", peak memory {amount(max(timeline.peak_memory))}" if timeline.peak_memory else "")


def legend(timelines: Sequence[Timeline], most: float) -> list[tuple[str, str]]:
    """What there is to explain, and its colour. most: the memory held at most, 0 when none is drawn."""
    present = {event.action.kind for timeline in timelines for row in timeline.events for event in row}
    entries = [(f"{kind} {MEANING[kind]}", COLOURS[kind]) for kind in COLOURS if kind in present]
    if any(timeline.schedule.chunks > 1 for timeline in timelines):
        entries.append(("later chunk of a rank", shade("F", 1, 2)))
    entries += [("idle", IDLE), ("not yet started, or done", OUTSIDE)]
    return [*entries, (f"memory held, at most {amount(most)}", HELD)] if most else entries


def shade(kind: str, place: int, count: int) -> str:
    """The colour of a kind for chunk `place` of a rank's `count`: later ones are lighter."""
    channels = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * 0.75 * place / count):02x}" for c in channels)


def is_light(colour: str) -> bool:
    """Whether a number on it must be dark to be read: by the luminance that sRGB's weights give."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 150


def amount(memory: float) -> str:
    """Memory, whose unit is free: from a million on it is taken for bytes, and written as 24.5 GB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if abs(memory) >= size:
            return f"{number(memory / size)} {unit}"
    return number(memory)


def duration(time: float, unit: str) -> str:
    """A time with its unit, where that is known."""
    return f"{number(time)} {unit}".rstrip()


def number(value: float) -> str:
    """Four significant digits, or the whole number where that has a few more."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e8 else f"{value:.4g}"
