"""Draws the pictures of docs/schedules.md and fills in its figures: python docs/gallery.py

The text is written by hand. What is between `<!-- NAME -->` and `<!-- end -->` is simulated here, and a test compares
the page with it. The plans among it are in docs/plans; `python docs/gallery.py SECONDS` first searches for better ones,
for SECONDS each.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from zbkern.pipeline import Costs, Schedule, Timeline, draw, plan, simulate
from zbkern.planning.simulation.comparison import INTERLEAVED, build, rechunk

PAGE = Path(__file__).parent / "schedules.md"
IMAGES = Path(__file__).parent / "images"
PLANS = Path(__file__).parent / "plans"

HELD = 1.15
"""Of the activation, between B and W: zbkern's block shaped as Llama-3 8B's (LLAMA in bench/split_models.py)."""
UNIT = Costs(held=HELD)
PROFILE = Costs(18.522, 18.086, 9.337, communication=0.601, held=HELD)
"""ms of one stage of a model of 1.5 billion parameters on 8 GPUs (arXiv 2401.10241, Table 9)."""


class Formulas(NamedTuple):
    """Bubble and memory as Python expressions in p, m, v, F, B, W; a bubble without F, B, W is for all three at 1."""

    title: str
    bubble: str
    memory: str


FORMULAS = {
    "gpipe": Formulas("GPipe", "(p - 1) * (F + B + W)", "m"),
    "one_f_one_b": Formulas("1F1B", "(p - 1) * (F + B + W)", "p"),
    "zb_h1": Formulas("ZB-H1", "(p - 1) * (F + B - W)", "p"),
    "zb_h2": Formulas("ZB-H2", "(p - 1) * (F + B - 2 * W)", "2 * p - 1"),
    "interleaved": Formulas("interleaved 1F1B", "(p - 1) * (F + B + W) / v", "p + (p - 1) / v"),
    "interleaved_zero_bubble": Formulas("interleaved zero bubble", "(p - 1) * (F + B - W) / v", "p"),
    "zb_v": Formulas("ZB-V", "0", "p"),
    "v_half": Formulas("V-Half", "(3 * p - (4 if p % 2 else 7)) / 2", "p // 2 + 1"),
    "dualpipe_v": Formulas("DualPipe-V", "(p - 1) / 2", "p + 1 / 2"),
}


def timeline(name: str, stages: int, microbatches: int, costs: Costs = UNIT, chunks: int = 2) -> Timeline:
    """costs: of a whole rank; a rank with several chunks runs as many passes of a share each."""
    schedule = build(name, stages, microbatches, chunks)
    return simulate(schedule, rechunk(costs, stages, len(schedule.placement)))


def picture(name: str) -> str:
    """4 ranks, 8 microbatches, every pass of a rank as long as the others, and the memory."""
    shown = timeline(name, 4, 8)
    costs = rechunk(UNIT, 4, len(shown.schedule.placement))
    width = 80 + round(28 * shown.makespan)  # one unit of time is as wide in all of them
    return draw.svg([shown], [FORMULAS[name].title], width, [costs])


def figures(name: str) -> str:
    """The line under a picture."""
    bubble, memory = (formula.replace(" * ", "") for formula in FORMULAS[name][1:])
    unit = "" if set("FBW") & set(bubble) else ", where F = B = W = 1"
    chunks = ", chunks=2" if name in INTERLEAVED else ""
    return f"Bubble `{bubble}`{unit}. Memory `{memory}`. Code: `schedules.{name}(stages, microbatches{chunks})`"


def summary() -> str:
    """Every schedule with 8 ranks."""
    rows = []
    for name, formulas in FORMULAS.items():
        equal, few, real = timeline(name, 8, 24), timeline(name, 8, 8, PROFILE), timeline(name, 8, 24, PROFILE)
        rates = [
            equal.bubble_rate,
            1 - sum(equal.busy) / (len(equal.busy) * equal.makespan),
            real.bubble_rate,
            few.bubble_rate,
        ]
        memory = f"{max(real.peak_memory):.1f}"
        rows.append([formulas.title, str(real.schedule.chunks), memory, *map(percent, rates)])
    rows.sort(key=lambda row: float(row[5].rstrip("%")))
    head = ["schedule", "chunks", "memory", "F = B = W", "with a barrier", "1.5B profile", "1.5B, m = 8"]
    return table(head, rows)


LIMITS = (0.5, 0.75, 1.0, 1.5)  # in units of what 1F1B holds
PLACEMENTS = {1: "linear", 2: "v", 4: "zigzag"}


def plans() -> str:
    """The best published schedule and the plans within a limit, 8 ranks, 24 microbatches, the profile."""
    rows = []
    for limit in LIMITS:
        published = [timeline(name, 8, 24, PROFILE) for name in FORMULAS]
        fitting = [each for each in published if max(each.peak_memory) <= 8 * limit + 1e-9]
        best = min(fitting, key=lambda each: each.bubble_rate, default=None)
        row = [f"{limit:g}", f"{FORMULAS[best.schedule.name].title}, {percent(best.bubble_rate)}" if best else "none"]
        for chunks in PLACEMENTS:
            planned = kept(chunks, limit)
            assert max(planned.peak_memory) <= 8 * limit + 1e-9
            row.append(percent(planned.bubble_rate))
        rows.append(row)
    return table(["memory", "best published", *(f"plan, {v} chunk{'s' * (v > 1)}" for v in PLACEMENTS)], rows)


def kept(chunks: int, limit: float) -> Timeline:
    """The plan in docs/plans for that many chunks and that limit."""
    text = (PLANS / f"{PLACEMENTS[chunks]}-{limit:g}x.csv").read_text(encoding="utf-8")
    return simulate(Schedule.from_csv(text), rechunk(PROFILE, 8, 8 * chunks))


def search(seconds: float) -> None:
    """Replaces the plans for which it finds better ones."""
    for chunks, placement in PLACEMENTS.items():
        for limit in LIMITS:
            found = plan(rechunk(PROFILE, 8, 8 * chunks), 8, 24, chunks, placement, 8 * limit, seconds)
            path = PLANS / f"{placement}-{limit:g}x.csv"
            if not path.exists() or found.bubble_rate < kept(chunks, limit).bubble_rate - 1e-9:
                path.write_text(found.schedule.to_csv(), encoding="utf-8")
            print(f"{path.name}: {found.bubble_rate:.2%}, at least {found.lower_bound:.2%}")


def more_chunks() -> str:
    """Time lost with 1, 2, 4 and 8 chunks per rank, when messages and every pass have a cost of their own."""
    stages, microbatches, counts = 8, 32, (1, 2, 4, 8)
    rows = []
    for message, overhead in ((0, 0), (0.03, 0), (0.1, 0), (0.3, 0), (0, 0.02), (0, 0.05)):
        row = [f"{message:.0%}", f"{overhead:.0%}"]
        for name in ("interleaved", "interleaved_zero_bubble"):
            for count in counts:
                passes = dict.fromkeys(("forward", "backward", "weight"), 1 / count + overhead)
                # A fused backward has the overhead once: the split adds it a second time.
                costs = Costs(**passes, communication=message, split_overhead=overhead)
                cost = simulate(build(name, stages, microbatches, count), costs).cost
                row.append(percent(1 - 3 * microbatches / cost))
        best = [min(row[first : first + 4], key=lambda cell: float(cell[:-1])) for first in (2, 6)]
        rows.append(
            [f"**{cell}**" if place > 1 and cell == best[place > 5] else cell for place, cell in enumerate(row)]
        )
    columns = [f"{name}, v = {count}" for name in ("1F1B", "ZB") for count in counts]
    return table(["message", "overhead", *columns], rows)


def split_costs() -> str:
    """Time per step beside 1F1B's, when B and W apart take longer than BW."""
    names = ("interleaved", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zb_v", "dualpipe_v")
    fused = PROFILE.per_chunk(1).fused[0]
    rows = []
    for share in (0, 0.05, 0.1, 0.2):
        weight = PROFILE.per_chunk(1).weight[0] + share * fused
        costs = replace(PROFILE, weight=weight, split_overhead=share * fused)
        base = timeline("one_f_one_b", 8, 24, costs).cost
        rows.append([f"{share:.0%}", *(f"{timeline(name, 8, 24, costs).cost / base:.3f}" for name in names)])
    return table(["split costs", *(FORMULAS[name].title for name in names)], rows)


def jitter() -> str:
    """Mean bubble rate of ZB-H1 when every pass takes a random time, in the planned order and with eager W."""
    rows = []
    for deviation in (0, 0.05, 0.1, 0.2):
        rates = mean_rate(deviation), mean_rate(deviation, fill="eager", memory_limit=8)
        rows.append([f"{deviation:.0%}", *map(percent, rates)])
    return table(["jitter", "as planned", "eager W"], rows)


def mean_rate(deviation: float, **keywords: Any) -> float:
    """Of ZB-H1 over twelve samples."""
    schedule = build("zb_h1", 8, 24)
    seeds = range(12 if deviation else 1)
    return mean(simulate(schedule, PROFILE, jitter=deviation, seed=seed, **keywords).bubble_rate for seed in seeds)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(rate: float) -> str:
    return f"{abs(rate):.1%}"  # not -0.0%


PARTS: dict[str, Callable[[], str]] = {
    "summary": summary,
    "plans": plans,
    "more chunks": more_chunks,
    "split costs": split_costs,
    "jitter": jitter,
}


def fill(text: str) -> str:
    """The page with its generated parts made again. Raises KeyError for a part that does not exist."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n{figures(name) if name in FORMULAS else PARTS[name]()}\n<!-- end -->"

    return re.sub(r"<!-- ([a-z0-9_ ]+) -->\n(?:(?!<!--).)*?<!-- end -->", part, text, flags=re.DOTALL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the pictures of docs/schedules.md and fills in its figures.")
    parser.add_argument("seconds", nargs="?", type=float, help="first search for better plans, so long for each")
    if seconds := parser.parse_args().seconds:
        search(seconds)
    for name in FORMULAS:
        (IMAGES / f"{name}.svg").write_text(picture(name), encoding="utf-8")
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
