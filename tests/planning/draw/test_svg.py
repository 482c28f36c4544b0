from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.schedules import schedule_of
from zbkern.pipeline import Costs, Schedule, draw, schedules, simulate

SVG = "{http://www.w3.org/2000/svg}"


def boxes(text: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(text).iter(f"{SVG}rect") if e.get("class") == "action"]


def test_every_event_is_a_box_of_its_length_and_colour() -> None:
    timeline = simulate(schedules.zb_h1(3, 5), Costs(forward=1, backward=2, weight=0.5))
    events = [event for row in timeline.events for event in row]
    text = draw.svg([timeline], width=1080)
    found, colours = (
        boxes(text),
        {kind: colour for colour, kind in re.findall(r'fill="(#\w+)"/><text [^>]*>(\w+) ', text)},
    )
    assert len(found) == len(events)
    scale = (1080 - 64 - 16) / timeline.makespan
    for box, event in zip(found, events, strict=True):
        assert float(box.get("x", 0)) == pytest.approx(event.start * scale, abs=0.01)
        assert float(box.get("width", 0)) == pytest.approx((event.end - event.start) * scale, abs=0.01)
        assert box.get("fill") == colours[event.action.kind]  # of the legend
        assert str(event.action) in box[0].text


def test_passes_beside_each_other_share_the_height_of_their_row() -> None:
    costs = Costs(3, 3, 1, network_forward=1, network_backward=1, collectives=1)
    made = schedule_of("0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2", microbatches=3)
    schedule = Schedule.build(made.actions, [0], 3, beside=[[(1, 3), (3, 6)]])
    found = boxes(draw.svg([simulate(schedule, costs)]))
    places = [(float(box.get("y", 0)), float(box.get("height", 0))) for box in found]
    assert places[:3] == [(0, 22), (0, 11), (11, 11)]
    third = pytest.approx(22 / 3, abs=0.01)
    assert places[3:6] == [(0, third), (third, third), (pytest.approx(44 / 3, abs=0.01), third)]
    assert places[6:] == [(0, 22)] * 3
    ends = [float(box.get("x", 0)) + float(box.get("width", 0)) for box in found]
    assert float(found[2].get("x", 0)) < ends[1]  # they overlap in time
    trace = [each for each in draw.trace.events([simulate(schedule, costs)]) if each["ph"] == "X"]
    for thread in {each["tid"] for each in trace}:
        row = sorted((each["ts"], each["ts"] + each["dur"]) for each in trace if each["tid"] == thread)
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(row))


def test_chunks_of_a_rank_have_their_own_shade_and_the_legend_says_so() -> None:
    text = draw.svg([simulate(schedules.zb_v(2, 4))])
    assert len({box.get("fill") for box in boxes(text)}) == 6  # F, B, W of two chunks
    assert "later chunk" in text
    assert "later chunk" not in draw.svg([simulate(schedules.zb_h1(2, 4))])


def test_timelines_share_one_axis() -> None:
    short, long = simulate(schedules.zb_h1(2, 4)), simulate(schedules.zb_h1(2, 8))
    both, alone = boxes(draw.svg([short, long])), boxes(draw.svg([long]))
    assert float(both[0].get("width", 0)) == pytest.approx(float(alone[0].get("width", 0)))
    assert "rank 1" in draw.svg([short])


def test_titles_are_escaped_and_counted() -> None:
    timeline = simulate(schedules.gpipe(1, 1))
    assert "a &lt; b" in draw.svg([timeline], titles=["a < b"])
    with pytest.raises(ValueError, match="titles must be one for each of 1"):
        draw.svg([timeline], titles=["a", "b"])
    with pytest.raises(ValueError, match="timelines is empty"):
        draw.svg([])


