"""The pages' text, their tables, and the scripts beside them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def tables(text: str, *header: str) -> list[list[str]]:
    """The rows of the one table whose first columns have these names, which are patterns."""
    columns = "".join(rf"\s*{column}\s*\|" for column in header)
    pattern = rf"^\|{columns}[^\n]*\n\|[-: |]+\n((?:\|[^\n]*\n)+)"
    (rows,) = re.findall(pattern, text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.strip().split("\n")]


def script(name: str) -> ModuleType:
    """Of the folder of pages."""
    made = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module
