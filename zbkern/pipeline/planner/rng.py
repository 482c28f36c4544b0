"""Random numbers, the same as in C++ (csrc/planner_random.h)."""

from __future__ import annotations


class Random:
    """SplitMix64, so that every language draws the same numbers."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def next(self) -> int:
        mask = 2**64 - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def below(self, count: int) -> int:
        return ((self.next() >> 32) * count) >> 32

    def percent(self, chance: int) -> bool:
        return self.below(100) < chance
