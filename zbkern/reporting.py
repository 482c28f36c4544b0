"""What a printed figure needs: the machine and versions that it belongs to, and a table to stand in."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import zbkern

_CHECKOUT = Path(__file__).parents[1]


def environment() -> dict[str, Any]:
    """The machine, the versions and zbkern's commit: "unknown" outside of a git checkout. gpu is None without one."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zbkern": zbkern.__version__,
        "commit": _commit(_CHECKOUT),
    }


def machine_line(machine: Mapping[str, Any]) -> str:
    """The result of `environment` in one line."""
    where = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    return f"{where}; torch {machine['torch']}, zbkern {machine['zbkern']} ({machine['commit']})"


def markdown_table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others, numbers as a rule, to the right."""
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"markdown_table: a row must have {len(header)} cells, as the header has; got {row!r}")
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("| " + " | ".join([row[0].ljust(widths[0]), *others]) + " |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@functools.cache
def _commit(checkout: Path) -> str:
    if not (checkout / ".git").exists():  # git would look further up, and find another project's
        return "unknown"
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
