"""Lower bounds on the cost of any schedule of a problem.

Three arguments, of which the largest number counts. Each is proven where it is written.

- `_work_in_between`: what a rank can do before the first pass of a chunk, and leave for after the last, is little, as
  its memory is. The rest it does in between, and another rank, or the same one, waits: it began before, and the last
  microbatch has yet to come back to it. With one rank in both parts this is idle time in warm-up and cool-down; with
  two it is the time for which the first rank of a V waits for the last. With the passes of one chunk alone it is the
  longest chain of passes that must follow each other.
- `_memory_over_time`: every microbatch stays in memory for a round trip at least, and memory times time is limited.
- `_joint_warm_up_bound`: with one chunk per rank, the ranks' warm-ups are whole numbers of forwards.

All hold with fused backwards and merged W, too: what could run elsewhere is counted without their savings, and all that
must run with them. Integers as in `Problem`; microbatches cost the same, so that those of a chunk pass in order.

With slices a microbatch above is a unit, but for this: the first B of a chunk comes after all F of the first
microbatch, and is of its last slice; before it the whole microbatch is in memory; the last F is of a last slice, and
after it all B of its microbatch are left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from zbkern.planning.planner.problem import BACKWARD, FORWARD, PassCosts, Problem

_INFINITE = 2**62


def cost_bound(problem: Problem) -> int:
    """No schedule of `problem` costs less (its makespan, when that is minimised)."""
    ranks = range(problem.ranks)
    returns = _returns(problem)
    over_time = (_memory_over_time(problem, rank, returns) for rank in ranks)
    bound = max(_work_in_between(problem), *over_time)
    if problem.placement == tuple(ranks) and not problem.makespan and len(problem.slices) == 1:
        bound = _joint_warm_up_bound(problem, bound)
    return bound


def _arrivals(problem: Problem, slice: int = 0) -> list[int]:
    """The earliest start of each chunk's first forward; of another slice, if that were the first."""
    steps = (each.forward[slice] + each.communication[slice] for each in problem.by_chunk[:-1])
    return [*accumulate(steps, initial=0)]


def _forwarded(problem: Problem, begin: int = 0) -> list[int]:
    """From the start of the first forward of chunk `begin`: the earliest end of each chunk's last one there.

    0 for the chunks before.
    """
    arrived, found = [0] * len(problem.slices), [0] * begin
    for each in problem.by_chunk[begin:]:
        now = 0
        for slice, forward in enumerate(each.forward):
            now = max(now, arrived[slice]) + forward
            arrived[slice] = now + each.communication[slice]
        found.append(now)
    return found


def _returns(problem: Problem) -> list[int]:
    """For each chunk, the least time from the end of a last slice's forward to the start of its backward."""
    back = [0]
    for here, there in reversed([*pairwise(problem.by_chunk)]):
        back.append(2 * here.communication[-1] + there.forward[-1] + back[-1] + _backwards(there)[0])
    return back[::-1]


def _falls(problem: Problem, place: int) -> list[int]:
    """From the start of each chunk's B to the start of chunk 0's: of a microbatch's first B (place 0) or last (-1)."""
    slice = -1 if place == 0 else 0
    steps = (here.communication[slice] + _backwards(there)[place] for here, there in pairwise(problem.by_chunk))
    return [*accumulate(steps, initial=0)]


def _backwards(costs: PassCosts) -> list[int]:
    """The least times of a chunk's backwards, in their order."""
    return list(map(min, costs.backward, costs.fused))


def _backwards_and_weights(costs: PassCosts) -> list[int]:
    """The least times from each B, or BW, on to the end of its W: which may be merged, and come right after."""
    each = zip(costs.backward, costs.weight, costs.merge_saving, costs.fused, strict=True)
    return [min(backward + weight - saved, fused) for backward, weight, saved, fused in each]


class _Event(NamedTuple):
    """The first F or B of a chunk, or the last one. work: the most that its rank can do before the first, or after."""

    kind: int
    chunk: int
    work: int


