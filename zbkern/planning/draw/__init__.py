"""Pictures of timelines, planned or measured: SVG, one HTML page that zooms, and traces for Perfetto.

Timelines and costs come in as data: nothing here imports the simulation, which draws with `save`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbkern.planning.draw import trace
from zbkern.planning.draw.svg import html as html
from zbkern.planning.draw.svg import svg as svg


def save(
    timelines: Sequence[Any],
    path: str | Path,
    titles: Sequence[str] | None = None,
    costs: Sequence[Any] | None = None,
    limit: float | None = None,
) -> Path:
    """Writes the file that the suffix names, and returns its path: .svg, .html, or .json (a Perfetto trace).

    titles, costs (`Costs`): one per timeline; by default the schedules' names, and no memory curves (a trace has none).
    limit: the memory that a rank may hold, drawn above its curve.
    Raises ValueError for another suffix or count, TypeError for what is no list of timelines or no path.
    """
    path = Path(path)
    if path.suffix == ".json":
        text = json.dumps({"traceEvents": trace.events(timelines, titles), "displayTimeUnit": "ms"})
    elif path.suffix == ".html":
        text = html(timelines, titles, costs, limit)
    elif path.suffix == ".svg":
        text = svg(timelines, titles, costs=costs, limit=limit)
    else:
        raise ValueError(f"draw.save: path must end in .svg, .html or .json; got {str(path)!r}")
    path.write_text(text, encoding="utf-8")
    return path
