"""Timelines as one self-contained HTML page, for schedules of any size: zoom, move, hover.

The page carries the events as numbers and draws what is visible on a canvas, so that 64 ranks with 1024 microbatches
stay quick where an SVG would have 200,000 elements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from zbkern.pipeline.draw import style

if TYPE_CHECKING:
    from zbkern.pipeline.simulation.costs import Costs
    from zbkern.pipeline.simulation.timeline import Event, Timeline


def html(
    timelines: Sequence[Timeline], titles: Sequence[str] | None = None, costs: Sequence[Costs] | None = None
) -> str:
    """The page; titles and costs as in `draw.save`.

    The wheel zooms, dragging moves, hovering shows the times of an action, a double click shows everything again.
    """
    shown = style.drawing(timelines, titles, costs)
    data = {
        "unit": timelines[0].unit,
        "memoryUnit": shown.memory_unit,
        "timelines": [_timeline(*each) for each in zip(timelines, shown.titles, shown.memory, strict=True)],
    }
    # a title with </script or <!--<script would move the end of the script
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    legend = "".join(
        f'<span><i style="background:{fill}"></i>{escape(name)}</span>' for name, fill in style.legend(shown)
    )
    colours = {"idle": style.IDLE, "outside": style.OUTSIDE, "held": style.HELD}
    page = resources.files("zbkern.pipeline.draw").joinpath("viewer.html").read_text(encoding="utf-8")
    parts = {"TITLE": escape(", ".join(shown.titles)), "LEGEND": legend, "COLOURS": json.dumps(colours), "DATA": text}
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], page)


def _timeline(timeline: Timeline, title: str, tracks: Sequence[style.Track]) -> dict[str, object]:
    """fills: colour and colour of the number; rows: [start, end, fill, action, microbatch] of each event; lanes: of
    each rank, a name and the same of each copy, in a lane per direction."""
    first = min((row[0].start for row in timeline.events if row), default=0.0)
    fills: dict[str, int] = {}

    def boxes(rank: int, events: Sequence[Event]) -> list[list[object]]:
        chunks, found = timeline.schedule.chunks_of(rank), []
        for _, action, start, end in events:
            fill = style.shade(action.kind, chunks.index(action.chunk), len(chunks))
            index = fills.setdefault(fill, len(fills))
            found.append([_short(start - first), _short(end - first), index, str(action), action.microbatch])
        return found

    ranks = range(len(timeline.events))
    rows = [boxes(rank, timeline.events[rank]) for rank in ranks]
    lanes = [[[name, boxes(rank, each)] for name, each in style.lanes(timeline, rank).items()] for rank in ranks]
    return {
        "title": title,
        "note": style.note(timeline),
        "fills": [[fill, "#24292f" if style.is_light(fill) else "#fff"] for fill in fills],
        "rows": rows,
        "lanes": lanes,
        "held": [[[_short(time - first), _short(held)] for time, held in track] for track in tracks],
    }


def _short(value: float) -> float:
    """Rounded to six digits: no picture shows more."""
    return float(f"{value:.6g}")
