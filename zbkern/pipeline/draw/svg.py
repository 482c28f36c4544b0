"""Pictures of timelines, planned or measured, as SVG.

Several timelines stand one above the other on one time axis. A box is an action: its colour the kind, its shade the
chunk of the rank, its number the microbatch. Idle time between a rank's first and last action is pink, that before and
after it grey: a rank may start late and end early for free. Below its row are the lanes of a rank's copies, where it
has any, and given costs the memory that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from zbkern.pipeline.draw.style import HELD, IDLE, OUTSIDE, Track, drawing, is_light, lanes, legend, note, shade
from zbkern.pipeline.schedules.units import duration, number

if TYPE_CHECKING:
    from zbkern.pipeline.simulation.costs import Costs
    from zbkern.pipeline.simulation.timeline import Event, Timeline

_LEFT, _RIGHT, _TITLE, _ROW, _HELD_ROW, _GAP, _AXIS = 64, 16, 28, 24, 26, 20, 30
_LANE = 16  # of the copies in one direction
_DARK = "#24292f"
_STYLE = f"""
text {{ font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a; }}
.title {{ font-size: 14px; font-weight: 600; fill: {_DARK}; }} .end {{ text-anchor: end; }}
.tick {{ text-anchor: middle; }} .number {{ font-size: 11px; fill: #fff; text-anchor: middle; }}
.dark {{ fill: {_DARK}; }} .action {{ stroke: #fff; }} .held {{ fill: {HELD}; }}
.track {{ fill: #f6f8fa; }} .outside {{ fill: {OUTSIDE}; }} .idle {{ fill: {IDLE}; }}
"""


def svg(
    timelines: Sequence[Timeline],
    titles: Sequence[str] | None = None,
    width: int = 1000,
    costs: Sequence[Costs] | None = None,
) -> str:
    """The picture as SVG text, `width` pixels wide; titles and costs as in `draw.save`."""
    shown = drawing(timelines, titles, costs)
    span = max(timeline.makespan for timeline in timelines) or 1.0
    scale = (width - _LEFT - _RIGHT) / span
    most = shown.most_memory
    head, top = _legend(legend(shown), width)
    parts = [head]
    for timeline, title, rows in zip(timelines, shown.titles, shown.memory, strict=True):
        first = min((row[0].start for row in timeline.events if row), default=0.0)
        parts.append(
            f'<text x="{_LEFT}" y="{top + 17:g}"><tspan class="title">{escape(title)}</tspan>'
            f'<tspan dx="10">{escape(note(timeline))}</tspan></text>'
        )
        top += _TITLE
        for rank, row in enumerate(timeline.events):
            boxes = _row(timeline, rank, row, first, scale, width - _LEFT - _RIGHT)
            parts.append(f'<g transform="translate({_LEFT} {top:g})">{boxes}</g>')
            top += _ROW
            for lane, copies in lanes(timeline, rank).items():
                boxes = _lane(timeline, rank, lane, copies, first, scale, width - _LEFT - _RIGHT)
                parts.append(f'<g transform="translate({_LEFT} {top:g})">{boxes}</g>')
                top += _LANE
            if most:
                held = _held(rows[rank], first, scale, (_HELD_ROW - 7) / most)
                parts.append(
                    f'<g transform="translate({_LEFT} {top + _HELD_ROW - 7:g})"><rect class="track" '
                    f'y="{5 - _HELD_ROW}" width="{width - _LEFT - _RIGHT}" height="{_HELD_ROW - 5}"/>'
                    f'<path class="held" d="{held}"/></g>'
                )
                top += _HELD_ROW
        top += _GAP
    parts.append(_axis(span, scale, top - _GAP, timelines[0].unit))
    height = round(top - _GAP + _AXIS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "</svg>\n"
    )


def _row(timeline: Timeline, rank: int, row: Sequence[Event], first: float, scale: float, width: float) -> str:
    tall = f'height="{_ROW - 2}"'
    parts = [
        f'<text class="end" x="-8" y="{_ROW - 9}">rank {rank}</text>',
        f'<rect class="outside" width="{width}" {tall}/>',
    ]
    if row:
        left, length = (row[0].start - first) * scale, (row[-1].end - row[0].start) * scale
        parts.append(f'<rect class="idle" x="{left:.5g}" width="{length:.5g}" {tall}/>')
    return "".join([*parts, *_boxes(timeline, rank, row, first, scale, _ROW)])


def _lane(
    timeline: Timeline, rank: int, name: str, copies: Sequence[Event], first: float, scale: float, width: float
) -> str:
    parts = [
        f'<text class="end" x="-8" y="{_LANE - 5}">{name}</text>',
        f'<rect class="track" width="{width}" height="{_LANE - 2}"/>',
    ]
    return "".join([*parts, *_boxes(timeline, rank, copies, first, scale, _LANE)])


def _boxes(timeline: Timeline, rank: int, row: Sequence[Event], first: float, scale: float, height: float) -> list[str]:
    """A box for each event in a row that is so high, and its number where there is room."""
    parts = []
    chunks, base = timeline.schedule.chunks_of(rank), height - 9 if height == _ROW else height - 5
    for event in row:
        kind, chunk, microbatch, _ = event.action
        fill, label = shade(kind, chunks.index(chunk), len(chunks)), str(microbatch)
        x, length = (event.start - first) * scale, (event.end - event.start) * scale
        border = f' stroke-width="{length / 8:.2f}"' if length < 8 else ""  # a border must not hide a narrow box
        parts.append(
            f'<rect class="action" x="{x:.5g}" width="{length:.5g}" height="{height - 2}" fill="{fill}"{border}>'
            f"<title>{event.action} on rank {rank}: {number(event.start)} to "
            f"{duration(event.end, timeline.unit)}</title></rect>"
        )
        if length >= 7 * len(label) + 2:
            dark = " dark" if is_light(fill) else ""
            parts.append(f'<text class="number{dark}" x="{x + length / 2:.5g}" y="{base}">{label}</text>')
    return parts


def _held(track: Track, first: float, scale: float, tall: float) -> str:
    """The outline of the memory held over time, from the base line up and back."""
    if not track:
        return ""
    begin = (track[0][0] - first) * scale
    steps = "".join(f"H{(time - first) * scale:.5g}V{-held * tall:.4g}" for time, held in track)
    return f"M{begin:.5g} 0{steps}V0Z"


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


def _axis(span: float, scale: float, y: float, unit: str) -> str:
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 10)
    parts = [f'<text class="end" x="{_LEFT - 20}" y="{y + 19:g}">{unit or "time"}</text>']
    for index in range(int(span / step + 1e-9) + 1):
        x = _LEFT + index * step * scale
        parts.append(f'<path d="M{x:.5g} {y + 2:g}v4" stroke="#8c959f"/>')
        parts.append(f'<text class="tick" x="{x:.5g}" y="{y + 19:g}">{index * step:g}</text>')
    return "".join(parts)
