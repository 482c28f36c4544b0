"""The programs that a page shows, for tests that run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist


def blocks(page: Path) -> list[str]:
    """Every block of Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def block(page: Path, what: str) -> str:
    """The one block of Python of a page that contains `what`."""
    (found,) = (each for each in blocks(page) if what in each)
    return found


def run_program(program: str, *arguments: str) -> list[str]:
    """The lines that a rank prints which runs a program of a page with these arguments."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", *arguments])
        patch.setattr(dist, "init_process_group", lambda backend: None)  # there is one already
        exec(program, {"print": lambda line, flush: printed.append(line)})
    return printed
