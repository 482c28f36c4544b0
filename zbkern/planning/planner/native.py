"""The compiled core of the planner (csrc/planner*.cpp), which every search needs: None where there was no C++ compiler
at installation, or it was compiled from other sources than these, and would read problems wrongly.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

_VERSION = 22

core: Any = None
try:
    from zbkern import _planner
except ImportError:
    pass
else:
    core = _planner
if core is not None and getattr(core, "version", 1) != _VERSION:
    logging.getLogger("zbkern").warning(
        "the planner's compiled search is of another version of zbkern, and not used; install zbkern again"
    )
    core = None


def check(function: str) -> None:
    """Raises RuntimeError, in the name of `function`, where there is no search."""
    if core is None:
        raise RuntimeError(
            f"{function}: it needs the planner's search, which is compiled: install a C++ compiler, then zbkern again; "
            "simulate and published schedules do without"
        )


class Effort(NamedTuple):
    """How long and how hot a search runs: simulated annealing at one temperature after the other.

    temperatures: in units of time. work: of annealing, the same at each temperature: a pass whose times are computed
    again counts as 6, and a move as 50 besides; of the other searches the moves at each. spread: the weight of the
    ranks' mean span beside the largest, in annealing and patterns. target: a cost at which to stop, such as a lower
    bound.
    """

    seed: int = 0
    temperatures: Sequence[int] = ()
    work: int = 0
    spread: int = 1
    target: int = 0


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which would look at a million new tuples again and again: half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


__all__ = ["Effort", "check", "core", "uncollected"]
