"""Pictures of timelines, planned or measured: SVG, PNG, one HTML page that zooms, and traces for Perfetto.

Timelines and costs come in as data: nothing here imports the simulation, which draws with `save`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbkern.pipeline.draw import trace
from zbkern.pipeline.draw.style import Drawable
from zbkern.pipeline.draw.svg import html as html
from zbkern.pipeline.draw.svg import svg as svg


def save(
    timelines: Sequence[Drawable],
    path: str | Path,
    titles: Sequence[str] | None = None,
    costs: Sequence[Any] | None = None,
    limit: float | None = None,
) -> Path:
    """Writes the file that the suffix names, and returns its path: .svg, .html, .png, or .json (a Perfetto trace).

    titles, costs (`Costs`): one per timeline; by default the schedules' names, and no memory curves (a trace has none).
    limit: the memory that a rank may hold, drawn above its curve.
    Raises ValueError for another suffix or count, TypeError for what is no list of timelines or no path, ImportError
    for a PNG without the package cairosvg.
    """
    if not isinstance(path, (str, Path)):
        raise TypeError(
            f"draw.save: path must be a str or Path, such as 'plan.svg'; got {type(path).__name__} {path!r}"
        )
    path = Path(path)
    if path.suffix == ".json":
        text = json.dumps({"traceEvents": trace.events(timelines, titles), "displayTimeUnit": "ms"})
        path.write_text(text, encoding="utf-8")
        return path
    if path.suffix not in (".svg", ".html", ".png"):
        raise ValueError(f"draw.save: path must end in .svg, .html, .png or .json; got {str(path)!r}")
    if path.suffix == ".html":
        path.write_text(html(timelines, titles, costs, limit), encoding="utf-8")
        return path
    picture = svg(timelines, titles, costs=costs, limit=limit)
    if path.suffix == ".svg":
        path.write_text(picture, encoding="utf-8")
        return path
    try:
        import cairosvg
    except ImportError as error:
        raise ImportError("draw.save: PNG needs the package cairosvg: pip install 'zbkern[draw]'") from error
    cairosvg.svg2png(picture.encode(), write_to=str(path), scale=2)
    return path
