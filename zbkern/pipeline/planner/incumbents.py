"""The best orders found so far, and when to stop looking for better ones."""

from __future__ import annotations

import time

from zbkern.pipeline.planner.problem import Ordering


class Budget:
    """When to stop: after some seconds, or after a number of rounds whatever the time."""

    def __init__(self, seconds: float, rounds: int | None) -> None:
        self._end = time.monotonic() + seconds if rounds is None else float("inf")
        self._rounds = rounds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Budget:
        """One that ends when this share of what is left is over; rounds are not divided."""
        return Budget(self.left * share, self._rounds)

    def allows(self, round_: int) -> bool:
        return self.left > 0 if self._rounds is None else round_ < self._rounds


class Pool:
    """The best orders found so far, each of another cost, best first; `bound`: a lower bound on any cost."""

    def __init__(self, keep: int, bound: int) -> None:
        self.orders: list[Ordering] = []
        self.bound = bound
        self._keep = max(keep, 1)

    def add(self, orders: Ordering | None) -> None:
        if orders is not None and all(orders.cost != other.cost for other in self.orders):
            self.orders = sorted([*self.orders, orders], key=lambda each: each.cost)[: self._keep]

    @property
    def optimal(self) -> bool:
        return self.beats(self.bound)

    def beats(self, bound: int) -> bool:
        """Whether the best here costs no more than this bound."""
        return bool(self.orders) and self.orders[0].cost <= bound
