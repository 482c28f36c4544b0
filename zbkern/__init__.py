"""zbkern: layers whose input gradient (B) and weight gradient (W) are separate launches, and pipelines without bubbles.

Importing zbkern loads neither torch nor triton: the public names below are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "convert": "zbkern.conversion.convert",
    "coverage": "zbkern.conversion.coverage",
    "restore": "zbkern.conversion.convert",
    "unconverted": "zbkern.conversion.convert",
    "SeparableFunction": "zbkern.ops.functions.separable",
    "WGradQueue": "zbkern.wgrad",
    "WGradTask": "zbkern.wgrad",
    "in_flight": "zbkern.wgrad",
    "no_defer": "zbkern.wgrad",
}
_MODULES = ("functional", "nn", "pipeline", "testing")

__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from zbkern import functional as functional
    from zbkern import nn as nn
    from zbkern import pipeline as pipeline
    from zbkern import testing as testing
    from zbkern.conversion.convert import convert as convert
    from zbkern.conversion.convert import restore as restore
    from zbkern.conversion.convert import unconverted as unconverted
    from zbkern.conversion.coverage import coverage as coverage
    from zbkern.ops.functions.separable import SeparableFunction as SeparableFunction
    from zbkern.wgrad import WGradQueue as WGradQueue
    from zbkern.wgrad import WGradTask as WGradTask
    from zbkern.wgrad import in_flight as in_flight
    from zbkern.wgrad import no_defer as no_defer


def __getattr__(name: str) -> Any:
    try:
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif name in _MODULES:
            value = importlib.import_module(f"zbkern.{name}")
        else:
            raise AttributeError(f"module 'zbkern' has no attribute {name!r}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"zbkern.{name} needs torch 2.8 or later: pip install torch") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
