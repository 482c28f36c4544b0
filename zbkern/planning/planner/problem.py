"""What the search works on: a planning problem in integers, and orders as lists of numbers.

Times and memory are scaled to integers, so that sums do not depend on their order, nor plans on the compiler. A pass
is one number, (kind * chunks + chunk) * units + k for the k-th F, B or W of the chunk. A unit is a microbatch, or a
slice of one. Those of a chunk pass in order: they cost the same, so that no other order is better. Costs of slices
differ by their place: the k-th F is of unit k, the k-th B and W that of `order_of_backward`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from operator import add, sub
from typing import NamedTuple

from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.costs.memory import Limit, limits_of
from zbkern.planning.planner import native
from zbkern.schedules.actions import Action, ScheduleError
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.slices import order_of_backward
from zbkern.schedules.units import amount, enough

FORWARD, BACKWARD, WEIGHT = range(3)
Rows = list[list[int]]

_TIME_SCALE = 2.0**46  # of all work done one pass after the other
_MEMORY_SCALE = 2.0**52  # of all microbatches at once, so that numbers do not depend on the limit
_UNLIMITED = 2.0**60
_SLACK = 1e-9  # relative, of a limit: sums of fractions of one number differ in the last digits


class PassCosts(NamedTuple):
    """What the passes of a chunk take, by their place in a microbatch: B and W go from its last slice to its first.

    communication: of F's message to the next chunk; 0 within a rank. activation: memory that F takes; freed: what B
    frees of it, and held what it leaves for W. network_forward, network_backward: of the times of F, and of B, what
    passes beside them can hide, in so many collectives. message: memory of that to the next chunk; 0 within a rank.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    fused: tuple[int, ...]
    merge_saving: tuple[int, ...]
    communication: tuple[int, ...]
    activation: tuple[int, ...]
    freed: tuple[int, ...]
    held: tuple[int, ...]
    network_forward: tuple[int, ...]
    network_backward: tuple[int, ...]
    collectives: tuple[int, ...]
    message: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A planning problem. One unit of time here is 1 / time_scale of the costs'.

    units: slices of all microbatches. by_chunk: what passes cost. limit: of each rank, beside what it holds all the
    time and `room`, which is that for messages that wait there: more of them have to be within the limit, too. apart:
    no two F, or B, of one chunk run beside each other. flat: what it was made from.
    """

    ranks: int
    chunks: int
    units: int
    slices: tuple[int, ...]
    placement: tuple[int, ...]
    by_chunk: tuple[PassCosts, ...]
    limit: tuple[int, ...]
    room: tuple[int, ...]
    makespan: bool
    time_scale: float
    memory_scale: float
    flat: FlatCosts = field(compare=False)
    apart: bool = False

    @classmethod
    def build(cls, flat: FlatCosts, microbatches: int, limit: Sequence[float], makespan: bool) -> Problem:
        """limit: one number per rank, in the unit of `Costs.activation`."""
        placement, by_slice = flat.placement, flat.by_place
        chunks = len(placement)
        # one pass and message of all microbatches after the other
        parts = [sum(e.forward) + sum(e.backward) + sum(e.weight) + 2 * sum(e.communication) for e in by_slice]
        time_scale = _TIME_SCALE / serial if (serial := microbatches * sum(parts)) > 1e-200 else 1.0
        unlimited = most_memory(flat, microbatches)
        memory_scale = _MEMORY_SCALE / unlimited if unlimited > 1e-200 else 1.0

        def scaled(values: Iterable[float], scale: float) -> tuple[int, ...]:
            return tuple(round(value * scale) for value in values)

        def of_chunk(chunk: int) -> PassCosts:
            backward, weight, fused, saving = (
                scaled([getattr(each, name)[chunk] for each in reversed(by_slice)], time_scale)
                for name in ("backward", "weight", "fused", "merge_saving")
            )
            # A split without overhead must stay so when all three are rounded, or fusing would seem to gain a little.
            both_and_parts = zip(fused, backward, weight, strict=True)
            fused = tuple(b + w if abs(both - b - w) <= 1 else both for both, b, w in both_and_parts)
            apart = placement[chunk] != placement[min(chunk + 1, chunks - 1)]
            lags = [each.communication[chunk] if apart else 0.0 for each in by_slice]
            messages = [each.message[chunk] if apart else 0.0 for each in by_slice]
            held = [each.held[chunk] for each in reversed(by_slice)]
            memory = taken_memory(flat, chunk), freed_memory(flat, chunk), held
            forward = scaled([each.forward[chunk] for each in by_slice], time_scale)
            times = forward, backward, weight, fused, saving, scaled(lags, time_scale)
            network_forward = scaled([each.network_forward[chunk] for each in by_slice], time_scale)
            network_backward = scaled([each.network_backward[chunk] for each in reversed(by_slice)], time_scale)
            turns = (max(1, round(flat.whole.collectives[chunk])),) * len(by_slice)
            taken, freed, left, sent = (scaled(each, memory_scale) for each in (*memory, messages))
            return PassCosts(*times, taken, freed, left, network_forward, network_backward, turns, sent)

        return cls(
            ranks=max(placement) + 1,
            chunks=chunks,
            units=microbatches * len(flat.slices),
            slices=flat.slices,
            placement=placement,
            by_chunk=tuple(map(of_chunk, range(chunks))),
            limit=scaled([min(value, unlimited) * (1 + _SLACK) for value in limit], memory_scale),
            room=tuple(
                round(min(ahead + max(0.0, value - unlimited), _UNLIMITED / memory_scale) * memory_scale)
                for value, ahead in zip(limit, flat.ahead, strict=True)
            ),
            makespan=makespan,
            time_scale=time_scale,
            memory_scale=memory_scale,
            flat=flat,
        )

    def with_room(self, messages: Sequence[int]) -> Problem:
        """The same with more room for messages."""
        if not any(messages):
            return self
        room, limit = map(add, self.room, messages), map(sub, self.limit, messages)
        return replace(self, room=tuple(room), limit=tuple(limit))

    @property
    def passes(self) -> int:
        return 3 * self.chunks * self.units

    @cached_property
    def may_fuse(self) -> bool:
        """Whether fusing a backward may gain time, or memory: B leaves more than it found, and memory is short.

        Otherwise B and W one right after the other do as well: both hold no more, and B's result is there sooner.
        """
        parts = (zip(each.fused, each.backward, each.weight, strict=True) for each in self.by_chunk)
        if any(both < b + w for each in parts for both, b, w in each):
            return True
        memory = [0] * self.ranks  # of all microbatches at once
        for rank, each in zip(self.placement, self.by_chunk, strict=True):
            memory[rank] += self.microbatches * sum(map(max, each.activation, each.held))
        short = any(limit < all_ for limit, all_ in zip(self.limit, memory, strict=True))
        more = (zip(each.held, each.freed, strict=True) for each in self.by_chunk)
        return short and any(held > found for each in more for held, found in each)

    @property
    def saves(self) -> bool:
        return any(any(each.merge_saving) for each in self.by_chunk)

    @property
    def microbatches(self) -> int:
        return self.units // len(self.slices)

    @property
    def has_network(self) -> bool:
        return any(any(each.network_forward) or any(each.network_backward) for each in self.by_chunk)

    @property
    def has_messages(self) -> bool:
        """Whether messages take memory."""
        return any(any(each.message) for each in self.by_chunk)

    @property
    def order_of_backward(self) -> list[int]:
        """The units in the order in which every chunk runs their B."""
        return order_of_backward(self.units, len(self.slices))

    @cached_property
    def chunks_of(self) -> list[list[int]]:
        """Those of every rank."""
        owned = [*enumerate(self.placement)]
        return [[chunk for chunk, owner in owned if owner == rank] for rank in range(self.ranks)]

    def work(self, rank: int) -> int:
        """The least time that `rank` can spend in passes."""
        total = 0
        for each in (self.by_chunk[chunk] for chunk in self.chunks_of[rank]):
            parts = [*zip(each.backward, each.weight, each.merge_saving, each.fused, strict=True)]
            least = self.microbatches * sum(min(b + w - saved, both) for b, w, saved, both in parts)
            if len(parts) == 1:  # the first W follows none
                b, w, saved, both = parts[0]
                least = min(self.microbatches * (b + w - saved) + saved, self.microbatches * both)
            total += self.microbatches * sum(each.forward) + least
        return total


class DoesNotFit(ScheduleError):
    """least: the smallest limit that an order of these chunks fits."""

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


def problem_of(flat: FlatCosts, microbatches: int, limit: Limit, objective: str) -> Problem:
    """The problem of chunks with these costs. Raises DoesNotFit when nothing fits.

    One microbatch must fit: a rank holds it in all of its chunks when its last forward there has run. A B may leave
    more than it found; a fused BW leaves nothing, but for gradients of keys and values that belong to slices before it.
    """
    owners, static, unit = flat.placement, flat.static, flat.given.memory_unit
    given = limits_of("plan", limit, len(static)) or [math.inf] * len(static)
    needs, last_chunk = [0.0] * len(static), {owner: chunk for chunk, owner in enumerate(owners)}
    for chunk, owner in enumerate(owners):
        gradients = -freed_memory(flat, chunk)[0] if len(flat.slices) > 1 and chunk == last_chunk[owner] else 0.0
        needs[owner] += sum(taken_memory(flat, chunk)) + max(0.0, gradients)
    least = max(need + always for need, always in zip(needs, static, strict=True))
    for rank, (need, most, always) in enumerate(zip(needs, given, static, strict=True)):
        if need > (most - always) * (1 + _SLACK):
            besides = f" beside the {amount(always, unit)} that are there all the time" if always else ""
            raise DoesNotFit(
                f"plan: no schedule fits memory_limit={amount(most, unit)} on rank {rank}: one microbatch "
                f"in all chunks of a rank holds {amount(need, unit)}{besides}; the smallest limit that any "
                f"schedule fits is {enough(least, unit)}",
                least,
            )
    limits = [most - always for most, always in zip(given, static, strict=True)]
    return Problem.build(flat, microbatches, limits, objective == "makespan")


def most_memory(flat: FlatCosts, microbatches: int) -> float:
    """What so many microbatches hold at most, in all chunks together."""
    most = microbatches * sum(sum(map(max, each.activation, each.held)) for each in flat.by_place)
    carried = (*flat.whole.carried, *flat.whole.carried_gradients) if len(flat.slices) > 1 else ()
    return most + microbatches * sum(carried)


def taken_memory(flat: FlatCosts, chunk: int) -> list[float]:
    """What the F of each slice takes, from first to last."""
    slices = enumerate(flat.by_place)
    return [each.activation[chunk] + flat.carried_change("F", chunk, slice) for slice, each in slices]


def freed_memory(flat: FlatCosts, chunk: int) -> list[float]:
    """What the B of each slice frees besides leaving `held`, from the last slice to the first; may be below 0."""
    slices = reversed([*enumerate(flat.by_place)])
    return [each.activation[chunk] - flat.carried_change("B", chunk, slice) for slice, each in slices]


@dataclass(frozen=True)
class Ordering:
    """An order of every rank, its cost, and which backwards are fused: fused[chunk * units + k].

    The W of a fused backward stays in its row, as a pass of no length and no memory. beside: for each rank, which
    actions run beside each other, as in `Schedule`.
    """

    cost: int
    rows: Rows
    fused: list[int]
    beside: Sequence[Sequence[tuple[int, int]]] = ()


def tighter(problem: Problem, shares: Sequence[float]) -> list[Problem]:
    """The same with these shares of the memory that 1F1B needs, where there is more: what fits there fits here."""
    whole = max(sum(sum(problem.by_chunk[chunk].activation) for chunk in chunks) for chunks in problem.chunks_of)
    limits = [round(share * problem.ranks * whole * (1 + _SLACK)) for share in shares]
    found = [tuple(min(most, limit) for most in problem.limit) for limit in limits]
    return [replace(problem, limit=limit) for limit in found if limit != problem.limit]


def fewer_ranks(problem: Problem, count: int) -> Problem:
    """So many of its ranks, the first and the last among them, with their chunks and as much less microbatches and
    memory: what is best there is mostly among the best here."""
    kept = [rank * (problem.ranks - 1) // (count - 1) for rank in range(count)]
    chunks = [chunk for chunk, rank in enumerate(problem.placement) if rank in kept]
    return replace(
        problem,
        ranks=count,
        chunks=len(chunks),
        units=-(-problem.microbatches * count // problem.ranks) * len(problem.slices),
        placement=tuple(kept.index(problem.placement[chunk]) for chunk in chunks),
        by_chunk=tuple(problem.by_chunk[chunk] for chunk in chunks),
        limit=tuple(-(-problem.limit[rank] * count // problem.ranks) for rank in kept),
        room=tuple(problem.room[rank] for rank in kept),
    )


def within(peaks: Iterable[float], limit: Sequence[int]) -> bool:
    """Whether no rank exceeds its limit."""
    return all(peak <= most for peak, most in zip(peaks, limit, strict=True))


def serial_ordering(problem: Problem, fuse: bool) -> Ordering:
    """One microbatch after the other, each W right after its B: fits whenever anything does. Its cost is not known."""
    chunks, units, slices = problem.chunks, problem.units, len(problem.slices)
    rows: Rows = [[] for _ in range(problem.ranks)]
    forwards = [(chunk, (FORWARD,)) for chunk in range(chunks)]
    backwards = [(chunk, (BACKWARD, WEIGHT)) for chunk in reversed(range(chunks))]
    for first in range(0, units, slices):
        for chunk, kinds in (*forwards, *backwards):
            for number in range(first, first + slices):
                rows[problem.placement[chunk]] += [(kind * chunks + chunk) * units + number for kind in kinds]
    return Ordering(0, rows, [int(fuse)] * (chunks * units))


def ordering_of(schedule: Schedule) -> Ordering:
    """A published schedule as orders: with the units of a chunk in order, and no W beside other passes. No cost yet."""
    chunks, units = len(schedule.placement), len(schedule.units)
    order = order_of_backward(units, len(schedule.slices))
    place = {unit: number for number, unit in enumerate(order)}  # of its B and its W
    fused = [0] * (chunks * units)
    first = {(kind, chunk): (number * chunks + chunk) * units
             for number, kind in enumerate("FBW") for chunk in range(chunks)}  # fmt: skip
    rows: Rows = []
    for actions in schedule.actions:
        row: list[int] = []
        for kind, chunk, unit in actions:
            number = unit if kind == "F" else place[unit]
            if kind == "BW":
                fused[chunk * units + number] = 1
                row += (first["B", chunk] + number, first["W", chunk] + number)
            else:
                row.append(first[kind, chunk] + number)
        rows.append(row)
    return Ordering(0, rows, fused, schedule.beside)


def grouped(orders: Ordering) -> Ordering:
    """The orders with W that follow each other grouped by chunk, which is free. The cost is the old one."""
    return replace(orders, rows=native.core.grouped(orders.rows, orders.fused))


def actions_of(rows: Rows, fused: Sequence[int], order: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """Rows of numbers as actions. order: the units in the order of their B, which is the same in every chunk."""
    half, count = len(fused), len(order)
    actions: list[Action | None] = []  # by number
    for kind, units in (("F", range(count)), ("B", order), ("W", order)):
        for chunk in range(half // count):
            fields = zip(repeat(kind), repeat(chunk), units)
            actions += map(tuple.__new__, repeat(Action), fields)  # a third of the time that Action takes
    for at in (at for at, both in enumerate(fused) if both):
        chunk, place = divmod(at, count)
        actions[half + at], actions[2 * half + at] = Action("BW", chunk, order[place]), None
    return tuple(tuple(action for number in row if (action := actions[number])) for row in rows)


def schedule_of(orders: Ordering, problem: Problem, name: str) -> Schedule:
    """Orders as a schedule, validated and with W grouped where passes run one after the other."""
    rows = orders.rows if any(orders.beside) else grouped(orders).rows
    actions = actions_of(rows, orders.fused, problem.order_of_backward)
    return Schedule.build(actions, problem.placement, problem.microbatches, name, problem.slices, beside=orders.beside)
