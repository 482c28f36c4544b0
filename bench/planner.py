"""The planner beside published figures: bubble rates of the published search and of ours, the lower bound, and time.

    python -m bench.planner [one] [v] [unit] [scale]     (default: all, which takes many minutes)

Seconds are processor time of this process on one core, which other work on the machine changes little. Plans have
plan's own effort, a number of rounds, unless --effort is given.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report import add_out, write_json
from zbkern.pipeline import Costs, PlanOptions, plan
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
    """Two chunks in a V: the data file's cells, and its low-memory schedules."""
    for row in PROFILES["two_chunks"]:
        costs = _two_chunks(row)
        shape = (row["stages"], row["microbatches"], 2)
        for low in row["low_memory"].values():
            yield row["model"], costs, *shape, low["peak_chunks"] / 2 / row["stages"], low["bubble_rate"]
        for limit, published in row["bubble_rate_by_memory_limit"].items():
            yield row["model"], costs, *shape, float(limit), published["ZB-V"]


def unit() -> Iterator[Cell]:
    """Unit costs: one chunk at 1.5 and 2 times the memory of 1F1B, two in a V at 1.0."""
    for row in PROFILES["unit_cost"]:
        for chunks, limit, name in ((1, 1.5, "ZB at 1.5p"), (1, 2.0, "ZB at 2p"), (2, 1.0, "ZB-V at 1.0p")):
            costs = Costs(activation=1 / chunks, held=0.5 / chunks)
            yield "unit", costs, row["stages"], row["microbatches"], chunks, limit, row[name]


def scale() -> Iterator[Cell]:
    """Large problems, by the constructive answer (effort 0); nothing is published to compare with."""
    for stages, microbatches, chunks in ((64, 512, 2), (64, 1024, 1), (64, 1024, 2), (128, 1024, 1), (128, 1024, 2)):
        costs = Costs(communication=0.1, activation=1 / chunks, held=0.5 / chunks)
        yield "unit", costs, stages, microbatches, chunks, 1.5, None


def _two_chunks(row: dict[str, Any], times: int = 1) -> Costs:
    names = ("chunk_forward", "chunk_backward", "chunk_weight")
    passes = (times * row[name] for name in names)
    return Costs(*passes, row["communication"], times * row["chunk_activation"], times * row["chunk_held"])


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


SECTIONS = {"one": one_chunk, "v": v_shape, "unit": unit, "scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.planner", description=__doc__.splitlines()[0])
    tables = f"{', '.join(SECTIONS)} (default: all)"
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], metavar="TABLE", help=tables)
    parser.add_argument("--effort", type=int, default=EFFORT, help="rounds of every plan (default: %(default)s)")
    parser.add_argument("--stages", type=int, help="only cells with this many stages")
    parser.add_argument("--microbatches", type=int, help="only cells with this many microbatches")
    add_out(parser)
    options = parser.parse_args()
    for section in options.sections or SECTIONS:
        print(f"\n{SECTIONS[section].__doc__}\n")
        rows: list[dict[str, Any]] = []
        for cell in SECTIONS[section]():
            if options.stages in (None, cell[2]) and options.microbatches in (None, cell[3]):
                rows.append(measure(cell, options.effort))
                write_json(f"planner_{section}", rows, options.out)  # after every plan: all take many minutes
        print(markdown_table(HEADER, [_line(row) for row in rows]), flush=True)


HEADER = ("model", "p", "m", "chunks", "limit", "published", "plan", "bound", "above bound", "against published", "s")


def _line(row: dict[str, Any]) -> list[Any]:
    published, rate = row["published"], abs(round(row["plan"], 4))  # not -0.0000
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
