"""How the search divides its time, and at which temperatures it anneals; each number was found by experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """The search is a sequence of rounds, each twice as long as the one before; see also `layers_rounds`.

    Work is counted in passes: one pass of an evaluated order, in whichever search, is one unit. Temperatures are in
    units of the mean length of a pass.

    A cooling is (temperature to start from, spread), where spread is the weight of the ranks' mean span beside the
    largest. Where memory is plenty a spread of 10 is better than 3 (p=8, m=16, two chunks in a V, 1.5 times 1F1B's
    memory: 1.9% idle instead of 2.8%), elsewhere mostly worse, so that searches alternate.

    The long annealing takes most of a round where no good warm-up is known to start from. It starts so hot that the
    result does not depend on the start (same problem, 14 s: 1.35, 1.43 and 1.54% idle from three starts, where short
    ones from several starts reached 1.9 to 3.1% in 60 s).
    """

    first_round: int = 8_000_000
    """Passes of the first round: a tenth of a second."""

    most_runs: int = 12_000
    """The first round has no more passes than so many runs of all."""

    large: int = 50_000
    """Problems of more passes have a first round of a quarter: with 64 stages and 512 microbatches it finds as much
    (7.2% idle with one chunk per rank)."""

    gains: tuple[float, ...] = (0.06, 0.04, 0.04, 0.04)
    """The most that each round may gain at a level of memory, relative, so that levels without hope are left out; each
    round after these half as much as the one before. Where memory is shortest all rounds gain 13%, mostly far less."""

    # annealing
    coolings: tuple[tuple[float, int], ...] = (
        *((0.15, 3), (0.2, 10), (0.5, 3), (0.1, 10)),
        *((0.3, 3), (0.25, 10), (1.0, 3), (0.15, 30)),
    )
    """The coolings of the short annealings, in turn."""
    long_cooling: tuple[float, int] = (0.6, 10)
    """The cooling of the long annealing."""
    plenty: float = 0.75
    """Times what 1F1B holds: with more memory there is a long annealing."""
    end_temperature: float = 0.02
    """The temperature at which annealing ends."""
    temperatures: int = 60
    """The number of temperatures from start to end."""

    # rules of the list scheduler
    list_scheduler_pass: int = 10
    """A pass in the list scheduler takes as long as this many in annealing."""
    refined_rules: int = 2
    """For each memory limit, the number of rules near which better ones are searched."""
    rule_tries: int = 1500
    """Changed rules in one attempt; after that a new attempt finds more than going on."""
    trial_passes: int = 8_000_000
    """All rules together are tried on at most this many passes, in all levels of memory: a second or two of the
    compiled core, and mostly half of that, as levels are left out whose lower bound has been reached."""
    trial_passes_in_python: int = 12_000
    """In one level without the compiled core."""

    levels: tuple[tuple[int, int], ...] = ((2, 4000), (4, 100))
    """Rules are tried at every so many-th level of memory, if they are allowed so many runs of all passes; else every
    eighth."""

    # patterns
    pattern_start_temperatures: tuple[float, ...] = (0.15, 0.25, 0.1, 0.5)
    """The temperatures at which the search for a pattern starts, in turn."""
    pattern_spread: int = 2
    """The weight of the mean span in the search for a pattern."""
    pattern_moves: int = 20
    """Moves per rank and temperature in one attempt; after that a new attempt finds more than going on."""
    pattern_start_passes: int = 3_000_000
    """All patterns together are tried as a start on at most this many passes."""
    pattern_cutoff: float = 1.1
    """Patterns are dropped where the best to start from costs this many times the best known."""

    # layers
    chunks_per_rank: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Where it is not given: as many of these as there are layers."""
    partitions: int = 2
    """For each placement and level of memory."""
    layers_steps: int = 13
    """The partitions made for so many steps of memory, from the largest, take part with any more memory, too; those for
    less, half of what 1F1B holds, only up to the next larger step."""
    layers_rules: int = 60_000
    """Rules are tried on at most this many passes for each cut and level of memory."""
    layers_rounds: tuple[int, ...] = (500_000, 1_500_000, 5_000_000, 64_000_000)
    """Passes of the first rounds of each cut and level of memory: few are left for the long ones."""
    layers_large: int = 1500
    """With more microbatches times stages the last of these rounds is a quarter as long: the plan is up to 0.1% worse,
    and found in about half the time."""
    layers_gains: tuple[float, ...] = (0.04, 0.02, 0.042, 0.06)
    """As `gains`: not much more than what the levels that win gain, so that those that could not win are left out."""
    layers_closes: tuple[float, ...] = (0.5, 0.2, 0.82, 0.95)
    """The most of the distance to its lower bound that each round may gain at a level of memory."""
    layers_long_runs: int = 10_000
    """The last of these rounds may gain that where it is so many runs of all passes long, and less where it is
    shorter."""
    layers_more_rules: tuple[int, int] = (600_000, 2)
    """Rules are tried on at most this many passes at the start of that round: with four chunks and 16 stages the rule
    that a search starts from matters more than its length."""
    layers_fewer: float = 3.0
    """A search with fewer microbatches takes a third of the time: only where they are this many times fewer."""
    layers_few_rounds: int = 2
    """The most rounds at every other step of memory."""
    layers_rules_every: int = 4
    """Rules are tried at every so many-th step of memory."""
