"""What all pictures share: colours, legends, and the checks of what is to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zbkern.pipeline.schedules.units import amount, duration

if TYPE_CHECKING:
    from zbkern.pipeline.simulation.costs import Costs
    from zbkern.pipeline.simulation.timeline import Event, Timeline

COLOURS = {
    "F": "#3f83c9",
    "B": "#2e9e86",
    "W": "#dfa23a",
    "BW": "#8d74c4",
    "R": "#c2668f",
    "O": "#7a8793",
    "L": "#a58a6b",
}
MEANING = {
    "F": "forward",
    "B": "input gradient",
    "W": "weight gradient",
    "BW": "both gradients",
    "R": "recompute",
    "O": "offload",
    "L": "load",
}
LANES = {"O": "out", "L": "back"}  # the copies of a rank: below its passes, a lane for each direction
IDLE, OUTSIDE, HELD = "#f7c5c1", "#eef0f3", "#a9b3bf"

Track = list[tuple[float, float]]  # of one rank: (time, memory held from then on)


class Drawing(NamedTuple):
    """What is to be drawn: per timeline a title and the memory curve of every rank (empty without costs)."""

    timelines: Sequence[Timeline]
    titles: Sequence[str]
    memory: list[list[Track]]
    memory_unit: str

    @property
    def most_memory(self) -> float:
        """The memory that any rank holds at most; 0 where none is drawn."""
        return max((held for rows in self.memory for track in rows for _, held in track), default=0.0)


def drawing(timelines: Sequence[Timeline], titles: Sequence[str] | None, costs: Sequence[Costs] | None) -> Drawing:
    """The drawing of these timelines. Raises TypeError or ValueError where they are none, or the counts differ."""
    titles = checked("draw", timelines, titles)
    if costs is None:
        return Drawing(timelines, titles, [[[] for _ in timeline.events] for timeline in timelines], "")
    if not _is_list(costs, "per_chunk"):
        raise TypeError(f"draw: costs must be a list with the Costs of every timeline, or None; got {costs!r}")
    if len(costs) != len(timelines):
        raise ValueError(f"draw: costs must be one for each of {len(timelines)} timelines; got {len(costs)}")
    units = {each.memory_unit or "" for each in costs}
    memory = [timeline.memory_held(each) for timeline, each in zip(timelines, costs, strict=True)]
    return Drawing(timelines, titles, memory, units.pop() if len(units) == 1 else "")


def checked(function: str, timelines: Sequence[Timeline], titles: Sequence[str] | None) -> Sequence[str]:
    """The title of every timeline: as given, or the name of its schedule. Raises TypeError or ValueError."""
    if not _is_list(timelines, "events"):
        raise TypeError(
            f"{function}: timelines must be a list of Timelines, such as [simulate(schedule)]; got "
            f"{type(timelines).__name__} {timelines!r}"
        )
    if not timelines:
        raise ValueError(f"{function}: timelines is empty; give at least one")
    if titles is not None and len(titles) != len(timelines):
        raise ValueError(f"{function}: titles must be one for each of {len(timelines)} timelines; got {len(titles)}")
    return titles or [timeline.schedule.name for timeline in timelines]


def _is_list(values: Any, attribute: str) -> bool:
    """Whether these are a list of what has such an attribute: drawing takes data, and imports no class of it."""
    return isinstance(values, Sequence) and all(hasattr(value, attribute) for value in values)


def note(timeline: Timeline) -> str:
    """The figures beside a title."""
    text = f"{timeline.bubble_rate:.1%} bubble, makespan {duration(timeline.makespan, timeline.unit)}"
    if timeline.peak_memory:
        text += f", peak memory {amount(max(timeline.peak_memory), timeline.memory_unit)}"
    return text


def lanes(timeline: Timeline, rank: int) -> dict[str, list[Event]]:
    """The copies of a rank by their lane, for every rank of a timeline that has any; else no lanes."""
    if not any(timeline.copies):
        return {}
    return {lane: [e for e in timeline.copies[rank] if e.action.kind == kind] for kind, lane in LANES.items()}


def legend(shown: Drawing) -> list[tuple[str, str]]:
    """The entries of the legend: text and colour."""
    rows = [row for timeline in shown.timelines for row in (*timeline.events, *timeline.copies)]
    present = {event.action.kind for row in rows for event in row}
    entries = [(f"{kind} {MEANING[kind]}", COLOURS[kind]) for kind in COLOURS if kind in present]
    if any(timeline.schedule.chunks > 1 for timeline in shown.timelines):
        entries.append(("later chunk of a rank", shade("F", 1, 2)))
    entries += [("idle", IDLE), ("not yet started, or done", OUTSIDE)]
    most = shown.most_memory
    return [*entries, (f"memory held, at most {amount(most, shown.memory_unit)}", HELD)] if most else entries


def shade(kind: str, index: int, count: int) -> str:
    """The colour of a kind for chunk `index` of a rank's `count`: later ones are lighter."""
    channels = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * 0.75 * index / count):02x}" for c in channels)


def is_light(colour: str) -> bool:
    """Whether a number on it must be dark to be read: by the luminance that sRGB's weights give."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 150
