"""Plans and lower bounds beside the best possible, from an exact solver: which of the two is to blame for the gap.

    pip install 'zbkern[exact]';  python -m bench.planner_exact [--seconds 60] [--out results]

Small problems only: the solver (CP-SAT of OR-Tools) needs minutes for some dozen microbatches. Where it runs out of
time, its own bound is shown, too. B and W are split everywhere: held tensors are no larger than activations here.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.report import add_out, write_json
from zbkern.pipeline import Costs, plan
from zbkern.reporting import markdown_table

COSTS = (9, 9, 5, 1)  # F, B, W of a whole rank and a message; whole numbers, times 4 for up to four chunks
CASES = [  # stages, microbatches, chunks per rank, memory relative to 1F1B's
    (2, 4, 2, 1.0),
    (3, 4, 2, 1.0),
    (3, 5, 2, 0.7),
    (4, 4, 2, 1.0),
    (4, 6, 2, 1.0),
    (4, 6, 2, 1.5),
    (2, 3, 4, 1.0),
    (3, 4, 4, 1.0),
]
HEADER = ("p", "m", "chunks", "memory", "plan", "best possible", "lower bound", "plan above best", "best above bound")


def exact(
    costs: Costs, owners: tuple[int, ...], microbatches: int, limit: float, seconds: float
) -> tuple[float, float]:
    """The least cost that the solver finds, and its lower bound on it; equal where it is proven."""
    from ortools.sat.python import cp_model

    model, flat = cp_model.CpModel(), costs.per_chunk(len(owners))
    lengths = {"F": flat.forward, "B": flat.backward, "W": flat.weight}
    horizon = int(microbatches * sum(map(sum, lengths.values()))) + 100
    chunks = range(len(owners))
    start: dict[tuple[str, int, int], Any] = {}
    passes: list[list[Any]] = [[] for _ in set(owners)]
    memory: list[list[tuple[Any, int]]] = [[] for _ in passes]
    for kind, times in lengths.items():
        for chunk in chunks:
            for microbatch in range(microbatches):
                name = f"{kind}{chunk}.{microbatch}"
                begin = start[kind, chunk, microbatch] = model.new_int_var(0, horizon, name)
                passes[owners[chunk]].append(model.new_fixed_size_interval_var(begin, int(times[chunk]), name))

    def end(kind: str, chunk: int, microbatch: int) -> Any:
        return start[kind, chunk, microbatch] + int(lengths[kind][chunk])

    for chunk, owner in enumerate(owners):
        for microbatch in range(microbatches):
            model.add(start["B", chunk, microbatch] >= end("F", chunk, microbatch))
            model.add(start["W", chunk, microbatch] >= end("B", chunk, microbatch))
            if chunk:
                lag = int(flat.communication[chunk - 1]) if owners[chunk - 1] != owner else 0
                model.add(start["F", chunk, microbatch] >= end("F", chunk - 1, microbatch) + lag)
                model.add(start["B", chunk - 1, microbatch] >= end("B", chunk, microbatch) + lag)
            if microbatch:  # they cost the same, so that they may as well pass in order
                for kind in "FBW":
                    model.add(start[kind, chunk, microbatch] >= end(kind, chunk, microbatch - 1))
            for first, last, held in (
                (start["F", chunk, microbatch], end("B", chunk, microbatch), flat.activation[chunk]),
                (end("B", chunk, microbatch), end("W", chunk, microbatch), flat.held[chunk]),
            ):
                size = model.new_int_var(0, horizon, "")
                memory[owner].append((model.new_interval_var(first, size, last, ""), int(held)))
    cost = model.new_int_var(0, horizon, "cost")
    for rank, intervals in enumerate(passes):
        model.add_no_overlap(intervals)
        each, demands = zip(*memory[rank], strict=True)
        model.add_cumulative(each, demands, int(limit))
        first_chunk = owners.index(rank)
        for chunk in (chunk for chunk in chunks if owners[chunk] == rank):
            model.add(cost >= end("W", chunk, microbatches - 1) - start["F", first_chunk, 0])
    model.minimize(cost)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.solve(model)
    return solver.objective_value, solver.best_objective_bound


def measure(case: tuple[int, int, int, float], seconds: float) -> dict[str, Any]:
    stages, microbatches, chunks, memory = case
    forward, backward, weight, message = (4 * each // chunks for each in COSTS)
    unit = 8 // chunks  # of memory, for the activation of a chunk
    costs = Costs(forward, backward, weight, message * chunks, unit, unit // 2)
    limit = int(memory * stages * 8)
    found = plan(costs, stages, microbatches, chunks, memory_limit=limit)
    best, bound = exact(costs, found.schedule.placement, microbatches, limit, seconds)
    busy = sum(found.timeline.busy) / stages
    return {
        "stages": stages, "microbatches": microbatches, "chunks": chunks, "memory": memory,
        "plan": found.bubble_rate, "lower_bound": found.lower_bound,
        "best": 1 - busy / best, "best_bound": 1 - busy / bound,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.planner_exact", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the solver for each problem")
    add_out(parser)
    options = parser.parse_args()
    rows = [measure(case, options.seconds) for case in CASES]
    write_json("planner_exact", {"rows": rows}, options.out)
    print(markdown_table(HEADER, [_line(row) for row in rows]))


def _line(row: dict[str, Any]) -> list[Any]:
    proven = abs(row["best"] - row["best_bound"]) < 1e-9
    best = f"{row['best']:.2%}" if proven else f"{row['best_bound']:.2%} to {row['best']:.2%}"
    return [
        row["stages"], row["microbatches"], row["chunks"], f"{row['memory']:g}", f"{row['plan']:.2%}", best,
        f"{row['lower_bound']:.2%}", f"{row['plan'] - row['best']:.2%}", f"{row['best'] - row['lower_bound']:.2%}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
