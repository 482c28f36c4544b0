"""How the search divides its work, and at which temperatures it anneals; each number was found by experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """The search is a sequence of rounds, each twice as long as the one before and for half as many candidates.

    Work is counted in passes: one pass of an evaluated order, in whichever search, is one unit. Temperatures are in
    units of the mean length of a pass.

    A cooling is (temperature to start from, spread), where spread is the weight of the ranks' mean span beside the
    largest: more is better where memory is plenty, elsewhere mostly worse, so that searches alternate. The long
    annealing starts so hot that its result does not depend on the start.

    What every mechanism is worth: points of idle time without it, the most in 18 problems, and where
    (`python -m bench.planner --without all --effort 3`):

        rules            5.4  four chunks per rank, 0.75 times 1F1B's memory (p 8, m 24)
        patterns         3.1  a V with 1.25 times 1F1B's memory (p 16, m 48)
        blocks           2.2  a V with half of 1F1B's memory (p 8, m 16)
        cold end         1.2  the same
        refinement       1.0  four chunks per rank, 0.75 times 1F1B's memory (p 8, m 24)
        hot when small   1.1  three chunks per rank, 0.6 times 1F1B's memory (p 3, m 4)
        long annealing   0.6  four chunks per rank, 0.6 times 1F1B's memory (p 4, m 12)
        warm start       0.5  one chunk per rank, twice 1F1B's memory (p 16, m 128)
        several coolings 0.3  a V whose W holds more than F keeps (p 8, m 16)
    """

    first_round: int = 8_000_000  # passes of the first round: a tenth of a second
    first_round_of_several: int = 12_000_000  # the same for all candidates together, where there are several
    half_missed: float = 6.0  # chunks per rank with which a candidate should miss half of the way to its lower bound
    most_runs: int = 48_000  # the first round has no more passes than so many runs of all
    rule_passes: int = 1_000_000  # at first, of all candidates together, to try the rules of the list scheduler on
    rule_share: int = 60  # in every round more rules are tried, on one pass in so many: with four chunks and 16 stages
    # the rule that a search starts from matters more than its length
    rule_pass: int = 10  # a pass in the list scheduler takes as long as this many in annealing
    shares: tuple[float, ...] = (1.0, 1.5)  # of 1F1B's memory, in which rules are tried where there is more
    least_ranks: int = 8  # to try all rules, or patterns, on fewer ranks first: with less they differ too much
    rules_on_all: int = 2  # rules or patterns that are tried on all microbatches, where most are tried on fewer: with
    # one, large problems are idle for up to 0.9 points more
    refined_rules: int = 2  # the number of rules near which better ones are searched
    rule_tries: int = 1500  # changed rules in one attempt; after that a new attempt finds more than going on

    coolings: tuple[tuple[float, int], ...] = (  # of the short annealings, in turn
        *((0.15, 3), (0.2, 10), (0.5, 3), (0.1, 10)),
        *((0.3, 3), (0.25, 10), (1.0, 3), (0.15, 30)),
    )
    long_cooling: tuple[float, int] = (0.6, 10)
    long_chunks: int = 2  # per rank; with more there is a long annealing, which takes most of a round
    hot_cooling: tuple[float, int] = (2.0, 1)  # in small problems, which leave local optima only so
    small: int = 400  # passes at most: four ranks, four chunks on each, and eight microbatches, say
    end_temperature: float = 0.02
    least_runs: int = 3_000  # of all passes for each start of a round, or there are fewer starts, two at least
    temperatures: int = 60  # from start to end

    pattern_temperatures: tuple[float, ...] = (0.15, 0.25, 0.1, 0.5)  # at which the search for one starts, in turn
    pattern_spread: int = 2
    pattern_moves: int = 20  # per rank and temperature in one attempt; after that a new one finds more than going on

    finish: tuple[float, float] = (0.01, 0.001)  # the first and the last temperature after every round
    finish_share: float = 0.25  # of the next round; where ranks are slower or faster, twice as long
    finish_share_of_several: float = 1.0  # where there are several candidates, the work of whose rounds is divided
    samples: int = 16  # of the ranks' speeds, where they are slower or faster: with 8 what is found suits these alone

    chunks_per_rank: tuple[int, ...] = (1, 2, 3, 4, 6, 8)  # of layers: as many of these as there are layers
    partitions: int = 2  # of layers, for each placement: those whose constructive answer is the best
    partition_passes: int = 12_000  # on which the rules are tried to tell which these are
    partitions_of_slices: int = 3  # of layers, for each placement, with slices: the most even ones that fit
    numbers_searched: int = 3  # of all numbers of slices: those whose constructive answer is the best
    most_parts: int = 12  # chunks per rank times slices, where chunks are not given, or two chunks: with many slices
    # there is little idle time left for more chunks to fill, with few of them more chunks cost less
