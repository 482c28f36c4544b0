"""The best orders found so far, and when to stop looking for better ones."""

from __future__ import annotations

import time

from zbkern.pipeline.planner.annealing import with_cost
from zbkern.pipeline.planner.problem import Ordering, Problem, grouped


class Budget:
    """When to stop: after a number of rounds, which is work and not time; and after some seconds, if that is sooner."""

    def __init__(self, rounds: int, seconds: float = float("inf")) -> None:
        self._end = time.monotonic() + seconds
        self.rounds = rounds

    @property
    def left(self) -> float:
        """Seconds; infinite without a clock."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Budget:
        """One that ends when this share of the seconds left is over; rounds are not divided."""
        return Budget(self.rounds, self.left * share)

    def allows(self, round_: int) -> bool:
        return round_ < self.rounds and self.left > 0


class Pool:
    """The best orders of a problem found so far, each of another cost, best first; `bound`: a lower bound on any cost.

    All have W grouped as in the schedule that is made of them, so that they are compared by what they will cost.
    """

    def __init__(self, problem: Problem, keep: int, bound: int = 0) -> None:
        self._problem = problem
        self.orders: list[Ordering] = []
        self._refused: list[Ordering] = []
        self._least = 0
        self.bound = bound
        self.keep = max(keep, 1)

    def add(self, orders: Ordering | None) -> None:
        """Groups their W and computes their cost: some searches count waits that these orders do not have."""
        if orders is not None and self._problem.saves:
            orders = grouped(orders, self._problem.chunks, self._problem.microbatches)
        self.add_grouped(orders and with_cost(self._problem, orders))

    @property
    def reached(self) -> int:
        """The least cost here, or that below which something was kept back."""
        return self._least if self._refused else self.orders[0].cost

    def refuse_below(self, cost: int) -> None:
        """From now on, orders that cost less than this are kept back, until they no longer do."""
        self._least, kept_back, self._refused = cost, self._refused, []
        for orders in kept_back:
            self.add_grouped(orders)

    def add_grouped(self, orders: Ordering | None) -> None:
        """Orders with W grouped and the cost that they have."""
        if orders is not None and orders.cost < self._least:
            self._refused = sorted([*self._refused, orders], key=lambda each: each.cost)[: self.keep]
            return
        if orders is not None and all(orders.cost != other.cost for other in self.orders):
            self.orders = sorted([*self.orders, orders], key=lambda each: each.cost)[: self.keep]

    @property
    def optimal(self) -> bool:
        return self.beats(self.bound)

    def beats(self, bound: int) -> bool:
        """Whether the best here costs no more than this bound."""
        return bool(self.orders) and self.orders[0].cost <= bound
