"""The best orders found so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zbkern.planning.planner.annealing import measured
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.problem import Ordering, Problem, grouped, within

ROUNDING = 1e-9
"""Relative: a cost this near to another one, or to a lower bound, is the same."""


class Incumbent:
    """The best orders of a problem found so far, None at first; `bound`: a lower bound on any cost.

    Their W are grouped as in the schedule that is made of them, so that orders are compared by what they will cost.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.orders: Ordering | None = None
        self.bound = 0

    def offer(self, orders: Ordering | None, most: float | None = None) -> None:
        """Takes these orders where they fit and cost less than the best, or no more than `most` where that is given.

        Their W are grouped, and their cost is computed: some searches count waits that their orders do not have. Of
        equals the first stays, which is a published schedule: a late pass delays few others there.
        """
        if orders is None:
            return
        found = measured(self.problem, grouped(orders) if self.problem.saves else orders)
        if found is None or not within(found[1], self.problem.limit):
            return
        if most is None:
            most = math.inf if self.orders is None else self.orders.cost * (1 - ROUNDING)
        if found[0].cost <= most:
            self.orders = found[0]

    @property
    def over(self) -> bool:
        """Whether nothing better is possible."""
        return self.orders is not None and self.orders.cost <= self.bound

    def effort(self, seed: int, temperatures: Sequence[int], work: int, spread: int = 1) -> Effort:
        """Of a search that ends there."""
        return Effort(seed, temperatures, work, spread, self.bound)
