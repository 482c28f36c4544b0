"""The programs that a page shows, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path


def blocks(page: Path) -> list[str]:
    """Every block of Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def block(page: Path, what: str) -> str:
    """The one block of Python of a page that contains `what`."""
    (found,) = (each for each in blocks(page) if what in each)
    return found
