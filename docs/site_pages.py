"""What mkdocs needs besides the pages: README as the first one, and a page of docstrings. `make site` builds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import zbkern
import zbkern.pipeline

ROOT = Path(__file__).parents[1]
PARTS = ("functional", "nn", "testing")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are no files of docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files that are no pages become those files' paths."""
    outside = r"\[[^\]]+\]\((?:\.\./)?((?:zbkern/|CONTRIBUTING|plans\b)[^)]*)\)"
    return re.sub(outside, r"`\1`", markdown)


def reference() -> str:
    """The docstring of every public name."""
    lines = ["# Docstrings"]
    for module in (zbkern, zbkern.pipeline):
        names = [
            name for name in module.__all__ if name not in (*PARTS, "__version__", "pipeline", "schedules", "wgrad")
        ]
        lines += [f"\n## {module.__name__}\n", *(f"::: {module.__name__}.{name}" for name in names)]
    return "\n".join([*lines, *(f"\n## zbkern.{name}\n\n::: zbkern.{name}" for name in PARTS)])
