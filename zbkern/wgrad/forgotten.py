"""A warning where an optimizer steps while W of its parameters still wait: the step lacks their gradients."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zbkern.wgrad import fsdp
from zbkern.wgrad.task import WGradTask


class Queue(Protocol):
    """A WGradQueue, as far as it is read here."""

    _tasks: dict[WGradTask, None]


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(queue: Queue) -> None:
    """Steps of torch optimizers from now on look at what waits in this queue; the first to find something warns."""
    _register()
    _watched.add(queue)


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    own: set[int] = set()
    for queue in [*_watched]:
        waiting = [*queue._tasks]  # without its lock: threads whose hooks step could wait for each other's
        if not waiting:
            continue
        own = own or _parameters_of(optimizer)
        # Those with hooks may step inside of a hook, a parameter at a time, with another backward of it still to come.
        lost = [task for task in waiting if own.intersection(map(id, task.parameters)) and not task.has_hooks]
        if lost:
            _watched.discard(queue)
            warnings.warn(
                f"{type(optimizer).__name__}.step: {len(lost)} W of its parameters still wait in a WGradQueue (first: "
                f"{lost[0]}), so this step lacks their gradients; call the queue's run() before the step, or discard() "
                "to drop them on purpose",
                RuntimeWarning,
                stacklevel=3,
            )


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of its parameters, and of those that FSDP2 gathers from them."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return own | {gathered for gathered, shard in fsdp.shards().items() if id(shard) in own}
