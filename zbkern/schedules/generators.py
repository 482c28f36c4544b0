"""Every published schedule as a function of stages and microbatches: which action each rank runs, in which order.

p is the number of stages (ranks) and m that of microbatches; ranks, chunks and microbatches count from 0. A schedule
says nothing about time: `simulate` does, given costs. The figures in the docstrings are for F = B = W and no
communication, and memory counts whole-rank activations.

slices: into how many equal slices every sequence is cut, or their lengths. With n of them the schedule has m n
microbatches, in the order that it would have without, but that backwards wait for all forwards of their sequence: the
figures are then those of m n microbatches, with n - 1 more in memory. `one_f_one_b` so is Seq1F1B (arXiv 2406.03488).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from zbkern.schedules.actions import Action, ScheduleError, check_count
from zbkern.schedules.building_blocks import fused_order, split_order
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.slices import late_backwards, slice_lengths

Slices = int | Sequence[int]
_Rows = Sequence[Sequence[Action]]  # the actions of every rank
_Orders = Sequence[Sequence[tuple[str, int, int]]]  # the same as (kind, 0 or 1 of a rank's chunks, microbatch)

NAMES = (
    "gpipe",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
    "interleaved",
    "interleaved_zero_bubble",
    "zb_v",
    "v_half",
    "v_min",
    "one_f_one_b_v",
    "dualpipe_v",
)
"""Every generator of this module that takes (stages, microbatches)."""

MOST_PASSES = 10_000_000
"""F, B and W of a step, all ranks together: ten times those of 1024 ranks and 300 microbatches, some gigabytes."""


def gpipe(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965). Memory m; bubble (p-1)(F+B+W)."""

    def rows(m: int) -> _Rows:
        return [[Action(kind, rank, i) for kind in ("F", "BW") for i in range(m)] for rank in range(stages)]

    return _made("gpipe", stages, microbatches, slices, rows)


