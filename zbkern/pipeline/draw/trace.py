"""Traces that open in Perfetto and chrome://tracing: a process per timeline, a thread per rank, counters of samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbkern.pipeline.simulation.timeline import Timeline

_COUNTERS = ("W that wait", "bytes they pin", "bytes allocated")
_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}


def save(timelines: Sequence[Timeline], path: str | Path, titles: Sequence[str] | None = None) -> Path:
    """Writes the trace as JSON and returns its path; titles: one per timeline, by default the schedules' names."""
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events(timelines, titles), "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def events(timelines: Sequence[Timeline], titles: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The trace's events; a unit that is not a unit of time counts as a millisecond."""
    if titles is not None and len(titles) != len(timelines):
        raise ValueError(f"trace: titles must be one for each of {len(timelines)} timelines; got {len(titles)}")
    found: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        scale = _MICROSECONDS.get(timeline.unit, 1e3)
        title = titles[process] if titles else timeline.schedule.name
        found.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}})
        for rank, row in enumerate(timeline.events):
            found.append(
                {"ph": "M", "pid": process, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
            )
            for event in row:
                kind, chunk, microbatch, part = event.action
                found.append(
                    {
                        "ph": "X",
                        "pid": process,
                        "tid": rank,
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
