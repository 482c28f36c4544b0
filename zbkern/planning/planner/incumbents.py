"""The best orders found so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import sub

from zbkern.planning.planner.annealing import measured
from zbkern.planning.planner.native import Effort
from zbkern.planning.planner.problem import Ordering, Problem, grouped, within

ROUNDING = 1e-9
"""Relative: a cost this near to another one, or to a lower bound, is the same."""


class Incumbent:
    """The best orders of a problem found so far, None at first; `bound`: a lower bound on any cost.

    Their W are grouped as in the schedule that is made of them, so that orders are compared by what they will cost.

    problem: what is searched, with room for the messages of the last orders that would have been the best: how many
    wait on a rank follows from the order, and no search but annealing counts them.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = self._whole = problem
        self._room: Sequence[int] = (0,) * problem.ranks  # for messages, beside that which the problem has
        self.refused = False  # of the last orders, because of their messages alone
        self.orders: Ordering | None = None
        self.bound = 0

    def offer(self, orders: Ordering | None, most: float | None = None) -> None:
        """Takes these orders where they fit and cost less than the best, or no more than `most` where that is given.

        Their W are grouped, and their cost is computed: some searches count waits that their orders do not have. Of
        equals the first stays, which is a published schedule: a late pass delays few others there.
        """
        if orders is None:
            return
        self.refused = False
        found = measured(self._whole, grouped(orders) if self.problem.saves else orders)
        if found is None:
            return
        if most is None:
            most = math.inf if self.orders is None else self.orders.cost * (1 - ROUNDING)
        whole, messages = self._whole, found.messages
        if found.orders.cost > most or not within(map(sub, found.peaks, messages), whole.limit):
            return
        over = [peak > limit for peak, limit in zip(found.peaks, whole.limit, strict=True)]
        self.refused = any(over)
        if not self.refused:
            self.orders, self._room = found.orders, messages
        else:
            each = zip(over, self._room, messages, strict=True)
            self._room = [max(room, more) if is_over else room for is_over, room, more in each]
        self.problem = whole.with_room(self._room)

    def beside(self, orders: Ordering) -> Problem | None:
        """The problem with room for the messages that these orders have; None where they do not fit."""
        if not self._whole.has_messages:
            return self._whole
        found = measured(self._whole, orders)
        if found is None or not within(found.peaks, self._whole.limit):
            return None
        return self._whole.with_room(found.messages)

    @property
    def over(self) -> bool:
        """Whether nothing better is possible."""
        return self.orders is not None and self.orders.cost <= self.bound

    def effort(self, seed: int, temperatures: Sequence[int], work: int, spread: int = 1) -> Effort:
        """Of a search that ends there."""
        return Effort(seed, temperatures, work, spread, self.bound)
