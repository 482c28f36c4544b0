"""The planner beside published figures: bubble rates of the published search and of ours, the lower bound, and time.

    python -m bench.planner [one] [v] [unit] [zigzag] [scale]     (default: all, which takes an hour)
    python -m bench.planner --without NAME ...                    (a mechanism, or all: an ablation)

Seconds are processor time of this process on one core, which other work on the machine changes little. Plans have
plan's own effort, a number of rounds, unless --effort is given.

--without: 18 problems with all mechanisms of the search and without each that is named, in points of idle time more (or
less, below 0); what gives less than 0.3 points nowhere has no place in the search.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.report import add_out, write_json
from zbkern.pipeline import Costs, PlanOptions, plan
from zbkern.planning.planner import portfolio, search
from zbkern.planning.planner.plan import EFFORT
from zbkern.reporting import markdown_table

PROFILES = json.loads((Path(__file__).parent.parent / "tests/data/zb_profiles.json").read_text())
Cell = tuple[str, Costs, int, int, int, float | None, float | None]  # name, costs, stages, microbatches, chunks, limit


def one_chunk() -> Iterator[Cell]:
    """Every cell of the data file with one chunk per rank; limits in units of stages activations."""
    for row in PROFILES["one_chunk"]:
        names = ("forward", "backward", "weight", "communication", "activation", "held")
        costs = Costs(*(row[name] for name in names))
        for limit, published in row["bubble_rate_by_memory_limit"].items():
            yield row["model"], costs, row["stages"], row["microbatches"], 1, float(limit), published
    for row in PROFILES["two_chunks"]:
        costs = _two_chunks(row, times=2)
        for limit, published in row["bubble_rate_by_memory_limit"].items():
            yield row["model"], costs, row["stages"], row["microbatches"], 1, float(limit), published["ZB"]


def v_shape() -> Iterator[Cell]:
    """Two chunks in a V: the data file's cells, its low-memory schedules, and the targets at p=8."""
    for row in PROFILES["two_chunks"]:
        costs = _two_chunks(row)
        shape = (row["stages"], row["microbatches"], 2)
        for low in row["low_memory"].values():
            yield row["model"], costs, *shape, low["peak_chunks"] / 2 / row["stages"], low["bubble_rate"]
        for limit, published in row["bubble_rate_by_memory_limit"].items():
            yield row["model"], costs, *shape, float(limit), published["ZB-V"]
    costs = Costs(92, 90, 46, 6, 0.5, 0.25)
    for microbatches, limits in {
        16: {0.5: 0.297, 0.75: 0.201, 1.0: 0.103, 1.5: 0.022},
        24: {0.5: 0.249},
    }.items():
        for limit, target in limits.items():
            yield "92, 90, 46", costs, 8, microbatches, 2, limit, target


def unit() -> Iterator[Cell]:
    """Unit costs: one chunk at 1.5 and 2 times the memory of 1F1B, two in a V at 1.0."""
    for row in PROFILES["unit_cost"]:
        for chunks, limit, name in ((1, 1.5, "ZB at 1.5p"), (1, 2.0, "ZB at 2p"), (2, 1.0, "ZB-V at 1.0p")):
            costs = Costs(activation=1 / chunks, held=0.5 / chunks)
            yield "unit", costs, row["stages"], row["microbatches"], chunks, limit, row[name]


def zigzag() -> Iterator[Cell]:
    """Four chunks in a zigzag at p=8 and m=24, and two in a V to compare with."""
    row = PROFILES["one_chunk"][0]
    for chunks, targets in ((2, (0.138, 0.071, 0.015)), (4, (0.114, 0.034, 0.001))):
        for limit, target in zip((0.5, 0.75), targets[:2], strict=True):
            yield "unit", Costs(activation=1 / chunks, held=0.5 / chunks), 8, 24, chunks, limit, target
        times = (row[name] / chunks for name in ("forward", "backward", "weight"))
        costs = Costs(*times, row["communication"], 1 / chunks, row["held"] / row["activation"] / chunks)
        yield row["model"], costs, 8, 24, chunks, 1.5, targets[2]


def scale() -> Iterator[Cell]:
    """Large problems: the first result; nothing published to compare with."""
    for stages, microbatches in ((32, 256), (64, 1024)):
        for chunks in (1, 2):
            yield "unit", Costs(communication=0.1, activation=1 / chunks), stages, microbatches, chunks, 1.5, None


def _two_chunks(row: dict[str, Any], times: int = 1) -> Costs:
    names = ("chunk_forward", "chunk_backward", "chunk_weight")
    passes = (times * row[name] for name in names)
    return Costs(*passes, row["communication"], times * row["chunk_activation"], times * row["chunk_held"])


def ablated() -> Iterator[Cell]:
    """Of one, two and four chunks per rank, in little memory and in plenty, small ones, and ones that may fuse."""
    one = PROFILES["one_chunk"]
    for row, limit in ((one[0], 1.25), (one[0], 1.5), (one[3], 1.0), (one[3], 1.5), (one[5], 2.0)):
        costs = Costs(*(row[name] for name in ("forward", "backward", "weight", "communication", "activation", "held")))
        yield row["model"], costs, row["stages"], row["microbatches"], 1, limit, 0.0
    v = Costs(92, 90, 46, 6, 0.5, 0.25)
    for microbatches, limit in ((16, 0.5), (16, 0.75), (16, 1.0), (16, 1.5), (24, 0.5)):
        yield "92, 90, 46", v, 8, microbatches, 2, limit, 0.0
    yield "92, 90, 46", v, 16, 48, 2, 1.25, 0.0
    for limit in (0.5, 0.75):
        yield "unit", Costs(activation=0.25, held=0.125), 8, 24, 4, limit, 0.0
    yield "small", Costs(5, 11, 8, 2, 1 / 3, 0.4 / 3), 3, 4, 3, 0.6, 0.0
    yield "unit", Costs(activation=0.25, held=0.125), 4, 12, 4, 0.6, 0.0
    llama = Costs(1, 1.2, 0.9, 0.05, 0.5, 0.57, split_overhead=0.06, merge_saving=0.05)
    for limit in (0.75, 1.25):
        yield "held more than kept", llama, 8, 16, 2, limit, 0.0
    yield "unequal", Costs((1, 1.1, 1, 1.4), 1, (1, 1.1, 1, 1.6)), 4, 12, 1, 1.5, 0.0


