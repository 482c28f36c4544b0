"""Lower bounds on the cost of any schedule of a problem.

Four arguments, of which the largest number counts. Each is proven where it is written.

- `_chain`: the longest chain of passes that must follow each other.
- `_work_in_between`: what a rank can do before the first pass of a chunk, and leave for after the last, is little, as
  its memory is. The rest it does in between, and another rank, or the same one, waits: it began before, and the last
  microbatch has yet to come back to it. With one rank in both parts this is idle time in warm-up and cool-down; with
  two it is the time for which the first rank of a V waits for the last.
- `_memory_over_time`: every microbatch stays in memory for a round trip at least, and memory times time is limited.
- `_joint_warm_up_bound`: with one chunk per rank, the ranks' warm-ups are whole numbers of forwards.

All hold with fused backwards and merged W, too: what could run elsewhere is counted without their savings, and all that
must run with them. Integers as in `Problem`; microbatches cost the same, so that those of a chunk pass in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from zbkern.pipeline.planner.problem import BACKWARD, FORWARD, Problem

_INFINITE = 2**62


def cost_bound(problem: Problem) -> int:
    """No schedule of `problem` costs less (its makespan, when that is minimised)."""
    ranks = range(problem.ranks)
    returns = _returns(problem)
    over_time = (_memory_over_time(problem, rank, returns) for rank in ranks)
    bound = max(_chain(problem), _work_in_between(problem), *over_time)
    if problem.placement == tuple(ranks) and not problem.makespan:
        bound = _joint_warm_up_bound(problem, bound)
    return bound


def _arrivals(problem: Problem) -> list[int]:
    """The earliest start of each chunk's first forward."""
    at = [0]
    for chunk in range(problem.chunks - 1):
        at.append(at[-1] + problem.forward[chunk] + problem.communication[chunk])
    return at


def _returns(problem: Problem) -> list[int]:
    """For each chunk, the least time from the end of its forward to the start of its backward."""
    back = [0] * problem.chunks
    for chunk in reversed(range(problem.chunks - 1)):
        there = problem.communication[chunk] + problem.forward[chunk + 1]
        back[chunk] = there + back[chunk + 1] + _backward(problem, chunk + 1) + problem.communication[chunk]
    return back


def _backward(problem: Problem, chunk: int) -> int:
    return min(problem.backward[chunk], problem.fused[chunk])


def _backward_and_weight(problem: Problem, chunk: int) -> int:
    """The least time from the start of a B, or BW, to the end of its W: which may be merged, and come right after."""
    apart = problem.backward[chunk] + problem.weight[chunk] - problem.merge_saving[chunk]
    return min(apart, problem.fused[chunk])


