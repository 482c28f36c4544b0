from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from zbkern.pipeline import Costs, draw, schedules, simulate

SVG = "{http://www.w3.org/2000/svg}"


def picture(text: str) -> ElementTree.Element:
    found = re.search(r"<svg.*</svg>", text, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def test_the_page_has_every_event_its_number_and_what_its_rank_holds() -> None:
    costs = [Costs(forward=2, activation=3), Costs(weight=0.25)]
    timelines = [simulate(schedules.zb_v(2, 30), costs[0]), simulate(schedules.zb_h2(2, 3), costs[1])]
    page = draw.html(timelines, ["one", "two"], costs)
    assert "<title>one, two</title>" in page
    said = [box[0].text or "" for box in picture(page).iter(f"{SVG}rect") if box.get("class") == "action"]
    events = [event for timeline in timelines for row in timeline.events for event in row]
    numbers = [each.text for each in picture(page).iter(f"{SVG}text") if "number" in each.get("class", "")]
    assert numbers == [str(event.action.unit) for event in events]
    for text, event in zip(said, events, strict=True):
        assert text.startswith(f"{event.action} on rank {event.rank}: {event.start:g} to {event.end:g}, memory held ")
    assert max(float(text.rpartition(" ")[2]) for text in said) == max(timelines[0].peak_memory)


@pytest.mark.parametrize("title", ["</script><b>", "<!--<script", "<script>", "]]>", "@SVG@"])
def test_the_page_fetches_nothing_and_its_titles_are_text(title: str) -> None:
    """`<!--<script` keeps a browser from seeing the end of a script."""
    text = draw.html([simulate(schedules.gpipe(1, 1))], [title])
    assert not re.search(r"https?:|src=|href=|@import|url\(", text.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert text.count("<script>") == text.count("</script>") == 1
    assert next(picture(text).iter(f"{SVG}tspan")).text == title


PAGE = """
function element(attributes, text) {
  return {attributes, textContent: text, style: {setProperty(name, value) { this[name] = value; }}, clientWidth: 1400,
    marked: false, viewBox: {baseVal: {width: 1400}}, getBoundingClientRect: () => ({left: 0}),
    getAttribute(name) { return this.attributes[name]; }, setAttribute(name, value) { this.attributes[name] = value; },
    classList: {contains: () => true, toggle(name, on) { boxes.find(b => b.classList === this).marked = on; }},
    handlers: {}, addEventListener(name, handler) { this.handlers[name] = handler; }};
}
const boxes = ['0F3 on rank 0', '1W3 on rank 1', '0F13 on rank 0'].map(text => element({width: 10}, text));
const texts = ['3', '3', '13'].map((text, i) => Object.assign(element({}, text), {previousSibling: boxes[i]}));
const found = {'.time': [element({}, '')], '.number': texts, '.action': boxes,
  '.tick': [element({x: 64}, '0'), element({x: 724}, '50')]};
const root = element({}, '');
root.querySelectorAll = name => found[name];
globalThis.document = {querySelector: () => root};
globalThis.addEventListener = (name, handler) => { root.handlers[name] = handler; };
"""
STATE = """
function state() {
  return {transform: found['.time'][0].attributes.transform, ticks: found['.tick'].map(t => +t.textContent),
    shown: texts.map(n => n.style.display !== 'none'), marked: boxes.map(b => b.marked)};
}
const states = [state()], does = (name, event) => { root.handlers[name](event); states.push(state()); };
for (let i = 0; i < 10; i++) root.handlers.wheel({clientX: 724, deltaY: -1, preventDefault() {}});
states.push(state());
root.handlers.pointerdown({clientX: 700});
does('pointermove', {clientX: 690});
root.handlers.pointerup({});
does('pointerover', {target: boxes[0]});
does('pointerout', {target: boxes[0]});
does('dblclick', {});
console.log(JSON.stringify(states));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node, which runs the script, is not installed")
def test_the_wheel_zooms_around_the_pointer_and_dragging_moves() -> None:
    """The page's script on a page of plain objects: a time axis of 1320 pixels with a tick at 0 and at 50."""
    script = re.search(r"<script>(.*)</script>", draw.html([simulate(schedules.zb_h1(2, 3))]), re.DOTALL)
    assert script is not None
    run = subprocess.run(["node", "-e", PAGE + script[1] + STATE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    whole, zoomed, moved, over, out, again = json.loads(run.stdout)
    assert whole == {
        "transform": "translate(0 0) scale(1 1)",
        "ticks": [0, 50],
        "shown": [True, True, False],
        "marked": [False] * 3,
    }
    shift, factor = transform(zoomed)
    assert factor == pytest.approx(1.2**10)
    assert zoomed["ticks"][1] == pytest.approx(50)  # where the pointer was
    assert zoomed["shown"] == [True] * 3
    assert transform(moved) == (pytest.approx(shift + 10), factor)
    assert (over["marked"], out["marked"]) == ([True, True, False], [False] * 3)
    assert again == whole


def transform(state: dict[str, Any]) -> tuple[float, float]:
    shift, factor = re.findall(r"-?[\d.]+", state["transform"])[::2]
    return -float(shift), float(factor)
