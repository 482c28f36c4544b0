"""What plans with passes beside each other take, simulated: next to DualPipe-V's pairs, and to the best order in turn.

All ranks have the same work. All-to-alls are a share of it in turn: of F, B and W, where each computes as long. Figures
are shares of compute alone, which no schedule is above; the last column is the bound of a rank's network, if less.

    python -m bench.overlap_planned [--ranks 4 8 16] [--effort 0] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import report
from zbkern.pipeline import Costs, plan, schedules, simulate

SHARES = (0.14, 0.25, 0.40)
MEMORY = (1.0, 1.25, 1.5, 2.0)  # of 1F1B
COLLECTIVES = 4  # of an F of a chunk, and of a B


def costs_of(share: float, chunks: int, unit: float = 1.0) -> Costs:
    """Of ranks where F, B and W compute for `unit` each; what W holds is 0.6 of the activation."""
    network = 1.5 * share / (1 - share)
    times = {"forward": 1 + network, "backward": 1 + network, "weight": 1.0}
    times |= {"network_forward": network, "network_backward": network}
    memory = {"activation": 1 / chunks, "held": 0.6 / chunks}
    return Costs(**{name: unit * time / chunks for name, time in times.items()}, **memory, collectives=COLLECTIVES)  # type: ignore[arg-type]


def measure(ranks: int, microbatches: int, share: float, memory: float, effort: int) -> dict[str, Any]:
    costs = costs_of(share, 2)
    pairs = simulate(schedules.dualpipe_v(ranks, microbatches), costs)
    without = replace(costs, network_forward=0.0, network_backward=0.0)  # the same times, which nothing hides
    made = [
        plan(each, ranks, microbatches, 2, "v", memory * ranks, effort=effort).timeline for each in (without, costs)
    ]
    compute = 3.0 * microbatches
    turns, planned, dualpipe = (compute / each.cost for each in (*made, pairs))
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "share": share,
        "memory": memory,
        "turns": turns,
        "dualpipe": dualpipe,
        "dualpipe_fits": max(pairs.peak_memory) <= memory * ranks * (1 + 1e-9),
        "planned": planned,
        "network": min(1.0, (1 - share) / share),
    }


COLUMNS = (
    "ranks: {ranks}; microbatches: {microbatches}; all-to-alls: {share:.0%}; memory, of 1F1B: {memory:.2f}; "
    "plan in turn: {turns:.3f}; DualPipe-V's pairs: {dualpipe:.3f}; they fit: {dualpipe_fits}; plan: {planned:.3f}"
)


def rows_of(ranks: Sequence[int], effort: int) -> list[dict[str, Any]]:
    return [
        measure(p, many * p, share, memory, effort)
        for p in ranks
        for many in (2, 4)
        for share in SHARES
        for memory in MEMORY
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="4 8 16")
    parser.add_argument("--effort", type=int, default=0, help="of the search in turn")
    report.add_out(parser)
    o = parser.parse_args(arguments)
    found = rows_of(o.ranks, o.effort)
    print(report.table("share of compute alone", COLUMNS, found))
    print("\n" + report.write_json("overlap_planned", found, o.out))
    fitting = [row for row in found if row["dualpipe_fits"]]
    ahead = sum(row["planned"] > row["dualpipe"] for row in fitting)
    print(f"ahead of DualPipe-V's pairs in {ahead} of {len(fitting)} cases in which they fit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
