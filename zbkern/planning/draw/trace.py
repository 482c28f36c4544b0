"""Traces that open in Perfetto and chrome://tracing: a process per timeline, a thread per rank, per pass that runs
beside others on it and per direction of its copies, counters of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbkern.planning.draw.svg import checked, lanes, stacked
from zbkern.schedules.actions import Event
from zbkern.schedules.units import TIME_UNITS

_COUNTERS = ("pending W", "held bytes", "bytes allocated")


def events(timelines: Sequence[Any], titles: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The trace's events; where the timeline's unit is not known, one counts as a millisecond.

    Raises TypeError for what is no list of timelines, ValueError for an empty one or another number of titles.
    """
    names = checked("draw", timelines, titles)
    found: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        scale = TIME_UNITS["us"] / TIME_UNITS.get(timeline.unit, TIME_UNITS["ms"])  # a trace is in microseconds
        found.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": names[process]}})
        rows: list[tuple[str, Sequence[Event]]] = []
        for rank, row in enumerate(timeline.events):
            placed = stacked(row)
            for place in range(max((places for _, _, places in placed), default=1)):
                name = f"rank {rank}" + (f": beside, {place}" if place else "")
                rows.append((name, [event for event, at, _ in placed if at == place]))
        for rank in range(len(timeline.events)):
            rows += [(f"rank {rank}: copies {lane}", copies) for lane, copies in lanes(timeline, rank).items()]
        for thread, (name, row) in enumerate(rows):
            where = {"pid": process, "tid": thread}
            found.append({"ph": "M", **where, "name": "thread_name", "args": {"name": name}})
            for event in row:
                args, start = event.action._asdict(), event.start * scale
                length = (event.end - event.start) * scale
                box = {"ph": "X", **where, "name": str(event.action), "cat": args["kind"], "ts": start, "dur": length}
                found.append({**box, "args": args})
        for rank, samples in enumerate(timeline.samples):
            for seconds, *values in samples:
                for name, value in zip(_COUNTERS, values, strict=True):
                    counter = {"ph": "C", "pid": process, "name": f"rank {rank}: {name}", "ts": seconds * scale}
                    found.append({**counter, "args": {name: value}})
    return found
