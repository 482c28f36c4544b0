"""plan_batch: a schedule for one batch of sequences of unequal lengths, made before its step.

Long sequences are cut into slices and short ones are put together in packs, so that all units take about as long. The
order of the microbatches and the rule of the list scheduler are then changed at random (csrc/planner_batch.cpp), with
passes in turn, and where costs have network time also beside each other. Whole packs in published schedules are tried
as well. The result depends on the lengths and the costs alone, so that every rank finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.flat import FlatCosts, Growth, Growths, kept_by_slices
from zbkern.planning.costs.memory import Limit, exceeds
from zbkern.planning.planner import native
from zbkern.planning.planner.annealing import events_of
from zbkern.planning.planner.lane_bounds import batch_bound
from zbkern.planning.planner.plan import Plan
from zbkern.planning.planner.problem import Rows, actions_of
from zbkern.planning.planner.published import published_orders
from zbkern.planning.planner.request import BatchRequest, Placement
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules.actions import ScheduleError, check_count
from zbkern.schedules.ahead import memory_ahead
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, enough

PASSES = 400_000
"""How many passes a search runs where nothing else is said: about 40 ms of one core, 100 with network time."""
_SCALE = float(2**44)  # of times and memory, which the search has as whole numbers
_UNLIMITED = float(2**60)
_SLACK = 1e-9  # relative, of a limit: sums of fractions of one number differ in the last digits
_PACKS = (1, 2, 4)  # per rank


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchPlan(Plan):
    """A plan of one batch for the makespan, and what its microbatches are. Its bound is of any schedule of this batch.

    rows: of each microbatch, the numbers of the sequences in it: one, whole or in slices (`schedule.slices_of`), or a
    pack of whole ones, in this order. ends: of each microbatch, where its sequences end, 0 first. published: the name
    and the makespan of the best published schedule of whole packs that fits, None for none.
    """

    rows: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    published: tuple[str, float] | None

    def __repr__(self) -> str:
        better = "" if self.published is None else f", {self.published[0]} of packs {self.published[1]:.4g}"
        cut = sum(len(each) > 1 for each in self.schedule.own_slices)
        return (
            f"<BatchPlan: {sum(map(len, self.rows))} sequences in {len(self.rows)} microbatches, {cut} in slices; "
            f"makespan {self.makespan:.4g}, at least {self.bound:.4g}{better}>"
        )


def plan_batch(
    lengths: Sequence[int],
    costs: Costs,
    stages: int,
    chunks: int | None = None,
    placement: Placement = None,
    memory_limit: Limit = None,
    *,
    multiple: int = 128,
    packs: bool = True,
    passes: int = PASSES,
    fully_shard: bool = False,
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
        passes: how many the search runs again, a budget that is the same on every machine; as many again for passes
            beside each other, where costs have network time.
        fully_shard: as in `PlanOptions`.

    Raises ScheduleError where the batch does not fit the limit, TypeError or ValueError for other arguments,
    RuntimeError without the compiled search.
    """
    request = BatchRequest(
        costs=costs,
        stages=stages,
        chunks=chunks,
        placement=placement,
        memory_limit=memory_limit,
        multiple=multiple,
        packs=packs,
        passes=passes,
        fully_shard=fully_shard,
    )
    return best_batch_plan(request, lengths)


@native.uncollected()
def best_batch_plan(request: BatchRequest, lengths: Sequence[int]) -> BatchPlan:
    """What `plan_batch` returns for these lengths and arguments."""
    native.check(request.function)
    if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
        must = "lengths must be a list of the sequences' numbers of tokens"
        raise TypeError(f"{request.function}: {must}; got {lengths!r}")
    for number, length in enumerate(lengths):
        check_count(f"{request.function}: lengths[{number}]", length)
    costs, limits = request.costs, request.limits
    _, owners = request.placed(request.chunks_per_rank)
    flat = FlatCosts.of(costs, owners)
    while True:
        found, ahead = _searched(request, lengths, flat)
        room = tuple(map(max, flat.ahead, ahead))  # for messages, of which the search has left some
        if limits is None or room == flat.ahead or not any(map(exceeds, found.peak_memory, limits)):
            return found
        flat = replace(flat, ahead=room)


