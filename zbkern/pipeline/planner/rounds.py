"""The rounds of a search: how much each does, and the most that it may gain.

A round is not allowed to gain more than that: what it finds beyond counts in the next one. So it is known before a
round which answers it cannot come to, and a level of memory (`levels.py`) that could not win is left out; the answer is
the same whatever else takes part. The most is a little above what the levels that win gain, by experiment; the numbers
are in `settings.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zbkern.pipeline.planner.settings import SearchSettings

_AFTER_LITTLE = 2 / 3  # of what a round may gain: where the one before gained little
_TIMES_BEFORE = 1.75  # a round may gain so many times as much as the one before
_LEAST_SHARE = 0.2  # of the distance to its lower bound that a round may gain, however short it is


class Work(NamedTuple):
    """How much is done at a level, in passes: rules that are tried, and the first rounds of the search.

    Every round after these is twice as long as the one before.

    gains: the most that each round may gain, relative, each round after these half as much as the one before.
    closes: the same as a share of the distance to the lower bound, those after the last one like it. long_runs: the
    last of these rounds, and those after it, may gain as much only if they are so many runs of all passes long; 0 if
    their length does not count. See `most_gain`.
    fewer: where this many times fewer microbatches are enough for warm-up and cool-down, there is a search for those
    as well. more_rules: tried at the start of the round `ruled_round`, as the first answer has no time for them.
    """

    rules: int
    rounds: Sequence[int]
    gains: Sequence[float] = SearchSettings().gains
    closes: Sequence[float] = (1.0,)
    long_runs: int = 0
    fewer: float = 1.0
    more_rules: int = 0
    ruled_round: int = 0

    def passes(self, number: int) -> int:
        """Of the round of this number."""
        last = len(self.rounds) - 1
        return self.rounds[min(number, last)] * 2 ** max(0, number - last)

    def most_gain(self, number: int, problem_passes: int, before: float) -> tuple[float, float]:
        """The most that the round of this number may gain: relative, and as a share of the distance to the lower bound.

        problem_passes: of one run of all. before: what the round before gained, relative; infinite if that is not
        known. Where it gained little, a long round may gain less, too: one that gains much mostly comes after others
        that did. The first rounds may gain the same however long they are: they gain by other ways than their length.
        """
        last = len(self.gains) - 1
        gain = self.gains[min(number, last)] * 0.5 ** max(0, number - last)
        share = self.closes[min(number, len(self.closes) - 1)]
        if number < last or not self.long_runs:
            return gain, share
        gain = min(gain, max(_AFTER_LITTLE * gain, _TIMES_BEFORE * before))
        long = min(1.0, self.passes(number) / (problem_passes * self.long_runs))
        return gain * long, share if long == 1 else max(_LEAST_SHARE, share * long)
