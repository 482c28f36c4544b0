"""Plans and lower bounds beside the best possible, from an exact solver: which of the two is to blame for the gap.

    pip install 'zbkern[exact]';  python -m bench.planner_exact [small] [usual] [--seconds 60] [--effort 4]

small: problems of two to four ranks, for which the solver (CP-SAT of OR-Tools) often proves what is best; where it runs
out of time, the range that it leaves is shown. usual: the gap alone, for problems of a size that is trained with.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from bench.report import add_out, write_json
from zbkern.pipeline import Costs, plan
from zbkern.planning.costs.chunks import ChunkCosts
from zbkern.planning.planner.plan import EFFORT, Plan
from zbkern.reporting import markdown_table


class Case(NamedTuple):
    """memory: relative to 1F1B's."""

    name: str
    costs: Costs  # of a chunk
    stages: int
    microbatches: int
    chunks: int
    memory: float

    def plan(self, effort: int) -> Plan:
        return plan(self.costs, *self[2:5], memory_limit=self.limit, effort=effort)

    @property
    def limit(self) -> float:
        return self.memory * self.stages * self.chunks * self.costs.per_chunk(1).activation[0]


# Whole numbers, for the solver: F, B, W, a message, the activation, what W holds.
SMALL = {"W half of B": Costs(10, 10, 5, 1, 20, 23), "W 0.6 of B": Costs(10, 10, 6, 1, 20, 10)}
SHAPES = [(2, 2, 4), (2, 3, 4), (2, 4, 2), (3, 2, 4), (3, 4, 2), (3, 4, 4), (3, 6, 2), (4, 4, 2), (4, 6, 2)]
PROFILE = (18.5, 18.1, 9.3, 0.6)  # of a rank: 1.5B, arXiv 2401.10241, Table 9, in ms; a Llama block holds 1.15


def small() -> Iterator[Case]:
    for (name, costs), shape, memory in product(SMALL.items(), SHAPES, (0.75, 1.0, 1.5)):
        yield Case(name, costs, *shape, memory)


def usual() -> Iterator[Case]:
    forward, backward, weight, message = PROFILE
    for stages, times, chunks, memory in product((4, 8, 16), (2, 4), (1, 2, 4), (0.75, 1.0, 1.5)):
        passes = (each / chunks for each in (forward, backward, weight))
        yield Case("1.5B", Costs(*passes, message, 1 / chunks, 1.15 / chunks), stages, times * stages, chunks, memory)


class Model:
    """All orders of a problem as constraints, for costs that are whole numbers and a cost of at most `most`.

    With this small a horizon the solver proves in seconds what it does not in minutes without. Chunk 0's first F is at
    0; every pass is within `most` of it or of what it waits for, which is within twice that.
    """

    def __init__(self, flat: ChunkCosts, owners: tuple[int, ...], microbatches: int, limit: float, most: int) -> None:
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self._flat, self._owners, self._limit, self._horizon = flat, owners, limit, 2 * most
        self._start = {
            (kind, chunk, microbatch): self._time()
            for kind, chunk, microbatch in product("FBW", range(len(owners)), range(microbatches))
        }
        self._memory: dict[int, list[tuple[Any, int]]] = {rank: [] for rank in owners}
        self.cost = self.model.new_int_var(0, most, "")
        self.model.add(self._start["F", 0, 0] == 0)
        for chunk, microbatch in product(range(len(owners)), range(microbatches)):
            self._pass(chunk, microbatch)
        for rank in sorted(set(owners)):
            self._rank(rank, microbatches)
        self.model.minimize(self.cost)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self._horizon, "")

    def _length(self, kind: str, chunk: int) -> int:
        return int({"F": self._flat.forward, "B": self._flat.backward, "W": self._flat.weight}[kind][chunk])

    def _end(self, kind: str, chunk: int, microbatch: int) -> Any:
        return self._start[kind, chunk, microbatch] + self._length(kind, chunk)

    def _pass(self, chunk: int, microbatch: int) -> None:
        """What the F, B and W of one microbatch wait for, and the memory between them."""
        model, start, owner = self.model, self._start, self._owners[chunk]
        begin, back, done = (self._end(kind, chunk, microbatch) for kind in "FBW")
        fused = model.new_bool_var("")
        model.add(start["B", chunk, microbatch] >= begin)
        model.add(start["W", chunk, microbatch] >= back)
        model.add(start["W", chunk, microbatch] == back).only_enforce_if(fused)
        if chunk:
            lag = int(self._flat.communication[chunk - 1]) if self._owners[chunk - 1] != owner else 0
            model.add(start["F", chunk, microbatch] >= self._end("F", chunk - 1, microbatch) + lag)
            model.add(start["B", chunk - 1, microbatch] >= back + lag)
            model.add(start["B", chunk - 1, microbatch] >= done + lag).only_enforce_if(fused)
        if microbatch:  # they cost the same, so that they may as well pass in order
            for kind in "FBW":
                model.add(start[kind, chunk, microbatch] >= self._end(kind, chunk, microbatch - 1))
        leaves = self._time()  # the activation
        model.add(leaves == back).only_enforce_if(~fused)
        model.add(leaves == done).only_enforce_if(fused)
        kept = model.new_interval_var(start["F", chunk, microbatch], self._time(), leaves, "")
        held = model.new_optional_interval_var(back, self._time(), done, ~fused, "")
        self._memory[owner] += [(kept, int(self._flat.activation[chunk])), (held, int(self._flat.held[chunk]))]

    def _rank(self, rank: int, microbatches: int) -> None:
        """One pass at a time, the memory, and the cost."""
        chunks = [chunk for chunk, owner in enumerate(self._owners) if owner == rank]
        passes = product("FBW", chunks, range(microbatches))
        fixed = self.model.new_fixed_size_interval_var
        self.model.add_no_overlap(fixed(self._start[each], self._length(*each[:2]), "") for each in passes)
        intervals, demands = zip(*self._memory[rank], strict=True)
        self.model.add_cumulative(intervals, demands, int(self._limit + 1e-9))
        for chunk in chunks:
            span = self._end("W", chunk, microbatches - 1) - self._start["F", chunks[0], 0]
            self.model.add(self.cost >= span)


