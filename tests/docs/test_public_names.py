"""Every public name is used by a program of a page, an example or a benchmark, or is what one of these is given.

Of every public class that holds for its methods and attributes, too, or api.md or the class itself has them: what only
the library uses is private.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import zbkern
from tests.support.programs import blocks
from zbkern.pipeline import checkpoint, schedules
from zbkern.pipeline.models.layers import Layer
from zbkern.pipeline.runtime.last_step import LastStep
from zbkern.planning.planner import Plan

ROOT = Path(__file__).parents[2]
GIVEN = {
    "Action": "of `Schedule.actions`",
    "BatchPlan": "of `plan_batch`",
    "DeferredLogits": "to a `loss_fn` that takes them",
    "Event": "of `Timeline.events`",
    "Loaded": "of `checkpoint.load`",
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
MODULES = (zbkern, zbkern.pipeline, zbkern.nn, zbkern.functional, zbkern.testing, checkpoint)
NAMES = {name for module in MODULES for name in module.__all__} | {*schedules.NAMES}


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_program_uses_it(name: str) -> None:
    used = re.search(rf"(?<!\w){name}(?!\w)", PROGRAMS) is not None
    assert used or name in GIVEN, "show it in a page's program, or make it private"


def test_what_programs_are_given_is_public_and_a_class() -> None:
    for name in GIVEN:
        assert any(isinstance(getattr(module, name, None), type) for module in MODULES)


# ---- methods and attributes

SPANS = "\n".join(span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
CALLS = "\n".join([PROGRAMS, SPANS, *(each.read_text() for each in (ROOT / "zbkern" / "integrations").glob("*.py"))])
API = "\n".join(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "api.md").read_text(encoding="utf-8")))
RETURNED = {LastStep, Layer, Plan}
"""Classes that a user meets without naming them."""
CLASSES = {
    *(value for module in MODULES for name in module.__all__ if isinstance(value := getattr(module, name), type)),
    *RETURNED,
}


def own(kind: type) -> list[type]:
    """The class and its bases that are zbkern's."""
    return [each for each in kind.__mro__ if each.__module__.startswith("zbkern")]


def members(kind: type) -> list[str]:
    """The public methods and attributes of a class that no base outside zbkern has."""
    names: set[str] = set()
    for each in own(kind):
        names |= {*vars(each), *vars(each).get("__annotations__", ())}
        tree = ast.parse(inspect.getsource(each))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        names |= {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == "self"}
    others = [each for each in kind.__mro__ if each not in own(kind)]
    return sorted(name for name in names if name[0] != "_" and not any(hasattr(each, name) for each in others))


def is_shown(kind: type, name: str) -> bool:
    """Whether a page names it, a program uses it, or the class takes it as an argument and its docstring says so."""
    word = rf"(?<!\w){name}(?!\w)"
    if name in inspect.signature(kind).parameters and any(re.search(word, each.__doc__ or "") for each in own(kind)):
        return True
    said = re.search(word, API) or re.search(rf"^{name}(?!\w)", SPANS, re.MULTILINE)
    return (said or re.search(rf"(\.|\bdef ){name}(?!\w)", CALLS)) is not None


@pytest.mark.parametrize("kind", sorted(CLASSES, key=lambda kind: kind.__name__))
def test_a_page_has_its_methods_and_attributes(kind: type) -> None:
    unused = [name for name in members(kind) if not is_shown(kind, name)]
    assert not unused, "show them in api.md or a program, or make them private"
