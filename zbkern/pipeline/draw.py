"""Pictures of timelines, planned or measured: SVG, one HTML file that zooms, PNG.

Several timelines stand one above the other on one time axis. A box is an action: its colour the kind, its shade the
chunk of the rank, its number the microbatch; grey is idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from zbkern.pipeline.timeline import Event, Timeline

COLOURS = {"F": "#3f83c9", "B": "#2e9e86", "W": "#dfa23a", "BW": "#8d74c4"}
MEANING = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "both gradients"}

_LEFT, _RIGHT, _ROW, _TITLE, _GAP, _AXIS = 64, 16, 24, 30, 18, 30
_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f; }
.title { font-size: 14px; font-weight: 600; } .note, .tick { fill: #57606a; } .number { font-size: 11px; fill: #fff; }
.idle { fill: #e9ecf0; } .action { stroke: #fff; stroke-width: 0.8; }
"""


def save(timelines: Sequence[Timeline], path: str | Path, titles: Sequence[str] | None = None) -> Path:
    """Writes the picture that the suffix names, .svg, .html or .png, and returns its path.

    Raises ValueError for another suffix, ImportError for a PNG without the package cairosvg.
    """
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(svg(timelines, titles), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(html(timelines, titles), encoding="utf-8")
    elif path.suffix == ".png":
        try:
            import cairosvg
        except ImportError as error:
            raise ImportError("draw.save: PNG needs the package cairosvg: pip install 'zbkern[draw]'") from error
        cairosvg.svg2png(svg(timelines, titles).encode(), write_to=str(path), scale=2)
    else:
        raise ValueError(f"draw.save: path must end in .svg, .html or .png; got {str(path)!r}")
    return path


def svg(timelines: Sequence[Timeline], titles: Sequence[str] | None = None, width: int = 1000) -> str:
    """The picture as SVG text, `width` pixels wide; titles: one per timeline, by default the schedules' names."""
    if not timelines:
        raise ValueError("draw.svg: timelines is empty; give at least one")
    if titles is not None and len(titles) != len(timelines):
        raise ValueError(f"draw.svg: titles must be one for each of {len(timelines)} timelines; got {len(titles)}")
    span = max(max(timeline.makespan, timeline.cost) for timeline in timelines) or 1.0
    scale = (width - _LEFT - _RIGHT) / span
    parts, top = [_legend(timelines, width)], 34.0
    for index, timeline in enumerate(timelines):
        title = titles[index] if titles else timeline.schedule.name
        parts.append(_one(timeline, title, top, scale, width))
        top += _TITLE + _ROW * len(timeline.events) + _GAP
    parts.append(_axis(span, scale, top - _GAP, timelines[0].unit))
    height = round(top - _GAP + _AXIS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


def html(timelines: Sequence[Timeline], titles: Sequence[str] | None = None) -> str:
    """One page without outside parts: the wheel zooms, dragging moves, a double click resets, hovering tells."""
    picture = svg(timelines, titles, width=1600)
    return f'<!doctype html><meta charset="utf-8"><title>zbkern timeline</title>{picture}<script>{_SCRIPT}</script>\n'


def _one(timeline: Timeline, title: str, top: float, scale: float, width: int) -> str:
    first = min((row[0].start for row in timeline.events if row), default=0.0)
    note = f"{timeline.bubble_rate:.1%} bubble, makespan {_number(timeline.makespan)} {timeline.unit}".rstrip()
    if timeline.peak_memory:
        note += f", peak memory {_number(max(timeline.peak_memory))}"
    parts = [
        f'<text x="{_LEFT}" y="{top + 18:.0f}"><tspan class="title">{escape(title)}</tspan>'
        f'<tspan class="note" dx="10">{escape(note)}</tspan></text>'
    ]
    for rank, row in enumerate(timeline.events):
        y = top + _TITLE + rank * _ROW
        parts.append(
            f'<text class="note" x="{_LEFT - 8}" y="{y + _ROW - 8:.0f}" text-anchor="end">rank {rank}</text>'
            f'<rect class="idle" x="{_LEFT}" y="{y + 1:.0f}" width="{width - _LEFT - _RIGHT}" height="{_ROW - 2}"/>'
        )
        chunks = timeline.schedule.chunks_of(rank)
        parts += [_box(event, chunks.index(event.action.chunk), len(chunks), first, y, scale) for event in row]
    return "".join(parts)


def _box(event: Event, place: int, count: int, first: float, y: float, scale: float) -> str:
    x, length = _LEFT + (event.start - first) * scale, (event.end - event.start) * scale
    fill = _shade(COLOURS[event.action.kind], place / max(1, count))
    number = str(event.action.microbatch)
    box = (
        f'<rect class="action" x="{x:.2f}" y="{y + 1:.0f}" width="{length:.2f}" height="{_ROW - 2}" fill="{fill}">'
        f"<title>{event.action} on rank {event.rank}: {_number(event.start)} to {_number(event.end)}</title></rect>"
    )
    if length >= 7 * len(number) + 2:
        box += f'<text class="number" x="{x + length / 2:.1f}" y="{y + 16:.0f}" text-anchor="middle">{number}</text>'
    return box


def _legend(timelines: Sequence[Timeline], width: int) -> str:
    kinds = [kind for kind in COLOURS if any(e.action.kind == kind for t in timelines for row in t.events for e in row)]
    entries = [(f"{kind}  {MEANING[kind]}", COLOURS[kind]) for kind in kinds] + [("idle", "#e9ecf0")]
    if any(timeline.schedule.chunks > 1 for timeline in timelines):
        entries.insert(-1, ("lighter: later chunks of a rank", _shade(COLOURS["F"], 0.5)))
    parts, x = [], float(_LEFT)
    for text, fill in entries:
        parts.append(f'<rect x="{x:.0f}" y="12" width="12" height="12" rx="2" fill="{fill}"/>')
        parts.append(f'<text class="note" x="{x + 17:.0f}" y="22">{text}</text>')
        x += 36 + 6.4 * len(text)
    return "".join(parts)


def _axis(span: float, scale: float, y: float, unit: str) -> str:
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 10)
    parts = []
    for index in range(int(span / step + 1e-9) + 1):
        x = _LEFT + index * step * scale
        label = f"{index * step:g}" + (f" {unit}" if unit and index == 0 else "")
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2:.0f}" y2="{y + 6:.0f}" stroke="#8c959f"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 19:.0f}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _shade(colour: str, amount: float) -> str:
    """The colour mixed with white, amount 0 to 1."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * 0.75 * amount):02x}" for c in channels)


def _number(value: float) -> str:
    return f"{value:.4g}"


_SCRIPT = """
const s = document.querySelector('svg'), whole = s.getAttribute('viewBox').split(' ').map(Number);
let v = [...whole], from = null;
const show = () => s.setAttribute('viewBox', v.join(' '));
s.style.width = '100%'; s.style.height = 'auto';
s.addEventListener('wheel', e => {
  e.preventDefault();
  const r = s.getBoundingClientRect(), f = e.deltaY > 0 ? 1.2 : 1 / 1.2;
  const x = v[0] + (e.clientX - r.left) / r.width * v[2], w = Math.min(whole[2], v[2] * f);
  v = [x - (x - v[0]) * w / v[2], v[1], w, v[3]]; show();
}, {passive: false});
s.setAttribute('preserveAspectRatio', 'none');
s.addEventListener('mousedown', e => { from = [e.clientX, v[0]]; e.preventDefault(); });
addEventListener('mousemove', e => {
  if (from) { v[0] = from[1] - (e.clientX - from[0]) / s.getBoundingClientRect().width * v[2]; show(); }
});
addEventListener('mouseup', () => { from = null; });
s.addEventListener('dblclick', () => { v = [...whole]; show(); });
"""
