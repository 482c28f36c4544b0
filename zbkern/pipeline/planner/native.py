"""The compiled core of the planner (csrc/planner*.cpp), or None where there was no C++ compiler at installation.

It makes the same list schedules as list_scheduler.py, a hundred times faster, and it alone does the annealing. One that
was compiled from other sources than these is not used: it would read problems wrongly.
"""

from __future__ import annotations

import logging

_VERSION = 2

try:
    from zbkern import _planner as core
except ImportError:
    core = None
if core is not None and getattr(core, "version", 1) != _VERSION:
    logging.getLogger("zbkern").warning(
        "the planner's compiled search is of another version of zbkern, and not used; install zbkern again"
    )
    core = None

__all__ = ["core"]
