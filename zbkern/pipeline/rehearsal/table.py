"""What a rehearsal says, as text: a row for each rank that ran, and the step beside those of published schedules."""

from __future__ import annotations

from statistics import fmean

from zbkern.pipeline.rehearsal.rehearse import Rank, Rehearsal
from zbkern.planning.simulation.timeline import Timeline
from zbkern.reporting import markdown_table
from zbkern.schedules.units import TIME_UNITS, amount, number

_KINDS = ("F", "B", "W", "BW", "R")


def table(
    found: Rehearsal,
    tokens: int | None = None,
    memory: float | None = None,
    planned: Timeline | None = None,
    compare: bool = False,
) -> str:
    """A table of the ranks that ran, and the figures of the step that all would make.

    tokens: of a step. memory: bytes that a rank may hold. planned: the plan's timeline, milliseconds where it has no
    unit. compare: also 1F1B and interleaved 1F1B, by the same measurements.
    """
    used = {action.kind for row in found.schedule.actions for action in row}
    kinds = [kind for kind in _KINDS if kind in used]
    header = ["rank", *(f"{kind}, ms" for kind in kinds), "all passes, ms", "optimizer, ms", "peak memory"]
    rows = [
        [str(at), *(_mean(rank, kind) for kind in kinds), *_sums(found, at, memory)] for at, rank in found.ranks.items()
    ]
    if planned is not None:
        header.insert(len(kinds) + 2, "planned, ms")
        to_ms = 1e3 / TIME_UNITS[planned.unit or "ms"]
        for row, at in zip(rows, found.ranks, strict=True):
            row.insert(len(kinds) + 2, number(planned.busy[at] * to_ms))
    timeline = found.timeline
    said = f"{number(1e3 * timeline.cost)} ms and {number(1e3 * (found.seconds - timeline.cost))} ms for the optimizer"
    rate = "" if tokens is None else f"; {tokens / found.seconds / found.schedule.ranks:,.0f} tokens/s on each rank"
    lines = [markdown_table(header, rows), "", f"step {said}{rate}", f"idle {timeline.bubble_rate:.1%}"]
    if found.speeds is not None:
        lines.append(f"ranks have the speeds {' '.join(map(number, found.speeds))}, and this device 1")
    for other in found.compare() if compare else ():
        cost, idle = number(1e3 * other.cost), f"{other.bubble_rate:.1%}"
        lines.append(f"{other.schedule.name}, simulated with these passes: {cost} ms, idle {idle}")
    if len(found.ranks) < found.schedule.ranks:
        lines.append(f"passes of the other {found.schedule.ranks - len(found.ranks)} ranks: those of the nearest chunk")
    return "\n".join(lines)


def _mean(rank: Rank, kind: str) -> str:
    """Of a pass."""
    times = [seconds for action, seconds in rank.passes if action.kind == kind]
    return number(1e3 * fmean(times)) if times else ""


def _sums(found: Rehearsal, at: int, memory: float | None) -> list[str]:
    rank, peak = found.ranks[at], found.peak_bytes(at)
    fits = "" if memory is None else ", fits" if peak <= memory else ", does not fit"
    passes = sum(seconds for _, seconds in rank.passes)
    return [number(1e3 * passes), number(1e3 * rank.optimizer), amount(peak, "bytes") + fits]
