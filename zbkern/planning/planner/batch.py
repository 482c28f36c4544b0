"""plan_batch: a schedule for one batch of sequences of unequal lengths, made before its step.

Long sequences are cut into slices and short ones are put together in packs, so that all units take about as long; then
each rank's passes are ordered by a list scheduler and random changes (csrc/planner_batch.h). Whole packs in published
schedules are tried as well. The result depends on the lengths and the costs alone, so that every rank finds the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import FlatCosts, Growth, Growths, flat_costs, kept_by_slices
from zbkern.planning.costs.memory import Limit, limits_of
from zbkern.planning.planner import native
from zbkern.planning.planner.arguments import chunks_per_rank, placement_of
from zbkern.planning.planner.idle_time import IdleTime
from zbkern.planning.planner.plan import Plan, compared
from zbkern.planning.planner.problem import within
from zbkern.planning.planner.published import generators_of
from zbkern.planning.simulation.timeline import Event, Timeline
from zbkern.schedules.actions import Action, ScheduleError, check_count
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, enough

PASSES = 400_000
"""How many passes a search runs where nothing else is said: about 40 ms of one core."""
_SCALE = float(2**44)  # of times and memory, which the search has as whole numbers
_UNLIMITED = float(2**60)
_SLACK = 1e-9  # relative, of a limit: sums of fractions of one number differ in the last digits
_KINDS = ("F", "B", "W", "BW")
_PACKS = (1, 2, 4)  # per rank


@dataclass(frozen=True)
class BatchPlan:
    """A schedule of one batch, and what its microbatches are.

    rows: of each microbatch, the numbers of the sequences in it: one, whole or in slices (`schedule.slices_of`), or a
    pack of whole ones, in this order. ends: of each microbatch, where its sequences end, 0 first.

    costs: those of the plan. makespan: from the first pass to the last. peak_memory: of each rank. published: the name
    and the makespan of the best published schedule of whole packs that fits, None for none. Worked out when it is asked
    for: timeline; bubble_rate, idle, lower_bound and optimal as `Plan` has them for the makespan; the bound is of any
    schedule of this batch, in which the busiest rank's passes follow one another.
    """

    schedule: Schedule
    rows: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    makespan: float
    peak_memory: tuple[float, ...]
    published: tuple[str, float] | None
    costs: Costs = field(repr=False)
    _least: float = field(repr=False)  # makespan
    _limits: tuple[float, ...] | None = field(repr=False, compare=False)
    _times: tuple[list[tuple[float, float]], ...] = field(repr=False)

    def __repr__(self) -> str:
        better = "" if self.published is None else f", {self.published[0]} of packs {self.published[1]:.4g}"
        cut = sum(len(each) > 1 for each in self.schedule.own_slices)
        return (
            f"<BatchPlan: {sum(map(len, self.rows))} sequences in {len(self.rows)} microbatches, {cut} in slices; "
            f"makespan {self.makespan:.4g}, at least {self._least:.4g}{better}>"
        )

    @functools.cached_property
    def timeline(self) -> Timeline:
        """When each pass runs by the costs."""
        events = tuple(
            tuple(Event(rank, action, *time) for action, time in zip(actions, times, strict=True))
            for rank, (actions, times) in enumerate(zip(self.schedule.actions, self._times, strict=True))
        )
        return Timeline(self.schedule, events, self.peak_memory, self.costs.time_unit or "")

    @functools.cached_property
    def _compared(self) -> Plan:
        return compared(self.timeline, flat_costs(self.costs, self.schedule), self._limits, "makespan", self._least)

    @property
    def bubble_rate(self) -> float:
        """The share of time in which ranks are idle (`Timeline.bubble_rate`)."""
        return self.timeline.bubble_rate

    @property
    def lower_bound(self) -> float:
        """The least share of ranks times makespan that is idle in any schedule of this batch."""
        return self._compared.lower_bound

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no schedule of this batch is faster."""
        return self._compared.optimal

    @property
    def idle(self) -> IdleTime:
        """Where the idle time comes from, in shares of the makespan."""
        return self._compared.idle