def _nothing(*_: Any) -> None:
    """In the place of a mechanism."""


MECHANISMS: dict[str, tuple[Any, str, Any]] = {
    "rules": (search, "best_tried_rules", lambda *_: []),
    "refinement": (portfolio.Population, "_refined", _nothing),
    "patterns": (portfolio, "is_v", lambda _: False),
    "blocks": (portfolio.Population, "_block", _nothing),
    "long annealing": (portfolio, "SETTINGS", replace(portfolio.SETTINGS, long_chunks=10**6)),
    "several coolings": (portfolio, "SETTINGS", replace(portfolio.SETTINGS, coolings=((0.3, 3),))),
    "hot in small problems": (portfolio, "SETTINGS", replace(portfolio.SETTINGS, small=0)),
    "warm start": (portfolio, "warm_start", _nothing),
    "cold end": (search.Search, "finish", _nothing),
}


def ablation(names: list[str], effort: int) -> str:
    """A row per problem: idle time with all mechanisms, and how many points more without each."""
    rows, cells = [], list(ablated())
    for cell in cells:
        model, _, stages, microbatches, chunks, limit, _ = cell
        whole = measure(cell, effort)
        row = [f"{model}, p {stages}, m {microbatches}, x{chunks}, {limit:g}", f"{whole['plan']:.2%}"]
        for name in names:
            with patch.object(*MECHANISMS[name]):
                found = measure(cell, effort)
            row.append(f"{100 * (found['plan'] - whole['plan']):+.2f}")
        rows.append(row)
        print(*row, sep=" | ", flush=True)
    return markdown_table(["problem", "all", *names], rows)


def measure(cell: Cell, effort: int) -> dict[str, Any]:
    model, costs, stages, microbatches, chunks, limit, published = cell
    if published is None:
        effort = 0
    memory = None if limit is None else limit * stages * chunks * costs.activation
    begin = time.process_time()
    options = PlanOptions(steady=False)
    found = plan(costs, stages, microbatches, chunks, memory_limit=memory, effort=effort, options=options)
    spent = time.process_time() - begin
    assert memory is None or max(found.timeline.peak_memory) <= memory * (1 + 1e-9)
    return {
        "model": model, "stages": stages, "microbatches": microbatches, "chunks": chunks, "limit": limit,
        "published": published, "plan": found.bubble_rate, "lower_bound": found.lower_bound, "optimal": found.optimal,
        "seconds": spent, "effort": found.effort,
    }  # fmt: skip


SECTIONS = {"one": one_chunk, "v": v_shape, "unit": unit, "zigzag": zigzag, "scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.planner", description=__doc__.splitlines()[0])
    tables = f"{', '.join(SECTIONS)} (default: all)"
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], metavar="TABLE", help=tables)
    parser.add_argument("--effort", type=int, default=EFFORT, help="rounds of every plan (default: %(default)s)")
    parser.add_argument("--stages", type=int, help="only cells with this many stages")
    parser.add_argument("--microbatches", type=int, help="only cells with this many microbatches")
    parser.add_argument(
        "--without", nargs="+", choices=["all", *MECHANISMS], metavar="NAME", help=", ".join(MECHANISMS)
    )
    add_out(parser)
    parser.add_argument("--name", default="planner", help="of the JSON file there")
    options = parser.parse_args()
    if options.without:
        names = list(MECHANISMS) if "all" in options.without else options.without
        print(ablation(names, options.effort))
        return
    figures: dict[str, list[dict[str, Any]]] = {}
    for section in options.sections or SECTIONS:
        print(f"\n{SECTIONS[section].__doc__}\n")
        rows = figures[section] = []
        for cell in SECTIONS[section]():
            if options.stages in (None, cell[2]) and options.microbatches in (None, cell[3]):
                rows.append(measure(cell, options.effort))
                write_json(options.name, figures, options.out)  # after every plan: all of them take an hour
        print(markdown_table(HEADER, [_line(row) for row in rows]), flush=True)


HEADER = ("model", "p", "m", "chunks", "limit", "published", "plan", "bound", "above bound", "against published", "s")


def _line(row: dict[str, Any]) -> list[Any]:
    published, rate = row["published"], round(row["plan"], 4)
    if published is None:
        against = ""
    else:  # a target of three digits is met by what rounds to it
        digits = 3 if round(published, 3) == published else 4
        difference = round(row["plan"], digits) - published
        against = "worse" if difference > 1e-9 else "better" if difference < -1e-9 else "equal"
    above = row["plan"] - row["lower_bound"]
    return [
        row["model"], row["stages"], row["microbatches"], row["chunks"], f"{row['limit']:g}",
        "" if published is None else f"{published:.4f}", f"{rate:.4f}", f"{row['lower_bound']:.4f}",
        "optimal" if row["optimal"] else f"{above:.4f}", against, f"{row['seconds']:.1f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
