from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from zbkern.pipeline import Costs, schedules, simulate
from zbkern.pipeline.draw import html, style
from zbkern.pipeline.schedules import units


def data(text: str) -> Any:
    found = re.search(r"^const data = (.*);$", text, re.MULTILINE)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_every_event_and_what_each_rank_holds() -> None:
    costs = [Costs(forward=2, activation=3), Costs(weight=0.25)]
    timelines = [simulate(schedules.zb_v(2, 3), costs[0]), simulate(schedules.zb_h2(2, 3), costs[1])]
    found = data(html.html(timelines, ["one", "two"], costs))["timelines"]
    assert [each["title"] for each in found] == ["one", "two"]
    for timeline, each in zip(timelines, found, strict=True):
        assert [[event[:2] + event[3:] for event in row] for row in each["rows"]] == [
            [[event.start, event.end, str(event.action), event.action.microbatch] for event in row]
            for row in timeline.events
        ]
        assert [max(held for _, held in track) for track in each["held"]] == list(timeline.peak_memory)
        for rank, row in enumerate(each["rows"]):
            chunks = timeline.schedule.chunks_of(rank)
            for event, (_, action, _, _) in zip(row, timeline.events[rank], strict=True):
                colour, number = each["fills"][event[2]]
                assert colour == style.shade(action.kind, chunks.index(action.chunk), len(chunks))
                assert number == ("#24292f" if style.is_light(colour) else "#fff")


def test_the_page_fetches_nothing_and_its_titles_are_text() -> None:
    text = html.html([simulate(schedules.gpipe(1, 1))], ["</script><b>"])
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)
    assert text.count("</script>") == 1
    assert "<title>&lt;/script&gt;&lt;b&gt;</title>" in text
    assert data(text)["timelines"][0]["title"] == "</script><b>"


@pytest.mark.parametrize("title", ["<!--<script", "</script", "<script>", "]]>"])
def test_no_title_can_reach_into_the_script(title: str) -> None:
    """`<!--<script` keeps a browser from seeing the end of a script."""
    text = html.html([simulate(schedules.gpipe(1, 1))], [title])
    script = text[text.index("<script>") + 8 : text.rindex("</script>")]
    assert not re.search("<!--|<script|</script", script)
    assert data(text)["timelines"][0]["title"] == title


def test_the_page_is_made_from_a_zip_too(tmp_path: Path) -> None:
    package = Path(html.__file__).parents[2]
    with zipfile.ZipFile(tmp_path / "zbkern.zip", "w") as archive:
        for path in package.rglob("*"):
            if path.suffix in (".py", ".html"):
                archive.write(path, path.relative_to(package.parent))
    code = (
        "from zbkern.pipeline import schedules, simulate; from zbkern.pipeline.draw import html; "
        "print(html.html([simulate(schedules.gpipe(1, 1))]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "zbkern.zip")}, capture_output=True, text=True
    )
    assert found.stdout.startswith("<!doctype html>"), found.stderr


def test_measured_times_start_at_zero_and_keep_their_digits() -> None:
    from zbkern.pipeline import Event, Timeline

    planned = simulate(schedules.gpipe(1, 1))
    events = tuple(
        tuple(Event(e.rank, e.action, 1e6 + e.start / 3, 1e6 + e.end / 3) for e in r) for r in planned.events
    )
    (row,) = data(html.html([Timeline(planned.schedule, events, unit="s")]))["timelines"][0]["rows"]
    assert [event[:2] for event in row] == [[0.0, pytest.approx(1 / 3, 1e-4)], [pytest.approx(1 / 3, 1e-4), 1.0]]


@pytest.mark.skipif(shutil.which("node") is None, reason="node, which checks the script, is not installed")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    text = html.html([simulate(schedules.zb_h1(2, 3))])
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script is not None
    path = tmp_path / "page.js"
    path.write_text(script[1])
    subprocess.run(["node", "--check", str(path)], check=True)


@pytest.mark.skipif(shutil.which("node") is None, reason="node, which runs the script, is not installed")
@pytest.mark.parametrize("unit", ["bytes", None])
def test_the_page_writes_memory_as_tables_do(unit: str | None) -> None:
    values = [0, 3, 999, 1000, 2500, 512e6, 2.45e10, 1e12, 3.2e15]
    timeline = simulate(schedules.gpipe(1, 1), Costs(memory_unit=unit))
    text = html.html([timeline], costs=[Costs(memory_unit=unit)])
    short = re.search(r"^const short = .*$", text, re.MULTILINE)
    amount = re.search(r"^function amount.*?^}", text, re.MULTILINE | re.DOTALL)
    assert short is not None
    assert amount is not None
    script = f"const data = {json.dumps({'memoryUnit': data(text)['memoryUnit']})};\n{short[0]}\n{amount[0]}"
    run = f"{script}\nconsole.log(JSON.stringify({json.dumps(values)}.map(amount)))"
    found = json.loads(subprocess.run(["node", "-e", run], capture_output=True, text=True, check=True).stdout)
    said = [units.amount(value, unit) for value in values]
    assert found == (said if unit else [str(int(value)) for value in values])