def plan_batch(
    lengths: Sequence[int],
    costs: Costs,
    stages: int,
    chunks: int | None = None,
    placement: str | Sequence[int] | None = None,
    memory_limit: Limit = None,
    *,
    multiple: int = 128,
    packs: bool = True,
    passes: int = PASSES,
) -> BatchPlan:
    """A plan of one step for sequences of these lengths, in tokens.

    Args:
        costs: of a sequence of `costs.tokens` tokens in each chunk, as `profile(..., slices=True)` measures them;
            attention, overhead and what slices carry tell what others take.
        stages, chunks, placement: as in `plan`; a V of two chunks per rank by default.
        memory_limit: of one rank's `peak_memory`, in the unit of the costs and including what the rank holds all the
            time: one number, one per rank, or None for none.
        multiple: of which slices are.
        packs: False for models that would let sequences in one row see each other: each is then one of its own.
        passes: how many the search runs again, a budget that is the same on every machine.

    Raises ScheduleError where the batch does not fit the limit, TypeError or ValueError for other arguments,
    RuntimeError without the compiled search.
    """
    native.check("plan_batch")
    if not isinstance(costs, Costs):
        raise TypeError(f"plan_batch: costs must be a zbkern.pipeline.Costs; got {type(costs).__name__}")
    if costs.tokens is None:
        raise ValueError("plan_batch: costs must have tokens, the length of the sequence that they are of; got None")
    if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
        raise TypeError(f"plan_batch: lengths must be a list of the sequences' numbers of tokens; got {lengths!r}")
    counts = {f"lengths[{number}]": length for number, length in enumerate(lengths)}
    for name, count in {**counts, "stages": stages, "multiple": multiple, "passes": passes}.items():
        check_count(f"plan_batch: {name}", count)
    if chunks is None:
        chunks = 2 if placement is None else chunks_per_rank(placement, stages)
    _, owners = placement_of("v" if placement is None and chunks == 2 else placement or "loop", stages, chunks)
    limits = limits_of("plan_batch", memory_limit, stages)
    problem = _problem(FlatCosts.of(costs, owners), costs.tokens, lengths, limits, multiple, bool(packs))
    numbers = list(lengths)
    best = _Found(*native.core.plan_batch(problem, numbers, passes))
    published = _best_published(problem, numbers)
    if published is not None and published[1].makespan < best.makespan:
        best = published[1]
    if not best.events:
        assert limits is not None
        unit, more = costs.memory_unit, best.least_excess / problem.memory_scale
        if len({*limits}) == 1:
            fits = f"the least that any order found needs is {enough(limits[0] + more, unit)}"
        else:
            fits = f"any order found needs {enough(more, unit)} more on some rank"
        raise ScheduleError(
            f"plan_batch: memory_limit must let the largest unit run; got {amount(min(limits), unit)}, "
            f"and {fits}; raise the limit, or use more chunks or stages"
        )
    return _plan_of(problem, numbers, best, published, costs, limits)


def sequence_work(costs: Costs, length: int) -> float:
    """The time of all passes of a sequence of so many tokens in all chunks, whole, in the unit of the costs."""
    count = max(
        len(value) if isinstance(value, tuple) else 1 for value in (costs.forward, costs.backward, costs.weight)
    )
    flat, share = costs.per_chunk(count), length / (costs.tokens or length)
    attention = sum(flat.attention_forward) + sum(flat.attention_backward)
    whole = sum(flat.forward) + sum(flat.fused)
    return (whole - attention) * share + attention * share * share


class _Problem(NamedTuple):
    """What the compiled search reads; times and memory in its own units."""

    placement: tuple[int, ...]
    forward: Growth
    backward: Growth
    weight: Growth
    fused: Growth
    lag: Growth
    activation: Growth
    held: Growth
    carried: Growth
    carried_gradients: Growth
    limit: tuple[int, ...]  # of each rank, beside what it holds all the time; empty for none
    multiple: int
    packs: bool
    time_scale: float
    memory_scale: float
    static: tuple[float, ...]
    lower_bound: float


class _Found(NamedTuple):
    rows: list[list[int]]
    cuts: list[list[int]]
    events: list[list[tuple[int, int, int, int, int]]]
    makespan: int
    peaks: list[int]
    least_excess: int


