"""What offload and recomputation are worth: plans of one model in less and less memory, with and without them.

    python -m bench.offload [--effort 0]

Simulated, nothing is measured: a model of equal layers on 8 ranks with 24 microbatches. Times are those of a Llama-3 8B
layer with sequences of 4096 tokens, relative to its F (counted in floating-point operations); memory is what zbkern's
block saves for backward (counted in elements).
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.report import add_out, write_json
from zbkern.pipeline import Costs, ScheduleError, plan, schedules, simulate
from zbkern.reporting import markdown_table

STAGES, MICROBATCHES = 8, 24
LIMITS = (1.0, 0.75, 0.5, 0.25)  # 1 is what 1F1B holds on its first rank
WAYS = {"neither": {}, "offload": {"offload": True}, "recompute": {"recompute": True}}
HEADER = ("chunks", "a copy takes", "memory", *WAYS)


def costs(chunks: int, copy: float, copy_size: float | None = None) -> Costs:
    """Of one of `chunks` chunks per rank, where a rank's F takes 1 and leaves 1; copy: of that, in one direction.

    Attention makes B 1.1 and W 0.93 of F. Between B and W a block holds 1.13 of what F left, a chunk's input is a
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
        held=1.13 * share,
        split_overhead=0.04 * share,
        checkpoint=0.02,
        offload_bandwidth=1 / copy,
        reload_bandwidth=1 / copy,
        copy_slowdown=0.03,
        copy_size=copy_size,
    )


def measure(chunks: int, copy: float, limit: float, effort: int, copy_size: float | None) -> dict[str, Any]:
    """Steps of the plans relative to 1F1B's, which holds 1; None where no schedule fits."""
    one = costs(1, copy)
    base = simulate(schedules.one_f_one_b(STAGES, MICROBATCHES), one).cost
    row: dict[str, Any] = {"chunks": chunks, "copy": copy, "limit": limit}
    mine = costs(chunks, copy, copy_size)
    for name, way in WAYS.items():
        try:
            found = plan(mine, STAGES, MICROBATCHES, chunks, memory_limit=limit * STAGES, effort=effort, **way)
        except ScheduleError:
            row[name] = None
            continue
        assert max(found.timeline.peak_memory) <= limit * STAGES * (1 + 1e-6)
        row[name] = found.timeline.cost / base
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.offload", description=__doc__.splitlines()[0])
    parser.add_argument("--effort", type=int, default=0, help="of every plan")
    parser.add_argument("--copy", type=float, default=2.0, help="how long a copy takes, in the time of F")
    parser.add_argument("--copy-size", type=float, help="of one transfer, in what F leaves on a rank; default: all")
    add_out(parser)
    options = parser.parse_args()
    rows = []
    for chunks in (1, 2):
        for limit in LIMITS:
            rows.append(measure(chunks, options.copy, limit, options.effort, options.copy_size))
            print(_line(rows[-1]), flush=True)
    print(markdown_table(HEADER, [_line(row) for row in rows]))
    print(write_json("offload", rows, options.out))


def _line(row: dict[str, Any]) -> list[Any]:
    shown = ["none fits" if row[name] is None else f"{row[name]:.3f}" for name in WAYS]
    return [row["chunks"], f"{row['copy']:g} F", f"{row['limit']:g}", *shown]


if __name__ == "__main__":
    main()