def _work_in_between(problem: Problem) -> int:
    """The largest over all pairs of ranks, of which one waits while the other works.

    The time from the start of rank `waiting` to its end is at least the sum of: the chain of passes from its start to a
    first pass, the first F or B of a chunk on rank `working`; what `working` can do neither before that nor after a
    last pass, the last F or B of a chunk there; and the chain from that to the end of `waiting`. With the makespan, the
    time begins with chunk 0, and every rank ends within it. In the place of all that a rank does may be the F of a
    chunk, its B, or both of the last chunk: none of these is before the first, or after the last.
    """
    chains = _Chains(problem)
    rows = []
    for rank in range(problem.ranks):
        alike = _Rank.of(problem, rank)
        firsts, lasts = (_events(problem, rank, works) for works in (_before_first(alike), _after_last(alike)))
        rows.append((problem.work(rank), firsts, lasts))
    for chunk, each in enumerate(problem.by_chunk):
        least = _backwards(each)
        forwards, backwards = problem.microbatches * sum(each.forward), problem.microbatches * sum(least)
        first, last = _Event(FORWARD, chunk, 0), _Event(BACKWARD, chunk, least[-1])
        rows += [(forwards, [first], [first]), (backwards, [_Event(BACKWARD, chunk, 0)], [last])]
    rows.append((forwards + backwards, [first], [last]))
    most = 0
    for waiting in range(problem.ranks):
        home = problem.chunks_of[waiting][0]
        to_first, from_last = chains.to_first(0 if problem.makespan else home), chains.from_last(home)
        for working, (work, firsts, lasts) in enumerate(rows):
            heads = [to_first[each.kind][each.chunk] - each.work for each in firsts]
            tails = [from_last[each.kind][each.chunk] - each.work for each in lasts]
            head = max(heads)
            if waiting == working or problem.makespan:  # the time ends no sooner than `working` does
                most = max(most, work + head)
            if head + work + max(tails) <= most:
                continue
            for head, first in zip(heads, firsts, strict=True):
                for tail, last in zip(tails, lasts, strict=True):
                    if head + work + tail > most and _in_order(problem, working, first, last):
                        most = head + work + tail
    return most


class _Chains:
    """The least times between passes of one microbatch, by the chain of chunks."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._arrivals, self._returns = _arrivals(problem), _returns(problem)
        ends = zip(_arrivals(problem, -1), problem.by_chunk, strict=True)  # of last slices alone
        self._last_ends = [arrival + each.forward[-1] for arrival, each in ends]
        self._first_falls, self._last_falls = _falls(problem, 0), _falls(problem, -1)
        self._before_last = [sum(_backwards(each)[:-1]) for each in problem.by_chunk]

    def to_first(self, begin: int) -> tuple[list[int], list[int]]:
        """From the start of the first F of chunk `begin` to the start of the first F, and B, of every chunk.

        -inf if that need not come after.
        """
        arrivals, down = self._arrivals, self._first_falls
        forwarded = _forwarded(self._problem, begin)
        forwards = [-_INFINITE] * begin + [arrival - arrivals[begin] for arrival in arrivals[begin:]]
        turns = [max(chunk, begin) for chunk in range(len(arrivals))]  # forward to there, to the last chunk, and back
        back = [forwarded[turn] + self._returns[turn] + down[turn] - down[chunk] for chunk, turn in enumerate(turns)]
        return forwards, back

    def from_last(self, end: int) -> tuple[list[int], list[int]]:
        """From the end of every chunk's last F, and the start of its last B, to the end of chunk `end`'s W; -inf as
        above.
        """
        first, last, before = self._first_falls, self._last_falls, self._before_last
        weight = _backwards_and_weights(self._problem.by_chunk[end])[-1]
        forwards = []
        for chunk, here in enumerate(self._last_ends):
            turn = max(chunk, end)  # all B of the microbatch are on either chunk
            fall = max(before[turn] + last[turn] - last[end], first[turn] - first[end] + before[end])
            forwards.append(self._last_ends[turn] - here + self._returns[turn] + fall + weight)
        return forwards, [-_INFINITE] * end + [each - last[end] + weight for each in last[end:]]


_OfSlices = list[int]  # an amount of memory or work of each slice, from the first of a microbatch to the last


class _Rank(NamedTuple):
    """All that decides what a rank can do before its first passes and after its last: ranks are mostly alike."""

    chunks: tuple[PassCosts, ...]
    limit: int
    microbatches: int
    slices: int

    @classmethod
    def of(cls, problem: Problem, rank: int) -> _Rank:
        chunks = tuple(problem.by_chunk[chunk] for chunk in problem.chunks_of[rank])
        return cls(chunks, problem.limit[rank], problem.microbatches, len(problem.slices))

    @property
    def units(self) -> int:
        return self.microbatches * self.slices


class _Work(NamedTuple):
    """What the slices of a microbatch hold in some of a rank's chunks, and how long their passes take there."""

    memory: _OfSlices
    forward: _OfSlices
    backward: _OfSlices  # with W


def _work(rank: _Rank, begin: int, end: int | None) -> _Work:
    none, chunks = (0,) * rank.slices, rank.chunks[begin:end]

    def of_slices(*names: str) -> _OfSlices:
        return _sums(none, *(getattr(chunk, name) for chunk in chunks for name in names))

    return _Work(of_slices("activation"), of_slices("forward"), of_slices("backward", "weight")[::-1])


def _sums(*amounts: Sequence[int]) -> _OfSlices:
    return list(map(sum, zip(*amounts, strict=True)))


