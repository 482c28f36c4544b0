"""The deferred half of a backward: `WGradTask`, one W that has not run yet, and `WGradQueue`, which holds them."""

from __future__ import annotations

from zbkern.wgrad.queue import WGradQueue as WGradQueue
from zbkern.wgrad.queue import current as current
from zbkern.wgrad.queue import no_defer as no_defer
from zbkern.wgrad.queue import run_in_backward as run_in_backward
from zbkern.wgrad.task import Segment as Segment
from zbkern.wgrad.task import WGradFunction as WGradFunction
from zbkern.wgrad.task import WGradKernel as WGradKernel
from zbkern.wgrad.task import WGradTask as WGradTask

__all__ = [
    "Segment",
    "WGradFunction",
    "WGradKernel",
    "WGradQueue",
    "WGradTask",
    "current",
    "no_defer",
    "run_in_backward",
]
