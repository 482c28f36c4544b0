"""`zbkern play`: what the page shows is what simulation and planner say, also in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import patiently
from zbkern import __main__
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
        ({"stages": "32", "microbatches": "64", "slices": "16"}, "196,608 passes are more than 60,000: choose fewer"),
    ],
)
def test_wrong_numbers_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        play.drawn({**GIVEN, "schedules": "zb_h1", **change})


def test_the_number_is_that_of_the_best_that_fits() -> None:
    found = play.drawn({**GIVEN, "schedules": "zb_h1,gpipe,one_f_one_b"})
    assert found["best"] == "of the time is idle with zb_h1"
    assert found["idle"] == f"{simulate(schedules.zb_h1(3, 6), Costs(1, 1.5, 0.5, 0.1)).bubble_rate:.1%}"
    assert play.drawn({**GIVEN, "schedules": "gpipe"})["idle"] == "-"


def test_the_command_plans_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found = play.drawn({**GIVEN, "schedules": "zb_h1"})
    echo, command = found["command"].splitlines()
    words = shlex.split(echo)
    assert (words[0], words[2:]) == ("echo", [">", "costs.json"])
    Path("costs.json").write_text(words[1])
    assert __main__.main([*shlex.split(command)[1:], "--effort", "0"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("zb_h1"))
    assert re.split(r"\s{2,}", row)[2] == bubbles(found["table"])["zb_h1"]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with play._Server(("127.0.0.1", 0), play._Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def address(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


QUERY = "&".join(f"{name}={value}" for name, value in {**GIVEN, "schedules": "zb_h1"}.items())


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Host": "localhost:9000"}, True),  # through a tunnel
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Host": "evil.example"}, False),  # a name that leads here
        ({"Host": "127.0.0.1.evil.example"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://127.0.0.1:9999"}, False),  # another program of this machine
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
    ],
)
@pytest.mark.parametrize("path", ["/", f"/drawn?{QUERY}"])
def test_other_pages_are_refused(address: str, path: str, headers: dict[str, str], allowed: bool) -> None:
    request = urllib.request.Request(f"{address}{path}", headers=headers)
    with contextlib.nullcontext() if allowed else pytest.raises(urllib.error.HTTPError, match="403"):
        answer = urllib.request.urlopen(request, timeout=60)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_one_computation_at_a_time_and_the_newest_wins(server: Any, address: str, monkeypatch: Any) -> None:
    begun, may_end, computed = threading.Event(), threading.Event(), []

    def drawn(given: dict[str, str]) -> dict[str, str]:
        computed.append(given["n"])
        begun.set()
        may_end.wait(60)
        return {"svg": given["n"]}

    def get(n: int) -> str:
        try:
            return urllib.request.urlopen(f"{address}/drawn?n={n}", timeout=60).read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()

    monkeypatch.setattr(play, "drawn", drawn)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(get, 0)]
        assert begun.wait(60)
        for n in (1, 2, 3):
            newest = server._newest
            answers.append(pool.submit(get, n))
            while server._newest is newest:
                time.sleep(0.01)
        may_end.set()
        found = [answer.result() for answer in answers]
    assert computed == ["0", "3"]
    assert ["another window" in text for text in found] == [False, True, True, False]


def test_silent_connections_end_and_hold_up_nobody(server: Any, address: str, monkeypatch: Any) -> None:
    def check(scale: float) -> None:
        monkeypatch.setattr(play._Handler, "timeout", 0.5 * scale)
        with socket.create_connection(server.server_address, timeout=60) as silent:
            assert urllib.request.urlopen(f"{address}/", timeout=60).status == 200
            assert silent.recv(1) == b""  # ended by the server

    patiently(check)


def test_the_server_answers(address: str) -> None:
    with urllib.request.urlopen(f"{address}/drawn?{QUERY}", timeout=60) as answer:
        assert json.load(answer) == play.drawn({**GIVEN, "schedules": "zb_h1"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/etc/passwd", timeout=60)
    with pytest.raises(urllib.error.HTTPError, match="400") as error:
        urllib.request.urlopen(f"{address}/drawn?stages=0", timeout=60)
    assert "stages must be a number" in json.load(error.value)["error"]


def shown(link: str, folder: Path) -> str:
    """The page as a browser has it at last."""
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    options = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in quiet)]
    command = [str(CHROMIUM), *options, f"--user-data-dir={folder}", "--virtual-time-budget=20000", "--dump-dom", link]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_link_runs_no_script(address: str, tmp_path: Path) -> None:
    """Whatever of it the page shows is text."""
    script = """"><img src=x onerror="document.title='script ran'"><script>document.title='script ran'</script>"""
    names = [*GIVEN, "schedules"]
    page = shown(f"{address}/?{urllib.parse.urlencode(dict.fromkeys(names, script))}", tmp_path)
    assert "<title>zbkern play</title>" in page


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_in_a_browser(address: str, tmp_path: Path) -> None:
    """The sliders begin where the link says, and the picture is there without an error."""
    page = shown(f"{address}/?stages=5&schedules=zb_v,plan", tmp_path)
    assert 'id="error"></div>' in page
    assert "rank 4<" in page
    assert "rank 5<" not in page
    assert re.search(r'<pre id="table">schedule[^<]*zb_v', page)
    assert len(re.findall('class="title">', page)) == 2
