"""api.md has every public name, and the arguments that it shows exist."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest

import zbkern
from tests.support.pages import page
from zbkern.pipeline import schedules
from zbkern.pipeline.runtime.last_step import LastStep

API = {word for part in re.findall(r"`([^`]+)`", page("api.md")) for word in re.findall(r"\w+", part.partition("(")[0])}
CALLS = re.findall(r"^\| `([\w.]+)\(([^`]*)\)`", page("api.md"), re.MULTILINE)


def test_every_public_name_is_there() -> None:
    public = {*zbkern.__all__, *zbkern.pipeline.__all__, *schedules.NAMES} - {"__version__"}
    assert (public | {*zbkern.nn.__all__, *zbkern.functional.__all__}) - API == set()


def found(path: str) -> Any:
    """What the page calls by this name."""
    first, *rest = path.replace("pipe.last", "last").split(".")
    homes = (zbkern, zbkern.pipeline)
    objects = {"pipe": zbkern.pipeline.Pipeline, "last": LastStep}
    value = objects.get(first) or next(getattr(home, first) for home in homes if hasattr(home, first))
    for name in rest:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("path", "arguments"), CALLS, ids=[path for path, _ in CALLS])
def test_arguments(path: str, arguments: str) -> None:
    known = inspect.signature(found(path)).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    positional, _, named = re.sub(r"lambda.*|\{.*?\}", "", arguments).partition("*, ")
    for part, kinds in (positional, {"POSITIONAL_OR_KEYWORD"}), (named, {"KEYWORD_ONLY"}):
        for keyword, default in re.findall(r"(\w+)=([^,]+)", part):
            assert known[keyword].kind.name in kinds
            assert default in ("...", "64 MiB") or known[keyword].default == ast.literal_eval(default)
