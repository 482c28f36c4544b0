"""Text in columns: a schedule's grid cut to the width of a terminal, figures beside their names, and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from zbkern.planning.costs.memory import exceeds
from zbkern.planning.simulation.timeline import Timeline
from zbkern.schedules import grid as grids
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.units import amount, duration, number

_MARGIN = 10  # columns of the names of figures


def grid(schedule: Schedule, width: int) -> str:
    """The grid of `Schedule.to_text`; one wider than `width` is cut in the middle, and a line below says so."""
    cells = grids.cells_of(schedule)
    column, margin = grids.widths(cells)
    shown, total = grids.lines(cells, column, margin), len(cells[0])
    if max(map(len, shown)) > width:
        room = max(2, (width - margin) // column - 1)  # less the column of dots
        first, last = room - room // 2, total - room // 2
        shown = grids.lines([[*row[:first], "..", *row[last:]] for row in cells], column, margin)
        left_out = f"columns {first} to {last - 1} of {total} left out"
        shown.append(f"({left_out}: a wider terminal shows more, --out plan.txt all)")
    return "\n".join(shown)


def lines(figures: Iterable[tuple[str, str]], width: int) -> str:
    """Names, and texts beside them in lines of `width`, in which no word is divided; a name is said once for all."""
    room, said, before = max(width, 2 * _MARGIN), [], ""
    for name, text in figures:
        first = f"{'' if name == before else name:<{_MARGIN - 1}} "
        wrap = textwrap.TextWrapper(room, first, " " * _MARGIN, break_long_words=False, break_on_hyphens=False)
        said.append(wrap.fill(text))
        before = name
    return "\n".join(said)


def table(
    timelines: Sequence[Timeline],
    limit: float | None,
    whole: float = 0.0,
    tokens: int = 0,
    beside: float = 0.0,
    cuts: bool = False,
) -> str:
    """A line per timeline, with the memory of the rank that holds most; whole: as for `describe`.

    The least idle first; with the tokens of a step, for times in ms, the fastest. beside: seconds of a step that no
    pass has. cuts: every one has a cut of its own, that which holds least where none fits: it says nothing about how
    fast the others are, and has no times.
    """
    ends = ["step", "tokens/s", "bubble", "memory"] if tokens else ["bubble", "makespan", "memory", "of 1x"]
    rows = []
    for timeline in timelines:
        name, bubble, peak = timeline.schedule.name, timeline.bubble_rate, max(timeline.peak_memory)
        if len(timeline.schedule.slices) > 1:
            name += f", {len(timeline.schedule.slices)} slices"
        memory, makespan = amount(peak, timeline.memory_unit), duration(timeline.makespan, timeline.unit)
        cells = [f"{bubble:.2%}", makespan, memory, f"{peak / whole:.2f}x" if whole else ""]
        if tokens:
            seconds = timeline.cost / 1e3 + beside
            cells = [f"{number(seconds)} s", f"{tokens / seconds:,.0f}", f"{bubble:.2%}", memory]
        over = exceeds(peak, limit)
        if over and cuts:
            cells = [each if each == memory else "" for each in cells]
        note = ("at least: does not fit" if cuts else "over the limit") if over else ""
        order = over and cuts, timeline.cost if tokens else round(bubble, 9), peak
        rows.append((order, [name, str(timeline.schedule.chunks), *cells, note]))
    rows.sort(key=lambda row: row[0])
    return columns([["schedule", "chunks", *ends, ""], *(row for _, row in rows)])


def columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.rjust) -> str:
    """A line per row; justify: of all cells but the first, which are on the left."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[row[0].ljust(first), *map(justify, row[1:], widths)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)
