"""What a rank does while a collective of one of its passes is in flight: other passes, then W."""

from __future__ import annotations

from zbkern.wgrad.queue import current, thread


def in_flight() -> None:
    """Lets this rank go on with something else; for layers of your own: call it between a collective's start and wait.

    Passes that run beside this one (`Schedule.beside`) go on, each until a collective of its own is in flight. Then,
    inside `WGradQueue.defer`, `wgrads_per_collective` of the oldest W run. Which pass goes on, and how many W run,
    never depends on time: all ranks of a group start their collectives in one order. Within a W it does nothing.
    """
    if thread.in_w:
        return
    if thread.give_way is not None:
        thread.give_way()
    scope = current()
    if scope is not None and scope[0].wgrads_per_collective:
        scope[0].run_during_collective()


def is_any_beside() -> bool:
    """Whether `in_flight` has anything to go on with, now or later in this pass."""
    scope = current()
    return thread.give_way is not None or (scope is not None and scope[0].wgrads_per_collective > 0)
