"""Sentences of the pages begin with their subject, and are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
HABITS = {
    r"(?:^|[.;:!?] |\*\*|^- |\| )Of [\w`]": "begins with its genitive; say what does something, and then with what",
    r"\bbut for\b": "except",
    r"\b[Aa]s ever\b": "as before, or nothing",
    r", say[,.;:)]": "such as",
}
WORDS = 25  # of a sentence; what is in backquotes counts as one
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return re.sub(r"^ *```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    """Those of paragraphs, items of lists and cells of tables, in which a semicolon ends one, too."""
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)|\*\*", "", text))
    for part in re.split(r"\n\s*\n|\n(?= *[-*|#] ?| *\d+\. )", text):
        line = " ".join(part.split())
        yield from re.split(r"[.!?;]\)? |\|" if line.startswith("|") else r"[.!?]\)? ", line)


@named
def test_sentences_are_short(page: Path) -> None:
    found = [each for each in sentences(text_of(page)) if len(re.findall(r"\w[\w'.,/-]*", each)) > WORDS]
    assert not found, f"more than {WORDS} words:\n" + "\n".join(found)


@named
def test_pages_keep_to_plain_english(page: Path) -> None:
    found = [
        f"{line.strip()[:80]}: {better}"
        for line in text_of(page).replace("\n  ", " ").split("\n")
        for habit, better in HABITS.items()
        if re.search(habit, line)
    ]
    assert not found, "\n".join(found)