def _events(problem: Problem, rank: int, works: Sequence[tuple[int, int]]) -> list[_Event]:
    """Of each of the rank's chunks the F and the B, with these works."""
    pairs = zip(problem.chunks_of[rank], works, strict=True)
    return [_Event(kind, chunk, work) for chunk, both in pairs for kind, work in enumerate(both)]


@lru_cache(maxsize=1024)
def _before_first(rank: _Rank) -> list[tuple[int, int]]:
    """Of every chunk the most work before its first F starts, and before its first B.

    Before a chunk's first B nothing of it, or of the rank's chunks before it, leaves memory. So a microbatch has been
    forwarded through some of those, or through all and has everything done in those after; the first microbatch is
    where it must be.
    """
    forwarded: list[tuple[_OfSlices, _OfSlices]] = []
    before, works = 0, []
    for position in range(len(rank.chunks)):
        done, later = _work(rank, 0, position + 1), _work(rank, position + 1, None)
        to_forward = before + _most_work(rank, forwarded, rank.limit - done.memory[0], rank.units - 1)
        before = done.forward[0]
        forwarded.append((done.memory, done.forward))
        all_later = (done.memory, _sums(done.forward, later.forward, later.backward))
        free = rank.limit - sum(done.memory)
        most = _most_work(rank, [*forwarded, all_later], free, rank.units - rank.slices)
        works.append((to_forward, sum(all_later[1]) + most))
    return works


@lru_cache(maxsize=1024)
def _after_last(rank: _Rank) -> list[tuple[int, int]]:
    """Of every chunk the most work after the end of its last F, and from the start of its last B on.

    A microbatch is somewhere between that F, or B, and its last W, holds memory, and has work left. Only the most work
    per memory matters; the last microbatch itself holds what it held in the chunks up to this, and has all left. At the
    last B of a chunk the others are behind it.
    """
    states = []  # (memory, work left): forwarded so far, not yet back
    # Backward down to some chunk, each W of what is behind done or not: the W by themselves are states of their own.
    behind = []
    for end in range(1, len(rank.chunks) + 1):
        done, later = _work(rank, 0, end), _work(rank, end, None)
        states.append((done.memory, _sums(later.forward, done.backward, later.backward)))
        behind.append((done.memory, done.backward))
    others, works = rank.units - 1, []
    for position in range(len(rank.chunks)):
        memory, left = map(sum, states[position])
        room, weights = rank.limit - memory, _weights(rank, others, len(rank.chunks))
        most = _most_work(rank, [*states[position:], *behind], room, rank.units - rank.slices, weights)
        after_forward = left + most
        memory, left = behind[position][0][0], behind[position][1][0]
        weights = _weights(rank, others, position)
        most = _most_work(rank, behind[:position], rank.limit - memory, others, weights)
        works.append((after_forward, left + most))
    return works


def _in_order(problem: Problem, rank: int, first: _Event, last: _Event) -> bool:
    """Whether a first pass surely comes before a last pass, so that there is a time between them.

    Either the chain of chunks says so; or with the last pass first all microbatches would be in the memory of one chunk
    at once, and there is no room: they must have been forwarded through it by then, and cannot have come back to it.
    """
    if first.kind == FORWARD and (last.kind == BACKWARD or first.chunk <= last.chunk):
        return True
    if first.kind == BACKWARD and last.kind == BACKWARD and last.chunk <= first.chunk:
        return True
    kept = problem.chunks_of[rank][0] if last.kind == FORWARD else first.chunk
    return problem.microbatches * sum(problem.by_chunk[kept].activation) > problem.limit[rank]


