"""Every public name is used by a program of a page, an example or a benchmark, or is what one of these is given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zbkern
from tests.support.programs import blocks
from zbkern.pipeline import schedules

ROOT = Path(__file__).parents[2]
GIVEN = {
    "Action": "of `Schedule.actions`",
    "BatchPlan": "of `plan_batch`",
    "DeferredLogits": "to a `loss_fn` that takes them",
    "Event": "of `Timeline.events`",
    "PipelineError": "raised by every rank",
    "PlannedBatch": "of `PlannedBatches`",
    "Timeline": "of `simulate` and plans",
    "WGradTask": "of `WGradQueue.tasks`",
}
"""Types that a program gets and need not name: of what, or to what."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [*(ROOT / "examples").glob("*.py"), *(ROOT / "bench").glob("*.py")]
PROGRAMS = "\n".join([
    *(code for page in PAGES for code in blocks(page)),
    *(script.read_text(encoding="utf-8") for script in SCRIPTS),
])  # fmt: skip
NAMES = {*zbkern.__all__, *zbkern.pipeline.__all__, *zbkern.nn.__all__, *zbkern.functional.__all__, *schedules.NAMES}


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_program_uses_it(name: str) -> None:
    used = re.search(rf"(?<!\w){name}(?!\w)", PROGRAMS) is not None
    assert used or name in GIVEN, "show it in a page's program, or make it private"


def test_what_programs_are_given_is_public_and_a_class() -> None:
    for name in GIVEN:
        assert isinstance(getattr(zbkern.pipeline, name, None) or getattr(zbkern, name), type)
