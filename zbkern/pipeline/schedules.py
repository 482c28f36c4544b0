"""Every published schedule as a function of stages and microbatches: which action each rank runs, in which order.

p is the number of stages (ranks) and m that of microbatches; ranks, chunks and microbatches count from 0. A schedule
says nothing about time: `simulate` does, given costs. The figures in the docstrings are for F = B = W and no
communication, and memory counts whole-rank activations.
"""

from __future__ import annotations

from zbkern.pipeline.actions import Action, Schedule, ScheduleError


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965). Memory m; bubble (p-1)(F+B+W)."""
    _check("gpipe", stages, microbatches)
    row = [Action(kind, 0, microbatch) for kind in ("F", "BW") for microbatch in range(microbatches)]
    return _one_chunk("gpipe", [_moved(row, rank) for rank in range(stages)], microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: a backward as soon as one can run (arXiv 2006.09503). Memory p; bubble (p-1)(F+B+W)."""
    _check("one_f_one_b", stages, microbatches)
    rows = [_pairs(rank, stages - rank, microbatches, weight_delay=None) for rank in range(stages)]
    return _one_chunk("one_f_one_b", rows, microbatches)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2): 1F1B, W `rank` microbatches after B. Memory p; bubble (p-1)(F+B-W)."""
    _check("zb_h1", stages, microbatches)
    rows = [_pairs(rank, stages - rank, microbatches, weight_delay=rank) for rank in range(stages)]
    return _one_chunk("zb_h1", rows, microbatches)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2 (arXiv 2401.10241, section 2): twice the warm-up, W 2 * `rank` after B. Memory 2p-1; bubble (p-1)(F+B-2W).

    With fewer than 2p-1 microbatches it is all warm-up, and has more bubbles than the formula says.
    """
    _check("zb_h2", stages, microbatches)
    rows = [_pairs(rank, 2 * (stages - rank) - 1, microbatches, weight_delay=2 * rank) for rank in range(stages)]
    return _one_chunk("zb_h2", rows, microbatches)


def _pairs(rank: int, ahead: int, microbatches: int, weight_delay: int | None) -> list[Action]:
    """`ahead` forwards before the first backward, then one of each; W `weight_delay` backwards late, or fused."""
    row: list[Action] = []
    forwards = iter(range(microbatches))
    for _ in range(min(ahead - 1, microbatches)):
        row.append(Action("F", rank, next(forwards)))
    for microbatch in range(microbatches):
        row += [Action("F", rank, forward) for forward in [next(forwards, None)] if forward is not None]
        row.append(Action("BW" if weight_delay is None else "B", rank, microbatch))
        if weight_delay is not None and microbatch >= weight_delay:
            row.append(Action("W", rank, microbatch - weight_delay))
    if weight_delay:
        row += [
            Action("W", rank, microbatch) for microbatch in range(max(0, microbatches - weight_delay), microbatches)
        ]
    return row


def _moved(row: list[Action], chunk: int) -> list[Action]:
    return [action._replace(chunk=chunk) for action in row]


def _one_chunk(name: str, rows: list[list[Action]], microbatches: int) -> Schedule:
    return Schedule.build(rows, range(len(rows)), microbatches, name)


def _check(name: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    for what, count in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name}: {what} must be an int; got {type(count).__name__} {count!r}")
        if count < 1:
            raise ScheduleError(f"{name}: {what} must be at least 1; got {count}")