def one_f_one_b(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """1F1B: a backward as soon as one can run (arXiv 2006.09503). Memory p; bubble (p-1)(F+B+W)."""
    return _looped("one_f_one_b", stages, microbatches, slices, per_hop=1)


def zb_h1(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2): 1F1B, W `rank` microbatches after B. Memory p; bubble (p-1)(F+B-W)."""
    return _looped("zb_h1", stages, microbatches, slices, per_hop=1, late=1)


def zb_h2(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """ZB-H2 (arXiv 2401.10241, section 2): twice the warm-up, W 2 * `rank` after B. Memory 2p-1; bubble (p-1)(F+B-2W).

    With fewer than 2p-1 microbatches all forwards are warm-up, and there are more bubbles than the formula says.
    """
    return _looped("zb_h2", stages, microbatches, slices, per_hop=2, late=2)


def interleaved(stages: int, microbatches: int, chunks: int = 2, *, slices: Slices = 1) -> Schedule:
    """Interleaved 1F1B (arXiv 2104.04473): rank r holds chunks r, r+p, r+2p, ... Bubble (p-1)(F+B+W)/chunks.

    Microbatches go through in groups of p, all of a group through one chunk before the next chunk; when m is not a
    multiple of p, in m // p groups of nearly equal size. Memory (1 + (p-1)/(p chunks)) p for groups of p.
    """
    return _looped("interleaved", stages, microbatches, slices, per_hop=2, chunks=chunks)


def interleaved_zero_bubble(stages: int, microbatches: int, chunks: int = 2, *, slices: Slices = 1) -> Schedule:
    """ZB-H1 with several chunks per rank, as torch's ScheduleInterleavedZeroBubble: W runs `rank` backwards late.

    Memory p; bubble (p-1)(F+B-W)/chunks when m is a multiple of p.
    """
    return _looped("interleaved_zero_bubble", stages, microbatches, slices, per_hop=1, late=1, chunks=chunks)


def zb_v(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): two chunks per rank in a V. Memory p on every rank; no bubble.

    With fewer than 2p-1 microbatches it is the schedule for 2p-1 without the missing microbatches.
    """
    return _in_a_v("zb_v", stages, microbatches, slices, lambda m: _filled(stages, m, 2 * stages - 1, _fill_zb_v))


def dualpipe_v(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """DualPipe-V (DeepSeek-V3, arXiv 2412.19437, cut in half): a forward beside a fused backward in the steady state.

    Each such pair runs beside each other, but the first of the last rank, as in torch. Memory p + 1/2; bubble (p-1)/2
    where that hides nothing. With fewer than 2p microbatches it is the schedule for 2p without the missing ones, and
    without pairs.
    """
    made = _in_a_v(
        "dualpipe_v", stages, microbatches, slices, lambda m: _filled(stages, m, 2 * stages, _fill_dualpipe_v)
    )
    if len(made.units) < 2 * stages:
        return made
    pairs = [[(at, at + 2) for at, both in enumerate(pairwise(row)) if _is_pair(*both)] for row in made.actions]
    del pairs[-1][:1]
    return replace(made, beside=tuple(map(tuple, pairs)) if any(pairs) else ())


def _is_pair(before: Action, after: Action) -> bool:
    return before.kind == "F" and after.kind == "BW" and before[1:3] != after[1:3]


def v_half(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """V-Half (arXiv 2405.15362): half of 1F1B's memory, about p/2 + 1, and half of its bubbles, about 1.5p.

    Made for F = B = W; with other costs there is some idle time in every microbatch.
    """

    def block(rank: int) -> tuple[int, ...]:
        shift = 3 if stages % 2 == 0 else 0
        return 2 * rank, 3 * stages - rank - 2, 3 * stages + shift + 2 * rank - 1, 6 * stages + shift - rank - 2

    return _in_a_v("v_half", stages, microbatches, slices, lambda m: split_order(map(block, range(stages)), m))


def v_min(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """V-Min (arXiv 2405.15362): a third of 1F1B's memory, about p/3 + 1, and two thirds of its bubbles, about 2p.

    Made for F = B = W; with other costs there is some idle time in every microbatch.
    """

    def block(rank: int) -> tuple[int, ...]:
        shift = 2 if stages % 3 == 0 else 0
        return rank, 2 * stages - rank - 1, 2 * stages + shift + rank, 4 * stages + shift - rank - 1

    return _in_a_v("v_min", stages, microbatches, slices, lambda m: split_order(map(block, range(stages)), m))


def one_f_one_b_v(stages: int, microbatches: int, *, slices: Slices = 1) -> Schedule:
    """1F1B-V (arXiv 2405.15362): fused backward, two chunks per rank in a V. Memory about 2p/3, bubble about 2.5p."""

    def rows(m: int) -> _Orders:
        block = [[rank, 2 * stages - rank - 1, 0, 0] for rank in range(stages)]
        slot = 2 * stages + (3 if stages % 3 == 0 else 0)
        steps = [(rank, 2) for rank in range(stages)] + [(rank, 3) for rank in reversed(range(stages))]
        for count, (rank, each) in enumerate(steps, start=-(stages + 2) % 3 + 1):
            block[rank][each] = slot
            slot += 5 if count % 3 == 0 else 2
        return fused_order(block, m)

    return _in_a_v("one_f_one_b_v", stages, microbatches, slices, rows)


def _looped(name: str, stages: int, microbatches: int, slices: Slices, chunks: int = 1, **how: int) -> Schedule:
    return _made(name, stages, microbatches, slices, lambda m: _loop(stages, m, chunks=chunks, **how), chunks)


def _loop(stages: int, microbatches: int, per_hop: int, late: int | None = None, chunks: int = 1) -> _Rows:
    """Rank r holds chunks r, r + p, ...: `per_hop` forwards more ahead of the backwards on each rank before the last.

    late: W runs `late` times the rank backwards after its B; None for fused backwards.
    """
    groups = _groups(stages, microbatches)
    largest = max(map(len, groups))
    rows = []
    for rank in range(stages):
        local = list(range(rank, stages * chunks, stages))
        forwards = [(chunk, microbatch) for group in groups for chunk in local for microbatch in group]
        backwards = [(chunk, microbatch) for group in groups for chunk in reversed(local) for microbatch in group]
        ahead = (chunks - 1) * largest + per_hop * (stages - 1 - rank) + 1
        rows.append(_pairs(forwards, backwards, ahead, None if late is None else late * rank))
    return rows


def _groups(stages: int, microbatches: int) -> list[range]:
    """Consecutive microbatches in m // p groups (one at least) whose sizes differ by one at most, larger ones first."""
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _pairs(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int, weight_delay: int | None
) -> list[Action]:
    """`ahead` forwards before the first backward, then one of each; W `weight_delay` backwards late, or fused."""
    starts = [Action("F", *each) for each in forwards]
    ends = [Action("BW" if weight_delay is None else "B", *each) for each in backwards]
    row, next_forward = starts[: ahead - 1], ahead - 1
    weights = [] if weight_delay is None else [Action("W", *each) for each in backwards]
    for index, end in enumerate(ends):
        if next_forward < len(starts):
            row.append(starts[next_forward])
            next_forward += 1
        row.append(end)
        if weight_delay is not None and index >= weight_delay:
            row.append(weights[index - weight_delay])
    return row + (weights[-weight_delay:] if weight_delay else [])


class _RowBuilder:
    """One rank's actions, written in the shorthand of the papers: "F0" is the next F of its first chunk, "BW1" the next
    BW of its second, and "W" the oldest pending W."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int, int]] = []
        self._done: Counter[str] = Counter()
        self._weights: deque[tuple[str, int, int]] = deque()

    def add(self, *steps: str) -> None:
        for step in steps:
            if step == "W":
                if self._weights:
                    self.passes.append(self._weights.popleft())
                continue
            kind, second, counter = step[:-1], int(step[-1]), step.replace("BW", "B")
            self.passes.append((kind, second, self._done[counter]))
            if kind == "B":
                self._weights.append(("W", second, self._done[counter]))
            self._done[counter] += 1

    def repeat(self, times: int, *steps: str) -> None:
        for _ in range(times):
            self.add(*steps)

    def count(self, step: str) -> int:
        return self._done[step]


def _fill_zb_v(row: _RowBuilder, rank: int, stages: int, microbatches: int) -> None:
    row.repeat(2 * (stages - rank) - 1, "F0")
    row.repeat(rank, "F1", "F0")
    row.repeat(stages - rank, "F1", "B1", "W1")
    while row.count("F0") < microbatches or row.count("F1") < microbatches:
        row.repeat(row.count("F0") < microbatches, "F0")
        row.add("B0", "W0", "F1", "B1", "W1")
    row.repeat(rank, "B0", "B1")
    row.repeat(stages - rank, "B0", "W0")
    row.repeat(microbatches - row.count("W1"), "W1")
    row.repeat(microbatches - row.count("W0"), "W0")


def _fill_dualpipe_v(row: _RowBuilder, rank: int, stages: int, microbatches: int) -> None:
    later = stages - rank - 1
    row.repeat(2 * later, "F0")
    row.repeat(rank + 1, "F0", "F1")
    row.repeat(later, "B1", "W", "F1")
    row.repeat(microbatches - 2 * stages + rank + 1, "F0", "BW1", "F1", "BW0")
    row.repeat(later, "BW1", "F1", "BW0")
    for step in range(2 * (rank + 1)):  # the W of the second half fill the gaps that follow
        row.add(("B" if step > rank else "BW") + str(1 - step % 2))
    row.repeat(later, "W", "B0")
    row.repeat(rank + 1, "W")


def _filled(stages: int, microbatches: int, least: int, fill: Callable[[_RowBuilder, int, int, int], None]) -> _Orders:
    """`fill` writes each rank's row for `least` microbatches, of which the first m stay."""
    rows = [_RowBuilder() for _ in range(stages)]
    for rank, row in enumerate(rows):
        fill(row, rank, stages, max(microbatches, least))
    return [[each for each in row.passes if each[2] < microbatches] for row in rows]


def _in_a_v(name: str, stages: int, microbatches: int, slices: Slices, orders: Callable[[int], _Orders]) -> Schedule:
    """Rank r holds chunks r and 2p-1-r."""

    def rows(m: int) -> _Rows:
        return [
            [Action(kind, 2 * stages - 1 - rank if second else rank, i) for kind, second, i in order]
            for rank, order in enumerate(orders(m))
        ]

    return _made(name, stages, microbatches, slices, rows, v=True)


def _made(
    name: str,
    stages: int,
    microbatches: int,
    slices: Slices,
    rows: Callable[[int], _Rows],
    chunks: int = 1,
    v: bool = False,
) -> Schedule:
    """The schedule of `rows`, which takes a number of microbatches: with slices one for slices - 1 more of them.

    Not validated here, which takes longer than making it: whoever runs or simulates a schedule validates it.
    """
    lengths = slice_lengths(name, slices)
    check_counts(name, stages, microbatches, chunks, len(lengths))
    count, more = microbatches * len(lengths), len(lengths) - 1
    made = rows(count + more)
    if more:
        made = [late_backwards(row, count, len(lengths)) for row in made]
    placement = [*range(stages), *reversed(range(stages))] if v else [*range(stages)] * chunks
    return Schedule(tuple(map(tuple, made)), tuple(placement), microbatches, name, lengths if more else (1,))


def check_counts(name: str, stages: int, microbatches: int, chunks: int = 1, slices: int = 1) -> None:
    """Raises TypeError or ScheduleError, in the name of the function `name`, for sizes that no schedule can have."""
    for what, count in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        check_count(f"{name}: {what}", count, error=ScheduleError)
    passes = 3 * stages * microbatches * chunks * slices
    if passes > MOST_PASSES:
        raise ScheduleError(
            f"{name}: 3 x stages x microbatches x chunks x slices must be at most {MOST_PASSES} passes; {stages} x "
            f"{microbatches} x {chunks} x {slices} make {passes}: lower stages, microbatches, chunks or slices"
        )
