"""Pictures of timelines, planned or measured, as SVG; and as a page around one that zooms.

Several timelines stand one above the other on one time axis. A box is an action: its colour the kind, its shade the
chunk of the rank, its number the microbatch, with slices that of the sequence and the slice. Idle time between a rank's
first and last action is pink, that before and after it grey: a rank may start late and end early for free. Below its
row are the lanes of a rank's copies, where it has any, and given costs the memory that it holds, what is always there
darker, and the limit as a line.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from zbkern.planning.draw import style
from zbkern.planning.draw.style import Drawable
from zbkern.schedules.actions import Event
from zbkern.schedules.units import amount, duration, number

_LEFT, _RIGHT, _TITLE, _ROW, _GAP, _AXIS = 64, 16, 28, 24, 20, 30
_LANE = 16  # of the copies in one direction
_HELD = 19  # of the memory, of which the most that any rank holds takes all
_DARK = "#24292f"
_STYLE = f"""
text {{ font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a; }}
.title {{ font-size: 14px; font-weight: 600; fill: {_DARK}; }} .end {{ text-anchor: end; }}
.tick {{ text-anchor: middle; }} .number {{ font-size: 11px; fill: #fff; text-anchor: middle; }}
.dark {{ fill: {_DARK}; }} .action {{ stroke: #fff; }} .held {{ fill: {style.HELD}; }}
.static {{ fill: {style.STATIC}; }} .limit {{ stroke: {style.LIMIT}; stroke-dasharray: 4 2; }}
.track {{ fill: #f6f8fa; }} .outside {{ fill: {style.OUTSIDE}; }} .idle {{ fill: {style.IDLE}; }}
"""

Track = list[tuple[float, float]]  # of one rank: (time, memory from then on, static memory among it)


class _Axis(NamedTuple):
    """How times of one timeline become pixels, and how many pixels memory has at most."""

    timeline: Drawable
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
    timelines: Sequence[Drawable],
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
    return head.replace("@TITLE@", escape(", ".join(style.checked("draw", timelines, titles)))) + picture + script


def svg(
    timelines: Sequence[Drawable],
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
    titles = style.checked("draw", timelines, titles, costs)
    memory = [_memory(*both) for both in zip(timelines, costs or [None] * len(timelines), strict=True)]
    most = max((now for _, tracks in memory for track in tracks for _, now in track), default=0.0)
    room, span = width - _LEFT - _RIGHT, max(timeline.makespan for timeline in timelines) or 1.0
    entries = style.legend(timelines)
    if most:
        entries.append(("memory held", style.HELD))
        entries += [("static memory", style.STATIC)] if any(any(static) for static, _ in memory) else []
        entries += [("memory limit", style.LIMIT)] if limit is not None else []
        most = max(most, limit or 0.0)
    head, top = _legend(entries, width)
    parts, labels = [head], []
    for timeline, title, (static, tracks) in zip(timelines, titles, memory, strict=True):
        parts.append(
            f'<text x="{_LEFT}" y="{top + 17:g}"><tspan class="title">{escape(title)}</tspan>'
            f'<tspan dx="10">{escape(style.note(timeline, limit))}</tspan></text>'
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


def _memory(timeline: Drawable, costs: Any) -> tuple[Sequence[float], Sequence[Track]]:
    """The static memory of every rank, and what it holds over time; nothing without costs."""
    if costs is None:
        return [0.0] * len(timeline.events), [[]] * len(timeline.events)
    schedule = timeline.schedule
    of_chunks = costs.per_chunk(len(schedule.placement)).static
    static = [sum(of_chunks[chunk] for chunk in schedule.chunks_of(rank)) for rank in range(schedule.ranks)]
    both = zip(static, timeline.memory_held(costs), strict=True)
    return static, [[(time, always + held) for time, held in track] for always, track in both]


def _bands(axis: _Axis) -> Iterator[tuple[str, int, str]]:
    """Label, height and content of each rank's row, lanes of copies, and memory."""
    timeline = axis.timeline
    for rank, row in enumerate(timeline.events):
        idle = ""
        if row:
            left, length = axis.x(row[0].start), (row[-1].end - row[0].start) * axis.scale
            idle = f'<rect class="idle" x="{left:.7g}" width="{length:.7g}" height="{_ROW - 2}"/>'
        yield f"rank {rank}", _ROW, _band("outside", axis, _ROW, idle + _boxes(axis, rank, row, _ROW))
        for lane, copies in style.lanes(timeline, rank).items():
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
    for event in row:
        kind, chunk, microbatch, _ = event.action
        fill, label = style.shade(kind, chunks.index(chunk), len(chunks)), style.label(timeline.schedule, microbatch)
        x, length = axis.x(event.start), (event.end - event.start) * axis.scale
        border = f' stroke-width="{length / 8:.2f}"' if length < 8 else ""  # a border must not hide a narrow box
        held = bisect_right(track, (event.start, math.inf)) - 1
        memory = f", memory held {amount(track[held][1], timeline.memory_unit)}" if held >= 0 else ""
        parts.append(
            f'<rect class="action" x="{x:.7g}" width="{length:.7g}" height="{height - 2}" fill="{fill}"{border}>'
            f"<title>{event.action} on rank {rank}: {number(event.start)} to "
            f"{duration(event.end, timeline.unit)}{memory}</title></rect>"
        )
        if axis.crowded or length >= 7 * len(label) + 2:
            dark = " dark" if style.is_light(fill) else ""
            parts.append(f'<text class="number{dark}" x="{x + length / 2:.7g}" y="{base}">{label}</text>')
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


def _ticks(span: float, width: float, y: float, unit: str) -> str:
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 10)
    parts = [f'<text class="end" x="{_LEFT - 20}" y="{y + 19:g}">{unit or "time"}</text>']
    for index in range(int(span / step + 1e-9) + 1):
        x = _LEFT + index * step * width / span
        parts.append(f'<path d="M{x:.7g} {y + 2:g}v4" stroke="#8c959f"/>')
        parts.append(f'<text class="tick" x="{x:.7g}" y="{y + 19:g}">{index * step:g}</text>')
    return "".join(parts)