def _searched(request: BatchRequest, lengths: Sequence[int], flat: FlatCosts) -> tuple[BatchPlan, tuple[float, ...]]:
    """What one search finds, and the memory of its messages on each rank. Raises ScheduleError where nothing fits."""
    costs, owners, stages, limits = request.costs, flat.placement, request.stages, request.limits
    assert costs.tokens is not None
    problem = _BatchCosts.of(flat, costs.tokens, lengths, request)
    wanted = [per_rank * stages for per_rank in _PACKS] if request.packs else [len(lengths)]
    counts_of_packs = dict.fromkeys(min(len(lengths), count) for count in wanted)
    known = [each for count in counts_of_packs for each in published_orders(owners, count)]
    if flat.has_network:  # what runs beside each other, and the same in turn, which holds less
        known += [(name, replace(each, beside=())) for name, each in known if each.beside]
    orders = [(each.rows, each.fused, each.beside if flat.has_network else ()) for _, each in known]
    found = _Found(*native.core.plan_batch(problem, list(lengths), request.passes, orders))
    if found.times is None:
        assert limits is not None
        unit, more = costs.memory_unit, found.excess / problem.memory_scale
        if len({*limits}) == 1:
            fits = f"the least that any order found needs is {enough(limits[0] + more, unit)}"
        else:
            fits = f"any order found needs {enough(more, unit)} more on some rank"
        raise ScheduleError(
            f"{request.function}: memory_limit must let the largest unit run; got {amount(min(limits), unit)}, "
            f"and {fits}; raise the limit, or use more chunks or stages"
        )
    best = found.published
    published = None if best < 0 else (known[best][0], found.published_cost / problem.time_scale)
    cuts = tuple(map(tuple, found.cuts))
    ends = zip(accumulate(map(len, cuts)), cuts, strict=True)
    order = [end - 1 - slice for end, cut in ends for slice in range(len(cut))]  # of the units' B
    actions = actions_of(found.rows, found.fused, order)
    beside = tuple(map(tuple, found.beside)) if any(found.beside) else ()
    schedule = Schedule(actions, owners, len(cuts), "plan-batch", own_slices=cuts, beside=beside)._proven()
    found_flat = replace(flat, ahead=_ahead(flat, schedule, costs.tokens))
    peaks = (own + peak / problem.memory_scale for own, peak in zip(found_flat.static, found.peaks, strict=True))
    events, unit = events_of(actions, found.times), costs.time_unit or ""
    plan = BatchPlan(
        timeline=Timeline(schedule, events, tuple(peaks), unit, memory_unit=costs.memory_unit or ""),
        costs=costs,
        objective="makespan",
        bound=problem.bound,
        limits=None if limits is None else tuple(limits),
        rows=tuple(map(tuple, found.members)),
        ends=tuple(tuple(accumulate((lengths[number] for number in row), initial=0)) for row in found.members),
        published=published,
    )
    return plan, found_flat.ahead


def _ahead(flat: FlatCosts, schedule: Schedule, tokens: int) -> tuple[float, ...]:
    """The memory of the messages that may wait on each rank: the costs of all units, which have it, take longer to make
    than the search takes."""
    message, units = flat.whole.message, [length for cut in schedule.own_slices for length in cut]
    if not any(message):
        return flat.ahead
    return tuple(memory_ahead(schedule, lambda edge, unit: message[edge] * units[unit] / tokens))


def sequence_work(costs: Costs, length: int) -> float:
    """The time of all passes of a sequence of so many tokens in all chunks, whole, in the unit of the costs."""
    count = max(
        len(value) if isinstance(value, tuple) else 1 for value in (costs.forward, costs.backward, costs.weight)
    )
    flat, share = costs.per_chunk(count), length / (costs.tokens or length)
    attention = sum(flat.attention_forward) + sum(flat.attention_backward)
    whole = sum(flat.forward) + sum(flat.fused)
    return (whole - attention) * share + attention * share * share


