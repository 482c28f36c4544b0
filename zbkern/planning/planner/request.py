"""What `plan` is given, checked: placements by name, memory limits by rank, and whether one microbatch fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zbkern import schedules
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.equal_slices import SLICE_UNIT, equal_lengths, equal_times
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.costs.layers import ModelCosts
from zbkern.planning.costs.memory import Limit, limits_of
from zbkern.planning.planner.problem import Problem, problem_of
from zbkern.schedules.actions import check_count
from zbkern.schedules.slices import slice_lengths

PLACEMENTS = ("linear", "loop", "v", "zigzag")
OBJECTIVES = ("cost", "makespan")
Slices = int | Sequence[int] | str  # lengths, a number, or "auto"

_NUMBERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # of slices to choose from
_MOST_PASSES = 400_000  # of one chunk per rank: making and measuring published schedules then takes seconds
_LEAST_UNITS = 2  # of a slice's length, in the mean


@dataclass(frozen=True)
class PlanOptions:
    """What few need to set of a `plan`.

    Args:
        objective: what to minimise, "cost" or "makespan" (see `Timeline`).
        partition: the first layer of every chunk, for `ModelCosts`; searched for where it is None.
        seed: of the search; another one finds other plans.
        progress: is called with a line about the search before every round, and with an empty one at the end.
        slice_tokens: slices that are chosen are multiples of so many tokens, where the costs say how many a sequence
            has.
        steady: the best orders are searched once more for orders that cost less in the mean of two: as planned, and
            where ranks are up to 20% slower or faster. They are taken if they cost at most 0.3% more as planned, and
            nothing more where the best are proven optimal. False for the best as they are.
        fully_shard: chunks are in `fully_shard`, so that no two F or B of one chunk may run beside each other.

    Raises TypeError or ValueError for what is none of these.
    """

    objective: str = "cost"
    partition: Sequence[float] | None = None
    seed: int = 0
    progress: Callable[[str], None] = lambda line: None
    slice_tokens: int = SLICE_UNIT
    steady: bool = True
    fully_shard: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"PlanOptions: objective must be one of {OBJECTIVES}; got {self.objective!r}")
        check_count("PlanOptions: seed", self.seed, 0)
        check_count("PlanOptions: slice_tokens", self.slice_tokens)


@dataclass(frozen=True)
class Request:
    """What `plan` is asked for; see there. Raises TypeError or ValueError for what it cannot use."""

    costs: Costs | ModelCosts
    stages: int
    microbatches: int
    chunks: int | None
    placement: str | Sequence[int] | None
    memory_limit: Limit
    effort: int
    slices: Slices
    options: PlanOptions
    schedule: str | None = None  # a published one, for which there is no search

    def __post_init__(self) -> None:
        costs, slices = self.costs, self.slices
        if isinstance(slices, str) and slices != "auto":
            raise ValueError(f'plan: slices must be "auto", a number of slices, or the length of each; got {slices!r}')
        count = 1 if isinstance(slices, str) else len(slice_lengths("plan", slices))
        if costs.tokens is not None and count > costs.tokens:
            raise ValueError(
                f"plan: slices must be at most as many as the {costs.tokens} tokens of a sequence; got {count}"
            )
        chunks = 1 if self.chunks is None else self.chunks
        schedules.check_counts("plan", self.stages, self.microbatches, chunks, count)
        check_count("plan: effort", self.effort, 0)
        if self.options.partition is not None and not isinstance(costs, ModelCosts):
            raise TypeError("plan: partition divides layers: give ModelCosts with it, or Costs without")

    @property
    def limits(self) -> list[float] | None:
        """The memory limit of every rank; None for none."""
        return limits_of("plan", self.memory_limit, self.stages)

    def slices_to_try(self) -> list[tuple[int, ...]]:
        """Lengths of slices: those that are given, or of so many both equal times and equal lengths.

        Where the tokens of a sequence are known, lengths are multiples of a unit of them.
        """
        costs, slices, unit = self.costs, self.slices, self.options.slice_tokens
        if slices == 1:
            return [(1,)]
        if not isinstance(slices, int):
            assert not isinstance(slices, str)  # "auto" becomes numbers
            return [slice_lengths("plan", slices)]
        if isinstance(costs, ModelCosts):
            whole = costs.chunk_costs([0]).per_chunk(1)
        else:
            whole = costs.per_chunk(self.stages * self.chunks_per_rank)
        found = equal_times(whole, slices, costs.tokens, unit), equal_lengths(slices, costs.tokens, unit)
        return list(dict.fromkeys(found))

    def numbers_to_try(self) -> list[int]:
        """Of slices, where their number is to be chosen, for a search that makes published schedules in seconds."""
        room = _MOST_PASSES // (3 * self.stages * self.microbatches)
        tokens = self.costs.tokens
        most = room if tokens is None else min(room, tokens // (_LEAST_UNITS * self.options.slice_tokens))
        return [number for number in _NUMBERS if number <= most]

    @property
    def chunks_per_rank(self) -> int:
        """As given, or as many as a placement that is spelt out has, else one."""
        return chunks_per_rank(self.placement, self.stages) if self.chunks is None else self.chunks

    def problem(self, flat: FlatCosts) -> Problem:
        """That of chunks with these costs. Raises DoesNotFit when nothing fits."""
        problem = problem_of(flat, self.microbatches, self.memory_limit, self.options.objective)
        return replace(problem, apart=self.options.fully_shard)


def chunks_per_rank(placement: str | Sequence[int] | None, stages: int) -> int:
    """How many chunks a rank has where that is not said: as a placement that is spelt out has it, else one."""
    if placement is None or isinstance(placement, str) or not isinstance(stages, int) or stages < 1:
        return 1
    return max(1, len(placement) // stages)


def placement_of(given: str | Sequence[int] | None, stages: int, chunks: int) -> tuple[str, tuple[int, ...]]:
    """Name, and the rank of every chunk."""
    down = range(stages)
    if given is None:
        given = "linear" if chunks == 1 else "v" if chunks == 2 else "zigzag"
    if not isinstance(given, str):
        owners = tuple(given)
        if len(owners) != stages * chunks or any(owners.count(rank) != chunks for rank in down):
            raise ValueError(
                f"plan: placement must name every rank below {stages} {chunks} times, once per chunk of each "
                f"(chunks={chunks}); got {owners}; chunks can be left out"
            )
        return "custom", owners
    if given not in PLACEMENTS:
        raise ValueError(f"plan: placement must be one of {PLACEMENTS} or the rank of every chunk; got {given!r}")
    if given == "v" and chunks != 2:
        raise ValueError(f'plan: placement "v" needs chunks=2 (or "zigzag" for more); got {chunks}')
    if given == "linear":
        return given, tuple(rank for rank in down for _ in range(chunks))
    if given == "loop":
        return given, tuple(rank for _ in range(chunks) for rank in down)
    return given, tuple(rank for turn in range(chunks) for rank in (reversed(down) if turn % 2 else down))