def _problem(
    flat: FlatCosts, tokens: int, lengths: Sequence[int], limits: Sequence[float] | None, multiple: int, packs: bool
) -> _Problem:
    owners, whole, shares = flat.placement, flat.whole, [length / tokens for length in lengths]
    all_, pairs = sum(shares), sum(share * share for share in shares)
    none = (0.0,) * len(owners)

    def per_token(growth: Growth) -> Growth:
        linear = tuple(value / tokens for value in growth.linear)
        return Growth(growth.fixed, linear, tuple(value / tokens**2 for value in growth.quadratic))

    def times(growth: Growth, scale: float) -> Growth:
        return Growth(*(tuple(value * scale for value in part) for part in growth))

    def memory(values: Sequence[float]) -> Growth:
        return times(per_token(Growth(none, tuple(values), none)), memory_scale)

    forward, backward, weight, apart, lag = map(per_token, Growths.of(whole))
    parts = [[*zip(*each, strict=True)] for each in zip(backward, weight, apart, strict=True)]  # of each kind of growth
    fused = Growth(*(tuple(max(0.0, b + w - split) for b, w, split in each) for each in parts))
    busy = [0.0] * (max(owners) + 1)
    for chunk, owner in enumerate(owners):
        for growth in (forward, fused):
            of_batch = growth.fixed[chunk] + growth.linear[chunk] * sum(lengths)
            busy[owner] += of_batch + growth.quadratic[chunk] * sum(length * length for length in lengths)
    time_scale = _SCALE / max(sum(busy), 1e-300)
    memory_scale = _SCALE / max((sum(whole.activation) + sum(whole.held)) * max(all_, pairs), 1e-300)
    rooms = [] if limits is None else [most - own for most, own in zip(limits, flat.static, strict=True)]
    return _Problem(
        placement=owners,
        forward=times(forward, time_scale),
        backward=times(backward, time_scale),
        weight=times(weight, time_scale),
        fused=times(fused, time_scale),
        lag=times(Growth(*((*part, 0.0) for part in lag)), time_scale),
        activation=memory(kept_by_slices(whole)),
        held=memory(whole.held),
        carried=memory(whole.carried),
        carried_gradients=memory(whole.carried_gradients),
        limit=tuple(round(min(room * (1 + _SLACK) * memory_scale, _UNLIMITED)) for room in rooms),
        multiple=multiple,
        packs=packs,
        time_scale=time_scale,
        memory_scale=memory_scale,
        static=tuple(flat.static),
        lower_bound=max(busy),
    )


def _best_published(problem: _Problem, lengths: list[int]) -> tuple[str, _Found] | None:
    """The best published schedule of whole packs within the limit, with the numbers of packs that people use."""
    ranks, best = max(problem.placement) + 1, None
    for count in (per_rank * ranks for per_rank in _PACKS) if problem.packs else (len(lengths),):
        rows, cuts = native.core.packed(problem, lengths, min(len(lengths), count))
        for name, orders in _published(problem.placement, len(rows)):
            found = _Found(*native.core.run_batch(problem, rows, cuts, lengths, orders))
            fits = not problem.limit or within(found.peaks, problem.limit)
            if fits and (best is None or found.makespan < best[1].makespan):
                best = name, found
    return best


@functools.lru_cache(16)
def _published(placement: tuple[int, ...], microbatches: int) -> list[tuple[str, list[list[int]]]]:
    """Those for chunks in these places, as the rows that the compiled search reads."""
    made = [make(max(placement) + 1, microbatches) for make in generators_of(placement)]
    return [
        (each.name, [[n for a in row for n in (_KINDS.index(a.kind), a.chunk, a.microbatch)] for row in each.actions])
        for each in made
    ]


def _plan_of(
    problem: _Problem,
    lengths: Sequence[int],
    best: _Found,
    published: tuple[str, _Found] | None,
    costs: Costs,
    limits: Sequence[float] | None,
) -> BatchPlan:
    rows = tuple(tuple(Action(_KINDS[kind], chunk, unit) for kind, chunk, unit, _, _ in row) for row in best.events)
    cuts = tuple(map(tuple, best.cuts))
    time, memory = 1 / problem.time_scale, 1 / problem.memory_scale
    return BatchPlan(
        schedule=Schedule(rows, problem.placement, len(cuts), "plan-batch", own_slices=cuts).proven(),
        rows=tuple(map(tuple, best.rows)),
        ends=tuple(tuple(accumulate((lengths[number] for number in row), initial=0)) for row in best.rows),
        makespan=best.makespan * time,
        peak_memory=tuple(own + peak * memory for own, peak in zip(problem.static, best.peaks, strict=True)),
        published=None if published is None else (published[0], published[1].makespan * time),
        costs=costs,
        _least=problem.lower_bound,
        _limits=None if limits is None else tuple(limits),
        _times=tuple([(start * time, end * time) for *_, start, end in row] for row in best.events),
    )
