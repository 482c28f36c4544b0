"""How the search divides its time, and how hot it anneals: numbers found by trial, with the trials behind them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """The search is a sequence of rounds, each twice as long as the one before. Work is counted in passes that are run.

    A schedule of annealing is (heat, spread): how hot it starts, in parts of the mean length of a pass, and the weight
    of the mean span beside the largest. Where memory is plenty a spread of 10 is better than 3 (p=8, m=16, two chunks
    in a V, 1.5 times 1F1B's memory: 1.9% idle instead of 2.8%), elsewhere mostly worse, so that searches take turns.

    The long search takes half of every round where no warm-up is known to start from. It melts its start, and comes to
    the same from any (the same problem, in 14 s: 1.35, 1.43 and 1.54% idle from three starts, where short ones with
    several starts had come to 1.9 to 3.1% in 60 s).
    """

    first_round: int = 8_000_000
    """Passes of the first round: a tenth of a second."""
    share_run_again: float = 0.25
    """Of all passes, what a move of the annealing runs again on average."""
    schedules: tuple[tuple[float, int], ...] = (
        *((0.15, 3), (0.2, 10), (0.5, 3), (0.1, 10)),
        *((0.3, 3), (0.25, 10), (1.0, 3), (0.15, 30)),
    )
    """(heat, spread) of the short searches, by turns."""
    long_schedule: tuple[float, int] = (0.6, 10)
    """(heat, spread) of the long search."""
    cold: float = 0.02
    """Where annealing ends, in parts of the mean length of a pass."""
    temperatures: int = 60
    """From hot to cold, one after the other."""
    list_pass: int = 10
    """One pass in the list scheduler takes the time of so many in annealing."""
    refined_rules: int = 2
    """Rules per memory limit whose neighbours are searched."""
    rule_tries: int = 1500
    """Changed rules of one attempt; after that a new attempt finds more than going on."""
    pattern_heats: tuple[float, ...] = (0.15, 0.25, 0.1, 0.5)
    """How hot the search for a pattern starts, by turns."""
    pattern_spread: int = 2
    """The weight of the mean span there."""
    pattern_moves: int = 20
    """Moves per rank and temperature of one attempt; after that a new attempt finds more than going on."""
    pattern_start_passes: int = 3_000_000
    """Of all patterns that are tried as a start, together."""
    pattern_far: float = 1.1
    """Patterns are given up when the best to start from costs so many times the best known."""
    trial_passes: int = 4_000_000
    """Of all rules that are tried, together: about a second of list scheduling in the compiled core."""
    trial_passes_in_python: int = 100_000
    """The same without the compiled core."""
    published_passes: int = 40_000
    """Up to so many passes the published schedules are made even for the constructive answer alone: a second or two."""