def _memory_over_time(problem: Problem, rank: int, returns: Sequence[int]) -> int:
    """Memory times time: what all microbatches need at least, by what the rank has.

    A chunk's activation is there from the start of F to the end of B, and then what W needs, or for a fused backward
    the activation, to the end of W. (Keys and values are there as long as a microbatch's first slice.) The memory is
    not full at once, nor to the end: after a time t there is at most what the passes of t fill (F, or F and B where
    that leaves more) and `largest`, for a pass that is running; and before the end likewise, what the passes yet to
    come free.
    """
    limit, microbatches = problem.limit[rank], problem.microbatches
    needed = largest = 0
    fills, frees = [], []  # (memory, time)
    for chunk in problem.chunks_of[rank]:
        each = problem.by_chunk[chunk]
        least, both = _backwards(each), _backwards_and_weights(each)
        gradients = sum(each.freed) - sum(each.activation)  # of keys and values: from the end of the first B on
        needed += microbatches * gradients * sum(least[1:])
        for slice, (taken, length) in enumerate(zip(each.activation, each.forward, strict=True)):
            place = len(least) - 1 - slice
            held, alone = each.held[place], max(0, each.weight[place] - each.merge_saving[place])
            stay = sum(each.forward[slice:]) + returns[chunk] + sum(least[:place])
            apart = taken * each.backward[place] + held * alone
            needed += microbatches * (taken * stay + min(apart, taken * each.fused[place]))
            left = held + (gradients if place == 0 else 0)
            largest = max(largest, taken, left)
            fills += [(taken, length), (left, length + least[place])]
            frees += [(each.freed[place], both[place]), (held, alone)]
    if limit <= 0:
        return 0
    spare = max(0, limit - largest)
    ramps = [min((time * spare // memory for memory, time in some if memory), default=0) for some in (fills, frees)]
    if sum(ramps) > problem.work(rank):  # they may overlap
        ramps = []
    return (needed + spare * sum(ramps) // 2) // limit


def _joint_warm_up_bound(problem: Problem, bound: int) -> int:
    """A larger bound, one chunk per rank, from the warm-ups of all ranks together.

    By bisection: the least cost for which every rank can have some number of F before its first B without more idle
    time than that cost allows.
    """
    tried = range(bound, bound + max(_returns(problem)) + max(each.forward[0] for each in problem.by_chunk))
    return bound + bisect_left(tried, True, key=lambda cost: warm_up_forwards(problem, cost) is not None)


def warm_up_forwards(problem: Problem, cost: int) -> list[int] | None:
    """With one chunk per rank: how many F each rank runs before its first B; None when no schedule costs so little.

    If a whole number of F does not fill the time until that B can start, the rank is idle, or runs one F more and so
    delays the first B of every rank before it. The least delay is always the best choice.
    """
    returns, delay, forwards = _returns(problem), 0, []
    for rank in reversed(range(problem.ranks)):
        each = problem.by_chunk[rank]
        taken, length = each.activation[0], each.forward[0]
        cool_down = returns[rank] + _backwards_and_weights(each)[0]
        cool_down = max(0, cool_down - _after_last(_Rank.of(problem, rank))[0][0])
        most = problem.limit[rank] // taken if taken else problem.units
        idle = cost - problem.work(rank) - (cool_down if most < problem.units else 0)
        until = length + returns[rank] + delay
        most = min(most, problem.units)
        fit = min(most, until // length) if length else most
        if until - fit * length > idle:
            if fit == most:
                return None
            fit += 1
            delay += fit * length - until
        forwards.append(fit)
    return forwards[::-1]


def _weights(rank: _Rank, others: int, position: int) -> list[_Kind]:
    """The W of the rank's chunks: of `others` units, and in the chunks behind a position of one more."""
    found = []
    for index, chunk in enumerate(rank.chunks):
        count = others + (index > position) if rank.slices == 1 else rank.microbatches
        found += [(held, weight, count) for held, weight in zip(chunk.held, chunk.weight, strict=True)]
    return found


def _most_work(
    rank: _Rank,
    states: Sequence[tuple[_OfSlices, _OfSlices]],
    limit: int,
    units: int,
    weights: Sequence[_Kind] = (),
) -> int:
    """The most work of so many units in any of the states, and of W by themselves, in the memory."""
    each = [pair for state in states for pair in zip(*state, strict=True)]
    if rank.slices > 1:  # as many units of every slice as microbatches
        kinds = [(*pair, rank.microbatches) for pair in each]
    else:  # A state is never worse than one with more memory and less work, as all together are so many units.
        useful = [s for s in set(each) if not any(o != s and o[0] <= s[0] and o[1] >= s[1] for o in each)]
        kinds = [(*pair, units) for pair in useful]
    return _most_filled((*kinds, *weights), limit)


_Kind = tuple[int, int, int]  # memory, work, and how many there are


@lru_cache(maxsize=16384)  # levels of memory are often alike
def _most_filled(all_kinds: tuple[_Kind, ...], limit: int) -> int:
    """The most work in the memory; a little more than that where there are too many numbers of each kind to try."""
    if limit < 0:
        return 0
    without_memory = sum(work * most for memory, work, most in all_kinds if memory == 0)
    kinds = sorted((kind for kind in all_kinds if min(kind[:2]) > 0), key=lambda kind: kind[0] / kind[1])
    tries = 100

    def filled(index: int, free: int) -> int:
        """The memory filled with the most work per memory first, at last with a part of one."""
        found = 0
        for memory, work, most in kinds[index:]:
            count = min(free // memory, most)
            found, free = found + count * work, free - count * memory
            if count < most:
                return found + free * work // memory
        return found

    def best(index: int, free: int) -> int:
        nonlocal tries
        if index == len(kinds):
            return 0
        memory, work, most = kinds[index]
        found = 0
        for count in range(min(free // memory, most), -1, -1):
            rest = free - count * memory
            possible = count * work + filled(index + 1, rest)
            if possible <= found:
                break  # with fewer of this kind still less
            tries -= 1
            found = max(found, possible if tries < 0 else count * work + best(index + 1, rest))
        return found

    return without_memory + best(0, limit)
