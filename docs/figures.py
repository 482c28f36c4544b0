"""Draws the pictures of the README: python docs/figures.py"""

from __future__ import annotations

from pathlib import Path

from zbkern.pipeline import draw, schedules, simulate

if __name__ == "__main__":
    timelines = [simulate(make(4, 8)) for make in (schedules.one_f_one_b, schedules.zb_h2)]
    titles = ["1F1B", "zero bubble (ZB-H2)"]
    print(draw.save(timelines, Path(__file__).parent / "images" / "zero_bubble.svg", titles))
