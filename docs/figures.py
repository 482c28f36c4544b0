"""Draws images/split.svg, for the README, zero_bubble.svg, for the glossary, slices.svg, for the page on long context,
and batches.svg, for that on batches of unequal sequences: python docs/figures.py"""

from __future__ import annotations

from pathlib import Path

from zbkern.pipeline import Costs, Schedule, Timeline, draw, plan, plan_batch, schedules, simulate
from zbkern.planning.costs.equal_slices import equal_times

IMAGES = Path(__file__).parent / "images"
WIDTH, TOP = 1000, 196
LLAMA = Costs(held=1.15)  # between B and W, of the activation: zbkern's block (bench/split.py, LLAMA)
DARK, GREY, B, W, PALE = "#24292f", "#57606a", "#2e9e86", "#dfa23a", "#f6f8fa"  # those of the timelines below

_HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" width="{{width}}" height="{{height}}"
 viewBox="0 0 {{width}} {{height}}">
<style>.large {{{{ font-size: 14px; fill: {DARK}; }}}} .name {{{{ font-weight: 600; }}}} .formula {{{{ font-family:
ui-monospace, Menlo, Consolas, monospace; }}}} .middle {{{{ text-anchor: middle; }}}} .arrow {{{{ fill: none; stroke:
{GREY}; stroke-width: 1.6; marker-end: url(#head); }}}}</style>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path
d="M0 0.5 8 4 0 7.5z" fill="{GREY}"/></marker>
"""


def _text(x: float, y: float, words: str, style: str = "large") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{words}</text>'


def _arrow(path: str) -> str:
    return f'<path class="arrow" d="{path}"/>'


def _half(y: float, colour: str, name: str, formula: str) -> str:
    """One half of the backward: a box with its name and what it computes."""
    return (
        f'<rect x="232" y="{y:g}" width="268" height="54" rx="5" fill="{colour}" fill-opacity="0.16" '
        f'stroke="{colour}"/>'
        f'<rect x="232" y="{y:g}" width="34" height="54" rx="5" fill="{colour}"/>'
        + _text(249, y + 33, name, "large name middle")
        + _text(280, y + 23, {"B": "gradient of the input", "W": "gradient of the weight"}[name])
        + _text(280, y + 43, formula, "large formula")
    )


def split(timelines: list[Timeline], titles: list[str]) -> str:
    """A linear layer's backward in two halves and where each goes, above the same step without and with the split."""
    below = draw.svg(timelines, titles, WIDTH)
    height = int(below.split('height="', 1)[1].split('"', 1)[0]) + TOP
    queue = "".join(
        f'<rect x="{560 + 20 * i}" y="130" width="16" height="24" rx="2" fill="{W}" stroke="#fff"/>' for i in range(4)
    )
    parts = [
        _HEAD.format(width=WIDTH, height=height),
        '<rect width="100%" height="100%" fill="#fff"/>',
        _text(24, 28, "Backward of one layer, y = x weight\u1d40", "large name"),
        f'<rect x="24" y="80" width="140" height="54" rx="5" fill="{PALE}" stroke="{GREY}"/>',
        _text(94, 103, "gradient dy", "large middle"),
        _text(94, 123, "from the next stage", "middle"),
        _arrow("M166 107C200 107 196 71 228 71"),
        _arrow("M166 107C200 107 196 142 228 142"),
        _half(44, B, "B", "dx = dy weight"),
        _half(115, W, "W", "dweight += dy\u1d40 x"),
        _arrow("M502 71H548"),
        _text(560, 68, "sent to the previous stage at once,"),
        _text(560, 86, "because that stage is waiting for it"),
        _arrow("M502 142H548"),
        f'<rect x="554" y="124" width="90" height="36" rx="4" fill="{PALE}" stroke="{GREY}"/>{queue}',
        _text(599, 177, "queue", "middle"),
        _arrow("M646 142H692"),
        _text(704, 139, "runs when the rank would be idle"),
        _text(704, 157, "(in the bubble): no stage waits for it"),
        f'<svg y="{TOP}" width="{WIDTH}" height="{height - TOP}">{below}</svg></svg>',
    ]
    return "\n".join(parts) + "\n"


def batch() -> list[Timeline]:
    """One long sequence and 23 short ones on 4 ranks: four packs in 1F1B, and planned."""
    lengths = [8192, *(300 + 97 * number % 1500 for number in range(23))]
    stage = Costs(10.0, 10.0, 10.0, overhead=0.05, split_overhead=0.05, tokens=8192)
    half = Costs(5.05, 5.05, 5.05, overhead=0.05, split_overhead=0.05, activation=0.5, tokens=8192)
    packs = [0] * 4
    for length in sorted(lengths, reverse=True):
        packs[packs.index(min(packs))] += length
    usual = schedules.one_f_one_b(4, 4)
    usual = Schedule.build(usual.actions, usual.placement, 4, own_slices=[(tokens,) for tokens in packs])
    return [simulate(usual, stage), plan_batch(lengths, half, 4).timeline]


def save_all(folder: Path) -> list[Path]:
    """Writes the pictures into the folder and returns their paths."""
    step = [simulate(make(3, 5), LLAMA) for make in (schedules.one_f_one_b, schedules.zb_h1)]
    idea = folder / "split.svg"
    idea.write_text(split(step, ["B and W in one piece: 1F1B", "W on its own: ZB-H1"]), encoding="utf-8")
    timelines = [simulate(make(4, 8), LLAMA) for make in (schedules.one_f_one_b, schedules.zb_h2)]
    zero = draw.save(timelines, folder / "zero_bubble.svg", ["1F1B", "zero bubble (ZB-H2)"])
    # attention takes 0.7 of a forward, its backward 2.2 times as long; W is of the linear layers alone
    long = Costs(1.0, 1.84, 0.3, attention_forward=0.7, attention_backward=1.54, carried=0.1)
    found = [
        simulate(schedules.one_f_one_b(4, 4), long),
        simulate(schedules.one_f_one_b(4, 4, slices=equal_times(long.per_chunk(4), 4)), long),
        plan(long, 4, 4, slices=equal_times(long.per_chunk(4), 4), memory_limit=4.0, effort=1).timeline,
    ]
    names = ["whole sequences, 1F1B", "four slices each, Seq1F1B", "four slices each, planned, W on its own"]
    titles = ["four packs, one of them the long sequence: 1F1B", "slices of the long one, packs of the others: planned"]
    pictures = [idea, zero, draw.save(found, folder / "slices.svg", names)]
    return [*pictures, draw.save(batch(), folder / "batches.svg", titles)]


if __name__ == "__main__":
    for path in save_all(IMAGES):
        print(path)
