"""zbkern: layers whose input gradient (B) and weight gradient (W) are separate launches, and pipelines without bubbles.

Importing zbkern loads neither torch nor triton: the public names below are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "convert": "zbkern.convert",
    "restore": "zbkern.convert",
    "WGradQueue": "zbkern.wgrad",
    "WGradTask": "zbkern.wgrad",
}
_MODULES = ("functional", "nn", "pipeline", "testing", "wgrad")

__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from zbkern import functional, nn, pipeline, testing, wgrad
    from zbkern.convert import convert, restore
    from zbkern.wgrad import WGradQueue, WGradTask


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"zbkern.{name}")
    else:
        raise AttributeError(f"module 'zbkern' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