def _chain(problem: Problem) -> int:
    """All F of a chunk, or all B, or both of the last chunk, after the passes on the way there, before those back."""
    arrivals, returns, microbatches = _arrivals(problem), _returns(problem), problem.microbatches
    last = problem.chunks - 1
    weight = _backward_and_weight(problem, 0) - _backward(problem, 0)
    down = [0] * problem.chunks  # from the end of the chunk's backward to the end of chunk 0's
    for chunk in range(1, problem.chunks):
        down[chunk] = problem.communication[chunk - 1] + _backward(problem, chunk - 1) + down[chunk - 1]
    longest = arrivals[last] + microbatches * (problem.forward[last] + _backward(problem, last)) + down[last]
    for chunk in range(problem.chunks):
        there_and_back = returns[chunk] + _backward(problem, chunk) + down[chunk]
        longest = max(longest, arrivals[chunk] + microbatches * problem.forward[chunk] + there_and_back)
        there = arrivals[chunk] + problem.forward[chunk] + returns[chunk]
        longest = max(longest, there + microbatches * _backward(problem, chunk) + down[chunk])
    return longest + weight


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
    time begins with chunk 0, and every rank ends within it.
    """
    chains = _Chains(problem)
    rows = [
        (problem.work(rank), _first_passes(problem, rank), _last_passes(problem, rank)) for rank in range(problem.ranks)
    ]
    most = 0
    for waiting in range(problem.ranks):
        home = problem.chunks_of(waiting)[0]
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
        self._down = [0]  # from the start of the chunk's B to the start of chunk 0's
        for chunk in range(1, problem.chunks):
            self._down.append(self._down[-1] + _backward(problem, chunk) + problem.communication[chunk - 1])

    def to_first(self, begin: int) -> tuple[list[int], list[int]]:
        """From the start of the first F of chunk `begin` to the start of the first F, and B, of every chunk.

        -inf if that need not come after.
        """
        arrivals, down, forward = self._arrivals, self._down, self._problem.forward
        forwards, backwards = [-_INFINITE] * begin, []
        for chunk in range(self._problem.chunks):
            if chunk >= begin:
                forwards.append(arrivals[chunk] - arrivals[begin])
            turn = max(chunk, begin)  # forward to there, through the last chunk, and back
            there_and_back = forward[turn] + self._returns[turn]
            backwards.append(arrivals[turn] - arrivals[begin] + there_and_back + down[turn] - down[chunk])
        return forwards, backwards

    def from_last(self, end: int) -> tuple[list[int], list[int]]:
        """From the end of every chunk's last F, and the start of its last B, to the end of chunk `end`'s W; -inf as
        above.
        """
        arrivals, down, forward = self._arrivals, self._down, self._problem.forward
        weight = _backward_and_weight(self._problem, end)
        forwards, backwards = [], [-_INFINITE] * end
        for chunk in range(self._problem.chunks):
            turn = max(chunk, end)
            there = arrivals[turn] + forward[turn] - arrivals[chunk] - forward[chunk]
            forwards.append(there + self._returns[turn] + down[turn] - down[end] + weight)
            if chunk >= end:
                backwards.append(down[chunk] - down[end] + weight)
        return forwards, backwards


def _first_passes(problem: Problem, rank: int) -> list[_Event]:
    """The first F and the first B of every chunk, with the most work before their start.

    Before a chunk's first B nothing of it, or of the rank's chunks before it, leaves memory. So a microbatch has been
    forwarded through some of those, or through all and has everything done in those after; the first microbatch is
    where it must be.
    """
    own_chunks, limit, others = problem.chunks_of(rank), problem.limit[rank], problem.microbatches - 1
    later = sum(problem.forward[c] + problem.backward[c] + problem.weight[c] for c in own_chunks)
    memory = forward = 0
    forwarded: list[tuple[int, int]] = []
    events = []
    for chunk in own_chunks:
        memory += problem.activation[chunk]
        free = limit - memory
        events.append(_Event(FORWARD, chunk, forward + _most_work(tuple(forwarded), free, others)))
        forward += problem.forward[chunk]
        later -= problem.forward[chunk] + problem.backward[chunk] + problem.weight[chunk]
        forwarded.append((memory, forward))
        all_later = (memory, forward + later)
        work = forward + later + _most_work((*forwarded, all_later), free, others)
        events.append(_Event(BACKWARD, chunk, work))
    return events


def _last_passes(problem: Problem, rank: int) -> list[_Event]:
    """The last F of every chunk, with the most work after its end, and the last B, with the most from its start on."""
    own_chunks, limit = problem.chunks_of(rank), problem.limit[rank]
    events = []
    for position, chunk in enumerate(own_chunks):
        events.append(_Event(FORWARD, chunk, _work_left(problem, own_chunks, limit, position, False)))
        events.append(_Event(BACKWARD, chunk, _work_left(problem, own_chunks, limit, position, True)))
    return events


def _in_order(problem: Problem, rank: int, first: _Event, last: _Event) -> bool:
    """Whether a first pass surely comes before a last pass, so that there is a time between them.

    Either the chain of chunks says so; or with the last pass first all microbatches would be in the memory of one chunk
    at once, and there is no room: they must have been forwarded through it by then, and cannot have come back to it.
    """
    if first.kind == FORWARD and (last.kind == BACKWARD or first.chunk <= last.chunk):
        return True
    if first.kind == BACKWARD and last.kind == BACKWARD and last.chunk <= first.chunk:
        return True
    kept = problem.chunks_of(rank)[0] if last.kind == FORWARD else first.chunk
    return problem.microbatches * problem.activation[kept] > problem.limit[rank]


def _memory_over_time(problem: Problem, rank: int, returns: Sequence[int]) -> int:
    """Memory times time: what all microbatches need at least, by what the rank has.

    A chunk's activation is there from the start of F to the end of B, and then what W needs, or for a fused backward
    the activation, to the end of W. The memory is not full at once, nor to the end: after a time t there is at most
    what the passes of t fill (F, or F and B where that leaves more) and `largest`, for a pass that is running; and
    before the end likewise, what the passes yet to come free.
    """
    limit, microbatches = problem.limit[rank], problem.microbatches
    needed = largest = 0
    fills, frees = [], []  # (memory, time)
    for chunk in problem.chunks_of(rank):
        activation, held = problem.activation[chunk], problem.held[chunk]
        backward, weight = problem.backward[chunk], max(0, problem.weight[chunk] - problem.merge_saving[chunk])
        apart = activation * backward + held * weight
        stay = problem.forward[chunk] + returns[chunk]
        needed += microbatches * (activation * stay + min(apart, activation * problem.fused[chunk]))
        largest = max(largest, activation, held)
        fills += [(activation, problem.forward[chunk]), (held, problem.forward[chunk] + _backward(problem, chunk))]
        frees += [(activation, _backward_and_weight(problem, chunk)), (held, weight)]
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
    if warm_up_forwards(problem, bound) is not None:
        return bound
    low, high = bound, bound + max(_returns(problem)) + max(problem.forward)
    while low + 1 < high:  # low is not possible; high is, or is as far as this looks
        middle = (low + high) // 2
        low, high = (low, middle) if warm_up_forwards(problem, middle) is not None else (middle, high)
    return high if warm_up_forwards(problem, high) is not None else low


def warm_up_forwards(problem: Problem, cost: int) -> list[int] | None:
    """With one chunk per rank: how many F each rank runs before its first B; None when no schedule costs so little.

    If a whole number of F does not fill the time until that B can start, the rank is idle, or runs one F more and so
    delays the first B of every rank before it. The least delay is always the best choice.
    """
    returns, limit, microbatches = _returns(problem), problem.limit, problem.microbatches
    delay, forwards = 0, []
    for rank in reversed(range(problem.ranks)):
        cool_down = returns[rank] + _backward_and_weight(problem, rank)
        cool_down = max(0, cool_down - _work_left(problem, [rank], limit[rank]))
        most = microbatches if not problem.activation[rank] else limit[rank] // problem.activation[rank]
        idle = cost - problem.work(rank) - (cool_down if most < microbatches else 0)
        until = problem.forward[rank] + returns[rank] + delay
        length, most = problem.forward[rank], min(most, microbatches)
        fit = min(most, until // length) if length else most
        if until - fit * length > idle:
            if fit == most:
                return None
            fit += 1
            delay += fit * length - until
        forwards.append(fit)
    return forwards[::-1]


def _work_left(
    problem: Problem, own_chunks: Sequence[int], limit: int, position: int = 0, backward: bool = False
) -> int:
    """The most work that can be left after the last F of a rank's chunk, or, `backward`, from the start of its last B.

    A microbatch is somewhere between that F, or B, and its last W, holds memory, and has work left. Only the most work
    per memory matters; the last microbatch itself holds what it held in the chunks up to this, and has all left.
    """
    states = []  # (memory, work left): forwarded so far, not yet back
    memory, left = 0, sum(problem.forward[c] + problem.backward[c] + problem.weight[c] for c in own_chunks)
    for chunk in own_chunks:
        memory, left = memory + problem.activation[chunk], left - problem.forward[chunk]
        states.append((memory, left))
    # Backward down to some chunk, each W of what is behind done or not: the W by themselves are states of their own.
    behind = []
    memory = left = 0
    for chunk in own_chunks:
        memory, left = memory + problem.activation[chunk], left + problem.backward[chunk] + problem.weight[chunk]
        behind.append((memory, left))
    others = problem.microbatches - 1
    weights = [(problem.held[chunk], problem.weight[chunk], others) for chunk in own_chunks]
    if not backward:
        memory, left = states[position]
        return left + _most_work((*states[position:], *behind), limit - memory, others, tuple(weights))
    memory, left = behind[position]
    weights[position + 1 :] = [(held, weight, others + 1) for held, weight, _ in weights[position + 1 :]]
    return left + _most_work(tuple(behind[: position + 1]), limit - memory, others, tuple(weights))


_State = tuple[int, int]  # memory, work


@lru_cache(maxsize=16384)  # ranks are mostly alike, and levels of memory often
def _most_work(
    states: tuple[_State, ...], limit: int, microbatches: int, weights: tuple[tuple[int, int, int], ...] = ()
) -> int:
    """The most work of so many microbatches in any of the states, and of W by themselves, in the memory.

    weights: (memory, work, how many there are). The answer is a little more than the most where there are too many
    numbers of each kind to try.
    """
    if limit < 0:
        return 0
    each_state = [(*state, microbatches) for state in set(states)]
    without_memory = sum(work * most for memory, work, most in (*each_state, *weights) if memory == 0)
    # A state is never worse than one with more memory and less work, as all states together are so many microbatches.
    useful = [one for one in each_state if not any(o != one and o[0] <= one[0] and o[1] >= one[1] for o in each_state)]
    kinds = [kind for kind in (*useful, *weights) if kind[0] > 0 and kind[1] > 0]
    kinds.sort(key=lambda kind: kind[0] / kind[1])
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
        if index == len(kinds) - 1:  # as many as fit
            found = min(free // memory, most) * work
            tries -= found > 0
            return found
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
