"""A roofline plot as SVG: rate over arithmetic intensity, under the ceilings that the same run measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 520, 70, 50, 40, 220
COLORS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#7d4e9f", "#2e4057", "#a0522d", "#008b8b", "#b8860b", "#696969")


def write(path: Path, figures: Sequence[dict[str, Any]], title: str) -> Path | None:
    """Draws the figures that have an intensity (flop per byte); None where there is none, or no ceiling."""
    text = draw(figures, title)
    if text is None:
        return None
    path.write_text(text)
    return path


def draw(figures: Sequence[dict[str, Any]], title: str) -> str | None:
    """SVG text. Rates in TFLOP/s; the ceilings are the rows named "product, ceiling" and "copy, ceiling"."""
    peak = max((f["rate"] for f in figures if f["row"] == "product, ceiling" and "rate" in f), default=None)
    bandwidth = max((f["rate"] for f in figures if f["row"] == "copy, ceiling" and "rate" in f), default=None)
    points = [f for f in figures if "intensity" in f and f["row"] != "product, ceiling"]
    if not points or not peak or not bandwidth:
        return None
    ridge = peak / bandwidth
    xs = [f["intensity"] for f in points] + [ridge]
    ys = [f["rate"] for f in points] + [peak]
    plane = _Plane(min(xs) / 2, max(xs) * 2, min(ys) / 2, max(ys) * 2)
    low = max(plane.x0, plane.y0 / bandwidth)
    roof = [(low, low * bandwidth), (ridge, peak), (plane.x1, peak)]
    names = list(dict.fromkeys(f["row"] for f in points))
    color = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}: {peak:.3g} TFLOP/s, {bandwidth:.3g} TB/s</text>',
        *_grid(plane),
        '<polyline fill="none" stroke="black" stroke-width="1.5" points="'
        + " ".join(f"{plane.x(x):.1f},{plane.y(y):.1f}" for x, y in roof)
        + '"/>',
    ]
    for figure in points:
        label = f"{figure['row']}, {figure['shape']}: {figure['rate']:.3g} TFLOP/s"
        x, y = plane.x(figure["intensity"]), plane.y(figure["rate"])
        fill = color[figure["row"]]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}"><title>{escape(label)}</title></circle>')
    for index, name in enumerate(names):
        y = TOP + 14 + 18 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{y - 4}" r="4" fill="{color[name]}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 30}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


class _Plane:
    """Both axes logarithmic."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / self.x0) / math.log(self.x1 / self.x0)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(value / self.y0) / math.log(self.y1 / self.y0)


def _grid(plane: _Plane) -> Iterable[str]:
    for value in _ticks(plane.x0, plane.x1):
        x = plane.x(value)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
    for value in _ticks(plane.y0, plane.y1):
        y = plane.y(value)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle:.0f}" y="{HEIGHT - 12}" text-anchor="middle">flop per byte</text>'
    yield f'<text x="16" y="{HEIGHT / 2:.0f}" transform="rotate(-90 16 {HEIGHT / 2:.0f})">TFLOP/s</text>'


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two; powers of ten alone where that would be many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1e4 else (1,)
    return [step * 10.0**e for e in exponents for step in steps if low <= step * 10.0**e <= high]
