"""Sentences of the pages begin with their subject."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
HABITS = {
    r"(?:^|[.;:!?] |\*\*|^- |\| )Of [\w`]": "begins with its genitive; say what does something, and then with what",
    r"\bbut for\b": "except",
    r"\b[Aa]s ever\b": "as before, or nothing",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_keep_to_plain_english(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = [
        f"{line.strip()[:80]}: {better}"
        for line in text.replace("\n  ", " ").split("\n")
        for habit, better in HABITS.items()
        if re.search(habit, line)
    ]
    assert not found, "\n".join(found)
