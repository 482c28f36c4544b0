"""Schedules from a building block (arXiv 2405.15362): one microbatch in unit slots, repeated, compacted, reordered.

Two chunks per rank in a V, so that every rank holds an early and a late chunk, and with the right distances all ranks
hold equally much. The block of one microbatch says in which slot each of its passes starts on each rank; repeated
every six slots, the passes of all microbatches interleave. That fixes the steady state. Warm-up and cool-down are then
reordered: every pass moves to the earliest free slot that its inputs and the peak memory of the repeated block allow.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

_PERIOD = 6  # two chunks with F, B and W of one slot each
_F0, _F1, _B1, _B0, _W = range(5)  # the phases of one microbatch, in the order in which a rank runs them
_KIND, _CHUNK = "FFBB", (0, 1, 1, 0)  # of the first four, the local chunk
_IDLE = -1

Times = list[list[list[int]]]  # slot of each pass, by rank, phase and microbatch; W in the order of the B they follow


def split_order(block: Sequence[Sequence[int]], microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Each rank's (kind, local chunk, microbatch) in order, for a block that gives the slots of F0, F1, B1, B0 by rank.

    W takes the next free slot, first of chunk 1, then of chunk 0.
    """
    times = _repeat(block, microbatches)
    whole = _with_weights(times)
    whole = _reorder(whole, _Placed(whole, [1] * 5), *_steady_state(times))
    times = [row[:_W] for row in _compact(whole)]
    _, end = _steady_state(times)
    times = _reorder(times, _Filled(times), (0, 0), end)
    times = [row[:_W] for row in _compact(_with_weights(times))]
    return [list(_row_order(row)) for row in times]


def fused_order(block: Sequence[Sequence[int]], microbatches: int) -> list[list[tuple[str, int, int]]]:
    """The same for a block in which B and W are one pass BW of two slots."""
    times = _repeat(block, microbatches)
    times = _reorder(times, _Placed(times, [1, 1, 2, 2]), (0, 0), (0, 0))
    return [
        [(("F", "F", "BW", "BW")[phase], _CHUNK[phase], microbatch) for _, phase, microbatch in _passes(row)]
        for row in times
    ]


def _repeat(block: Sequence[Sequence[int]], microbatches: int) -> Times:
    return [[[first + _PERIOD * count for count in range(microbatches)] for first in row] for row in block]


def _passes(row: list[list[int]]) -> list[tuple[int, int, int]]:
    """(slot, phase, microbatch) of every pass of one rank, by slot."""
    return sorted([(slot, phase, index) for phase, slots in enumerate(row) for index, slot in enumerate(slots)])


def _all_passes(times: Times) -> list[tuple[int, int, int, int]]:
    """(slot, rank, phase, microbatch) of every pass of all ranks, by slot."""
    in_slot: list[list[tuple[int, int, int, int]]] = [[] for _ in range(1 + _last_slot(times))]
    for rank, row in enumerate(times):
        for phase, slots in enumerate(row):
            for index, slot in enumerate(slots):
                in_slot[slot].append((slot, rank, phase, index))
    return list(chain.from_iterable(in_slot))


def _last_slot(times: Times) -> int:
    return max(max(slots) for row in times for slots in row)


def _steady_state(times: Times) -> tuple[tuple[int, int], tuple[int, int]]:
    """(slot, rank) from where rank 0 has its first B0 to after where the last forward enters the pipeline.

    With few microbatches the second comes first: there is no steady state, and everything may move.
    """
    return (times[0][_B0][0], 0), (times[0][_F0][-1], 1)


def _with_weights(times: Times) -> Times:
    """A W in each free slot, for the oldest B that has none yet."""
    filled = []
    for row in times:
        cells = [_IDLE] * (1 + _last_slot([row]))
        for phase, slots in enumerate(row):
            for slot in slots:
                cells[slot] = phase
        weights: list[int] = []
        waiting = 0
        for slot, phase in enumerate(cells):
            if phase in (_B1, _B0):
                waiting += 1
            elif phase == _IDLE and waiting:
                waiting -= 1
                weights.append(slot)
        weights += range(len(cells), len(cells) + waiting)
        filled.append([*row, weights])
    return filled


def _row_order(row: list[list[int]]) -> Iterator[tuple[str, int, int]]:
    """One rank's passes, with a W in every gap: of chunk 1 when one is pending, else of chunk 0."""
    waiting: tuple[deque[int], deque[int]] = (deque(), deque())
    clock = 0
    for slot, phase, microbatch in _passes(row):
        for _ in range(min(slot - clock, len(waiting[0]) + len(waiting[1]))):
            chunk = 1 if waiting[1] else 0
            yield "W", chunk, waiting[chunk].popleft()
        clock = slot + 1
        chunk = _CHUNK[phase]
        if phase in (_B1, _B0):
            waiting[chunk].append(microbatch)
        yield _KIND[phase], chunk, microbatch
    for chunk in (1, 0):
        for microbatch in waiting[chunk]:
            yield "W", chunk, microbatch


