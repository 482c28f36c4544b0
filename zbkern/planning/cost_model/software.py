"""What programs get of a GPU by the software that runs them: software.json, whose rows replace shares of `Hardware`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbkern.planning.cost_model.hardware import Hardware

SOFTWARE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "software.json").read_text(encoding="utf-8"))
"""By name: a title; `like`, the software that the rest is as of; shares and times of every GPU; those of some GPUs;
and from where they are known."""

_SAID = ("title", "like", "gpus", "source")


def under(hardware: Hardware, name: str) -> Hardware:
    """That GPU with this software, if it does not have it yet. Raises ValueError for a name that is not in SOFTWARE."""
    if name not in SOFTWARE:
        raise ValueError(f"software: it must be one of {', '.join(SOFTWARE)}; got {name!r}")
    if hardware.software == name:
        return hardware
    shares: dict[str, Any] = {}
    row = SOFTWARE[name]
    for each in (SOFTWARE.get(row.get("like", ""), {}), row):
        shares |= {field: value for field, value in each.items() if field not in _SAID}
        shares |= each.get("gpus", {}).get(hardware.name, {})
    return replace(hardware, **shares, software=name)