def test_save_takes_the_kind_from_the_suffix(tmp_path: Path) -> None:
    timeline = simulate(schedules.zb_h2(2, 4))
    assert timeline.save(tmp_path / "a.svg").read_text().startswith("<svg")
    assert timeline.save(tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert "traceEvents" in json.loads(timeline.save(tmp_path / "a.json").read_text())
    both = json.loads(draw.save([timeline, timeline], tmp_path / "b.json", ["one", "two"]).read_text())["traceEvents"]
    assert [each["args"]["name"] for each in both if each["name"] == "process_name"] == ["one", "two"]
    with pytest.raises(ValueError, match=r"\.svg, \.html or \.json"):
        draw.save([timeline], tmp_path / "a.gif")


def test_idle_time_and_time_outside_a_ranks_span_differ() -> None:
    """1F1B: rank 1 of 2 starts one unit late and ends two early; rank 0 waits in between."""
    timeline = simulate(schedules.one_f_one_b(2, 2))
    root = ElementTree.fromstring(draw.svg([timeline], width=64 + 16 + 90))
    scale = 90 / timeline.makespan
    spans = [(float(e.get("x", 0)), float(e.get("width", 0))) for e in root.iter() if e.get("class") == "idle"]
    assert spans == [
        (pytest.approx(row[0].start * scale, abs=0.01), pytest.approx((row[-1].end - row[0].start) * scale, abs=0.01))
        for row in timeline.events
    ]
    assert all(float(e.get("width", 0)) == 90 for e in root.iter() if e.get("class") == "outside")


def test_numbers_are_there_when_they_fit_and_legible() -> None:
    def numbers(width: int) -> list[tuple[str, str]]:
        root = ElementTree.fromstring(draw.svg([simulate(schedules.zb_v(2, 3))], width=width))
        return [(e.get("class", ""), e.text or "") for e in root.iter() if "number" in e.get("class", "")]

    assert len(numbers(1000)) == 2 * 2 * 3 * 3
    assert numbers(200) == []
    assert {kind for kind, _ in numbers(1000)} == {"number", "number dark"}


def test_memory_is_drawn_below_each_rank_as_it_changes() -> None:
    costs = Costs(activation=2, held=1)
    timeline = simulate(schedules.zb_h1(1, 2), costs)  # F B W F B W: 2, 1, 0, 2, 1, 0 from 0, 2, 3, 3, 5, 6
    root = ElementTree.fromstring(draw.svg([timeline], width=64 + 16 + 60, costs=[costs]))
    (outline,) = [e.get("d") for e in root.iter() if e.get("class") == "held"]
    assert outline == "M0 19H0V0H20V9.5H30V19H30V0H50V9.5H60V19V19Z"
    picture = draw.svg([timeline], costs=[costs])
    assert ("memory held" in picture, "peak memory 2" in picture, "static memory" in picture) == (True, True, False)
    assert "memory held" not in draw.svg([timeline])
    with pytest.raises(ValueError, match="costs must be one for each of 1 timelines; got 2"):
        draw.svg([timeline], costs=[costs, costs])


def test_what_is_always_there_and_the_limit_are_drawn_and_the_peak_is_one_figure() -> None:
    costs = Costs(activation=2e9, held=1e9, static=[1e9, 3e9], memory_unit="bytes")
    timeline = simulate(schedules.zb_h1(2, 4), costs)  # at most 4 GB of two microbatches, and 1 or 3 GB
    text = draw.svg([timeline], costs=[costs], limit=10e9)
    root = ElementTree.fromstring(text)
    heights = [float(e.get("height", 0)) for e in root.iter() if e.get("class") == "static"]
    assert heights == [pytest.approx(1.9), pytest.approx(5.7)]
    assert [e.get("d") for e in root.iter() if e.get("class") == "limit"] == ["M0 0h920"] * 2
    outlines = [e.get("d") or "" for e in root.iter() if e.get("class") == "held"]
    tops = [min(float(level) for level in re.findall(r"V([\d.]+)", outline)) for outline in outlines]
    assert tops == [pytest.approx(19 * (1 - peak / 10e9), abs=1e-3) for peak in timeline.peak_memory]
    peak = f"peak memory {max(timeline.peak_memory) / 1e9:g} GB of 10 GB"
    assert peak in text
    assert re.findall(r"[\d.]+ GB", " ".join(e.text or "" for e in root.iter() if not e.tag.endswith("title"))) == (
        re.findall(r"[\d.]+ GB", peak)
    )
