"""Schedules from a building block (arXiv 2405.15362): one microbatch in unit slots, repeated, compacted, reordered.

Two chunks per rank in a V, so that every rank holds an early and a late chunk, and with the right distances all ranks
hold equally much. The block of one microbatch says in which slot each of its passes starts on each rank; repeated
every six slots, the passes of all microbatches interleave. That fixes the steady state. Warm-up and cool-down are then
reordered: every pass moves to the earliest free slot that its inputs and the peak memory of the repeated block allow.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

_PERIOD = 6  # two chunks with F, B and W of one slot each
_F0, _F1, _B1, _B0, _W = range(5)  # the phases of one microbatch, in the order in which a rank runs them
_KIND, _CHUNK = "FFBB", (0, 1, 1, 0)  # of the first four, the local chunk
_FROM = (-1, 1, -1, 1, 0)  # the rank before or behind that a phase has its input from
_IDLE, _BUSY = -1, -2  # of slots; busy is the first of a pass of two

Times = list[list[list[int]]]  # slot of each pass, by rank, phase and microbatch; W in the order of the B they follow


def split_order(block: Iterable[Sequence[int]], microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Each rank's (kind, local chunk, microbatch) in order, for a block that gives the slots of F0, F1, B1, B0 by rank.

    W takes the next free slot, first of chunk 1, then of chunk 0.
    """
    times = _repeat(block, microbatches)
    whole = _with_weights(times)
    whole = _reorder(whole, [1] * 5, *_steady_state(times))
    times = [row[:_W] for row in _compact(whole)]
    _, end = _steady_state(times)
    times = _reorder(times, [1] * 4, (0, 0), end)
    times = [row[:_W] for row in _compact(_with_weights(times))]
    return [[each[1:] for each in _filled(row)] for row in times]


def fused_order(block: Iterable[Sequence[int]], microbatches: int) -> list[list[tuple[str, int, int]]]:
    """The same for a block in which B and W are one pass BW of two slots."""
    times = _repeat(block, microbatches)
    times = _reorder(times, [1, 1, 2, 2], (0, 0), (0, 0))
    return [
        [(("F", "F", "BW", "BW")[phase], _CHUNK[phase], microbatch) for _, phase, microbatch in _passes(row)]
        for row in times
    ]


def _repeat(block: Iterable[Sequence[int]], microbatches: int) -> Times:
    return [[[first + _PERIOD * count for count in range(microbatches)] for first in row] for row in block]


def _passes(row: list[list[int]]) -> list[tuple[int, int, int]]:
    """(slot, phase, microbatch) of every pass of one rank, by slot."""
    return sorted([(slot, phase, index) for phase, slots in enumerate(row) for index, slot in enumerate(slots)])


def _all_passes(times: Times) -> list[tuple[int, int, int, int]]:
    """(slot, rank, phase, microbatch) of every pass of all ranks, by slot."""
    return sorted((slot, rank, phase, index) for rank, row in enumerate(times) for slot, phase, index in _passes(row))


def _steady_state(times: Times) -> tuple[tuple[int, int], tuple[int, int]]:
    """(slot, rank) from where rank 0 has its first B0 to after where the last forward enters the pipeline.

    With few microbatches the second comes first: there is no steady state, and everything may move.
    """
    return (times[0][_B0][0], 0), (times[0][_F0][-1], 1)


def _with_weights(times: Times) -> Times:
    return [[*row, [slot for slot, kind, _, _ in _filled(row) if kind == "W"]] for row in times]


def _filled(row: list[list[int]]) -> Iterator[tuple[int, str, int, int]]:
    """(slot, kind, chunk, microbatch) of one rank's passes, with a W in each free slot: of chunk 1, if one waits."""
    waiting: tuple[deque[int], deque[int]] = (deque(), deque())
    clock = 0
    for slot, phase, microbatch in [*_passes(row), (sys.maxsize, _W, 0)]:
        while clock < slot and any(waiting):
            chunk = 1 if waiting[1] else 0
            yield clock, "W", chunk, waiting[chunk].popleft()
            clock += 1
        if phase != _W:
            yield slot, _KIND[phase], _CHUNK[phase], microbatch
            clock = slot + 1
        if phase in (_B1, _B0):
            waiting[_CHUNK[phase]].append(microbatch)


