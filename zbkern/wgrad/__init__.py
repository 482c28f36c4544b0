"""The deferred half of a backward: `WGradTask`, one W that has not run yet, and `WGradQueue`, which holds them."""

from __future__ import annotations

from zbkern.wgrad.beside import in_flight
from zbkern.wgrad.queue import WGradQueue, current, no_defer, run_in_backward
from zbkern.wgrad.task import Segment, WGradFunction, WGradKernel, WGradTask

__all__ = [
    "Segment",
    "WGradFunction",
    "WGradKernel",
    "WGradQueue",
    "WGradTask",
    "current",
    "in_flight",
    "no_defer",
    "run_in_backward",
]
