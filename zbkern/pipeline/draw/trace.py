"""Traces that open in Perfetto and chrome://tracing: a process per timeline, a thread per rank and per direction of its
copies, counters of samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbkern.pipeline.draw.style import Drawable, checked, lanes
from zbkern.pipeline.schedules.actions import Event
from zbkern.pipeline.schedules.units import TIME_UNITS

_COUNTERS = ("pending W", "held bytes", "bytes allocated")


def save(timelines: Sequence[Drawable], path: str | Path, titles: Sequence[str] | None = None) -> Path:
    """Writes the trace as JSON and returns its path; titles: one per timeline, by default the schedules' names."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f"trace.save: path must be a str or Path, such as 'step.json'; got {path!r}")
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events(timelines, titles), "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def events(timelines: Sequence[Drawable], titles: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The trace's events; where the timeline's unit is not known, one counts as a millisecond.

    Raises TypeError for what is no list of timelines, ValueError for an empty one or another number of titles.
    """
    names = checked("trace", timelines, titles)
    found: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        scale = TIME_UNITS["us"] / TIME_UNITS.get(timeline.unit, TIME_UNITS["ms"])  # a trace is in microseconds
        found.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": names[process]}})
        rows: list[tuple[str, Sequence[Event]]] = [(f"rank {rank}", row) for rank, row in enumerate(timeline.events)]
        rows += [
            (f"rank {rank}: copies {name}", copies)
            for rank in range(len(timeline.events))
            for name, copies in lanes(timeline, rank).items()
        ]
        for thread, (name, row) in enumerate(rows):
            found.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}})
            for event in row:
                kind, chunk, microbatch, part = event.action
                found.append(
                    {
                        "ph": "X",
                        "pid": process,
                        "tid": thread,
                        "name": str(event.action),
                        "cat": kind,
                        "ts": event.start * scale,
                        "dur": (event.end - event.start) * scale,
                        "args": {"kind": kind, "chunk": chunk, "microbatch": microbatch, "part": part},
                    }
                )
        for rank, samples in enumerate(timeline.samples):
            for seconds, *values in samples:
                for name, value in zip(_COUNTERS, values, strict=True):
                    counter = {"ph": "C", "pid": process, "name": f"rank {rank}: {name}", "ts": seconds * scale}
                    found.append({**counter, "args": {name: value}})
    return found