def exact(found: Plan, limit: float, least: float, seconds: float) -> tuple[float, float]:
    """The least cost that is known, of the plan or what the solver finds, and a lower bound: equal where it is proven.

    least: a lower bound that is known already.
    """
    from ortools.sat.python import cp_model

    schedule, reached = found.schedule, round(found.timeline.cost)
    if least > reached - 1:  # whole numbers
        return reached, reached
    flat = found.costs.per_chunk(len(schedule.placement))
    problem = Model(flat, schedule.placement, schedule.microbatches, limit, reached - 1)
    problem.model.add(problem.cost >= math.ceil(least - 1e-6))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(problem.model)
    if status == cp_model.INFEASIBLE:
        return reached, reached
    best = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else reached
    return best, max(least, solver.best_objective_bound) if best < reached or status == cp_model.UNKNOWN else best


def measure(case: Case, seconds: float | None, effort: int) -> dict[str, Any]:
    """Idle shares of the plan, the bound, and with `seconds` of the best that is known and what it cannot be below."""
    found = case.plan(effort)
    busy = sum(found.timeline.busy) / case.stages
    row = {
        "costs": case.name, "stages": case.stages, "microbatches": case.microbatches, "chunks": case.chunks,
        "memory": case.memory, "plan": found.bubble_rate, "lower_bound": found.lower_bound,
    }  # fmt: skip
    if seconds is not None:
        best, least = exact(found, case.limit, busy / (1 - found.lower_bound), seconds)
        row |= {"best": 1 - busy / best, "best_at_least": 1 - busy / least}
    return row


def _blame(row: dict[str, Any]) -> str:
    """Whether the plan is above the best, or the bound below it."""
    above, below = row["plan"] - row["best"], row["best_at_least"] - row["lower_bound"]
    parts = [f"plan {above:.1%}"] * (above > 5e-4) + [f"bound {below:.1%}"] * (below > 5e-4)
    if row["best"] - row["best_at_least"] > 5e-4:
        parts.append("not known")
    return ", ".join(parts) or "no gap"


def _small_line(row: dict[str, Any]) -> list[Any]:
    proven = row["best"] - row["best_at_least"] <= 5e-4
    best = f"{row['best']:.1%}" if proven else f"{row['best_at_least']:.1%} to {row['best']:.1%}, not proven"
    return [*_shape(row), f"{row['plan']:.1%}", best, f"{row['lower_bound']:.1%}", _blame(row)]


def _usual_line(row: dict[str, Any]) -> list[Any]:
    gap = row["plan"] - row["lower_bound"]
    return [*_shape(row), f"{row['plan']:.1%}", f"{row['lower_bound']:.1%}", f"{gap:.1%}"]


def _shape(row: dict[str, Any]) -> list[Any]:
    return [row["costs"], row["stages"], row["microbatches"], row["chunks"], f"{row['memory']:g}"]


HEADER = ("costs", "p", "m", "chunks", "memory", "plan")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.planner_exact", description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=("small", "usual"), help="default: both")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the solver for each problem")
    parser.add_argument("--effort", type=int, default=EFFORT, help="of the plans")
    add_out(parser)
    options = parser.parse_args()
    sections, results = options.sections or ("small", "usual"), {}
    if "small" in sections:
        rows = results["small"] = [measure(case, options.seconds, options.effort) for case in small()]
        header = (*HEADER, "best possible", "lower bound", "to blame")
        print(markdown_table(header, list(map(_small_line, rows))), flush=True)
    if "usual" in sections:
        rows = results["usual"] = [measure(case, None, options.effort) for case in usual()]
        print(markdown_table((*HEADER, "lower bound", "gap"), list(map(_usual_line, rows))))
    write_json("planner_exact", results, options.out)


if __name__ == "__main__":
    main()
