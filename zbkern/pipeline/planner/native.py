"""The compiled core of the planner (csrc/planner*.cpp), or None where there was no C++ compiler at installation.

It makes the same list schedules as list_scheduler.py, a hundred times faster, and it alone does the annealing.
"""

from __future__ import annotations

try:
    from zbkern import _planner as core
except ImportError:
    core = None

__all__ = ["core"]
