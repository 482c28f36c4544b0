"""What offload and recomputation are worth: plans of one model in less and less memory, with and without them.

    python -m bench.offload [--effort 0]

Simulated, nothing is measured: a model of equal layers on 8 ranks with 24 microbatches. Times are those of a Llama-3 8B
layer with sequences of 4096 tokens, relative to its F (counted in floating-point operations); memory is what zbkern's
block saves for backward and holds for W (bench/split.py, LLAMA, counted in elements).

"Offload" moves all that an F leaves in one transfer, or in small ones, of a tenth of what it leaves on a rank. A second
table has 1F1B, made to fit, with both.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.report import add_out, write_json
from zbkern.pipeline import Costs, ScheduleError, plan, schedules, simulate
from zbkern.planning.planner.offload import fit
from zbkern.reporting import markdown_table

STAGES, MICROBATCHES = 8, 24
LIMITS = (1.0, 0.75, 0.5, 0.25)  # 1 is what 1F1B holds on its first rank
COPY = 2.0  # how long a copy takes, in the time of F
COPY_SIZE = 0.1  # of a small transfer, in what F leaves on a rank
SMALL = "offload, small transfers"
WAYS = {"neither": {}, "offload": {"offload": True}, SMALL: {"offload": True}, "recompute": {"recompute": True}}
HEADER = ("chunks", "a copy takes", "memory", *WAYS)
FITTED = ((0.5, 2.0), (0.5, 1.5), (1.0, 2.0), (1.0, 1.5), (2.0, 3.0), (2.0, 2.0))  # a copy's time, microbatches held


def costs(chunks: int, copy: float, copy_size: float | None = None) -> Costs:
    """Of one of `chunks` chunks per rank, where a rank's F takes 1 and leaves 1; copy: of that, in one direction.

    Attention makes B 1.1 and W 0.93 of F. Between B and W a block holds 1.15 of what F left, a chunk's input is a
    fiftieth of it, a split costs 2% of B and W, a message 2% of F, and a copy slows the passes beside it down by 3%.
    copy_size: of one transfer, None for all that a chunk's F leaves.
    """
    share = 1 / chunks
    return Costs(
        forward=share,
        backward=1.1 * share,
        weight=0.93 * share,
        communication=0.02,
        activation=share,
        held=1.15 * share,
        split_overhead=0.04 * share,
        checkpoint=0.02,
        offload_bandwidth=1 / copy,
        reload_bandwidth=1 / copy,
        copy_slowdown=0.03,
        copy_size=copy_size,
    )


def measure(chunks: int, limit: float, effort: int) -> dict[str, Any]:
    """Steps of the plans relative to 1F1B's, which holds 1; None where no schedule fits."""
    one = costs(1, COPY)
    base = simulate(schedules.one_f_one_b(STAGES, MICROBATCHES), one).cost
    row: dict[str, Any] = {"chunks": chunks, "copy": COPY, "limit": limit}
    for name, way in WAYS.items():
        mine = costs(chunks, COPY, COPY_SIZE if name == SMALL else None)
        try:
            found = plan(mine, STAGES, MICROBATCHES, chunks, memory_limit=limit * STAGES, effort=effort, **way)
        except ScheduleError:
            row[name] = None
            continue
        assert max(found.timeline.peak_memory) <= limit * STAGES * (1 + 1e-6)
        row[name] = found.timeline.cost / base
    return row


def transfers(copy: float, limit: float) -> list[str]:
    """A row: 1F1B that holds `limit` microbatches on every rank, relative to itself, in one transfer or small ones."""
    schedule = schedules.one_f_one_b(STAGES, MICROBATCHES)
    row = [f"{copy:g} F", f"{limit:g}"]
    for copy_size in (None, COPY_SIZE):
        mine = costs(1, copy, copy_size)
        try:
            row.append(f"{fit(schedule, mine, limit).cost / simulate(schedule, mine).cost:.3f}")
        except ScheduleError:
            row.append("none fits")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.offload", description=__doc__.splitlines()[0])
    parser.add_argument("--effort", type=int, default=0, help="of every plan")
    add_out(parser)
    options = parser.parse_args()
    rows = []
    for chunks in (1, 2):
        for limit in LIMITS:
            rows.append(measure(chunks, limit, options.effort))
            print(_line(rows[-1]), flush=True)
    print(markdown_table(HEADER, [_line(row) for row in rows]))
    fitted = [transfers(*each) for each in FITTED]
    print("\n" + markdown_table(("a copy takes", "memory", "one transfer", "small transfers"), fitted))
    print(write_json("offload", rows, options.out))


def _line(row: dict[str, Any]) -> list[Any]:
    shown = ["none fits" if row[name] is None else f"{row[name]:.3f}" for name in WAYS]
    return [row["chunks"], f"{row['copy']:g} F", f"{row['limit']:g}", *shown]


if __name__ == "__main__":
    main()
