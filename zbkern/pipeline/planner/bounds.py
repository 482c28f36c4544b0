"""Lower bounds on the cost of any schedule of a problem.

Per rank, cost = work + idle time. Some idle time cannot be avoided: in the warm-up, before the gradient of the first
microbatch is back, a rank can only run what its memory has room for, and in the cool-down, after its last forward, only
what its memory held then. This is the first-stage bound of one chunk per rank, for every rank and for any number of
chunks. It holds with fused backwards and merged W, too: what could run in those times is counted without their savings,
and all that must run with them. Beside it: the longest chain of passes that must follow each other. Integers as in
`Problem`; microbatches cost the same, so that their order is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.pipeline.planner.problem import Problem


def cost_bound(problem: Problem) -> int:
    """No schedule of `problem` costs less (its makespan, when that is minimised)."""
    ranks = range(problem.ranks)
    bound = max([_chain(problem), *(_rank_bound(problem, rank) for rank in ranks)])
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


def _rank_bound(problem: Problem, rank: int) -> int:
    own_chunks, arrivals, returns = problem.chunks_of(rank), _arrivals(problem), _returns(problem)
    first, limit, microbatches = own_chunks[0], problem.limit[rank], problem.microbatches
    warm_up = 0
    for position, chunk in enumerate(own_chunks):
        # From this rank's first F on until B of `chunk` can start, chunks up to it run F only, which stay in memory;
        # the later ones can run everything, for microbatches that this chunk has forwarded.
        latest = arrivals[chunk] - arrivals[first] + problem.forward[chunk] + returns[chunk]
        kinds = []
        memory = work = 0
        for index, other in enumerate(own_chunks):
            work += problem.forward[other]
            if index <= position:
                memory += problem.activation[other]
            else:
                work += problem.backward[other] + problem.weight[other]
            if index <= position or index == len(own_chunks) - 1:
                kinds.append((memory, work))
        warm_up = max(warm_up, latest - _most_work(kinds, limit, microbatches))
    cool_down = max(
        0,
        returns[first] + _backward_and_weight(problem, first) - _cool_down_work(problem, own_chunks, limit),
    )
    # The warm-up ends before the cool-down begins, unless all forwards of the first chunk fit the memory at once.
    apart = microbatches * problem.activation[first] > limit
    late = arrivals[first] if problem.makespan else 0
    return problem.work(rank) + (warm_up + cool_down if apart else max(warm_up, cool_down)) + late


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
        cool_down = max(0, cool_down - _cool_down_work(problem, [rank], limit[rank]))
        room = microbatches if not problem.activation[rank] else limit[rank] // problem.activation[rank]
        idle = cost - problem.work(rank) - (cool_down if room < microbatches else 0)
        until = problem.forward[rank] + returns[rank] + delay
        length, room = problem.forward[rank], min(room, microbatches)
        fit = min(room, until // length) if length else room
        if until - fit * length > idle:
            if fit == room:
                return None
            fit += 1
            delay += fit * length - until
        forwards.append(fit)
    return forwards[::-1]


def _cool_down_work(problem: Problem, own_chunks: Sequence[int], limit: int) -> int:
    """The most work that can be left for the time from the end of the first chunk's last F to the end of all.

    A microbatch is somewhere between its F in the first chunk and its last W, holds memory, and has work left. Only the
    most work per memory matters; the last microbatch itself holds the first chunk's activation and has all left.
    """
    first = own_chunks[0]
    whole = (
        sum(problem.forward[c] + problem.backward[c] + problem.weight[c] for c in own_chunks) - problem.forward[first]
    )
    states = [(problem.activation[first], whole)]
    memory, left = problem.activation[first], whole
    for chunk in own_chunks[1:]:  # forwarded so far
        memory, left = memory + problem.activation[chunk], left - problem.forward[chunk]
        states.append((memory, left))
    # Backward down to some chunk, each W of what is behind done or not: the W by themselves are states of their own.
    for index in range(len(own_chunks)):
        ahead = own_chunks[: len(own_chunks) - 1 - index]
        states.append(
            (sum(problem.activation[c] for c in ahead), sum(problem.backward[c] + problem.weight[c] for c in ahead))
        )
    states += [(problem.held[chunk], problem.weight[chunk]) for chunk in own_chunks]
    states = [(memory, left) for memory, left in states if left > 0]
    return whole + _most_work(states, limit - problem.activation[first], problem.microbatches - 1)


def _most_work(kinds: Sequence[tuple[int, int]], limit: int, microbatches: int) -> int:
    """The most work from any number of the kinds (memory, work), at most `microbatches` of each, in the memory."""
    if limit < 0:
        return 0
    free = sum(work * microbatches for memory, work in kinds if memory == 0)
    kinds = [kind for kind in kinds if min(kind) > 0]
    kinds = [
        (memory, work)
        for index, (memory, work) in enumerate(kinds)
        if not any(
            (less <= memory and more >= work and (less, more) != (memory, work))
            or ((less, more) == (memory, work) and other < index)
            for other, (less, more) in enumerate(kinds)
        )
    ]
    kinds.sort(key=lambda kind: kind[0] / kind[1])

    def best(index: int, room: int, steps: int) -> int:
        if index == len(kinds):
            return 0
        memory, work = kinds[index]
        most = min(room // memory, microbatches)
        if index == len(kinds) - 1:
            return most * work
        if steps * (most + 1) > 20_000:  # too many to try: the room filled with the best kind, whole or not
            return room * work // memory + 1
        found, (next_memory, next_work) = 0, kinds[index + 1]
        for count in range(most, -1, -1):
            rest = room - count * memory
            if count * work + rest * next_work // next_memory < found:
                break  # fewer of this kind, and as much as there is room for of all others, do less work still
            found = max(found, count * work + best(index + 1, rest, steps * (most + 1)))
        return found

    return free + best(0, limit, 1)