def _reorder(times: Times, lengths: Sequence[int], start: tuple[int, int], stop: tuple[int, int]) -> Times:
    """Moves each pass, in order of time, to the earliest slot that its inputs, the rank and the memory allow.

    lengths: of the passes, by phase. Those from `start` to before `stop`, by (slot, rank), stay.
    """
    ranks = _Slots(times, lengths)
    times = [[list(slots) for slots in row] for row in times]
    backwards: list[list[int]] = [[] for _ in times]  # slots of the B placed so far, in order
    for slot, rank, phase, index in _all_passes(times):
        if not start <= (slot, rank) < stop:
            row, source, first = times[rank], rank + _FROM[phase], 0
            if source != rank and 0 <= source < len(times):
                first = times[source][phase][index] + lengths[phase]
            if phase in (_F1, _B1, _B0):
                first = max(first, row[phase - 1][index] + lengths[phase - 1])
            if phase == _W:
                first = max(first, backwards[rank][index] + 1)
            if index > 0:
                first = max(first, row[phase][index - 1] + lengths[phase])
            row[phase][index] = ranks.move(rank, phase, slot, first)
        if phase in (_B1, _B0):
            insort(backwards[rank], times[rank][phase][index])
    return times


class _Slots:
    """What every rank runs in each slot, and before it (microbatches held, pending W).

    An F adds to what the rank holds; W takes it away, or the end of a BW, where backwards have two slots. Where W have
    no slots of their own, every free slot runs a pending one, if there is one.
    """

    def __init__(self, times: Times, lengths: Sequence[int]) -> None:
        self._lengths, self._fused = lengths, lengths[_B1] > 1
        self._fills = len(lengths) == _W and not self._fused
        self._cells, self._states = [], []
        last = max(max(slots) for row in times for slots in row)
        for row in times:
            cells, states = [_IDLE] * (2 + last), [(0, 0)]
            for phase, starts in enumerate(row):
                for start in starts:
                    self._put(cells, phase, start)
            for phase in cells:
                states.append(self._after(states[-1], phase))
            self._cells.append(cells)
            self._states.append(states)
        self._limit = max(held for states in self._states for held, _ in states)

    def move(self, rank: int, phase: int, slot: int, first: int) -> int:
        """Moves a pass from `slot` to the earliest one from `first` on, and returns that."""
        cells, states, length = self._cells[rank], self._states[rank], self._lengths[phase]
        cells[slot : slot + length] = [_IDLE] * length
        start = next(
            at
            for at in range(first, slot + 1)
            if cells[at : at + length].count(_IDLE) == length and self._fits(rank, phase, at, slot)
        )
        self._put(cells, phase, start)
        for at in range(start, len(cells)):
            state = self._after(states[at], cells[at])
            if at >= slot + length and state == states[at + 1]:
                break
            states[at + 1] = state
        return start

    def _put(self, cells: list[int], phase: int, start: int) -> None:
        length = self._lengths[phase]
        cells[start : start + length] = [*[_BUSY] * (length - 1), phase]

    def _fits(self, rank: int, phase: int, start: int, slot: int) -> bool:
        """Whether the rank stays in its limit with the pass at `start`; past `slot` it holds no more than before."""
        cells, state = self._cells[rank], self._states[rank][start]
        for at in range(start, slot):
            state = self._after(state, phase if at == start else cells[at])
            if state[0] > self._limit:
                return False
        return True

    def _after(self, state: tuple[int, int], phase: int) -> tuple[int, int]:
        held, waiting = state
        if phase in (_F0, _F1):
            return held + 1, waiting
        if phase in (_B1, _B0):
            return (held - 1, 0) if self._fused else (held, waiting + self._fills)
        if phase == _W:
            return held - 1, 0
        return (held - 1, waiting - 1) if phase == _IDLE and waiting else state


def _compact(times: Times) -> Times:
    """The slots when every rank keeps its order and starts each pass as soon as it can."""
    compacted: Times = [[[0] * len(slots) for slots in row] for row in times]
    free = [0] * len(times)
    for _, rank, phase, index in _all_passes(times):
        start, source = free[rank], rank + _FROM[phase]
        if source != rank and 0 <= source < len(times):
            start = max(start, compacted[source][phase][index] + 1)
        compacted[rank][phase][index] = start
        free[rank] = start + 1
    return compacted
