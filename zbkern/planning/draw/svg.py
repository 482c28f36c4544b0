"""Pictures of timelines, planned or measured, as SVG; and as a page around one that zooms.

Several timelines stand one above the other on one time axis. A box is an action: its colour the kind, its shade the
chunk of the rank, its number the microbatch, with slices that of the sequence and the slice. Passes beside each other
share the height of their row. Idle time between a rank's first and last action is pink, that before and after it grey:
a rank may start late and end early for free. Below its row are the lanes of a rank's copies, where it has any, and
given costs the memory that it holds, what is always there darker, and the limit as a line.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from zbkern.schedules.actions import Event
from zbkern.schedules.units import amount, duration, number

_KINDS = {
    "F": ("#3f83c9", "forward"),
    "B": ("#2e9e86", "input gradient"),
    "W": ("#dfa23a", "weight gradient"),
    "BW": ("#8d74c4", "both gradients"),
    "R": ("#c2668f", "recompute"),
    "O": ("#7a8793", "offload"),
    "L": ("#a58a6b", "load"),
}
_LANES = {"O": "out", "L": "back"}  # the copies of a rank: below its passes, a lane for each direction
_IDLE, _OUTSIDE, _HOLDS, _STATIC, _LIMIT = "#f7c5c1", "#eef0f3", "#a9b3bf", "#6e7781", "#cf222e"
_LEFT, _RIGHT, _TITLE, _ROW, _GAP, _AXIS = 64, 16, 28, 24, 20, 30
_LANE = 16  # of the copies in one direction
_HELD = 19  # of the memory, of which the most that any rank holds takes all
_NUMBER = 10  # of a number
_ROUNDING = 1e-9  # relative, of an end: what begins there does not run beside it
_DARK = "#24292f"
_STYLE = f"""
text {{ font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a; }}
.title {{ font-size: 14px; font-weight: 600; fill: {_DARK}; }} .end {{ text-anchor: end; }}
.tick {{ text-anchor: middle; }} .number {{ font-size: 11px; fill: #fff; text-anchor: middle; }}
.dark {{ fill: {_DARK}; }} .action {{ stroke: #fff; }} .held {{ fill: {_HOLDS}; }}
.static {{ fill: {_STATIC}; }} .limit {{ stroke: {_LIMIT}; stroke-dasharray: 4 2; }}
.track {{ fill: #f6f8fa; }} .outside {{ fill: {_OUTSIDE}; }} .idle {{ fill: {_IDLE}; }}
"""

Track = list[tuple[float, float]]  # of one rank: (time, memory from then on, static memory among it)


def checked(
    function: str, timelines: Sequence[Any], titles: Sequence[str] | None, costs: Sequence[Any] | None = None
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


def lanes(timeline: Any, rank: int) -> dict[str, list[Event]]:
    """The copies of a rank by their lane, for every rank of a timeline that has any; else no lanes."""
    if not any(timeline.copies):
        return {}
    return {lane: [e for e in timeline.copies[rank] if e.action.kind == kind] for kind, lane in _LANES.items()}


def stacked(row: Sequence[Event]) -> list[tuple[Event, int, int]]:
    """Each event of a row with its place among those that run at one time, and how many places they take."""
    found: list[tuple[Event, int, int]] = []
    group: list[tuple[Event, int]] = []
    ends: list[float] = []  # of the last event in each place
    for event in row:
        free = [place for place, end in enumerate(ends) if event.start >= end - _ROUNDING * abs(end)]
        if len(free) == len(ends):  # nothing runs beside it so far
            found += [(each, place, len(ends)) for each, place in group]
            group, ends, free = [], [], []
        place = free[0] if free else len(ends)
        ends[place : place + 1] = [event.end]
        group.append((event, place))
    return [*found, *((each, place, len(ends)) for each, place in group)]


class _Axis(NamedTuple):
    """How times of one timeline become pixels, and how many pixels memory has at most."""

    timeline: Any
    static: Sequence[float]
    tracks: Sequence[Track]
    first: float
    scale: float
    width: float
    most: float
    limit: float | None
    crowded: bool  # numbers also where there is no room for them

    def x(self, time: float) -> float:
        return (time - self.first) * self.scale

    def y(self, memory: float) -> float:
        return _HELD * (1 - memory / self.most)


def html(
    timelines: Sequence[Any],
    titles: Sequence[str] | None = None,
    costs: Sequence[Any] | None = None,
    limit: float | None = None,
) -> str:
    """The same picture in a self-contained page; titles, costs and limit as in `draw.save`.

    The wheel zooms, dragging moves, a double click shows everything again; hovering shows the times of an action, and
    marks its microbatch on all ranks.
    """
    picture = svg(timelines, titles, 1400, costs, limit, crowded=True)
    page = resources.files("zbkern.planning.draw").joinpath("viewer.html").read_text(encoding="utf-8")
    head, script = page.split("@SVG@")
    return head.replace("@TITLE@", escape(", ".join(checked("draw", timelines, titles)))) + picture + script


def svg(
    timelines: Sequence[Any],
    titles: Sequence[str] | None = None,
    width: int = 1000,
    costs: Sequence[Any] | None = None,
    limit: float | None = None,
    *,
    crowded: bool = False,
) -> str:
    """The picture as SVG text, `width` pixels wide; titles, costs and limit as in `draw.save`.

    crowded: the numbers of microbatches stand also where there is no room for them, for a page that zooms.
    """
    titles = checked("draw", timelines, titles, costs)
    memory = [_memory(*both) for both in zip(timelines, costs or [None] * len(timelines), strict=True)]
    most = max((now for _, tracks in memory for track in tracks for _, now in track), default=0.0)
    room, span = width - _LEFT - _RIGHT, max(timeline.makespan for timeline in timelines) or 1.0
    entries = _kinds(timelines)
    if most:
        entries.append(("memory held", _HOLDS))
        entries += [("static memory", _STATIC)] if any(any(static) for static, _ in memory) else []
        entries += [("memory limit", _LIMIT)] if limit is not None else []
        most = max(most, limit or 0.0)
    head, top = _legend(entries, width)
    parts, labels = [head], []
    for timeline, title, (static, tracks) in zip(timelines, titles, memory, strict=True):
        parts.append(
            f'<text x="{_LEFT}" y="{top + 17:g}"><tspan class="title">{escape(title)}</tspan>'
            f'<tspan dx="10">{escape(note(timeline, limit))}</tspan></text>'
        )
        top += _TITLE
        first = min((row[0].start for row in timeline.events if row), default=0.0)
        axis = _Axis(timeline, static, tracks, first, room / span, room, most, limit, crowded)
        for label, height, band in _bands(axis):
            parts.append(f'<g transform="translate({_LEFT} {top:g})">{band}</g>')
            labels.append(f'<text class="end" x="{_LEFT - 8}" y="{top + (height + 6) // 2:g}">{label}</text>')
            top += height
        top += _GAP
    top -= _GAP
    height = round(top + _AXIS)
    labels.append(_ticks(span, room, top, timelines[0].unit))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join([*parts, f'<rect width="{_LEFT}" height="{height}" fill="#fff"/>', *labels])
        + "</svg>\n"
    )


def _memory(timeline: Any, costs: Any) -> tuple[Sequence[float], Sequence[Track]]:
    """The static memory of every rank, and what it holds over time; nothing without costs."""
    if costs is None:
        return [0.0] * len(timeline.events), [[]] * len(timeline.events)
    static = timeline.memory_static(costs)
    both = zip(static, timeline.memory_held(costs), strict=True)
    return static, [[(time, always + held) for time, held in track] for always, track in both]


def _bands(axis: _Axis) -> Iterator[tuple[str, int, str]]:
    """Label, height and content of each rank's row, lanes of copies, and memory."""
    timeline = axis.timeline
    for rank, row in enumerate(timeline.events):
        idle = ""
        if row:
            left, length = axis.x(row[0].start), (max(event.end for event in row) - row[0].start) * axis.scale
            idle = f'<rect class="idle" x="{left:.7g}" width="{length:.7g}" height="{_ROW - 2}"/>'
        yield f"rank {rank}", _ROW, _band("outside", axis, _ROW, idle + _boxes(axis, rank, row, _ROW))
        for lane, copies in lanes(timeline, rank).items():
            yield lane, _LANE, _band("track", axis, _LANE, _boxes(axis, rank, copies, _LANE))
        if axis.most:
            yield "", _HELD + 7, _held(axis, rank)


def _band(background: str, axis: _Axis, height: int, content: str) -> str:
    """A background, and in the group `time` what moves with the time."""
    return f'<rect class="{background}" width="{axis.width}" height="{height - 2}"/><g class="time">{content}</g>'


def _boxes(axis: _Axis, rank: int, row: Sequence[Event], height: int) -> str:
    """A box for each event in a row that is so high, and its number where there is room."""
    parts = []
    timeline, track = axis.timeline, axis.tracks[rank]
    chunks, base = timeline.schedule.chunks_of(rank), (height + 6) // 2
    for event, place, places in stacked(row):
        kind, chunk, _ = event.action
        high, top = (height - 2) / places, (height - 2) / places * place
        (fill, dark), unit = _shade(kind, chunks.index(chunk), len(chunks)), timeline.schedule.units[event.action.unit]
        label = f"{unit.microbatch}.{unit.slice}" if unit.slices > 1 else str(unit.microbatch)
        x, length = axis.x(event.start), (event.end - event.start) * axis.scale
        below = f' y="{top:.4g}"' if place else ""
        border = f' stroke-width="{length / 8:.2f}"' if length < 8 else ""  # a border must not hide a narrow box
        held = bisect_right(track, (event.start, math.inf)) - 1
        memory = f", memory held {amount(track[held][1], timeline.memory_unit)}" if held >= 0 else ""
        parts.append(
            f'<rect class="action" x="{x:.7g}" width="{length:.7g}"{below} '
            f'height="{high:.4g}" fill="{fill}"{border}>'
            f"<title>{event.action} on rank {rank}: {number(event.start)} to "
            f"{duration(event.end, timeline.unit)}{memory}</title></rect>"
        )
        if high >= _NUMBER and (axis.crowded or length >= 7 * len(label) + 2):
            y = base if places == 1 else f"{top + high / 2 + 4:.4g}"
            parts.append(f'<text class="number{" dark" * dark}" x="{x + length / 2:.7g}" y="{y}">{label}</text>')
    return "".join(parts)


def _held(axis: _Axis, rank: int) -> str:
    """The memory of a rank over time, from the base line up and back; over it what is static, and the limit."""
    track, static, outline = axis.tracks[rank], axis.static[rank], ""
    if track:
        steps = "".join(f"H{axis.x(time):.7g}V{axis.y(held):.4g}" for time, held in track)
        outline = f"M{axis.x(track[0][0]):.7g} {_HELD}{steps}V{_HELD}Z"
    parts, top = [_band("track", axis, _HELD + 4, f'<path class="held" d="{outline}"/>')], axis.y(static)
    if static:
        parts.append(f'<rect class="static" y="{top:.4g}" width="{axis.width}" height="{_HELD - top:.4g}"/>')
    if axis.limit is not None:
        parts.append(f'<path class="limit" d="M0 {axis.y(axis.limit):.4g}h{axis.width}"/>')
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]], width: int) -> tuple[str, float]:
    """The legend, in as many lines as the width asks for, and where it ends."""
    parts, x, y = [], float(_LEFT), 12
    for text, fill in entries:
        length = 36 + 6.2 * len(text)
        if x + length > width:
            x, y = float(_LEFT), y + 20
        parts.append(f'<rect x="{x:g}" y="{y}" width="12" height="12" rx="2" fill="{fill}"/>')
        parts.append(f'<text x="{x + 17:g}" y="{y + 10}">{text}</text>')
        x += length
    return "".join(parts), y + 20.0


def note(timeline: Any, limit: float | None = None) -> str:
    """The figures beside a title; limit: of the memory of a rank."""
    text = f"{timeline.bubble_rate:.1%} bubble, makespan {duration(timeline.makespan, timeline.unit)}"
    if timeline.peak_memory:
        text += f", peak memory {amount(max(timeline.peak_memory), timeline.memory_unit)}"
        text += "" if limit is None else f" of {amount(limit, timeline.memory_unit)}"
    return text


def _kinds(timelines: Sequence[Any]) -> list[tuple[str, str]]:
    """The entries of the legend but for memory: text and colour."""
    rows = [row for timeline in timelines for row in (*timeline.events, *timeline.copies)]
    present = {event.action.kind for row in rows for event in row}
    entries = [(f"{kind} {meaning}", colour) for kind, (colour, meaning) in _KINDS.items() if kind in present]
    if any(timeline.schedule.chunks > 1 for timeline in timelines):
        entries.append(("later chunk of a rank", _shade("F", 1, 2)[0]))
    return [*entries, ("idle", _IDLE), ("not yet started, or done", _OUTSIDE)]


def _shade(kind: str, index: int, count: int) -> tuple[str, bool]:
    """The colour of a kind for chunk `index` of a rank's `count`: later ones are lighter.

    And whether a number on it must be dark to be read: by the luminance that sRGB's weights give.
    """
    channels = (int(_KINDS[kind][0][i : i + 2], 16) for i in (1, 3, 5))
    red, green, blue = (round(c + (255 - c) * 0.75 * index / count) for c in channels)
    return f"#{red:02x}{green:02x}{blue:02x}", 0.2126 * red + 0.7152 * green + 0.0722 * blue > 150


def _ticks(span: float, width: float, y: float, unit: str) -> str:
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 10)
    parts = [f'<text class="end" x="{_LEFT - 20}" y="{y + 19:g}">{unit or "time"}</text>']
    for index in range(int(span / step + 1e-9) + 1):
        x = _LEFT + index * step * width / span
        parts.append(f'<path d="M{x:.7g} {y + 2:g}v4" stroke="#8c959f"/>')
        parts.append(f'<text class="tick" x="{x:.7g}" y="{y + 19:g}">{index * step:g}</text>')
    return "".join(parts)
