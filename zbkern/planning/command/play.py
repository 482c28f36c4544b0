"""`zbkern play`: a page on this machine on which schedules, and a plan, are drawn anew as sliders move."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from zbkern.pipeline import schedules
from zbkern.pipeline.schedules.actions import ScheduleError
from zbkern.planning import draw
from zbkern.planning.command import report
from zbkern.planning.command.answer import search
from zbkern.planning.command.question import Question
from zbkern.planning.simulation import comparison
from zbkern.planning.simulation.costs import Costs
from zbkern.planning.simulation.timeline import Timeline

PLAN = "plan"
_SECONDS = 0.3  # of a search: a slider should not have to wait
_MOST = {"stages": 32, "microbatches": 64, "slices": 16}  # what is drawn in less than a second or two
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
        server = ThreadingHTTPServer(("127.0.0.1", arguments.port), _Handler)
    except (OSError, OverflowError) as error:
        print(f"zbkern play: argument --port: {error}; choose another one, or 0 for any that is free", file=sys.stderr)
        return 2
    with server:
        print(f"http://127.0.0.1:{server.server_address[1]} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def drawn(given: Mapping[str, str]) -> dict[str, str]:
    """The picture and the table of the schedules that are given by name; raises ValueError for wrong numbers.

    given: "schedules", names with commas between them, and the numbers of `_MOST` and `_NUMBERS`: times of a
    microbatch's passes in one stage, the latency between stages, the share of attention in forward and backward, and
    the memory of a rank in that of 1F1B.
    """
    sizes = {name: _number(int, given, name, 1, most) for name, most in _MOST.items()}
    numbers = {name: _number(float, given, name, 0, 1e6) for name in _NUMBERS}
    names = given.get("schedules", "").split(",")
    stages, limit = sizes["stages"], numbers["memory"] * sizes["stages"]
    share, times = numbers["attention"], {name: numbers[name] for name in _NUMBERS[:4]}
    costs = Costs(**times, attention_forward=share * times["forward"], attention_backward=share * times["backward"])
    published = comparison.timelines(costs, stages, sizes["microbatches"], 1, sizes["slices"])
    timelines = [each for name, each in zip(schedules.NAMES, published, strict=True) if name in names]
    if PLAN in names:
        timelines += _planned(costs, sizes, limit)
    if not timelines:
        raise ValueError("choose a schedule; a plan needs memory for at least one microbatch")
    each = [comparison.rechunk(costs, stages, len(timeline.schedule.placement)) for timeline in timelines]
    table = report.table(timelines, "cost", limit, float(stages))
    return {"svg": draw.svg(timelines, costs=each, limit=limit), "table": table}


def _planned(costs: Costs, sizes: Mapping[str, int], limit: float) -> list[Timeline]:
    """The best of one and two chunks per rank, of those that fit."""
    stages, memory, found = sizes["stages"], (limit, False), []
    question = Question(stages, sizes["microbatches"], slices=sizes["slices"], memory=memory, time_limit=_SECONDS)
    for chunks in (1, 2):
        cut = comparison.rechunk(costs, stages, chunks * stages)
        with contextlib.suppress(ScheduleError):  # does not fit
            found.append(search(replace(question, measured=cut, chunks=chunks)).timeline)
    return sorted(found, key=lambda timeline: timeline.cost)[:1]


def _number(kind: type, given: Mapping[str, str], name: str, least: float, most: float) -> Any:
    try:
        value = kind(given[name])
    except (KeyError, ValueError):
        value = None
    if value is None or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}; got {given.get(name)!r}")
    return value


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if path.path == "/":
            page = resources.files("zbkern.planning.command").joinpath("play.html").read_text(encoding="utf-8")
            self._answer(200, "text/html", page.replace("@SCHEDULES@", json.dumps([PLAN, *schedules.NAMES])))
        elif path.path == "/drawn":
            try:
                found = drawn({name: values[-1] for name, values in parse_qs(path.query).items()})
                self._answer(200, "application/json", json.dumps(found))
            except ValueError as error:
                self._answer(400, "application/json", json.dumps({"error": str(error)}))
        else:
            self.send_error(404)

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing: a line per request would bury the address."""
