"""`zbkern play`: a page on this machine on which schedules, and a plan, are drawn anew as sliders move.

Other pages of the same browser can reach the address, too. They are refused, what is computed is bounded, and the page
shows what comes in a link as text alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import secrets
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from zbkern import schedules
from zbkern.planning import draw
from zbkern.planning.command.answer import search
from zbkern.planning.command.question import Measured, Question, spelt
from zbkern.planning.command.tables import table
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.memory import exceeds
from zbkern.planning.planner import native
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import ScheduleError

PLAN = "plan"
_EFFORT = 1  # some tenths of a second: a slider should not have to wait
_MOST = {"stages": 32, "microbatches": 64, "slices": 16}
_MOST_PASSES = 60_000  # of all that is drawn: two seconds
_NUMBERS = ("forward", "backward", "weight", "communication", "attention", "memory")


def add_to(commands: Any) -> None:
    """Adds `play` to the subparsers of the command line."""
    what = "schedules drawn in a browser as you change stages, costs and memory"
    parser = commands.add_parser("play", help=what, description=f"A page on this machine: {what}.")
    parser.add_argument("--port", type=int, default=8000, help="of 127.0.0.1 (default 8000; 0: any that is free)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    try:
        server = _Server(("127.0.0.1", arguments.port), _Handler)
    except (OSError, OverflowError) as error:
        print(f"zbkern play: argument --port: {error}; choose another one, or 0 for any that is free", file=sys.stderr)
        return 2
    with server:
        print(f"http://127.0.0.1:{server.server_address[1]} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def drawn(given: Mapping[str, str]) -> dict[str, str]:
    """The picture and the table of the schedules that are given by name, the least idle time of those that fit, and the
    command that plans so; raises ValueError for wrong numbers, and for more than can be drawn at once.

    given: "schedules", names with commas between them, and the numbers of `_MOST` and `_NUMBERS`: times of a
    microbatch's passes in one stage, the latency between stages, the share of attention in forward and backward, and
    the memory of a rank in that of 1F1B.
    """
    sizes = {name: _number(int, given, name, 1, most) for name, most in _MOST.items()}
    numbers = {name: _number(float, given, name, 0, 1e6) for name in _NUMBERS}
    names = {*given.get("schedules", "").split(",")} & {PLAN, *schedules.NAMES}
    passes = 6 * math.prod(sizes.values()) * (len(names) + 3 * (PLAN in names))  # of two chunks; plans try several
    if passes > _MOST_PASSES:
        raise ValueError(f"{passes:,} passes are more than {_MOST_PASSES:,}: choose fewer schedules, stages or slices")
    if PLAN in names and native.core is None:
        raise ValueError("a plan needs a search, which is compiled: install a C++ compiler, then zbkern again")
    stages, limit = sizes["stages"], numbers["memory"] * sizes["stages"]
    share, times = numbers["attention"], {name: numbers[name] for name in _NUMBERS[:4]}
    costs = Costs(**times, attention_forward=share * times["forward"], attention_backward=share * times["backward"])
    published = [name for name in schedules.NAMES if name in names]
    timelines = comparison.timelines(costs, stages, sizes["microbatches"], 1, sizes["slices"], published)
    if PLAN in names:
        timelines += _planned(costs, sizes, limit)
    if not timelines:
        raise ValueError("choose a schedule; a plan needs memory for at least one microbatch")
    each = [comparison.rechunk(costs, stages, len(timeline.schedule.placement)) for timeline in timelines]
    fitting = [timeline for timeline in timelines if not exceeds(max(timeline.peak_memory), limit)]
    best = min(fitting, key=lambda timeline: timeline.cost, default=None)
    return {
        "idle": "-" if best is None else f"{best.bubble_rate:.1%}",
        "best": "none of these fits the memory" if best is None else f"of the time is idle with {best.schedule.name}",
        "svg": draw.svg(timelines, costs=each, limit=limit),
        "table": table(timelines, limit, float(stages)),
        "command": _command(costs, sizes, numbers["memory"]),
    }


def _command(costs: Costs, sizes: Mapping[str, int], memory: float) -> str:
    written = json.dumps({name: value for name, value in json.loads(costs.to_json()).items() if value})
    options = f"--costs costs.json {' '.join(spelt(sizes))} --memory {memory:g}x --compare"
    return f"echo '{written}' > costs.json\nzbkern plan {options}"


def _planned(costs: Costs, sizes: Mapping[str, int], limit: float) -> list[Timeline]:
    """The best of one and two chunks per rank, of those that fit."""
    stages, memory, found = sizes["stages"], (limit, False), []
    question = Question(stages, sizes["microbatches"], slices=sizes["slices"], memory=memory, effort=_EFFORT)
    for chunks in (1, 2):
        cut = comparison.rechunk(costs, stages, chunks * stages)
        with contextlib.suppress(ScheduleError):  # does not fit
            found.append(search(replace(question, setting=Measured(cut), chunks=chunks)).timeline)
    return sorted(found, key=lambda timeline: timeline.cost)[:1]


def _number(kind: type, given: Mapping[str, str], name: str, least: float, most: float) -> Any:
    try:
        value = kind(given[name])
    except (KeyError, ValueError):
        value = None
    if value is None or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}; got {given.get(name)!r}")
    return value


class _Server(ThreadingHTTPServer):
    """One computation at a time; of requests that wait for it only the newest is computed."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._computing, self._newest = threading.Lock(), object()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a browser that has gone nothing is said."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def drawn(self, given: Mapping[str, str]) -> dict[str, str]:
        """`drawn`; raises ValueError where another request has come meanwhile."""
        self._newest = mine = object()
        with self._computing:
            if self._newest is not mine:
                raise ValueError("another window has asked for another picture")
            return drawn(given)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds of silence on a connection

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if self._is_foreign():
            text = "zbkern play answers its own page alone: open the address that it has printed."
            self._answer(403, "text/plain", text)
        elif path.path == "/":
            page = resources.files("zbkern.planning.command").joinpath("play.html").read_text(encoding="utf-8")
            nonce = secrets.token_urlsafe()
            page = page.replace("@SCHEDULES@", json.dumps([PLAN, *schedules.NAMES])).replace("@NONCE@", nonce)
            self._answer(200, "text/html", page, nonce)
        elif path.path == "/drawn":
            try:
                found = self.server.drawn({name: values[-1] for name, values in parse_qs(path.query).items()})
                self._answer(200, "application/json", json.dumps(found))
            except ValueError as error:
                self._answer(400, "application/json", json.dumps({"error": str(error)}))
        else:
            self._answer(404, "text/plain", "zbkern play has one page: /")

    def _is_foreign(self) -> bool:
        """Whether a page of another origin asks, or one whose name somebody else has led to this machine."""
        host, origin, site = (self.headers.get(name) for name in ("Host", "Origin", "Sec-Fetch-Site"))
        local = host is not None and host.partition(":")[0] in ("127.0.0.1", "localhost")
        return not local or origin not in (None, f"http://{host}") or site not in (None, "none", "same-origin")

    def _answer(self, status: int, kind: str, text: str, nonce: str = "") -> None:
        body = text.encode()
        allowed = f"script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; " if nonce else ""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        policy = f"default-src 'none'; {allowed}frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing: a line per request would bury the address."""