class _BatchCosts(NamedTuple):
    """What the compiled search reads (csrc/planner_batch.h); times and memory in its own units.

    communication: of a message from a chunk to the next. collectives: of an F or B of each chunk; () where none can be
    hidden. masked_forward, masked_backward: of a pair of tokens of two sequences of a pack. limit: of each rank, beside
    what it holds all the time.
    bound: in the unit of the costs.
    """

    placement: tuple[int, ...]
    forward: Growth
    backward: Growth
    weight: Growth
    fused: Growth
    communication: Growth
    activation: Growth
    held: Growth
    carried: Growth
    carried_gradients: Growth
    network_forward: Growth
    network_backward: Growth
    collectives: tuple[int, ...]
    masked_forward: tuple[float, ...]
    masked_backward: tuple[float, ...]
    merge_saving: tuple[float, ...]
    limit: tuple[int, ...]
    multiple: int
    packs: bool
    apart: bool
    time_scale: float
    memory_scale: float
    bound: float

    @classmethod
    def of(
        cls,
        flat: FlatCosts,
        tokens: int,
        lengths: Sequence[int],
        request: BatchRequest,
    ) -> _BatchCosts:
        whole, shares = flat.whole, [length / tokens for length in lengths]
        none, ranks = (0.0,) * len(flat.placement), len(flat.static)
        time_scale = _SCALE / max(ranks * batch_bound(flat, shares, beside=False), 1e-300)
        most = (sum(whole.activation) + sum(whole.held)) * max(sum(shares), sum(share * share for share in shares))
        memory_scale = _SCALE / max(most, 1e-300)

        def per_token(growth: Growth, scale: float) -> Growth:
            factors = scale, scale / tokens, scale / tokens**2
            return Growth(*(tuple(value * by for value in part) for part, by in zip(growth, factors, strict=True)))

        def memory(values: Sequence[float]) -> Growth:
            return per_token(Growth(none, tuple(values), none), memory_scale)

        growths = Growths.of(whole)
        rooms = [most - own for most, own in zip(request.limits or [math.inf] * ranks, flat.static, strict=True)]
        return cls(
            placement=flat.placement,
            forward=per_token(growths.forward, time_scale),
            backward=per_token(growths.backward, time_scale),
            weight=per_token(growths.weight, time_scale),
            fused=per_token(growths.fused, time_scale),
            communication=per_token(growths.communication, time_scale),
            activation=memory(kept_by_slices(whole)),
            held=memory(whole.held),
            carried=memory(whole.carried),
            carried_gradients=memory(whole.carried_gradients),
            network_forward=per_token(growths.network_forward, time_scale),
            network_backward=per_token(growths.network_backward, time_scale),
            collectives=tuple(max(1, round(each)) for each in whole.collectives) if flat.has_network else (),
            masked_forward=tuple(value * time_scale / tokens**2 for value in whole.masked_forward),
            masked_backward=tuple(value * time_scale / tokens**2 for value in whole.masked_backward),
            merge_saving=tuple(value * time_scale for value in whole.merge_saving),
            limit=tuple(round(min(room * (1 + _SLACK) * memory_scale, _UNLIMITED)) for room in rooms),
            multiple=request.multiple,
            packs=bool(request.packs),
            apart=bool(request.fully_shard),
            time_scale=time_scale,
            memory_scale=memory_scale,
            bound=batch_bound(flat, shares, beside=flat.has_network),
        )


class _Found(NamedTuple):
    """What the compiled search finds: of every microbatch its sequences and the lengths of its slices, orders, when
    passes begin and end (None where nothing fits), the most that each rank holds, the best of the published orders and
    its cost, and by how much limits are exceeded where nothing fits."""

    members: list[list[int]]
    cuts: list[list[int]]
    rows: Rows
    fused: list[int]
    beside: list[list[tuple[int, int]]]
    times: list[tuple[list[float], list[float]]] | None
    peaks: list[int]
    published: int
    published_cost: int
    excess: int
