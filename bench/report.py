"""Where the figures of a benchmark are kept: JSON with the machine, the versions and the commit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zbkern.reporting import environment, markdown_table


def add_out(parser: argparse.ArgumentParser) -> None:
    """--out, without which nothing is written: a quick run must not replace the figures in bench/results."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="save the figures there, as JSON")


def searched(description: str, models: Iterable[str]) -> argparse.Namespace:
    """The arguments of a benchmark that plans known models: --effort and --model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", type=int, default=1)
    parser.add_argument("--model", nargs="+", choices=[*models], default=[*models])
    return parser.parse_args()


def write_json(name: str, figures: Any, folder: Path | None) -> str:
    """Writes FOLDER/NAME.json with the environment, if there is a folder; returns a line that says so. The file is the
    old one or the new one at any time, and never half of one."""
    if folder is None:
        return "not saved: --out FOLDER writes these figures as JSON"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    beside = folder / f"{name}.json.new"
    beside.write_text(as_text({"environment": environment(), "figures": figures}) + "\n")
    beside.replace(path)
    return f"written to {path}"


def as_text(value: Any, margin: str = "") -> str:
    """JSON in which a row, what a list has or what has no list or object in it, is one line: a change shows as one."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    if not any(isinstance(part, (dict, list, tuple)) for part in parts):
        return json.dumps(value)
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {as_text(part, margin + ' ')}" for key, part in value.items()]
    else:
        lines = [json.dumps(part) for part in parts]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(f"{margin} {line}" for line in lines) + f"\n{margin}{closing}"


def table(title: str, columns: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A title and a Markdown table; columns: "header: {key:format}", a semicolon between them."""
    headers, cells = zip(*(column.split(": ", 1) for column in columns.split("; ")), strict=True)
    return f"{title}\n\n{markdown_table(headers, [[cell.format_map(row) for cell in cells] for row in rows])}"
