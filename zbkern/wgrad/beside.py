"""What a rank does while a collective of one of its passes is in flight: other passes, then W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zbkern.wgrad.queue import current, thread


def in_flight(wait: Callable[[], Any] | None = None, is_completed: Callable[[], bool] | None = None) -> Any:
    """Lets this rank go on with something else; for layers of your own: call it between a collective's start and wait.

    Passes that run beside this one (`Schedule.beside`) go on, each until a collective of its own is in flight. Then,
    inside `WGradQueue.defer`, `wgrads_per_collective` of the oldest W run. Which pass goes on never depends on time:
    all ranks of a group start their collectives in one order. Within a W it does nothing.

    wait: what waits for the collective, such as `work.wait`; it is called last, and what it returns is returned. Then
    `profile` measures how long the pass waits, so that `plan` knows what passes beside it can hide. is_completed: says
    whether the collective has ended, such as `work.is_completed`, for `wgrads_per_collective="eager"`.
    """
    if not thread.in_w:
        if thread.give_way is not None:
            thread.give_way()
        scope = current()
        if scope is not None and scope[0].wgrads_per_collective:
            scope[0]._run_during_collective(is_completed)
    if wait is None:
        return None
    watch, thread.watch = thread.watch, None  # a wait within this one is a part of it
    if watch is None:
        return wait()
    try:
        with watch():
            return wait()
    finally:
        thread.watch = watch


def is_any_beside() -> bool:
    """Whether `in_flight` has anything to go on with, now or later in this pass."""
    scope = current()
    return thread.give_way is not None or (scope is not None and scope[0].wgrads_per_collective != 0)
