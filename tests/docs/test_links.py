"""Every relative link of the pages, and every path of the repository that they name, leads to something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
FOLDERS = ("bench", "build_tools", "csrc", "docs", "examples", "tests", "zbkern")

named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a heading is linked by: lower case, no punctuation, a hyphen for each blank."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@named
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} is nothing"
        assert not anchor or anchor in anchors(file), f"{target}: there is no such heading"


@named
def test_paths_in_backticks(page: Path) -> None:
    """Folders and files, with * for several, also within commands."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", without_code(page)))
    for path in re.findall(rf"(?<!\S)(?:{'|'.join(FOLDERS)})/[\w./*-]*", quoted):
        assert list(ROOT.glob(path.rstrip("/"))), f"{path} does not exist"


def test_every_page_is_linked() -> None:
    """From the README or from a page that is linked: otherwise readers do not find it."""
    found, rest = set[Path](), [ROOT / "README.md"]
    while rest:
        page = rest.pop()
        if page not in found and page.suffix == ".md" and page.exists():
            found.add(page)
            links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", without_code(page))
            rest += [(page.parent / link).resolve() for link in links if ":" not in link]
    assert set(ROOT.glob("docs/*.md")) <= found