def _reorder(times: Times, memory: _Placed | _Filled, start: tuple[int, int], stop: tuple[int, int]) -> Times:
    """Moves each pass, in order of time, to the earliest slot that its inputs, the rank and the memory allow.

    Those from `start` to before `stop`, by (slot, rank), stay. `memory` knows which slots of a rank are free and what
    the rank would hold.
    """
    times = [[list(slots) for slots in row] for row in times]
    lengths = memory.lengths
    backwards: list[list[int]] = [[] for _ in times]  # slots of the B placed so far, in order
    for slot, rank, phase, index in _all_passes(times):
        if not start <= (slot, rank) < stop:
            row = times[rank]
            first = 0
            if phase in (_F0, _B1) and rank > 0:
                first = times[rank - 1][phase][index] + lengths[phase]
            if phase in (_F1, _B0) and rank + 1 < len(times):
                first = times[rank + 1][phase][index] + lengths[phase]
            if phase in (_F1, _B1, _B0):
                first = max(first, row[phase - 1][index] + lengths[phase - 1])
            if phase == _W:
                first = max(first, backwards[rank][index] + 1)
            if index > 0:
                first = max(first, row[phase][index - 1] + lengths[phase])
            row[phase][index] = memory.move(rank, phase, slot, first)
        if phase in (_B1, _B0):
            insort(backwards[rank], times[rank][phase][index])
    return times


class _Placed:
    """Ranks whose every pass has a slot: an F adds to what the rank holds, W (or the end of a BW) takes it away."""

    def __init__(self, times: Times, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self._fused = len(lengths) == _W
        self._cells, self._held = [], []
        slots = 2 + _last_slot(times)
        for row in times:
            cells, held, now = [_IDLE] * (slots + 1), [], 0
            for phase, starts in enumerate(row):
                for start in starts:
                    cells[start : start + lengths[phase]] = [phase] * lengths[phase]
            for slot, phase in enumerate(cells):
                starts_release = phase == _W or (self._fused and phase in (_B1, _B0) and cells[slot - 1] == phase)
                now += (phase in (_F0, _F1)) - starts_release
                held.append(now)
            self._cells.append(cells)
            self._held.append(held)
        self._limit = max(max(held) for held in self._held)

    def move(self, rank: int, phase: int, slot: int, first: int) -> int:
        cells, held, length = self._cells[rank], self._held[rank], self.lengths[phase]
        if phase in (_F0, _F1):
            lowest = slot
            while lowest > first and held[lowest - 1] < self._limit:
                lowest -= 1
            first = lowest
        cells[slot : slot + length] = [_IDLE] * length
        start = cells.index(_IDLE, first)
        while cells[start : start + length].count(_IDLE) < length:
            start = cells.index(_IDLE, start + 1)
        cells[start : start + length] = [phase] * length
        change = 1 if phase in (_F0, _F1) else -1 if phase == _W or self._fused else 0
        for at in range(start + length - 1, slot + length - 1):
            held[at] += change
        return start


class _Filled:
    """Ranks in which every free slot runs a pending W, if there is one."""

    def __init__(self, times: Times) -> None:
        self.lengths = [1] * _W
        self._cells, self._states = [], []
        slots = 2 + _last_slot(times)
        peak = 0
        for row in times:
            cells = [_IDLE] * slots
            for phase, starts in enumerate(row):
                for start in starts:
                    cells[start] = phase
            states = [(0, 0)]  # before each slot: microbatches held, and pending W
            for phase in cells:
                states.append(_after(states[-1], phase))
            self._cells.append(cells)
            self._states.append(states)
            peak = max(peak, *(held for held, _ in states))
        self._limit = peak

    def move(self, rank: int, phase: int, slot: int, first: int) -> int:
        cells, states = self._cells[rank], self._states[rank]
        cells[slot] = _IDLE
        start = next(at for at in range(first, slot + 1) if cells[at] == _IDLE and self._fits(rank, phase, at, slot))
        cells[start] = phase
        for at in range(start, len(cells)):
            state = _after(states[at], cells[at])
            if at > slot and state == states[at + 1]:
                break
            states[at + 1] = state
        return start

    def _fits(self, rank: int, phase: int, start: int, slot: int) -> bool:
        """Whether the rank stays in its limit with the pass at `start`; past `slot` it holds no more than before."""
        cells = self._cells[rank]
        state = self._states[rank][start]
        for at in range(start, slot + 1):
            state = _after(state, phase if at == start else cells[at])
            if state[0] > self._limit and at < slot:
                return False
        return True


def _after(state: tuple[int, int], phase: int) -> tuple[int, int]:
    held, waiting = state
    if phase == _IDLE:
        return (held - 1, waiting - 1) if waiting else state
    return (held + 1, waiting) if phase in (_F0, _F1) else (held, waiting + 1)


def _compact(times: Times) -> Times:
    """The slots when every rank keeps its order and starts each pass as soon as it can."""
    compacted: Times = [[[0] * len(slots) for slots in row] for row in times]
    free, last = [0] * len(times), len(times) - 1
    for _, rank, phase, index in _all_passes(times):
        start, source = free[rank], rank
        if phase in (_F0, _B1):
            source = max(rank - 1, 0)
        elif phase in (_F1, _B0):
            source = min(rank + 1, last)
        if source != rank:
            start = max(start, compacted[source][phase][index] + 1)
        compacted[rank][phase][index] = start
        free[rank] = start + 1
    return compacted
