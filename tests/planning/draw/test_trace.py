from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zbkern.pipeline import Timeline, draw, schedules, simulate
from zbkern.planning.draw import trace
from zbkern.planning.simulation.timeline import Sample


def test_a_trace_has_every_event_of_every_timeline(tmp_path: Path) -> None:
    planned = simulate(schedules.zb_h1(2, 3))
    measured = Timeline(planned.schedule, planned.events, unit="s")
    data = json.loads(draw.save([planned, measured], tmp_path / "t.json", ["plan", "run"]).read_text())
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"]
    assert names == ["plan", "run"]
    for process, timeline, scale in ((0, planned, 1e3), (1, measured, 1e6)):
        found = [e for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] == process]
        events = [event for row in timeline.events for event in row]
        assert [(e["tid"], e["name"]) for e in found] == [(e.rank, str(e.action)) for e in events]
        assert [(e["ts"], e["dur"]) for e in found] == [
            pytest.approx((e.start * scale, (e.end - e.start) * scale)) for e in events
        ]


def test_samples_are_counters() -> None:
    planned = simulate(schedules.zb_h1(2, 3))
    samples = ((Sample(0.5, 2, 100, 1000),), (Sample(1.0, 1, 50, 2000), Sample(2.0, 0, 0, 3000)))
    found = [e for e in trace.events([replace(planned, unit="s", samples=samples)]) if e["ph"] == "C"]
    waiting = [(e["name"], e["ts"], e["args"]["pending W"]) for e in found if "pending W" in e["args"]]
    assert waiting == [
        ("rank 0: pending W", 5e5, 2),
        ("rank 1: pending W", 1e6, 1),
        ("rank 1: pending W", 2e6, 0),
    ]
    assert [e["args"]["bytes allocated"] for e in found if "bytes allocated" in e["args"]] == [1000, 2000, 3000]
