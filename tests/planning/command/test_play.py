"""`zbkern play`: what the page shows is what simulation and planner say, also in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from zbkern.pipeline import Costs, schedules, simulate
from zbkern.planning.command import play

GIVEN = {
    "stages": "3",
    "microbatches": "6",
    "slices": "1",
    "forward": "1",
    "backward": "1.5",
    "weight": "0.5",
    "communication": "0.1",
    "attention": "0.5",
    "memory": "1",
}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def bubbles(table: str) -> dict[str, str]:
    rows = (re.split(r"\s{2,}", line) for line in table.splitlines()[1:])
    return {name: bubble for name, _, bubble, *_ in rows}


def test_published_schedules_are_drawn_with_the_given_costs() -> None:
    found = play.drawn({**GIVEN, "schedules": "zb_h1,gpipe"})
    costs = Costs(1, 1.5, 0.5, 0.1)
    timelines = {name: simulate(getattr(schedules, name)(3, 6), costs) for name in ("zb_h1", "gpipe")}
    assert bubbles(found["table"]) == {name: f"{each.bubble_rate:.2%}" for name, each in timelines.items()}
    assert re.search("gpipe.*over the limit", found["table"])
    assert [name in found["svg"] for name in ("zb_h1", "gpipe", "zb_v")] == [True, True, False]


def test_slices_have_the_cost_of_their_place() -> None:
    found = play.drawn({**GIVEN, "slices": "4", "schedules": "one_f_one_b"})
    costs = Costs(1, 1.5, 0.5, 0.1, attention_forward=0.5, attention_backward=0.75)
    expected = simulate(schedules.one_f_one_b(3, 6, slices=4), costs).bubble_rate
    assert bubbles(found["table"]) == {"one_f_one_b, 4 slices": f"{expected:.2%}"}


@pytest.mark.parametrize("memory", ["1", "0.7"])
def test_a_plan_is_the_best_within_the_limit(memory: str) -> None:
    found = play.drawn({**GIVEN, "memory": memory, "schedules": "zb_h1,zb_v,v_half,plan"})
    rows = [line for line in found["table"].splitlines()[1:] if "over the limit" not in line]
    idle = {row.split()[0]: float(row.split()[2].rstrip("%")) for row in rows}
    (planned,) = (name for name in idle if name.startswith("plan"))
    assert idle[planned] == min(idle.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": "0"}, "stages must be a number from 1 to 32; got '0'"),
        ({"forward": "nan"}, "forward must be a number from 0"),
        ({"memory": "x"}, "memory must be a number"),
        ({"schedules": "nothing"}, "choose a schedule"),
        ({"schedules": "plan", "memory": "0"}, "a plan needs memory"),
    ],
)
def test_wrong_numbers_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        play.drawn({**GIVEN, "schedules": "zb_h1", **change})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "zbkern", "play", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait(10)


def test_the_server_answers(address: str) -> None:
    query = "&".join(f"{name}={value}" for name, value in {**GIVEN, "schedules": "zb_h1"}.items())
    with urllib.request.urlopen(f"{address}/drawn?{query}", timeout=20) as answer:
        assert json.load(answer) == play.drawn({**GIVEN, "schedules": "zb_h1"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/etc/passwd", timeout=20)
    with pytest.raises(urllib.error.HTTPError, match="400") as error:
        urllib.request.urlopen(f"{address}/drawn?stages=0", timeout=20)
    assert "stages must be a number" in json.load(error.value)["error"]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_in_a_browser(address: str, tmp_path) -> None:
    """The sliders begin where the link says, and the picture is there without an error."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    link = f"{address}/?stages=5&schedules=zb_v,plan"
    page = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", link], capture_output=True, text=True, timeout=120
    ).stdout
    assert 'id="error"></div>' in page
    assert "rank 4<" in page
    assert "rank 5<" not in page
    assert re.search(r'<pre id="table">schedule[^<]*zb_v', page)
    assert len(re.findall('class="title">', page)) == 2
