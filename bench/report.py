"""Where the figures of a benchmark are kept: JSON with the machine, the versions and the commit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zbkern.reporting import environment


def add_out(parser: argparse.ArgumentParser) -> None:
    """--out, without which nothing is written: a quick run must not replace the figures in bench/results."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the figures there, as JSON")


def write_json(name: str, figures: Any, folder: Path | None) -> str:
    """Writes FOLDER/NAME.json with the environment, where there is a folder; returns what to say about it."""
    if folder is None:
        return "not kept: --out FOLDER writes these figures as JSON"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "figures": figures}, indent=1) + "\n")
    return f"written to {path}"
