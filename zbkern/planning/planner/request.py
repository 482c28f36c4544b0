"""Requests: what planners are asked for, checked where the description is made, and nowhere after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

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
Placement = str | Sequence[int] | None  # one of these, or the rank of every chunk
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


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every planner is asked for: costs, the ranks, where their chunks are, and what each may hold.

    function: which asks, in the words of errors. Raises TypeError or ValueError for what cannot be planned.
    """

    function: str
    costs: Costs | ModelCosts
    stages: int
    chunks: int | None
    placement: Placement
    memory_limit: Limit

    by_chunks: ClassVar[tuple[str, str, str]]
    """The placement where none is given, for 1, 2 and more chunks per rank."""

    def __post_init__(self) -> None:
        if not isinstance(self.costs, (Costs, ModelCosts)):
            got = type(self.costs).__name__
            raise TypeError(f"{self.function}: costs must be a zbkern.pipeline.Costs or ModelCosts; got {got}")
        schedules.check_counts(self.function, self.stages, 1, 1 if self.chunks is None else self.chunks)
        object.__setattr__(self, "costs", self.costs._at_speeds(self.stages))
        if isinstance(self.costs, Costs) or None not in (self.placement, self.chunks_told):
            self.placed(self.chunks_per_rank)
        _ = self.limits

    @cached_property
    def limits(self) -> list[float] | None:
        """The memory limit of every rank; None for none."""
        return limits_of(self.function, self.memory_limit, self.stages)

    @property
    def chunks_told(self) -> int | None:
        """Chunks per rank, where they are given or follow from the placement."""
        if self.chunks is not None or self.placement is None:
            return self.chunks
        if not isinstance(self.placement, str):
            return max(1, len(self.placement) // self.stages)
        # with more chunks in a line, a rank's would follow each other: that is for whoever asks for it
        return {"linear": 1, "v": 2}.get(self.placement)

    @property
    def chunks_per_rank(self) -> int:
        """As told, else one."""
        return self.chunks_told or 1

    def placed(self, chunks: int, placement: Placement = None) -> tuple[str, tuple[int, ...]]:
        """The name of the placement of so many chunks per rank, and the rank of every chunk.

        placement: where the request has none; by default that of `by_chunks`.
        """
        default = self.by_chunks[min(chunks, 3) - 1] if placement is None else placement
        return placement_of(self.function, default if self.placement is None else self.placement, self.stages, chunks)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Request):
    """What `plan` is asked for; see there."""

    function: str = "plan"
    microbatches: int
    effort: int
    offload: bool
    recompute: bool
    slices: Slices
    options: PlanOptions
    schedule: str | None = None  # a published one, for which there is no search

    by_chunks: ClassVar[tuple[str, str, str]] = ("linear", "v", "zigzag")

    def __post_init__(self) -> None:
        super().__post_init__()
        costs, slices, chunks = self.costs, self.slices, self.chunks_per_rank
        if isinstance(slices, str) and slices != "auto":
            raise ValueError(f'plan: slices must be "auto", a number of slices, or the length of each; got {slices!r}')
        count = 1 if isinstance(slices, str) else len(slice_lengths("plan", slices))
        schedules.check_counts("plan", self.stages, self.microbatches, chunks, count)
        if costs.tokens is not None and count > costs.tokens:
            raise ValueError(
                f"plan: slices must be at most as many as the {costs.tokens} tokens of a sequence; got {count}"
            )
        check_count("plan: effort", self.effort, 0)
        partition = self.options.partition
        if isinstance(costs, ModelCosts):
            if partition is not None and len(partition) != self.stages * chunks:
                told = super().chunks_told
                wanted = f"a multiple of {self.stages}" if told is None else f"{self.stages * told}"
                raise ValueError(f"plan: partition must have chunks x stages entries, {wanted}; got {len(partition)}")
            if self.stages * chunks > len(costs.layers):
                raise ValueError(
                    f"plan: {self.stages} stages with {chunks} chunks each need as many layers, and costs has "
                    f"{len(costs.layers)}: lower stages or chunks"
                )
        elif partition is not None:
            raise TypeError("plan: partition divides layers: give ModelCosts with it, or Costs without")

    @property
    def chunks_told(self) -> int | None:
        told, partition = super().chunks_told, self.options.partition
        return max(1, len(partition) // self.stages) if told is None and partition is not None else told

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

    def problem(self, flat: FlatCosts) -> Problem:
        """That of chunks with these costs. Raises DoesNotFit when nothing fits."""
        problem = problem_of(flat, self.microbatches, self.memory_limit, self.options.objective)
        return replace(problem, apart=self.options.fully_shard)


@dataclass(frozen=True, kw_only=True)
class BatchRequest(Request):
    """What `plan_batch` is asked for, whichever sequences a step has; see there."""

    function: str = "plan_batch"
    costs: Costs
    multiple: int
    packs: bool
    passes: int
    fully_shard: bool

    by_chunks: ClassVar[tuple[str, str, str]] = ("linear", "v", "loop")

    def __post_init__(self) -> None:
        if not isinstance(self.costs, Costs):
            got = type(self.costs).__name__
            raise TypeError(f"{self.function}: costs must be a zbkern.pipeline.Costs; got {got}")
        if self.costs.tokens is None:
            must = "costs must have tokens, the length of the sequence that they are of"
            raise ValueError(f"{self.function}: {must}; got None")
        super().__post_init__()
        check_count(f"{self.function}: multiple", self.multiple)
        check_count(f"{self.function}: passes", self.passes)

    @property
    def chunks_per_rank(self) -> int:
        """As told, else two in a V."""
        return self.chunks_told or (2 if self.placement is None else 1)


def placement_of(function: str, given: str | Sequence[int], stages: int, chunks: int) -> tuple[str, tuple[int, ...]]:
    """Name, and the rank of every chunk. Raises ValueError in the name of `function`."""
    down = range(stages)
    if not isinstance(given, str):
        owners = tuple(given)
        if len(owners) != stages * chunks or any(owners.count(rank) != chunks for rank in down):
            raise ValueError(
                f"{function}: placement must name every rank below {stages} {chunks} times, once per chunk of each "
                f"(chunks={chunks}); got {owners}; chunks can be left out"
            )
        return "custom", owners
    if given not in PLACEMENTS:
        raise ValueError(f"{function}: placement must be one of {PLACEMENTS} or the rank of every chunk; got {given!r}")
    if given == "v" and chunks != 2:
        raise ValueError(f'{function}: placement "v" needs chunks=2 (or "zigzag" for more); got {chunks}')
    if given == "linear":
        return given, tuple(rank for rank in down for _ in range(chunks))
    if given == "loop":
        return given, tuple(rank for _ in range(chunks) for rank in down)
    return given, tuple(rank for turn in range(chunks) for rank in (reversed(down) if turn % 2 else down))
